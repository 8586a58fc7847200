"""Say why something is otherwise than a user may expect, and where."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remark:
    """A warning, a graph break, or a part of a model that is in no program.

    Args:
        kind: `warning`, `graph break`, `not captured` or `not placed`.
        text: one line.
        where: a line of the model, as `model.py:12`; empty: none is known.
    """

    kind: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{f' at {self.where}' if self.where else ''}: {self.text}"
