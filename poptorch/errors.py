"""Raise PopTorch's errors, and turn the core's into them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ipu_dynamo.errors import IpuError, guide_note

PYTHON_ORIGIN = "poptorch_py_error"
_Raised = TypeVar("_Raised", bound=Exception)
_MODULE = "poptorch.poptorch_core"  # where PopTorch programs look for the classes


class Error(Exception):
    """Something that this package refuses, or that failed while a program ran.

    It is no `RuntimeError`: `except RuntimeError` does not catch it.

    Args:
        message: what went wrong, without context.
        type: which part of PopTorch the error stands for.
        location: the contexts it passed through, innermost first, one per line; may be empty.
    """

    def __init__(self, message: str = "", *, type: str = PYTHON_ORIGIN, location: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.location = location

    def __str__(self) -> str:
        text = f"'{self.type}': {self.message}"
        return f"{text}\nin:\n{self.location}" if self.location else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.__class__, self.message, dict(self.__dict__))


class RecoverableError(Error):
    """A failure of the machine after which the program may run again.

    Args:
        recovery_action: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET.
    """

    def __init__(self, message: str = "", *, recovery_action: str = "FULL_RESET", **context: Any):
        super().__init__(message, **context)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A failure of the machine that no reset cures."""


for _error in (Error, RecoverableError, UnrecoverableError):
    _error.__module__ = _MODULE


def createPoptorchError(msg: str) -> Error:
    """Build, not raise, an error of the Python layer."""
    return Error(msg)


def require(condition: object, message: str) -> None:
    """Raise `AssertionError` unless `condition` holds, under `python -O` too.

    For the checks whose type PopTorch programs match on; a failed one is the user's mistake.
    """
    if not condition:
        raise AssertionError(message)


@contextmanager
def wrapped(context: str = "") -> Iterator[None]:
    """Let no error of the core out: raise `poptorch.Error` from it, with its message.

    Also a decorator: ``@wrapped()``.

    Args:
        context: what is being done, such as "compiling Net"; becomes part of `location`.
            Nested contexts stack, the innermost first.
    """
    try:
        yield
    except IpuError as error:
        guide = guide_note(error.id)
        notes = [note for note in getattr(error, "__notes__", ()) if note != guide]
        location = "\n".join([*notes, *([context] if context else ())])
        raise led_to_guide(Error(str(error), location=location), error) from error
    except Error as error:
        if isinstance(error.__cause__, IpuError):
            led_to_guide(error, error.__cause__)
        if context:
            error.location = "\n".join(filter(None, [error.location, context]))
        raise


def led_to_guide(error: _Raised, cause: IpuError) -> _Raised:
    """`error` with a note, once, that names the guide's section about its cause."""
    note = guide_note(cause.id)
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def _rebuild(cls: type[Error], message: str, state: dict[str, Any]) -> Error:
    error = cls(message)
    error.__dict__.update(state)
    return error
