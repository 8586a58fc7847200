"""Draw random numbers from a counter, so that they depend on nothing but what the user wrote.

Before   %d: f32[m,n] = aten.native_dropout(%x, 0.1, True)
After    %r: i32[m,n] = mix(index + key + number of the operator);  %mask = %r >= threshold; ...
Keeps    shapes, dtypes, source lines, distributions. The values are a function of the seed, the
         call, the micro-batch, the replica, the operator's position in the whole graph and the
         element: placement, schedule, engine and recomputation change no bit.
Source   Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): numbers of a counter.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ipu_dynamo.capture.capture import RANDOM_KEY, Capture, Placeholder
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.bodies import bodies_of
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import Drawing
from ipu_dynamo.passes.joint.random_numbers.draw_in_bodies import draw_in_bodies
from ipu_dynamo.passes.joint.random_numbers.random_operators import DRAW
from ipu_dynamo.passes.levels import Level


def plan(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The random operators, in graph order."""
    return tuple(node for node in graph.nodes if draws(node))


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, or a body that it runs does; attention without dropout
    does not."""
    if any(draws(inner) for body in bodies_of(node) for inner in body.graph.graph.nodes):
        return True
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in target._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    probability = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(probability != 0.0)


@dataclass(frozen=True)
class CounterRandom:
    """The pass."""

    name: ClassVar[str] = "CounterRandom"
    level: ClassVar[Level] = "joint"
    needed: ClassVar[str] = "stages, workers and recomputation would draw other numbers"

    def __call__(self, capture: Capture) -> bool:
        nodes = plan(capture.graph.graph)
        if not nodes:
            return False
        graph = capture.graph.graph
        draw_all(graph, key_input(capture), 0)
        graph.eliminate_dead_code()
        capture.graph.recompile()
        return True


def draw_all(graph: fx.Graph, key: fx.Node, first: int) -> int:
    """Rewrite the random operators of a graph, of which one has the number `first`; return that of
    the next."""
    nodes = plan(graph)
    for number, node in enumerate(nodes, first):
        with graph.inserting_before(node):
            drawing = Drawing(graph, key, node, number)
            if bodies_of(node):
                draw_in_bodies(drawing, draw_all)
            else:
                _replace(graph, node, _draw(drawing))
    return first + len(nodes)


def _draw(drawing: Drawing) -> tuple[fx.Node, ...]:
    """What takes the place of a random operator's results."""
    node = drawing.node
    draw = DRAW.get(node.target)
    if draw is None:
        raise CompileError(
            f"the random operator {node.target} has no counter-based form",
            node=node,
            hint="draw with torch.rand, randn, bernoulli, randint, multinomial or dropout",
            id="operator",
        )
    return draw(drawing)


def key_input(capture: Capture) -> fx.Node:
    """The input for the key; added after the other placeholders if there is none."""
    nodes = capture.placeholder_nodes
    for node, role in capture.roles().items():
        if role.kind == "random_key":
            return node
    with capture.graph.graph.inserting_after(nodes[-1] if nodes else None):
        key = capture.graph.graph.placeholder("random_key")
    with fake_mode_of([n.meta["val"] for n in capture.graph.graph.nodes if "val" in n.meta]):
        key.meta["val"] = torch.empty(2, dtype=torch.int32, device=_device(capture))
    capture.placeholders = (*capture.placeholders, Placeholder(RANDOM_KEY, "random_key"))
    return key


def _device(capture: Capture) -> torch.device:
    """Where the model's tensors are."""
    values = (n.meta.get("val") for n in capture.graph.graph.nodes)
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _replace(graph: fx.Graph, node: fx.Node, results: tuple[fx.Node, ...]) -> None:
    if isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    graph.erase_node(node)
