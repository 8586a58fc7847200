"""The language that passes and runtime share: programs, their values, functions, instructions."""

from ipu_dynamo.ops.marks.overlap import OVERLAPS, Overlap
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program.decision import Decision
from ipu_dynamo.program.host_program import HostProgram
from ipu_dynamo.program.ir.clipping import (
    Clip,
    ClipFactor,
    ClipGlobalNorm,
    ClipGradNorm,
    ClipGradValue,
    ClipValues,
    GradientNorm,
)
from ipu_dynamo.program.ir.collectives import Collective, CollectiveKind
from ipu_dynamo.program.ir.function import (
    Function,
    graph_outputs,
    make_function,
)
from ipu_dynamo.program.ir.instructions import (
    AllGather,
    AllReduce,
    Call,
    Copy,
    Instruction,
    Load,
    Order,
    Plain,
    Receive,
    ReduceScatter,
    Repeat,
    Send,
    Store,
)
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.rank_streams import ReceiveFromRank, SendToRank
from ipu_dynamo.program.ir.traced_update import Counter, ParameterPart, Round, TracedStep
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.update_instructions import (
    AdjustLossScale,
    JointUpdate,
    Update,
    UpdateFactors,
    UpdatePart,
)
from ipu_dynamo.program.ir.values import Input, Output, Returns, Variable
from ipu_dynamo.program.ir.writes import Accumulate, Accumulation, Direction, Write, WriteBuffer
from ipu_dynamo.program.schedule.phases import PhaseNumbers
from ipu_dynamo.program.schedule.stash import Stash
from ipu_dynamo.program.text.graph_text import GROUP, OWN_MEMORY, RECOMPUTED
from ipu_dynamo.program.traffic import Traffic

__all__ = [
    "GROUP",
    "OVERLAPS",
    "OWN_MEMORY",
    "RECOMPUTED",
    "Accumulate",
    "Accumulation",
    "AdjustLossScale",
    "AllGather",
    "AllReduce",
    "Call",
    "Clip",
    "ClipFactor",
    "ClipGlobalNorm",
    "ClipGradNorm",
    "ClipGradValue",
    "ClipValues",
    "Collective",
    "CollectiveKind",
    "Copy",
    "Counter",
    "Decision",
    "Direction",
    "Function",
    "GradientNorm",
    "HostProgram",
    "Input",
    "Instruction",
    "JointUpdate",
    "Load",
    "Order",
    "Output",
    "Overlap",
    "ParameterPart",
    "PhaseNumbers",
    "Plain",
    "Program",
    "Receive",
    "ReceiveFromRank",
    "ReduceScatter",
    "Repeat",
    "ReplicaGroups",
    "Returns",
    "Round",
    "Send",
    "SendToRank",
    "Stash",
    "Store",
    "TensorType",
    "TracedStep",
    "Traffic",
    "Update",
    "UpdateFactors",
    "UpdatePart",
    "Variable",
    "Write",
    "WriteBuffer",
    "graph_outputs",
    "make_function",
]
