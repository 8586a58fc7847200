"""Name the figures that decide how the functions of a program are compiled here."""

from collections.abc import Iterable, Mapping

from ipu_dynamo.program import Function
from ipu_dynamo.runtime.lower import choose_convolutions
from ipu_dynamo.runtime.lower.convolution_times import convolution_times
from ipu_dynamo.tune.convolution_shape import ConvolutionShape
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_choice import product_choice
from ipu_dynamo.tune.matmul_classes import MEASURED, class_of


def figures_of(functions: Iterable[Function]) -> Figures:
    """The figures of this machine that decide how functions are compiled here."""
    functions = tuple(functions)
    choice = product_choice()
    if choice.forced is not None:
        return Figures(choice.forced)
    asked = any(class_of(node) in MEASURED for f in functions for node in f.operators)
    uses = choose_convolutions.uses_of(functions)
    return Figures(None, choice.times() if asked else None, {use.of: use.seconds for use in uses})


def convolution_of(figures: Figures, one: ConvolutionShape) -> Mapping[str, float] | None:
    """Seconds of a convolution in each way; None where nothing is known."""
    return figures.convolutions.get(one) or convolution_times(one)
