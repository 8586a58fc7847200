"""Describe a program whose calls return gradients, to be added in the order of micro-batches."""

from dataclasses import dataclass

from ipu_dynamo.program.ir.program import Program


@dataclass(frozen=True, slots=True)
class Deferred:
    """A program whose calls return their gradients.

    Args:
        program: the original one with other calls and functions.
        gradients: names of the gradients.
        accumulators: names of the variables that they are to be added to, aligned.
    """

    program: Program
    gradients: tuple[str, ...]
    accumulators: tuple[str, ...]
