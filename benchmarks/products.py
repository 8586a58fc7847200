"""Compute every matmul and convolution of a step, each in the faster way, and nothing else.

No step of these shapes is faster, unless it computes something else.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from benchmarks.measure import Step
from ipu_dynamo import CompiledModel
from ipu_dynamo.ops import onednn
from ipu_dynamo.program import HostProgram
from ipu_dynamo.program.schedule.sections import sections
from ipu_dynamo.tune.matmul_classes import MATMULS, class_of, factors
from ipu_dynamo.tune.microbenchmark import shortest_times

aten = torch.ops.aten
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
Operands = dict[tuple[torch.Size, tuple[int, ...], torch.dtype], Tensor]


def products_alone(step: CompiledModel, *inputs: Tensor) -> Step:
    """All products of a call of `step`, which is compiled for `inputs`."""
    step.compile(*inputs)
    operands: Operands = {}
    products = [
        (_faster(node, operands), times)
        for graph, times in _graphs(step.executable.host_program)
        for node in graph.nodes
        if node.target in MATMULS | CONVOLUTIONS
    ]

    @torch.no_grad()
    def run() -> None:
        for product, times in products:
            for _ in range(times):
                product()

    return run


def _graphs(host: HostProgram) -> list[tuple[fx.Graph, int]]:
    """Every function of a program, and how often a call of it runs."""
    cut = sections(host.program)
    if host.fused is not None:
        return [(host.fused.function.graph.graph, cut.steps)]
    functions = {function.name: function for function in host.runs.functions}
    runs = cut.steps * cut.micro_batches
    return [(functions[call.function].graph.graph, runs) for call in host.runs.calls]


def _faster(node: fx.Node, operands: Operands) -> Callable[[], Any]:
    """A callable for a product, with operands laid out as in the program."""
    ways: dict[str, Callable[[], Any]] = {}
    if node.target in MATMULS:
        a, b = (_operand(of.meta["val"], operands) for of in factors(node))
        ways["torch"] = lambda: torch.matmul(a, b)
        if class_of(node) is not None and a.dim() == 2:
            ways["onednn"] = lambda: onednn.matmul(a, b, None, "none")
    else:
        arguments: Any = map_arg(node.args, lambda of: _operand(of.meta["val"], operands))
        target: Any = node.target
        ways["torch"] = lambda: target(*arguments)
    with torch.no_grad():
        seconds = shortest_times(ways, 0.005)
    return ways[min(seconds, key=seconds.__getitem__)]


def _operand(like: Tensor, operands: Operands) -> Tensor:
    """Random values; products share operands of one layout."""
    key = like.shape, like.stride(), like.dtype
    if key not in operands:
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        operands[key] = tensor.normal_() if like.dtype.is_floating_point else tensor.zero_()
    return operands[key]
