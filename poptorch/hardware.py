"""Answer what hardware is there: the virtual IPUs, unless the environment says otherwise.

The answers decide nothing else: no feature, check or result depends on them.
"""

import functools
import os

from poptorch._logging import logger
from poptorch.errors import createPoptorchError, require

MOST_IPUS = 64  # of one process
_GENERATIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}
_UNKNOWN_GENERATION = -1


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether IPUs are present. Up to 64 virtual ones stand in for hardware.

    With IPU_DYNAMO_HARDWARE=0, or if the environment selects the IPU Model, the answer is False.

    Args:
        num_ipus: how many IPUs a program needs.
    """
    wanted = os.environ.get("IPU_DYNAMO_HARDWARE") or None
    if wanted not in (None, "0", "1"):
        raise createPoptorchError(
            f"IPU_DYNAMO_HARDWARE must be 0 or 1, got {wanted!r}", id="option"
        )
    if wanted == "0" or ipu_model_from_environment() or num_ipus > MOST_IPUS:
        return False
    if wanted is None:
        _say_that_ipus_are_virtual()
    return True


@functools.cache  # once in a process
def _say_that_ipus_are_virtual() -> None:
    logger.info(
        "ipuHardwareIsAvailable: the IPUs of this machine are virtual; IPU_DYNAMO_HARDWARE=0 "
        "makes the answer False, IPU_DYNAMO_HARDWARE=1 leaves out this line"
    )


def ipuHardwareVersion() -> int:
    """The generation: 1 (Mk1), 2 (Mk2), 21 (Mk2 with FP8), -1 if unknown."""
    require(ipuHardwareIsAvailable(), "No IPU hardware available on this system")
    return ipu_generation()


def ipu_generation() -> int:
    """The generation that POPTORCH_IPU_MODEL_VERSION configures, by default 2."""
    name = os.environ.get("POPTORCH_IPU_MODEL_VERSION") or "ipu2"
    if name in _GENERATIONS:
        return _GENERATIONS[name]
    if "ipu:" in name:
        return _UNKNOWN_GENERATION
    raise createPoptorchError(
        f"Invalid IPU model version {name!r} in POPTORCH_IPU_MODEL_VERSION: "
        f"choose one of {', '.join(_GENERATIONS)}",
        id="option",
    )


def ipu_model_from_environment() -> bool:
    """Whether POPTORCH_IPU_MODEL or POPTORCH_SMALL_IPU_MODEL selects the IPU Model."""
    names = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")
    return any(_is_enabled(name) for name in names)


def uses_small_ipu_model() -> bool:
    """Whether POPTORCH_SMALL_IPU_MODEL alone selects the IPU Model: its IPUs have 4 tiles."""
    return _is_enabled("POPTORCH_SMALL_IPU_MODEL") and not _is_enabled("POPTORCH_IPU_MODEL")


def _is_enabled(variable: str) -> bool:
    """Whether an environment variable holds an integer other than 0."""
    text = os.environ.get(variable, "").strip()
    try:
        return bool(int(text or "0"))
    except ValueError as error:
        raise createPoptorchError(
            f"{variable} must be an integer, got {text!r}: set it to 0 or 1", id="option"
        ) from error
