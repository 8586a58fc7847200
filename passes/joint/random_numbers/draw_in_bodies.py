"""Let the bodies of loops and branches draw by key and counter.

Before   %r = ipu.loop([%h], [%x], [%w], 10, "body_4f0c..."), whose body draws
After    %k: i32[2] = the key, with the number of the loop;  %i: i32[] = 0
         %r = ipu.loop([%h, %i], [%x], [%w, %k], 10, "body_83d1...")
Keeps    results. Each iteration draws with a key of its own, mixed of %k and its number, which is
         carried; nested loops mix again. A branch draws with %k.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ipu_dynamo.capture.private.tracing import fake_mode_of
from ipu_dynamo.ops.bodies import Body, bodies_of
from ipu_dynamo.ops.control_flow import branch_op, loop_op, rename
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.joint.random_numbers.counter_distributions import (
    STREAM,
    WORDS,
    Drawing,
    offset,
)
from ipu_dynamo.program.ir.function import body_of

aten = torch.ops.aten
DrawAll = Callable[[fx.Graph, fx.Node, int], int]


def draw_in_bodies(drawing: Drawing, draw_all: DrawAll) -> None:
    """Rewrite the loop or branch `drawing.node`, which is a random operator of its graph.

    Args:
        draw_all: rewrites the random operators of a graph, given its key and the number of the
            first; returns the number of the next.
    """
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
        iteration: the number of the iteration, which it takes behind what is carried; None for a
            branch, which has none.
    """

    graph: fx.Graph
    given: fx.Node
    iteration: fx.Node | None

    @classmethod
    def of(cls, body: Body, carried: int | None, like: fx.Node) -> "_Keyed":
        graph = fx.Graph()
        result = graph.output(graph.graph_copy(body.graph.graph, {}))
        result.meta = {"val": None}
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
        """What an iteration draws with."""
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
            after = call(self.graph, aten.add.Tensor, self.iteration, 1, origin=loop)
        returned: Any = result.args[0]
        result.args = ((*returned[:carried], after, *returned[carried:]),)

    def finish(self) -> fx.GraphModule:
        self.graph.eliminate_dead_code()
        return module_of(self.graph)
