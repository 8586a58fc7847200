"""The language that passes and runtime share: programs, their values, functions, instructions."""

from ipu_dynamo.ops.overlap import OVERLAPS, Overlap
from ipu_dynamo.options.replica_groups import ReplicaGroups
from ipu_dynamo.program.ir.function import Function, graph_outputs, make_function
from ipu_dynamo.program.ir.instructions import (
    AdjustLossScale,
    Call,
    Copy,
    Direction,
    Gather,
    Instruction,
    Load,
    Order,
    Receive,
    Reduce,
    Repeat,
    Scatter,
    Send,
    Store,
    Update,
)
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.ir.values import Input, Output, Returns, Variable
from ipu_dynamo.program.schedule.phases import PhaseNumbers
from ipu_dynamo.program.schedule.pipeline_clock import Stash
from ipu_dynamo.program.text.graph_text import GROUP, MUTATED, RECOMPUTED
from ipu_dynamo.program.traffic import Traffic

__all__ = [
    "GROUP",
    "MUTATED",
    "OVERLAPS",
    "RECOMPUTED",
    "AdjustLossScale",
    "Call",
    "Copy",
    "Direction",
    "Function",
    "Gather",
    "Input",
    "Instruction",
    "Load",
    "Order",
    "Output",
    "Overlap",
    "PhaseNumbers",
    "Program",
    "Receive",
    "Reduce",
    "Repeat",
    "ReplicaGroups",
    "Returns",
    "Scatter",
    "Send",
    "Stash",
    "Store",
    "TensorType",
    "Traffic",
    "Update",
    "Variable",
    "graph_outputs",
    "make_function",
]
