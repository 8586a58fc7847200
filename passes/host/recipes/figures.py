"""Name the figures that decide how the functions of a program are compiled here."""

from collections.abc import Iterable

from ipu_dynamo.passes.host.recipes import unfold_convolutions
from ipu_dynamo.program import Function
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_choice import matmul_choice
from ipu_dynamo.tune.matmul_classes import MEASURED, class_of


def figures_of(functions: Iterable[Function]) -> Figures:
    """The figures of this machine that decide how functions are compiled here."""
    functions = tuple(functions)
    choice = matmul_choice()
    if choice.forced is not None:
        return Figures(choice.forced)
    classes = dict.fromkeys(class_of(node) for f in functions for node in f.operators)
    matmuls = {one: times for one in classes if one in MEASURED and (times := choice.measured(one))}
    uses = unfold_convolutions.uses_of(functions)
    return Figures(None, matmuls or None, {use.of: use.seconds for use in uses})
