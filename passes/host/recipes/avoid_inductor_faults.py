"""Run a function operator by operator if Inductor is known to compile it wrongly.

Before   recipe step0: inductor, of %y = aten.index_add(%x, 0, %i, aten.mul(%x, 2))
After    recipe step0: eager
Keeps    the function.
Source   PyTorch 2.13.0 writes the result of `x.index_add(dim, index, f(x))` over x while f(x) is
         still read from it. Its gradients of an average pool are wrong where padding counts and
         `ceil_mode` lets the last windows reach beyond it. Extremes of int8 and uint8 are 0 or 1
         where vectors have no element. Remainders of halves do not round a number that they are
         given. Some activations, a sum with zeros, `minimum` and `maximum` give the other zero,
         whose sign a division shows. Remainders and floor divisions of floats are one off where a
         quotient rounds to a whole number. `erfinv` is wrong in the fourth digit near 1, `acosh`
         and `sinh` overflow early, `atanh` and `expm1` are 0 near 0, and `softshrink` of NaN is 0.
         Zero times an infinity is zero, also as a coefficient of `addmm`. Two pads of one value in
         two layouts write beyond their memory. Plain torch.compile does all of this, too. Faults
         that every value shows are not listed: the check of compiled functions finds them
         (runtime/engines/check).
"""

import logging
from dataclasses import replace

import torch
from torch import fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import is_view_operator, needed_for, only_looks
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.program import Decision, HostProgram
from ipu_dynamo.program.recipe import FunctionRecipe

log = logging.getLogger(__name__)
_SCATTERS: dict[object, int] = {  # operator -> position of the values that it writes
    aten.index_add.default: 3,
    aten.index_copy.default: 3,
    aten.index_put.default: 2,
    aten.index_reduce.default: 3,
    aten.scatter.src: 3,
    aten.scatter_add.default: 3,
    aten.scatter_reduce.two: 3,
}
_POOLS: dict[object, int] = {  # gradients of average pools -> dims of a window
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
}
_EXTREMES = {
    aten.amax.default,
    aten.amin.default,
    aten.aminmax.default,
    aten.argmax.default,
    aten.argmin.default,
    aten.max.default,
    aten.max.dim,
    aten.min.default,
    aten.min.dim,
}
_WRONG_SOMEWHERE = {
    aten.acosh.default,
    aten.atanh.default,
    aten.erfinv.default,
    aten.expm1.default,
    aten.sinh.default,
    aten.softshrink.default,
}
_FLOORS = {
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    aten.remainder.Tensor,
    aten.floor_divide.default,
    aten.floor_divide.Scalar,
}
_CHANGE_ZEROS = {
    aten.elu.default,
    aten.fmax.default,
    aten.fmin.default,
    aten.gelu.default,
    aten.hardtanh.default,
    aten.maximum.default,
    aten.minimum.default,
}
_SHOW_SIGNS: dict[object, int] = {  # of zero -> position of the argument whose sign they show
    aten.div.Tensor: 1,
    aten.reciprocal.default: 0,
    aten.atan2.default: 0,
    aten.copysign.Tensor: 1,
    aten.signbit.default: 0,
}
_READ_IN_PLACE = {aten.gather.default, aten.index.Tensor, aten.index_select.default}


def miscompiled(graph: fx.Graph) -> fx.Node | None:
    """The first operator that Inductor would get wrong for some values, or None."""
    nodes: list[fx.Node] = list(graph.nodes)
    padded: dict[object, fx.Node] = {}
    for node in nodes:
        place = _SCATTERS.get(node.target)
        if place is not None and len(node.args) > place:
            written, values = node.args[0], node.args[place]
            if isinstance(values, fx.Node) and _base(written) in _read_by(values):
                return node
        if node.target in _POOLS and _has_windows_beyond_padding(node):
            return node
        if node.target in _EXTREMES and _dtype(node.args[0]) in (torch.int8, torch.uint8):
            return node
        if node.target in _WRONG_SOMEWHERE or _floors(node) or _drops_infinities(node):
            return node
        if node.target == aten.fmod.Scalar and _rounds_number(node):
            return node
        if _changes_zeros(node) and _sign_shows(node):
            return node
        if node.target == aten.constant_pad_nd.default:
            other = padded.setdefault(_base(node.args[0]), node)
            if _order(other) != _order(node) and _is_computed(node):
                return node
    return None


def _dtype(node: object) -> torch.dtype | None:
    return node.meta["val"].dtype if isinstance(node, fx.Node) else None


def _rounds_number(node: fx.Node) -> bool:
    """Whether a half is divided by a number that its type does not hold."""
    dtype, number = _dtype(node.args[0]), node.args[1]
    if dtype not in (torch.float16, torch.bfloat16) or not isinstance(number, float):
        return False
    return torch.tensor(number, dtype=dtype).item() != number


def _floors(node: fx.Node) -> bool:
    """Whether a quotient of floats is rounded before its floor is taken."""
    rounded = node.target in _FLOORS or node.kwargs.get("rounding_mode") == "floor"
    return rounded and _is_float(node)


def _drops_infinities(node: fx.Node) -> bool:
    """Whether zero times an infinity, or NaN, becomes zero, or the other way round."""
    if node.target == aten.addmm.default:
        return 0 in (node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1))
    is_product = node.target == aten.mul.Tensor and _is_float(node)
    return is_product and isinstance(node.args[1], int) and node.args[1] == 0


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.is_floating_point() or value.is_complex())


def _changes_zeros(node: fx.Node) -> bool:
    """Whether an operator gives a zero of the other sign where it is compiled."""
    if node.target in _CHANGE_ZEROS:
        return True
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return False
    return any(map(_is_zero, node.args[:2]))


def _is_zero(value: object) -> bool:
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and value == 0
    if value.target in (aten.full.default, aten.full_like.default):
        return bool(value.args[1] == 0)
    return value.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _sign_shows(node: fx.Node) -> bool:
    """Whether an operator that reads a value shows the sign of its zeros."""
    for user in node.users:
        place = _SHOW_SIGNS.get(user.target)
        if place is not None and user.args[place] is node:
            return True
        if only_looks(user) and _sign_shows(user):
            return True
    return False


def _order(node: fx.Node) -> list[int]:
    """Return the dimensions of a value in the order of its memory."""
    value = node.meta["val"]
    return sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))


def _is_computed(node: fx.Node) -> bool:
    """Whether a pad reads the result of an operator, element by element."""
    base = _base(node.args[0])
    assert isinstance(base, fx.Node)
    return base.op == "call_function"


def _has_windows_beyond_padding(node: fx.Node) -> bool:
    """Whether an average pool counts padding, and a window reaches beyond it."""
    gradient, source, kernel, stride, padding, _, counts_padding, divisor = node.args
    if not counts_padding or divisor is not None:
        return False
    dims = _POOLS[node.target]
    assert isinstance(gradient, fx.Node)
    assert isinstance(source, fx.Node)
    sizes: list[list[int]] = [
        list(of) * (dims if len(of) == 1 else 1)  # type: ignore[arg-type]
        for of in (kernel, stride or kernel, padding)
    ]
    counts, lengths = (list(of.meta["val"].shape)[-dims:] for of in (gradient, source))
    return any(
        (count - 1) * step + width > length + 2 * pad
        for count, length, width, step, pad in zip(counts, lengths, *sizes, strict=True)
    )


def _read_by(values: fx.Node) -> set[object]:
    """Nodes that are read element by element where `values` is needed."""
    return set(map(_base, needed_for([values], _is_inlined)))


def _is_inlined(node: fx.Node) -> bool:
    target = node.target
    return only_looks(node) or (
        isinstance(target, OpOverload)
        and (torch.Tag.pointwise in target.tags or target in _READ_IN_PLACE)
    )


def _base(node: object) -> object:
    """The tensor that a view looks at."""
    while isinstance(node, fx.Node) and is_view_operator(node.target):
        node = node.args[0]
    return node


class AvoidInductorFaults(RecipePass):
    """The pass."""

    needed = "results would be wrong"

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        fault = miscompiled(recipe.lowered.graph.graph)
        if fault is None:
            return recipe, ()
        function = recipe.function.name
        log.warning(
            "@%s runs on the eager engine: Inductor of this PyTorch gets %%%s wrong (%s)",
            function,
            fault.name,
            source_line(fault),
        )
        reason = f"Inductor gets %{fault.name} wrong"
        decision = Decision(self.name, "operator by operator", reason, function)
        return replace(recipe, engine="eager", settings=()), (decision,)
