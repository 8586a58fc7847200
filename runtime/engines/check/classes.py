"""Say of each value of a graph how far two right computations of it may differ.

A value is *exact* if no operator before it rounds: both give the same bits. It is *rounded* after
one that does. Integers that depend on rounded values may differ where these are close.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.graph_queries import is_view_operator, may_draw, owner, written_arguments
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.program import Function, graph_outputs

_PURE = frozenset({"aten", "prims", "prim", "mkldnn", "mkl", "ipu"})
_EFFECTS = frozenset({"host_call", "print_tensor", "run_executable", "hook"})  # of `ipu`
_FILLED_LATER = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "empty_permuted"})
_FILLED_LATER |= {"new_empty_strided"}
_FILLS_AT_RANDOM = frozenset({"bernoulli", "uniform", "normal_functional", "random", "rand_like"})
_FILLS_AT_RANDOM |= {
    "randn_like",
    "randint_like",
    "exponential",
    "cauchy",
    "log_normal",
    "geometric",
}
_FILLS_AT_RANDOM |= {f"{name}_" for name in _FILLS_AT_RANDOM} | {"normal_"}
_NO_VALUES = frozenset(  # look at the shape of their first argument, and at no value of it
    {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "fill", "fill_"}
    | {"zero", "zero_"}
    | _FILLED_LATER
    | _FILLS_AT_RANDOM
)
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"}) | _FILLS_AT_RANDOM
CASTS = frozenset({"_to_copy", "convert_element_type"})
_ORDERS = frozenset(  # take one of two zeros, whichever comes first
    {"maximum", "minimum", "fmax", "fmin", "amax", "amin", "max", "min", "aminmax", "clamp"}
    | {"clamp_min", "clamp_max", "relu", "relu_", "hardtanh", "sort", "topk", "msort", "kthvalue"}
    | {"median", "threshold", "threshold_backward", "max_pool2d_with_indices", "cummax", "cummin"}
    | {"max_pool3d_with_indices", "adaptive_max_pool2d", "prelu", "leaky_relu"}
)
_EXACT = (
    frozenset(
        {"clone", "contiguous", "lift_fresh_copy", "alias_copy", "cat", "stack", "index", "where"}
        | {"index_select", "gather", "take", "masked_fill", "select_scatter", "slice_scatter"}
        | {"as_strided_scatter", "diagonal_scatter", "constant_pad_nd", "flip", "roll", "repeat"}
        | {"repeat_interleave", "embedding", "tril", "triu", "scatter", "index_copy", "index_fill"}
        | {"masked_scatter", "masked_select", "nonzero", "full", "zeros", "ones", "eye", "neg"}
        | {"scalar_tensor", "abs", "sign", "sgn", "ceil", "floor", "trunc", "reflection_pad1d"}
        | {"reflection_pad2d", "replication_pad1d", "replication_pad2d", "upsample_nearest2d"}
        | {"pixel_shuffle", "unfold_copy", "slice_copy", "view_copy", "expand_copy", "logical_not"}
        | {"_unsafe_index", "_unsafe_view", "im2col", "broadcast_tensors", "permute_copy", "copy_"}
        | {"copysign", "index_put", "_index_put_impl", "masked_fill_", "copy", "trace_copy"}
        | {"set_", "detach_copy", "split_copy", "split_with_sizes_copy", "unsafe_split"}
    )
    | _ORDERS
    | _NO_VALUES
    | CASTS
    | {"threshold_backward"}
)


@dataclass(frozen=True, slots=True)
class Class:
    """How far two right computations of a value may differ.

    Args:
        rounded: an operator before it rounds.
        casts: to narrower types before it: one is exact, a second may round again.
        ordered: an operator before it may take either of two zeros.
        defined: it is not memory without a value.
        moves: an input of the function, or a random draw, reaches it.
    """

    rounded: bool = False
    casts: int = 0
    ordered: bool = False
    defined: bool = True
    moves: bool = False


def name_of(node: fx.Node) -> str:
    """The name of a node's operator, without overload."""
    return operator_name(node.target)


def operator_name(target: object) -> str:
    """The name of an operator, without overload; empty for anything else that can be called."""
    if not isinstance(target, OpOverload):
        return ""
    name: str = target.name()
    return name.partition("::")[2].partition(".")[0]


def rounds(node: fx.Node) -> bool:
    """Whether an operator computes floating numbers that the machine rounds."""
    return call_rounds(node.target, node.args, tensors_of(node))


def call_rounds(target: object, args: Sequence[Any], made: Iterable[Tensor]) -> bool:
    """Whether a call computes floating numbers that the machine rounds.

    Args:
        made: its results.
    """
    if not any(t.dtype.is_floating_point or t.dtype.is_complex for t in made):
        return False
    if target is getitem or is_view_operator(target):
        return False
    name = operator_name(target)
    accumulates = name in ("index_put", "_index_put_impl") and True in args[3:4]
    return accumulates or name not in _EXACT


def tensors_of(node: fx.Node) -> list[Tensor]:
    """Return the fake values of a node."""
    return tensors_in(node.meta.get("val"))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an operator's result."""
    values: Iterable[Any] = value if isinstance(value, list | tuple) else (value,)
    return [one for one in values if isinstance(one, Tensor)]


def classes_of(graph: fx.Graph) -> dict[fx.Node, Class]:
    """The class of every value, as it is at the end."""
    found: dict[fx.Node, Class] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op != "call_function":
            found[node] = Class(moves=node.op == "placeholder")
            continue
        sources = [found[owner(source)] for source in node.all_input_nodes]
        written = written_arguments(node)
        name = name_of(node)
        if name in _NO_VALUES:
            sources = []
        elif name in ("copy", "copy_"):
            sources = sources[1:]
        one = Class(
            rounded=rounds(node) or bool(bodies_of(node)) or any(s.rounded for s in sources),
            casts=max((s.casts for s in sources), default=0) + _narrows(node),
            ordered=name in _ORDERS or any(s.ordered for s in sources),
            defined=name not in _FILLED_LATER and all(s.defined for s in sources),
            moves=may_draw(node) or any(s.moves for s in sources),
        )
        if one.casts > 1 and not one.rounded:
            one = Class(True, one.casts, one.ordered, one.defined, one.moves)
        found[node] = one
        for target in map(owner, written):
            found[target] = one if name in _OVERWRITES else _joined(found[target], one)
    return found


def result_classes(function: Function) -> list[Class | None]:
    """The class of each result, and then of each argument that the function writes."""
    graph = function.graph.graph
    found = classes_of(graph)
    placeholders = graph.find_nodes(op="placeholder")
    nodes: Sequence[Any] = (
        *graph_outputs(function.graph),
        *(placeholders[place] for place in function.written),
    )
    return [found[owner(node)] if isinstance(node, fx.Node) else None for node in nodes]


def why_unchecked(graph: fx.Graph) -> str:
    """Why a function cannot run twice; empty if it can."""
    for node in graph.nodes:
        if any(tensor.device.type != "cpu" for tensor in tensors_of(node)):
            return "its tensors are not on the CPU"
        if node.op != "call_function" or node.target is getitem:
            continue
        if not isinstance(node.target, OpOverload) or node.target.namespace not in _PURE:
            return f"%{node.name} is no operator of PyTorch's, and may have effects"
        if name_of(node) in _EFFECTS:
            return f"%{node.name} has effects"
        for body in bodies_of(node):
            if reason := why_unchecked(body.graph.graph):
                return reason
    return ""


def _joined(one: Class, other: Class) -> Class:
    return Class(
        one.rounded or other.rounded,
        max(one.casts, other.casts),
        one.ordered or other.ordered,
        one.defined and other.defined,
        one.moves or other.moves,
    )


def _narrows(node: fx.Node) -> bool:
    if name_of(node) not in CASTS or not node.all_input_nodes:
        return False
    before, after = tensors_of(node.all_input_nodes[0]), tensors_of(node)
    if not before or not after or not after[0].dtype.is_floating_point:
        return False
    old = before[0].dtype
    return not old.is_floating_point or torch.finfo(after[0].dtype).eps > torch.finfo(old).eps
