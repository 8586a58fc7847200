"""Name the choices of PopART that PopTorch programs set by number, and nothing else of it."""

from enum import IntEnum
from typing import NoReturn

import poptorch  # noqa: F401  (stops beside Graphcore's own distribution)


class AccumulateOuterFragmentSchedule(IntEnum):
    """When the operators behind the accumulation loop run."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class BatchSerializationBatchSchedule(IntEnum):
    """In which order the parts of a serialised batch run."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class RecomputationType(IntEnum):
    """The values that the backward pass computes again."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class SubgraphCopyingStrategy(IntEnum):
    """When the arguments of a shared function are copied."""

    OnEnterAndExit = 0
    JustInTime = 1


class SyntheticDataMode(IntEnum):
    """The data in place of the host's."""

    Off = 0
    Zeros = 1
    RandomNormal = 2


class VirtualGraphMode(IntEnum):
    """How operators are given to IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3


__all__ = [
    "AccumulateOuterFragmentSchedule",
    "BatchSerializationBatchSchedule",
    "RecomputationType",
    "SubgraphCopyingStrategy",
    "SyntheticDataMode",
    "VirtualGraphMode",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"module 'popart' has no attribute {name!r}: this one comes with ipu_dynamo, for PopTorch "
        f"programs, and has nothing but the enumerations {', '.join(__all__)}"
    )
