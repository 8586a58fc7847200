"""Make errors that Dynamo hands to the user as they are, instead of wrapping or swallowing them."""

from functools import cache
from types import FrameType
from typing import Any

from ipu_dynamo.capture.private.dynamo import ShortenTraceback
from ipu_dynamo.capture.private.tracing import GuardOnDataDependentSymNode
from ipu_dynamo.errors import CompileError, IpuError, raised_at


def readable(error: Exception, frame: FrameType | None) -> ShortenTraceback:
    """The error to raise in a backend instead of `error`: of its type, if that is ours.

    Args:
        frame: where the traceback that the user sees begins.
    """
    notes = list(getattr(error, "__notes__", ()))
    if isinstance(error, GuardOnDataDependentSymNode):
        error = CompileError(
            f"a size or a branch depends on the values of a tensor: {str(error).splitlines()[0]}",
            hint="programs have static shapes: pass the number as a Python int, or move what "
            "needs it out of the compiled model",
            id="value",
        )
    if not isinstance(error, IpuError):
        error = CompileError(
            f"{type(error).__name__} while compiling: {error}",
            where=raised_at(error.__traceback__),
            hint="this is not expected: please report it with the model; backend='aot_eager' "
            "tells whether PyTorch alone can compile it",
            id="internal",
        )
    notes += [note for note in error.__notes__ if note not in notes]
    ours: Any = type(error)
    kind = _through_dynamo(ours)
    result = kind.__new__(kind)
    result.args = error.args
    result.__dict__ |= {key: value for key, value in vars(error).items() if key != "__notes__"}
    result.first_useful_frame = frame
    for note in notes:
        result.add_note(note)
    return result


@cache
def _through_dynamo(kind: Any) -> type[ShortenTraceback]:
    """A subclass of `kind`, an IpuError, that passes through Dynamo."""
    return type(kind.__name__, (ShortenTraceback, kind), {"__module__": kind.__module__})
