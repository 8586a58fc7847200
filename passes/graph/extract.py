"""Copy operators of one graph into several graphs, which pass values to each other.

A `Cut` is the plan: the piece of each operator, the values that each reader computes again, and the
names outside. `Extraction` applies it; its `pieces` map nodes of the graph to their copies.
Operators keep their order and their metadata.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.graph.builder import new_input


@dataclass(frozen=True)
class Cut:
    """How a graph is cut. A piece is a number; pieces run in ascending order.

    Args:
        place: the piece of every operator that is copied, in the graph's order.
        inputs: names of placeholders outside.
        name: returns the name of a value outside the piece that computes it.
        repeats: whether a piece that reads a value of another one makes it itself.
    """

    place: Mapping[fx.Node, int]
    inputs: Mapping[fx.Node, str]
    name: Callable[[fx.Node], str]
    repeats: Callable[[fx.Node, int], bool]


@dataclass
class Subgraph:
    """A graph under construction.

    Args:
        copies: by node of the original.
        inputs, outputs: by their names outside, in order.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[Any, fx.Node] = field(default_factory=dict)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    outputs: dict[str, fx.Node] = field(default_factory=dict)

    def take(self, name: str, meta: Mapping[str, Any]) -> fx.Node:
        """The placeholder for the input `name`, made on first use, before all operators."""
        if name not in self.inputs:
            last = next(reversed(self.inputs.values()), None)
            self.inputs[name] = new_input(self.graph, name, last)
            self.inputs[name].meta = dict(meta)
        return self.inputs[name]

    def prune(self, can_go: Callable[[fx.Node], bool]) -> None:
        """Erase unread operators that `can_go`, and then unread inputs."""
        kept = set(self.outputs.values())
        for node in reversed(self.graph.nodes):
            if node.op != "placeholder" and not node.users and node not in kept and can_go(node):
                self.graph.erase_node(node)
        for name, node in list(self.inputs.items()):
            if not node.users and node not in kept:
                self.graph.erase_node(self.inputs.pop(name))

    def finish(self) -> fx.GraphModule:
        """The module that takes `inputs` and returns `outputs`."""
        self.graph.output(tuple(self.outputs.values())).meta["val"] = None
        self.graph.lint()
        return module_of(self.graph)


class Extraction:
    """Build the pieces. Invariant: a value is an output of the piece that makes it as soon as
    another piece reads it."""

    def __init__(self, cut: Cut, pieces: Iterable[int]) -> None:
        self.cut = cut
        self.pieces = {index: Subgraph() for index in pieces}

    def fill(self) -> None:
        """Copy every operator to its piece."""
        for node, index in self.cut.place.items():
            self.value(node, index)

    def value(self, node: fx.Node, index: int) -> fx.Node:
        """Return the node for `node` in a piece: a copy, or an input."""
        copies = self.pieces[index].copies
        if node not in copies:
            copies[node] = self.make(node, index)
        return copies[node]

    def make(self, node: fx.Node, index: int) -> fx.Node:
        here = node not in self.cut.inputs and (
            self.cut.place[node] == index or self.cut.repeats(node, index)
        )
        return self.copy(node, index) if here else self.read(node, index)

    def read(self, node: fx.Node, index: int) -> fx.Node:
        """Return the input of a piece for a placeholder, or for a value of another piece."""
        if node in self.cut.inputs:
            return self.pieces[index].take(self.cut.inputs[node], node.meta)
        return self.pieces[index].take(self.output(node), {"val": node.meta["val"]})

    def copy(self, node: fx.Node, index: int) -> fx.Node:
        """Copy an operator to a piece, with its inputs."""
        sources = {source: self.value(source, index) for source in node.all_input_nodes}
        return self.pieces[index].graph.node_copy(node, sources.__getitem__)

    def output(self, node: fx.Node) -> str:
        """Make a value an output of its piece if it is not one yet; return its name."""
        name, index = self.cut.name(node), self.cut.place[node]
        if name not in self.pieces[index].outputs:
            self.pieces[index].outputs[name] = self.value(node, index)
        return name


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copy a whole graph; the second result maps its nodes to their copies."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, copies)).meta = dict(graph.output_node().meta)
    return copy, copies


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a module with its graph; the copy shares tensors and fake values."""
    return module_of(copied(module.graph)[0], module)


def subgraph(
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    name: Callable[[fx.Node], str] = lambda node: node.name,
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph of `nodes` that takes `inputs`, without an output yet, and all copies."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(name(node))
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph, copies
