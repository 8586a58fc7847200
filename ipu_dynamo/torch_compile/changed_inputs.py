"""Run a graph operator by operator in calls where a changed input shares memory with another one.

AOTAutograd makes the graph functional for inputs that share no memory, or that share it as in the
first call. Dynamo has no guard for inputs that begin to share memory later.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, fx

from ipu_dynamo.capture.private.aot import PlainAOTInput, overlapping_tensors
from ipu_dynamo.ops.private.node_meta import DESC
from ipu_dynamo.passes.aot.keep_changed import changed_inputs

Call = Callable[..., Any]


def places_of_changed(graph: fx.Graph) -> set[int]:
    """Places of the inputs of Dynamo's graph that a graph of AOTAutograd made of it changes.

    Inputs that share memory already are views of one input there; one of them is named.
    """
    places = set()
    for node in changed_inputs(graph):
        input_ = node.meta[DESC]
        while hasattr(input_, "base_of"):
            input_ = input_.base_of
        if isinstance(input_, PlainAOTInput):
            places.add(input_.idx)
    return places


def apart_or_plain(run: Call, plain: Call, changed: Collection[int], names: Sequence[str]) -> Call:
    """`run`; or `plain`, if an input that is changed has memory in common with another one.

    Args:
        plain: the user's graph.
        changed: places of inputs.
        names: of all inputs.
    """

    def call(*arguments: Any) -> Any:
        storages = [
            a.untyped_storage().data_ptr() if isinstance(a, Tensor) else 0 for a in arguments
        ]
        filled = [storage for storage in storages if storage]
        if len(set(filled)) == len(filled):
            return run(*arguments)
        for place in changed:
            own = storages[place]
            others = [i for i, storage in enumerate(storages) if storage == own and i != place]
            for other in others if own else ():
                if overlapping_tensors([arguments[place], arguments[other]]):
                    warnings.warn(
                        f"PyTorch runs a graph itself in this call: {names[place]}, which the graph"
                        f" changes, shares memory with {names[other]}",
                        stacklevel=2,
                    )
                    return plain(*arguments)
        return run(*arguments)

    return call
