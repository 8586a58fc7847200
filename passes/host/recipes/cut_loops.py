"""Cut a function at operators that run by themselves, loops and calls of the host, which no
compiler needs to see.

Before   recipe step0: inductor, of %h = ...;  %l = ipu.serialized_loss(%h, ...);  %z = ...
After    recipe step0: inductor, in 3 parts: %h compiled, the loop as it is, %z compiled
Keeps    operators and their order. Functions of the host are called in parts of their own, too. The
         bodies of loops and branches are compiled.
Source   our own: a compiler that wants a functional graph would copy the memory that such an
         operator writes in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import Tensor, fx

from ipu_dynamo.ops import serialized_loss
from ipu_dynamo.ops.control_flow import CONTROL_FLOW
from ipu_dynamo.ops.library.host_call import host_call
from ipu_dynamo.passes.graph.extract import subgraph
from ipu_dynamo.passes.host.recipes.make_recipes import run_by
from ipu_dynamo.passes.host.recipes.recipe_pass import RecipePass, Rewritten
from ipu_dynamo.program import Decision, Function, HostProgram, graph_outputs, make_function
from ipu_dynamo.program.recipe import CutFunction, FunctionPart, FunctionRecipe

LOOPS = CONTROL_FLOW | frozenset(
    {
        host_call,
        serialized_loss.serialized_loss,
        serialized_loss.serialized_loss_backward,
        serialized_loss.serialized_loss_backward_,
        serialized_loss.serialized_loss_step_,
    }
)


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators that run together.

    Args:
        loop: they are a loop and the selections of its results; others are to be compiled.
        inputs, outputs: nodes of the whole graph.
        graph: the operators; takes `inputs`, returns a tuple of `outputs`.
    """

    loop: bool
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    graph: fx.GraphModule


def has_loop(graph: fx.Graph) -> bool:
    """Whether a graph is to be cut."""
    return any(node.target in LOOPS for node in graph.nodes)


def cut(graph: fx.Graph) -> tuple[Segment, ...]:
    """Cut a graph into segments; they run in the order of the graph."""
    groups: list[list[fx.Node]] = [[]]
    own: dict[fx.Node, list[fx.Node]] = {}  # the group of each loop
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target in LOOPS:
            own[node] = [node]
            groups += [own[node], []]
        elif node.target is getitem and node.args[0] in own:
            own[node.args[0]].append(node)
        else:
            groups[-1].append(node)
    return tuple(_segment(group) for group in groups if group)


def _segment(nodes: Sequence[fx.Node]) -> Segment:
    inside = set(nodes)
    inputs = tuple(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
    outputs = tuple(
        n
        for n in nodes
        if n.target not in LOOPS or isinstance(n.meta["val"], Tensor)
        if any(user not in inside for user in n.users)
    )
    graph, copies = subgraph(nodes, inputs)
    graph.output(tuple(copies[node] for node in outputs))
    loop = nodes[0].target in LOOPS
    return Segment(loop, inputs, outputs, fx.GraphModule(torch.nn.Module(), graph))


def parts_of(
    function: Function, recipe: Callable[[str, fx.GraphModule, bool], FunctionRecipe]
) -> CutFunction:
    """A function in parts: `recipe` says how one becomes a callable, given its name and graph, and
    whether it is a loop."""
    graph = function.graph
    segments = cut(graph.graph)
    results = graph_outputs(graph)
    numbers = {n: number for number, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
    last: dict[fx.Node, int] = {}
    for index, segment in enumerate(segments):
        for node in segment.outputs:
            numbers[node] = len(numbers)
        last |= dict.fromkeys((*segment.inputs, *segment.outputs), index)
    parts = []
    for index, segment in enumerate(segments):
        dead = [numbers[n] for n, end in last.items() if end == index and n not in results]
        parts.append(
            FunctionPart(
                recipe(f"{function.name}_part", segment.graph, segment.loop),
                arguments=tuple(numbers[node] for node in segment.inputs),
                results=tuple(numbers[node] for node in segment.outputs),
                dead=tuple(dead),
            )
        )
    returned = (numbers[node] if isinstance(node, fx.Node) else None for node in results)
    return CutFunction(tuple(parts), tuple(returned))


class CutLoops(RecipePass):
    """The pass."""

    acts_on = LOOPS

    def rewrite(self, recipe: FunctionRecipe, host: HostProgram | None) -> Rewritten:
        if not has_loop(recipe.lowered.graph.graph):
            return recipe, ()

        def of_part(name: str, graph: fx.GraphModule, loop: bool) -> FunctionRecipe:
            function = make_function(name, graph)
            part = FunctionRecipe(
                function, function, "inductor", recipe.threads, function.written,
                settings=recipe.settings,
            )  # fmt: skip
            if not loop:
                return part
            run = {body.name for body in run_by(function)}
            own = tuple(body for body in recipe.bodies if body.function.name in run)
            return replace(part, engine="eager", settings=(), bodies=own)

        parts = parts_of(recipe.lowered, of_part)
        loops = sum(part.recipe.engine == "eager" for part in parts.parts)
        name = recipe.function.name
        decision = Decision(self.name, f"{len(parts.parts)} parts", f"{loops} loops", name)
        return replace(recipe, parts=parts), (decision,)
