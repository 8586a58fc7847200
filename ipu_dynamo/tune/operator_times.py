"""Measure the time of each operator of a graph on this machine."""

import time
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.graph_queries import is_view
from ipu_dynamo.ops.library.host_call import host_call, without_calling
from ipu_dynamo.ops.library.replica_collectives import COLLECTIVES
from ipu_dynamo.ops.operator_costs import has_matmuls, of_bodies
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.tune.intra_op import intra_op_threads

_REPETITIONS = 5
_FUSED = 0.4  # of an operator's own time: its rough cost inside a compiled loop


def operator_times(graph: fx.GraphModule, *, threads: int, fused: bool) -> dict[fx.Node, float]:
    """Seconds of each operator: the least of some runs, on small random numbers and zeros.

    Args:
        graph: a flat graph with meta["val"]; its integers may be zero.
        threads: intra-op threads.
        fused: operators that a compiler fuses count as much as they then take, about.
    """
    with intra_op_threads(threads), torch.no_grad():
        runs = [_times(graph, fused) for _ in range(_REPETITIONS)]
    return {node: min(run[node] for run in runs) for node in runs[0]}


def _times(graph: fx.GraphModule, fused: bool) -> dict[fx.Node, float]:
    clock = _Clock(graph, fused)
    inputs = [_value(n.meta["val"]) for n in graph.graph.find_nodes(op="placeholder")]
    clock.run(*inputs, enable_io_processing=False)
    return clock.seconds


class _Clock(fx.Interpreter):
    """Times every operator; views take no time in compiled code.

    Of loops and branches it runs each body once: the numbers here would not end a `while_loop`.
    An exchange of replicas counts nothing: here are no others.
    """

    def __init__(self, graph: fx.GraphModule, fused: bool) -> None:
        super().__init__(graph)
        self.seconds: dict[fx.Node, float] = {}
        self._fused = fused

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is host_call:  # the user's function has effects: it is not called for timing
            return without_calling(*args, **kwargs)
        start = time.perf_counter()
        result = target(*args, **kwargs)
        self._last = time.perf_counter() - start
        return result

    def run_node(self, n: fx.Node) -> Any:
        if bodies := bodies_of(n):
            inside = [sum(_times(body.graph, self._fused).values()) for body in bodies]
            self.seconds[n] = of_bodies(n, inside)
            return [_value(result) for result in n.meta["val"]]
        self._last = 0.0
        if n.target in COLLECTIVES:
            self.seconds[n] = 0.0
            return _value(n.meta["val"])
        result = super().run_node(n)
        if n.op not in ("placeholder", "output"):
            is_timed = isinstance(n.target, OpOverload) and not is_view(n)
            share = _FUSED if self._fused and not has_matmuls(n) else 1.0
            self.seconds[n] = self._last * share if is_timed else 0.0
        return result


def _value(like: Tensor) -> Tensor:
    """A tensor with the layout of `like`: small random numbers, or zeros."""
    tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()
