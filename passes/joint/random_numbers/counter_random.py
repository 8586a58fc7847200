"""Draw random numbers from a counter, so that they depend only on the user's model.

Before   %y = aten.rand_like(%x: f32[n])
After    def mix(%v: i32[n]):
             %a = aten.bitwise_and(aten.bitwise_right_shift(%v, 16), (1 << 16) - 1)
             %b = aten.mul(aten.bitwise_xor(%v, %a), signed(0x7FEB352D))
             %c = aten.bitwise_and(aten.bitwise_right_shift(%b, 15), (1 << 17) - 1)
             %d = aten.mul(aten.bitwise_xor(%b, %c), signed(0x846CA68B))
             %e = aten.bitwise_and(aten.bitwise_right_shift(%d, 16), (1 << 16) - 1)
             return (aten.bitwise_xor(%d, %e),)
         def integers(%k: i32[2]):
             %i = aten.view(aten.arange(n, dtype=torch.int32, device=torch.device("cpu")), [n])
             %a = aten.add(%k[0], offset(0, 0))    # word 0 of the key, of operator 0
             %b = aten.add(%k[1], offset(1, 0))
             %a  with meta["ipu.stream"] = (0, 0)
             %b  with meta["ipu.stream"] = (1, 0)
             %r = mix(aten.add(mix(aten.add(%i, %a)), %b))
             return (aten.bitwise_and(aten.bitwise_right_shift(%r, 8), (1 << 24) - 1),)
         %k: i32[2] = random_key(".random_key")
         %k  with meta["ipu.machine"] = "nothing"
         %r = integers(%k)  with meta["ipu.machine"] = "nothing"
         %f = aten._to_copy(%r, dtype=torch.float32)  with meta["ipu.machine"] = "nothing"
         %y = aten.mul(%f, 2.0**-24)  with meta["ipu.machine"] = "aten.rand_like.default"
Keeps    shapes, dtypes, source lines, distributions. The values are a function of the seed, the
         call, the micro-batch, the replica, the operator's position in the whole graph and the
         element: placement, schedule, engine and recomputation change no bit.
Source   Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011): numbers of a counter.

A loop with draws in its body takes the key with the number of the loop, and carries the number of
the iteration. Each iteration mixes its own key of the two. Nested loops mix again. A branch draws
with the key that it takes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.capture import RANDOM_KEY, Joint, Placeholder
from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import Body, bodies_of
from ipu_dynamo.ops.control_flow import branch_op, loop_op, rename
from ipu_dynamo.ops.graph_queries import draws
from ipu_dynamo.ops.operators import operator_name
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.graph.builder import call, new_input
from ipu_dynamo.passes.graph.extract import copied
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import (
    STREAM,
    WORDS,
    Drawing,
    offset,
)
from ipu_dynamo.passes.joint.random_numbers.random_operators import DRAW
from ipu_dynamo.passes.kit import GraphPass
from ipu_dynamo.program.ir.function import body_of
from ipu_dynamo.program.machine_marks import MACHINE, run_nothing


def plan(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The random operators, in graph order."""
    return tuple(node for node in graph.nodes if draws(node))


class CounterRandom(GraphPass):
    """The pass."""

    level = "joint"
    needed = "stages, workers and recomputation would draw other numbers"

    def rewrite(self, capture: Joint) -> bool:
        nodes = plan(capture.graph.graph)
        if not nodes:
            return False
        graph = capture.graph.graph
        draw_all(graph, key_input(capture), 0)
        graph.eliminate_dead_code()
        return True


def draw_all(graph: fx.Graph, key: fx.Node, first: int) -> int:
    """Rewrite the random operators of a graph, numbered from `first`; return the next number."""
    nodes = plan(graph)
    for number, node in enumerate(nodes, first):
        with graph.inserting_before(node):
            drawing = Drawing(graph, key, node, number)
            if bodies_of(node):
                _draw_in_bodies(drawing)
            else:
                _replace(graph, node, _draw(drawing))
    return first + len(nodes)


def _draw_in_bodies(drawing: Drawing) -> None:
    """Rewrite the loop or branch `drawing.node`, which is a random operator of its graph."""
    node = drawing.node
    args: list[Any] = list(node.args)
    keyed, number = [], 0
    carried = None if node.target is branch_op else len(args[0])
    for body in bodies_of(node):
        copy = _Keyed.of(body, carried, drawing.key)
        number = draw_all(copy.graph, copy.key(node), number)
        if carried is not None and body is bodies_of(node)[-1]:
            copy.carry_on(carried, node)
        keyed.append(body_of(copy.finish()))
    captured = 2 if node.target is loop_op else 1
    args[captured] = [*args[captured], _key_of_loop(drawing)]
    if carried is not None:
        device = drawing.key.meta["val"].device
        zero = drawing.op(aten.full.default, [], 0, dtype=torch.int32, device=device)
        args[0] = [*args[0], zero]
        _move_results(node, carried, zero.meta["val"])
    node.args = tuple(args)
    rename(node, keyed)


def _key_of_loop(drawing: Drawing) -> fx.Node:
    """The key of the graph, with the number of the loop."""
    words = []
    for word in range(WORDS):
        part = drawing.op(aten.select.int, drawing.key, 0, word)
        part = drawing.op(aten.add.Tensor, part, offset(word, 8 * drawing.number))
        part.meta[STREAM] = (word, 8 * drawing.number)
        words.append(part)
    return drawing.op(aten.stack.default, words)


def _move_results(node: fx.Node, place: int, new: torch.Tensor) -> None:
    """Let the readers of a loop's results know that there is a new one."""
    values = node.meta["val"]
    node.meta["val"] = [*values[:place], new, *values[place:]]
    for item in list(node.users):
        if item.args[1] >= place:  # type: ignore[operator]
            item.args = (node, item.args[1] + 1)  # type: ignore[operator]


@dataclass
class _Keyed:
    """A copy of a body, which takes the key of its loop last.

    Args:
        given: the key that it takes.
        iteration: the number of the iteration, an input after the carried values; None for a
            branch, which has no iterations.
    """

    graph: fx.Graph
    given: fx.Node
    iteration: fx.Node | None

    @classmethod
    def of(cls, body: Body, carried: int | None, like: fx.Node) -> "_Keyed":
        graph, _ = copied(body.graph.graph)
        graph.output_node().meta = {"val": None}
        inputs = list(graph.find_nodes(op="placeholder"))
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            key = graph.placeholder("loop_key")
        key.meta["val"] = like.meta["val"]
        if carried is None:
            return cls(graph, key, None)
        with graph.inserting_before([*inputs, key][carried]):
            iteration = graph.placeholder("iteration")
        with fake_mode_of([like.meta["val"]]):
            iteration.meta["val"] = like.meta["val"].new_empty(())
        return cls(graph, key, iteration)

    def key(self, loop: fx.Node) -> fx.Node:
        """Return the key of an iteration."""
        if self.iteration is None:
            return self.given
        with self.graph.inserting_before(self.given.next):
            drawing = Drawing(self.graph, self.given, loop, 0)
            return drawing.mix(drawing.op(aten.add.Tensor, self.given, self.iteration))

    def carry_on(self, carried: int, loop: fx.Node) -> None:
        """Return the number of the next iteration."""
        result = self.graph.output_node()
        assert self.iteration is not None
        with self.graph.inserting_before(result):
            after = run_nothing(call(self.graph, aten.add.Tensor, self.iteration, 1, origin=loop))
        returned: Any = result.args[0]
        result.args = ((*returned[:carried], after, *returned[carried:]),)

    def finish(self) -> fx.GraphModule:
        self.graph.eliminate_dead_code()
        return module_of(self.graph)


def _draw(drawing: Drawing) -> tuple[fx.Node, ...]:
    """Insert the replacements of a random operator's results."""
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


def key_input(capture: Joint) -> fx.Node:
    """Return the input for the key; if it is missing, add it after the other placeholders."""
    nodes = capture.placeholder_nodes
    for node, role in capture.roles().items():
        if role.kind == "random_key":
            return node
    key = new_input(capture.graph.graph, "random_key", nodes[-1] if nodes else None)
    run_nothing(key)
    with fake_mode_of([n.meta["val"] for n in capture.graph.graph.nodes if "val" in n.meta]):
        key.meta["val"] = torch.empty(2, dtype=torch.int32, device=_device(capture))
    capture.placeholders = (*capture.placeholders, Placeholder(RANDOM_KEY, "random_key"))
    return key


def _device(capture: Joint) -> torch.device:
    """Where the model's tensors are."""
    values = (n.meta.get("val") for n in capture.graph.graph.nodes)
    return next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))


def _replace(graph: fx.Graph, node: fx.Node, results: tuple[fx.Node, ...]) -> None:
    """Replace a random operator, which the machine runs where the first read result is made."""
    parts: list[Any] = [] if isinstance(node.meta["val"], torch.Tensor) else list(node.users)
    results[min((part.args[1] for part in parts), default=0)].meta[MACHINE] = operator_name(
        node.target
    )
    for part in parts:
        part.replace_all_uses_with(results[part.args[1]])
        graph.erase_node(part)
    node.replace_all_uses_with(results[0])
    graph.erase_node(node)
