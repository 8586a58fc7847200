"""Offer what PopTorch programs reach through `poptorch.poptorch_core`."""

from enum import IntEnum
from typing import Any, NoReturn

from poptorch import hardware
from poptorch._logging import setLogLevel, setPopartLogLevel
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.options.session import check_session
from poptorch.tracing import isRunningOnIpu


class TestErrorType(IntEnum):
    """The kinds of error that `_throwTestError` can raise."""

    __test__ = False  # not a class of tests, whatever its name says

    Poptorch = 0
    Popart = 1
    PopartInternal = 2
    Poplibs = 3
    PoplarUnrecoverable = 4
    PoplarUnknown = 5
    PoplarRecoverableFullReset = 6
    PoplarLinkError = 7


_ORIGINS = {
    TestErrorType.Poptorch: "poptorch_cpp_error",
    TestErrorType.Popart: "popart_exception",
    TestErrorType.PopartInternal: "popart_internal_exception",
    TestErrorType.Poplibs: "poplibs_exception",
    TestErrorType.PoplarUnrecoverable: "poplar_unrecoverable_runtime_error",
    TestErrorType.PoplarUnknown: "poplar_unknown_runtime_error",
    TestErrorType.PoplarRecoverableFullReset: "poplar_recoverable_runtime_error",
    TestErrorType.PoplarLinkError: "poplar_link_error",
}


def ipuHardwareVersion(numIpus: int = 1) -> int:
    """Return the generation of the hardware; 0 if fewer IPUs are present than needed.

    Args:
        numIpus: how many IPUs a program needs.
    """
    present = hardware.ipuHardwareIsAvailable(numIpus)
    return hardware.ipu_generation() if present else 0


def isCompilingWithDispatcher() -> bool:
    """Whether a model is being traced for an executor right now."""
    return isRunningOnIpu()


def _validateOptions(options: dict[str, Any]) -> None:
    """Check the dictionary that `Options.toDict()` makes, as a compilation does."""
    check_session(options)


def _throwTestError(type: TestErrorType) -> NoReturn:
    """Raise an error of the given kind, to try out a program's handling of it."""
    kind = TestErrorType(type)
    message, origin = f"test error {kind.name}", _ORIGINS[kind]
    if kind is TestErrorType.PoplarRecoverableFullReset:
        raise RecoverableError(message, type=origin, recovery_action="FULL_RESET", id="machine")
    if kind is TestErrorType.PoplarUnrecoverable:
        raise UnrecoverableError(message, type=origin, id="machine")
    raise Error(message, type=origin, id="internal")


__all__ = [
    "Error",
    "RecoverableError",
    "TestErrorType",
    "UnrecoverableError",
    "ipuHardwareVersion",
    "isCompilingWithDispatcher",
    "setLogLevel",
    "setPopartLogLevel",
]
