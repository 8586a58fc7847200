"""Make results that a program cannot return: numbers and views of inputs.

A model may return numbers that it reads from tensors, and slices of inputs at places that are
values; these share memory with the inputs. The program returns tensors without dimensions in their
place, which are read after it has run.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ipu_dynamo.capture.private.dynamo import is_read_number
from ipu_dynamo.passes.aot.select_by_indices import (
    ReturnedCut,
    model_results,
    number_as_tensor,
    returned_cut,
)

LateResults = Mapping[int, ReturnedCut | None]  # by place; None: a number


def late_results(graph: fx.GraphModule) -> LateResults:
    """Find the results of a graph of AOTAutograd that its caller makes after the call."""
    late: dict[int, ReturnedCut | None] = {}
    for place, node in model_results(graph.graph):
        if is_read_number(node.meta.get("val")):
            if number_as_tensor(node, plan=True) is not None:
                late[place] = None
        elif (cut := returned_cut(node)) is not None:
            late[place] = cut
    return late


def making_results(
    call: Callable[[list[Any]], tuple[Any, ...]], late: LateResults
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Wrap `call`: make `late` results from the tensors that it returns for them."""
    cut_inputs = {cut.argument for cut in late.values() if cut is not None}

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        inputs = {place: arguments[place] for place in cut_inputs}  # `call` empties the list
        results = list(call(arguments))
        for place, cut in late.items():
            number = results[place].item()
            results[place] = number if cut is None else cut(inputs[cut.argument], number)
        return tuple(results)

    return run
