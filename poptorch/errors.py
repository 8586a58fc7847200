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
        id: which kind of error this is: a section of docs/errors.md, which a note of the error
            names. Empty for errors that a program makes itself.
    """

    def __init__(
        self, message: str = "", *, type: str = PYTHON_ORIGIN, location: str = "", id: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.location = location
        self.id = id
        if id:
            self.add_note(guide_note(id))

    def __str__(self) -> str:
        text = f"'{self.type}': {self.message}"
        return f"{text}\nin:\n{self.location}" if self.location else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.__class__, self.message, dict(self.__dict__))


class RecoverableError(Error):
    """A failure of the machine after which the program may run again.

    Args:
        message: what went wrong, without context.
        recovery_action: IPU_RESET, LINK_RESET, PARTITION_RESET or FULL_RESET.
        context: `type`, `location` and `id` of an `Error`.
    """

    def __init__(self, message: str = "", *, recovery_action: str = "FULL_RESET", **context: Any):
        super().__init__(message, **context)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A failure of the machine that no reset cures."""


for _error in (Error, RecoverableError, UnrecoverableError):
    _error.__module__ = _MODULE


def createPoptorchError(msg: str, *, id: str = "") -> Error:
    """Return an error of the Python layer; it is not raised.

    Args:
        msg: what went wrong.
        id: which kind of error it is, see `Error`.
    """
    return Error(msg, id=id)


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
        context: the running task, such as "compiling Net"; becomes part of `location`.
            Nested contexts stack, the innermost first.
    """
    try:
        yield
    except IpuError as error:
        guide = guide_note(error.id)
        notes = [note for note in getattr(error, "__notes__", ()) if note != guide]
        location = "\n".join([*notes, *([context] if context else ())])
        raise Error(str(error), location=location, id=error.id) from error
    except Error as error:
        if context:
            error.location = "\n".join(filter(None, [error.location, context]))
        raise


def led_to_guide(error: _Raised, cause: IpuError) -> _Raised:
    """`error`, which is of a plain Python type, with a note of the guide's section on its cause."""
    error.add_note(guide_note(cause.id))
    return error


def _rebuild(cls: type[Error], message: str, state: dict[str, Any]) -> Error:
    error = cls(message)
    error.__dict__.update(state)
    return error
