"""Name the choices that options and operators of PopTorch take."""

from enum import Enum, IntEnum


class MeanReductionStrategy(IntEnum):
    """When a mean over accumulation steps and replicas is divided by their number."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(IntEnum):
    """Where a `poptorch.DataLoader` collates its items."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(IntEnum):
    """How a data set reaches the worker process of an asynchronous accessor."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(IntEnum):
    """Which micro-batches' outputs a call returns."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ConnectionType(IntEnum):
    """When an executor reserves its IPUs."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(IntEnum):
    """How operands of mixed precision were promoted; deprecated and without effect."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(IntEnum):
    """How values of several micro-batches or replicas become one."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class SyncPattern(IntEnum):
    """Which IPUs take part in a barrier."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class MatMulSerializationMode(Enum):
    """The dimension along which a matrix product is cut."""

    InputChannels = "input_channels"
    ReducingDim = "reducing_dim"
    OutputChannels = "output_channels"
    Disabled = "none"


class Liveness(IntEnum):
    """How long the tensors of a phase stay in tile memory."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class OverlapMode(Enum):
    """The loop in which computation hides the transfer of an input or output."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(IntEnum):
    """How blocks without an explicit stage are numbered."""

    SameAsIpu = 0
    AutoIncrement = 1


class MultiConvPlanType(IntEnum):
    """Whether the convolutions of a `MultiConv` run side by side or in turn."""

    Parallel = 0
    Serial = 1


class CommGroupType(IntEnum):
    """How replicas are divided into groups."""

    All = 0
    Consecutive = 1
    Orthogonal = 2
    NoGrouping = 3


class VariableRetrievalMode(IntEnum):
    """Which replicas' values of a variable come back to the host."""

    OnePerGroup = 0
    AllReplicas = 2


__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutputMode",
    "OverlapMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]
