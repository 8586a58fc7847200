"""Read indented lines as a tree, and say which line a mistake is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_STEP = "  "
_DEEPEST = 64  # levels of indentation; a program has ten


@dataclass(slots=True)
class Line:
    """A line without its indentation, and the lines below it that are indented more.

    Args:
        number: counts from 1.
    """

    number: int
    text: str
    below: list["Line"] = field(default_factory=list)


class LineError(ValueError):
    """A line of a text is not as it has to be."""


@contextmanager
def in_line(line: Line) -> Iterator[None]:
    """Say that a ValueError in here is about `line`, unless it is said already."""
    try:
        yield
    except LineError:
        raise
    except ValueError as error:
        raise LineError(f"line {line.number}: {error}\n  {shortened(line.text)}") from error


def indented(lines: list[str]) -> list[str]:
    """`lines`, one level further in."""
    return [_STEP + line for line in lines]


def outline(text: str) -> list[Line]:
    """The lines of `text` that are not indented, each with those that belong to it.

    Raises:
        LineError: a line is indented more than one level further than the line before it.
    """
    root = Line(0, "")
    path = [root]
    for number, whole in enumerate(text.split("\n"), 1):
        content = whole.lstrip(" ")
        line = Line(number, content)
        level, rest = divmod(len(whole) - len(content), len(_STEP))
        if rest or level >= min(len(path), _DEEPEST):
            with in_line(line):
                raise ValueError("the indentation is not that of a line here")
        del path[level + 1 :]
        path[level].below.append(line)
        path.append(line)
    return root.below


def shortened(text: str) -> str:
    """`text`, as much of it as an error shows."""
    return text if len(text) <= 120 else f"{text[:117]}..."
