"""The language that passes and runtime share: programs, their values, functions, instructions."""

from ipu_dynamo.program.function import Function, graph_outputs, make_function
from ipu_dynamo.program.graph_text import GROUP, MUTATED, RECOMPUTED
from ipu_dynamo.program.instructions import (
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
from ipu_dynamo.program.phases import PhaseNumbers
from ipu_dynamo.program.pipeline import Stash
from ipu_dynamo.program.program import Program
from ipu_dynamo.program.traffic import Traffic
from ipu_dynamo.program.types import TensorType
from ipu_dynamo.program.values import OVERLAPS, Input, Output, Overlap, Returns, Variable
from ipu_dynamo.replica_groups import ReplicaGroups

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
