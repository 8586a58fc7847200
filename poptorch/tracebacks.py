"""Let errors of a compilation show the user's lines, and keep the texts that programs match on."""

import logging
from types import TracebackType

from ipu_dynamo.capture.tracing_errors import user_lines
from ipu_dynamo.errors import IpuError
from poptorch._logging import logger
from poptorch.errors import Error


class WhileTracing(Exception):
    """Where an error of PyTorch was raised: its cause, since its own text stays PyTorch's."""


class ShortTracebacks:
    """A context whose errors show the lines of the user's model only; at level DEBUG all lines."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        if not isinstance(error, IpuError | Error):
            _move_notes(error)
        if not logger.isEnabledFor(logging.DEBUG):
            user_lines(trace)
            while (error := error.__cause__) is not None:
                user_lines(error.__traceback__)


def _move_notes(error: BaseException) -> None:
    """Turn the notes of an error into its cause: those who match texts see notes, too."""
    notes = error.__dict__.pop("__notes__", [])
    if notes and error.__cause__ is None:
        error.__cause__ = WhileTracing("\n".join(notes))
