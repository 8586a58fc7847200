"""Say what `doctor` finds: lines for readers, and problems with a remedy each."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with an installation.

    Args:
        text: what is wrong, in the words of the part that would meet it.
        remedy: an action that the user can take today. It may be empty if `text` names one.
        stops: whether programs cannot run because of it.
    """

    text: str
    remedy: str
    stops: bool = False

    def __str__(self) -> str:
        first, *others = self.text.splitlines() or [""]
        lines = [f"  problem: {first}", *(f"  {line}" for line in others)]
        if "try:  " not in self.text:
            lines.append(f"    try:  {self.remedy}")
        return "\n".join(lines)


Finding = str | Problem


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """The warnings that this package logs in the block; they are not written elsewhere."""
    noted: list[str] = []
    handler, logger = _Noting(noted), logging.getLogger("ipu_dynamo")
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield noted
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


class _Noting(logging.Handler):
    """Append warnings to a list."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._noted = noted

    def emit(self, record: logging.LogRecord) -> None:
        self._noted.append(record.getMessage())


def text_of(error: BaseException) -> str:
    """An error of this package in its own words; of any other its class, too."""
    from ipu_dynamo.errors import IpuError  # imports PyTorch

    if isinstance(error, IpuError | ImportError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}"
