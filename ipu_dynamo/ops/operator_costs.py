"""Estimate how long operators take on one core, to decide what is worth a call or a thread."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.control_flow import branch_op, loop_op
from ipu_dynamo.ops.graph_queries import nbytes, only_looks
from ipu_dynamo.ops.precision.stochastic_rounding import round_stochastically_op

# Round figures for one core of a server processor; decisions need no more than their size.
_FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 5e9
ANCHORED = "ipu.anchored"  # key of node.meta: only somebody who looks inside wants the value
_UNKNOWN_ITERATIONS = 10  # of a while_loop, whose values decide how often it runs
_ROUNDING_PASSES = 80  # a rounding at random is 40 operators on numbers of twice the size
_COUNTED_AS = {  # PyTorch's table lacks the attention of the CPU
    aten._scaled_dot_product_flash_attention_for_cpu.packet: (
        aten._scaled_dot_product_flash_attention.packet
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.packet: (
        aten._scaled_dot_product_flash_attention_backward.packet
    ),
}


def estimated_seconds(operators: Iterable[fx.Node]) -> float:
    """Arithmetic of products and convolutions, plus a pass over every operator's result.

    Operators that only anchors need do not count, so that anchors change no decision.
    """
    return sum(seconds(node) for node in operators if ANCHORED not in node.meta)


def seconds(node: fx.Node) -> float:
    """The same of one operator; of a loop or branch, with what its bodies take."""
    inside = [
        estimated_seconds(n for n in body.graph.graph.nodes if n.op == "call_function")
        for body in bodies_of(node)
    ]
    own = _flops(node) / _FLOPS_PER_SECOND + _nbytes(node) / BYTES_PER_SECOND
    return own + of_bodies(node, inside) if inside else own


def of_bodies(node: fx.Node, seconds: Sequence[float]) -> float:
    """Seconds in the bodies of a loop or branch, from the time of one run of each.

    A branch counts as its longer body. A `while_loop` counts as a fixed number of iterations, as
    theirs is not known before it runs.
    """
    if node.target is branch_op:
        return max(seconds)
    count: Any = node.args[3] if node.target is loop_op else _UNKNOWN_ITERATIONS
    return float(count * sum(seconds))


def has_matmuls(node: fx.Node) -> bool:
    """Whether an operator is a product or a convolution, for which there are libraries."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _flops(node: fx.Node) -> float:
    operator: Any = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(_COUNTED_AS.get(operator, operator))
    if count is None:
        return 0.0
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return float(count(*args, **kwargs, out_val=node.meta["val"]))


def _nbytes(node: fx.Node) -> int:
    """Bytes that an operator writes; its first result stands for several, but for loops."""
    if bodies_of(node):
        return nbytes(node)
    value = node.meta.get("val")
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if only_looks(node) or not isinstance(value, Tensor):
        return 0
    passes = _ROUNDING_PASSES if node.target is round_stochastically_op else 1
    return passes * value.numel() * value.element_size()
