"""Give results the memory layout that the functions which read them expect.

Inductor mostly keeps the layout of eager PyTorch, but not always (`cat` of transposed parts). It
returns one tensor twice for a result and a view of it with the same shape.
"""

from collections.abc import Sequence
from itertools import combinations

from torch import Tensor, fx

from ipu_dynamo.ops.graph_queries import root
from ipu_dynamo.program import graph_outputs
from ipu_dynamo.runtime.engines.stage import Stage

Layout = tuple[int, ...] | None  # strides; None: no tensor


def layouts_of(graph: fx.GraphModule) -> list[Layout]:
    """The layouts of a graph's results."""
    return [
        tuple(result.meta["val"].stride()) if isinstance(result, fx.Node) else None
        for result in graph_outputs(graph)
    ]


def views_of(graph: fx.GraphModule) -> list[tuple[int, int]]:
    """Pairs of results that are two views of one memory: the places of both, the later first."""
    nodes = [node for node in enumerate(graph_outputs(graph)) if isinstance(node[1], fx.Node)]
    return [
        (later, place)
        for (place, node), (later, view) in combinations(nodes, 2)
        if view is not node and root(view) is root(node)
    ]


def laid_out(
    run: Stage,
    made: Sequence[Layout] | None,
    expected: Sequence[Layout],
    views: Sequence[tuple[int, int]] = (),
) -> Stage:
    """`run`, with copies of the results that it makes in another layout than expected.

    Args:
        made: the layouts of its results; None: they are looked at after each call.
        views: pairs of results that share memory, and are a tensor of their own each.
    """
    wrong = [
        (place, stride)
        for place, stride in enumerate(expected)
        if stride is not None and (made is None or made[place] != stride)
    ]
    if not wrong and not views:
        return run

    def stage(arguments: list[Tensor]) -> Sequence[Tensor | None]:
        results = list(run(arguments))
        for place, stride in wrong:
            result = results[place]
            assert result is not None
            results[place] = with_layout(result, stride)
        for later, place in views:
            if (result := results[later]) is not None and result is results[place]:
                results[later] = result.view_as(result)
        return results

    return stage


def with_layout(result: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A tensor in the layout `stride`, copied if it has another.

    Along a stride of 0 all its elements are the same.
    """
    if result.stride() == stride:
        return result
    once = result
    for dim, step in enumerate(stride):
        if step == 0 and result.shape[dim] > 1:
            once = once.narrow(dim, 0, 1)
    dense = once.new_empty_strided(once.shape, stride).copy_(once)
    return dense.as_strided(result.shape, stride)
