"""The language that passes and runtime share: programs, their values, functions, instructions."""

from ipu_dynamo.program.function import Function, graph_outputs, make_function
from ipu_dynamo.program.graph_text import MUTATED
from ipu_dynamo.program.instructions import (
    Call,
    Copy,
    Direction,
    Instruction,
    Receive,
    Reduce,
    Repeat,
    Send,
    Update,
)
from ipu_dynamo.program.program import Program
from ipu_dynamo.program.replica_groups import ReplicaGroups
from ipu_dynamo.program.types import TensorType
from ipu_dynamo.program.values import Input, Output, Returns, Variable

__all__ = [
    "MUTATED",
    "Call",
    "Copy",
    "Direction",
    "Function",
    "Input",
    "Instruction",
    "Output",
    "Program",
    "Receive",
    "Reduce",
    "Repeat",
    "ReplicaGroups",
    "Returns",
    "Send",
    "TensorType",
    "Update",
    "Variable",
    "graph_outputs",
    "make_function",
]
