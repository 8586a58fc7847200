"""Measure on this machine what the operators of a graph take."""

import time
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.ops.library.host_call import host_call, without_calling
from ipu_dynamo.ops.operator_costs import has_matmuls
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.tune.intra_op import intra_op_threads

_REPETITIONS = 5
_FUSED = 0.4  # of its own time: what an operator takes inside a compiled loop, about


def operator_times(graph: fx.GraphModule, *, threads: int, fused: bool) -> dict[fx.Node, float]:
    """Seconds of each operator: the least of some runs, on small random numbers and zeros.

    Args:
        graph: a flat graph with meta["val"]; its integers may be zero.
        threads: intra-op threads.
        fused: operators that a compiler fuses count as much as they then take, about.
    """
    with intra_op_threads(threads), torch.no_grad():
        runs = [_times(graph) for _ in range(_REPETITIONS)]
    return {
        node: min(run[node] for run in runs) * (_FUSED if fused and not has_matmuls(node) else 1.0)
        for node in runs[0]
    }


def _times(graph: fx.GraphModule) -> dict[fx.Node, float]:
    finder = _Clock(graph)
    inputs = [_value(n.meta["val"]) for n in graph.graph.find_nodes(op="placeholder")]
    finder.run(*inputs, enable_io_processing=False)
    return finder.seconds


class _Clock(fx.Interpreter):
    """Times every operator; views take no time in compiled code."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seconds: dict[fx.Node, float] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is host_call:  # what it takes is the user's secret, and calling it has effects
            return without_calling(*args, **kwargs)
        start = time.perf_counter()
        result = target(*args, **kwargs)
        self._last = time.perf_counter() - start
        return result

    def run_node(self, n: fx.Node) -> Any:
        self._last = 0.0
        result = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            self.seconds[n] = (
                0.0 if not isinstance(n.target, OpOverload) or is_view(n) else self._last
            )
        return result


def _value(like: Tensor) -> Tensor:
    """A tensor with the layout of `like`: small random numbers, or zeros."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()
