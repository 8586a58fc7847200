"""Draw random flat ATen graphs for passes, with inputs to run them on."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.testing.private.testing_names import FakeTensorMode

LIMIT = 2.0**20  # values stay below, so that no product of two rows reaches 2**53


@dataclass(frozen=True, slots=True)
class Operator:
    """A way to extend a graph: by `target`, if two matrices fit it."""

    target: Any
    arguments: Callable[[fx.Node, fx.Node], tuple[Any, ...]]
    fits: Callable[[Tensor, Tensor], bool] = lambda a, b: True
    part: int | None = None  # index of the result to go on with, where there are several


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape


OPERATORS = (
    Operator(aten.t.default, lambda a, b: (a,)),
    Operator(aten.add.Tensor, lambda a, b: (a, b), _equal),
    Operator(aten.mm.default, lambda a, b: (a, b), lambda a, b: a.shape[1] == b.shape[0]),
    Operator(aten.relu.default, lambda a, b: (a,)),
    Operator(aten.mul.Tensor, lambda a, b: (a, b), _equal),
    Operator(aten.clone.default, lambda a, b: (a,)),
    Operator(aten.sum.dim_IntList, lambda a, b: (a, [1], True)),
    Operator(aten.view.default, lambda a, b: (a, [-1, 1]), lambda a, b: a.is_contiguous()),
    Operator(aten.slice.Tensor, lambda a, b: (a, 0, 0, 1)),
    Operator(aten.expand.default, lambda a, b: (a, [-1, 3]), lambda a, b: a.shape[1] == 1),
    Operator(aten.cat.default, lambda a, b: ([a, b],), lambda a, b: a.shape[1] == b.shape[1]),
    Operator(aten.max.dim, lambda a, b: (a, 1, True), part=0),
    Operator(aten.split.Tensor, lambda a, b: (a, 1), lambda a, b: len(a) > 1, part=1),
    Operator(aten.full_like.default, lambda a, b: (a, 2)),
)


@st.composite
def aten_graphs(
    draw: st.DrawFn, *, max_inputs: int = 3, max_ops: int = 8, max_dim: int = 3
) -> tuple[fx.GraphModule, list[Tensor]]:
    """A flat graph of functional operators and views on matrices, and inputs for it.

    Every node has meta["val"], operators have a stack trace. All numbers are integers below
    2**53 in float64, so that every sum is exact. The graph returns some of its values as a tuple,
    the last one among them.

    Args:
        max_inputs: number of placeholders, at least 1.
        max_ops: number of steps; some take two or three nodes.
        max_dim: rows and columns of the placeholders.

    Example:
        @given(case=aten_graphs())
        def test_keeps_values(case):
            graph, inputs = case
            expected = graph(*inputs)
            my_pass(graph)
            assert_same_bits(graph(*inputs), expected)
    """
    graph, mode = fx.Graph(), FakeTensorMode()
    rng = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    inputs: list[Tensor] = []
    matrices: dict[fx.Node, float] = {}  # with a bound on their values
    for index in range(draw(st.integers(1, max_inputs))):
        shape = (draw(st.integers(1, max_dim)), draw(st.integers(1, max_dim)))
        inputs.append(torch.randint(-1, 2, shape, generator=rng).double())
        node = graph.placeholder(f"x{index}")
        node.meta["val"] = mode.from_tensor(inputs[-1])
        matrices[node] = 1.0
    for line in range(draw(st.integers(0, max_ops))):
        a, b = (draw(st.sampled_from(list(matrices))) for _ in range(2))
        values = a.meta["val"], b.meta["val"]
        operator = draw(
            st.sampled_from([candidate for candidate in OPERATORS if candidate.fits(*values)])
        )
        node = append(graph, operator.target, *operator.arguments(a, b), line=line)
        if operator.part is not None:
            node = append(graph, getitem, node, operator.part, line=line)
        bound = max(2.0, matrices[a] + matrices[b], matrices[a] * matrices[b]) * max(
            values[0].shape
        )
        if bound > LIMIT:
            node, bound = append(graph, aten.clamp.default, node, -1, 1, line=line), 1.0
        matrices[node] = bound
    values_so_far = list(matrices)
    chosen = draw(st.lists(st.sampled_from(values_so_far), max_size=3))
    result = graph.output((*chosen, values_so_far[-1]))
    result.meta["val"] = None
    return fx.GraphModule({}, graph), inputs


def append(graph: fx.Graph, target: Any, *args: Any, line: int = 0) -> fx.Node:
    """Append a call with its fake value and a stack trace that points to `line` of `model.py`."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
    text = f"step {line}: {getattr(target, '__name__', target)}"
    node.meta["stack_trace"] = f'  File "model.py", line {line + 1}, in forward\n    {text}\n'
    return node
