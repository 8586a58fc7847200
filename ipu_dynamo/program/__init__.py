"""The language that passes and runtime share: programs, their values, functions, instructions."""

from ipu_dynamo.program.function import Function, graph_outputs, make_function
from ipu_dynamo.program.graph_text import MUTATED
from ipu_dynamo.program.instructions import (
    Call,
    Copy,
    Direction,
    Instruction,
    Order,
    Receive,
    Reduce,
    Repeat,
    Send,
    Update,
)
from ipu_dynamo.program.pipeline import Stash
from ipu_dynamo.program.program import Program
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
    "Order",
    "Output",
    "Program",
    "Receive",
    "Reduce",
    "Repeat",
    "Returns",
    "Send",
    "Stash",
    "TensorType",
    "Update",
    "Variable",
    "graph_outputs",
    "make_function",
]
