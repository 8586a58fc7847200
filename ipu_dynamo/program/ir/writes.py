"""Define the instructions that write variables within a micro-batch: functions write none.

An accumulation takes effect where it stands; sums run in the order of instructions, then in that of
micro-batches. A buffer's new value takes effect at the end of its stage pass: operators of the same
pass have read the one before, and who needs that later reads a copy, `NAME.before`.
"""

from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward", "forward_backward", "weights"]
Accumulation = Literal["store", "+=", "mean"]


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Write values to accumulators: `store` or add (`+=`) them, or keep the mean so far.

    Args:
        accumulators: names of variables.
        values: results of a call of the same stage pass, aligned.
        rule: of all; `mean` moves an accumulator by a share of what it differs from its value.
        stage, direction, phase: the stage pass that it belongs to.
        source: first line of the user's model behind a value.
        weight: name of the received share, of `mean` alone.
    """

    accumulators: tuple[str, ...]
    values: tuple[str, ...]
    rule: Accumulation
    ipu: int
    stage: int
    direction: Direction
    source: str
    weight: str | None = None
    phase: int | None = None

    def __str__(self) -> str:
        share = f" by %{self.weight}" if self.weight else ""
        names, values = _listed(self.accumulators), _listed(self.values)
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"accumulate {names} {self.rule} {values}{share}  {where}"


@dataclass(frozen=True, slots=True)
class WriteBuffer:
    """Give variables new values, all at once, at the end of a stage pass.

    Args:
        variables: names of buffers, or of other variables that the model changes.
        values: results of calls of the same stage pass, aligned.
        stage, direction, phase: the stage pass that it belongs to.
        source: first line of the user's model behind a value.
    """

    variables: tuple[str, ...]
    values: tuple[str, ...]
    ipu: int
    stage: int
    direction: Direction
    source: str
    phase: int | None = None

    def __str__(self) -> str:
        where = f"on ipu{self.ipu}{in_phase(self.phase)}"
        return f"write {_listed(self.variables)} = {_listed(self.values)}  {where}"


def in_phase(phase: int | None) -> str:
    """The end of an instruction's text, in a phased program."""
    return "" if phase is None else f", phase {phase}"


def _listed(names: tuple[str, ...]) -> str:
    return f"({', '.join(f'%{name}' for name in names)})"
