"""Choose for each matmul the library that is faster here.

Before   %y: f32[m,n] = aten.addmm(%bias, %a, %b);  %z = aten.gelu(%y)
After    %z: f32[m,n] = ipu.onednn_matmul(%a, %b, %bias, "gelu")
Keeps    shapes, layouts, source lines; values but for the order of the sums.
Source   measured here, see `tune/matmul_times.py`: which library is fast differs by processor.

Only gelu moves into the matmul: oneDNN's relu makes 0 of nan.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import fx

from ipu_dynamo.ops import onednn
from ipu_dynamo.ops.accumulate import accumulate_matmul
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.program import Decision, Function, HostProgram, make_function
from ipu_dynamo.program.recipe import FunctionRecipe, PrepackedWeight
from ipu_dynamo.tune.figures import Figures
from ipu_dynamo.tune.matmul_choice import (
    Library,
    MatmulChoice,
    forced_choice,
    matmul_choice,
)
from ipu_dynamo.tune.matmul_classes import MATMULS, MatmulClass, class_of, factors
from ipu_dynamo.tune.matmul_times import Way

_ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}  # by approximation
_RESHAPES = {aten.view.default, aten._unsafe_view.default}


@dataclass(frozen=True, slots=True)
class Matmul:
    """A matmul and the decision for it.

    Args:
        node: computes it.
        weight: the placeholder whose transposed value is the second operand, if it is constant.
        gelu: the activation that is computed with it, if it moves.
    """

    node: fx.Node
    of: MatmulClass
    way: Way
    weight: fx.Node | None = None
    gelu: fx.Node | None = None


def plan(
    graph: fx.Graph, choice: MatmulChoice, constants: Collection[int] = ()
) -> tuple[Matmul, ...]:
    """Decide how the matmuls of a graph are computed. Reads the graph, changes nothing.

    Args:
        constants: positions of the inputs that keep their values from call to call.
    """
    fixed = {n for i, n in enumerate(graph.find_nodes(op="placeholder")) if i in constants}
    matmuls = []
    for node in graph.nodes:
        matmul_class = class_of(node)
        if matmul_class is None:
            continue
        weight = _weight(node)
        way = choice.way(matmul_class, packable=weight in fixed)
        gelu = _gelu_of(node) if way != "torch" and node.target is not aten.bmm.default else None
        matmuls.append(Matmul(node, matmul_class, way, weight if way == "packed" else None, gelu))
    return tuple(matmuls)


def apply(
    function: Function, matmuls: Sequence[Matmul]
) -> tuple[Function, tuple[PrepackedWeight, ...]]:
    """Replace matmuls in a copy of `function`; the packed weights are inputs after its own."""
    graph, of = fx.Graph(), dict[fx.Node, fx.Node]()
    placeholders = list(function.graph.graph.find_nodes(op="placeholder"))
    for node in placeholders:
        of[node] = graph.node_copy(node)
    packed = _packed_inputs(matmuls, placeholders)
    further = {}
    for pack in packed:
        source = placeholders[pack.source]
        further[pack] = graph.placeholder(f"{source.name}_packed_{pack.rows}")
        further[pack].meta = dict(source.meta)
    inputs = {
        matmul.node: further[_packed(matmul, placeholders)]
        for matmul in matmuls
        if matmul.weight is not None
    }
    chosen = {matmul.node: matmul for matmul in matmuls}
    activated = {matmul.gelu for matmul in matmuls if matmul.gelu is not None}
    for node in function.graph.graph.nodes:
        if node.op == "placeholder":
            continue
        if node in activated:
            of[node] = _reshaped(graph, of[node.args[0]], node)
        elif node in chosen:
            of[node] = _call(graph, chosen[node], of, inputs.get(node))
        else:
            of[node] = graph.node_copy(node, of.__getitem__)
    graph.eliminate_dead_code()
    return make_function(function.name, fx.GraphModule(function.graph, graph)), packed


def decisions_of(
    matmuls: Iterable[Matmul], choice: MatmulChoice, *, by: str, function: str
) -> list[Decision]:
    """Return the decisions for matmuls, by class."""
    counts = Counter((matmul.of, matmul.way) for matmul in matmuls)
    reason = "it is forced" if choice.forced else ""
    return [
        Decision(by, way, reason, function, str(of), count, choice.measured(of))  # type: ignore[arg-type]
        for (of, way), count in counts.items()
    ]


class ChooseMatmuls(RecipePass):
    """The pass.

    Args:
        figures: to decide by; None: those of this machine.
        forced: the library of all matmuls.
    """

    acts_on = MATMULS
    choices = get_args(Library)

    figures: Figures | None = None
    forced: Library | None = None

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        choice = choice_by(self.figures, self.forced)
        matmuls = plan(recipe.lowered.graph.graph, choice)
        name = recipe.function.name
        decisions = decisions_of(matmuls, choice, by=self.name, function=name)
        changed = [matmul for matmul in matmuls if matmul.way != "torch"]
        if not changed:
            return recipe, decisions
        lowered, _ = apply(recipe.lowered, changed)
        return replace(recipe, lowered=lowered), decisions


def choice_by(figures: Figures | None, forced: Library | None) -> MatmulChoice:
    """The choice between libraries by figures, or the one that the user forces."""
    if forced is not None:
        return forced_choice(forced)
    return matmul_choice() if figures is None else figures.choice()


def _call(
    graph: fx.Graph, matmul: Matmul, of: dict[fx.Node, fx.Node], packed: fx.Node | None
) -> fx.Node:
    """The library's call, as a copy of the matmul's node."""
    node = matmul.node
    a, b = (of[factor] for factor in factors(node))
    bias = of[node.args[0]] if node.target is aten.addmm.default else None  # type: ignore[index]
    activation = "none" if matmul.gelu is None else _ACTIVATIONS[_approximation(matmul.gelu)]
    if node.target is accumulate_matmul:
        return _accumulated(graph, node, of[node.args[0]], a, b)  # type: ignore[index]
    if node.target is aten.bmm.default:
        call = graph.call_function(onednn.batched, (a, b))
    elif packed is not None:
        call = graph.call_function(onednn.packed, (a, packed, bias, activation))
    else:
        call = graph.call_function(onednn.matmul, (a, b, bias, activation))
    call.meta = dict(node.meta)
    return call


def _accumulated(graph: fx.Graph, node: fx.Node, total: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    """The library's matmul, stored in or added to the accumulator of `node`."""
    matmul = graph.call_function(onednn.matmul, (a, b, None, "none"))
    write = aten.add_.Tensor if node.args[1] else aten.copy_.default
    call = graph.call_function(write, (total, matmul))
    for new in (matmul, call):
        new.meta = node.meta | {"val": total.meta["val"]}
    return call


def _reshaped(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    """Insert the replacement of an activation that has moved: its input, with its source line."""
    shape = list(like.meta["val"].shape)
    view = graph.call_function(aten.view.default, (value, shape))
    view.meta = dict(like.meta)
    return view


def _packed_inputs(
    matmuls: Sequence[Matmul], placeholders: Sequence[fx.Node]
) -> tuple[PrepackedWeight, ...]:
    """Each packed weight once, in the order of the matmuls."""
    packed = [_packed(matmul, placeholders) for matmul in matmuls if matmul.weight is not None]
    return tuple(dict.fromkeys(packed))


def _packed(matmul: Matmul, placeholders: Sequence[fx.Node]) -> PrepackedWeight:
    assert matmul.weight is not None
    rows = factors(matmul.node)[0].meta["val"].shape[0]
    return PrepackedWeight(placeholders.index(matmul.weight), rows)


def _weight(node: fx.Node) -> fx.Node | None:
    """The matrix whose transposed value is the second operand."""
    if node.target in (aten.bmm.default, accumulate_matmul):
        return None
    second = factors(node)[1]
    is_transposed = second.target is aten.t.default or (
        second.target is aten.permute.default and second.args[1] == [1, 0]
    )
    source = second.args[0] if is_transposed else None
    return source if isinstance(source, fx.Node) else None


def _gelu_of(node: fx.Node) -> fx.Node | None:
    """The gelu that is all that becomes of a matmul, perhaps reshaped."""
    (*users,) = node.users
    while len(users) == 1 and users[0].target in _RESHAPES:
        (*users,) = users[0].users
    if len(users) == 1 and users[0].target is aten.gelu.default:
        return users[0]
    return None


def _approximation(gelu: fx.Node) -> Any:
    return gelu.args[1] if len(gelu.args) > 1 else gelu.kwargs.get("approximate", "none")
