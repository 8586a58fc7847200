"""Write the operators of a Python function in place of one operator."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_dynamo.ops.private.graphs import tracing_here


def written(
    graph: fx.Graph,
    node: fx.Node,
    compute: Callable[..., Sequence[Tensor | None]],
    sources: list[fx.Node],
    of: Mapping[fx.Node, fx.Node],
) -> list[fx.Node | None]:
    """Insert the operators of `compute` for `node`, with its source line; return the results."""
    values = [source.meta["val"] for source in sources]
    off = torch.autocast("cpu", enabled=False)
    with tracing_here(), values[0].fake_mode, torch.no_grad(), off:
        operators = make_fx(compute)(*values).graph
    new = dict[fx.Node, fx.Node](
        zip(operators.find_nodes(op="placeholder"), (of[g] for g in sources), strict=True)
    )
    for operator in operators.nodes:
        if operator.op == "call_function":
            new[operator] = graph.node_copy(operator, new.__getitem__)
            new[operator].meta |= {k: v for k, v in node.meta.items() if k != "val"}
    results: Any = operators.output_node().args[0]
    expected = node.meta["val"]
    for result, value in zip(
        results, [expected] if isinstance(expected, Tensor) else expected, strict=True
    ):
        assert result is None or _layout(result.meta["val"]) == _layout(value)
    return [None if result is None else new[result] for result in results]


def _layout(value: Tensor) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride()
