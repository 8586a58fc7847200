"""Estimate the costs of a program's nodes on an IPU, until there is a machine model.

Source: `cost_constants.py`; floating-point operations of products and convolutions are counted by
`torch.utils.flop_counter`, of all else there is one for each element of the result.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import FixedProgram
from ipu_dynamo.saved_model.conversion.pipelines.cost_constants import (
    BYTES_PER_CYCLE,
    FLOPS_PER_CYCLE,
    NODE_CYCLES,
)
from ipu_dynamo.saved_model.exported.node_names import is_result_of_tuple

_CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose2d")


def estimate_cycles(
    program: FixedProgram, *, half_matmul_partials: bool, half_conv_partials: bool
) -> dict[fx.Node, int]:
    """The cycles of every operator.

    Args:
        half_matmul_partials, half_conv_partials: products of halves sum up in halves.
    """
    counter = _Counter(program, half_matmul_partials, half_conv_partials)
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    with fake_mode_of(values):
        counter.run(*values)
    return counter.cycles


def tensor_bytes(value: Any) -> int:
    """Bytes of a value's tensors."""
    if isinstance(value, tuple | list):
        return sum(map(tensor_bytes, value))
    return prod(value.shape) * value.element_size() if isinstance(value, Tensor) else 0


class _Counter(fx.Interpreter):
    """Counts cycles operator by operator."""

    def __init__(self, program: FixedProgram, matmuls: bool, convolutions: bool) -> None:
        super().__init__(module_of(program.graph))
        self._half = {False: matmuls, True: convolutions}
        self.cycles: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or is_result_of_tuple(n):
            return super().run_node(n)
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        self.cycles[n] = self._cycles(n, value, counter.get_total_flops())
        return value

    def _cycles(self, node: fx.Node, value: Any, flops: int) -> int:
        values = value if isinstance(value, tuple | list) else (value,)
        tensors = [part for part in values if isinstance(part, Tensor)]
        if not tensors:
            return 0
        elements = sum(prod(tensor.shape) for tensor in tensors)
        kind = "float16" if tensors[0].dtype == torch.float16 else "float32"
        name = str(node.target).split(".")[1] if "." in str(node.target) else ""
        if kind == "float16" and flops and self._half[name in _CONVOLUTIONS]:
            kind = "float16, half partials"
        read = sum(tensor_bytes(source.meta["val"]) for source in node.all_input_nodes)
        computing = _up(flops or elements, FLOPS_PER_CYCLE[kind])
        moving = _up(read + tensor_bytes(value), BYTES_PER_CYCLE)
        return NODE_CYCLES + max(computing, moving)


def _up(number: int, by: int) -> int:
    return -(-number // by)
