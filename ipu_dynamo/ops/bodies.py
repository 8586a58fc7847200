"""Name the graphs that loops and branches run, by a digest of their content.

The operators of `control_flow.py` hold no graph: an argument names it, as `body_4f0c...`, by a
digest of all that it computes. So a name means the same in every process, equal bodies are one, and
a program holds its bodies as functions of these names. A body lives as long as a node that runs it:
`node.meta[BODIES]`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx

BODIES = "ipu.bodies"  # key of node.meta: the bodies that its arguments name, in their order
_known: "WeakValueDictionary[str, Body]" = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class Body:
    """The graph that a loop runs in each iteration, or one side of a branch.

    Args:
        name: made of the digest of the graph.
        graph: a pure flat graph, whose inputs and results are dense; it returns a tuple of tensors.
    """

    name: str
    graph: fx.GraphModule

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Fake tensors of its inputs."""
        return tuple(n.meta["val"] for n in self.graph.graph.find_nodes(op="placeholder"))

    @property
    def results(self) -> tuple[Tensor, ...]:
        """Fake tensors of its results."""
        returned: Any = self.graph.graph.output_node().args[0]
        return tuple(node.meta["val"] for node in returned)


def known(body: Body) -> Body:
    """The body of that name, which is `body` if there was none."""
    return _known.setdefault(body.name, body)


def body_named(name: str) -> Body:
    """The body of that name.

    Raises:
        KeyError: nothing that exists runs such a body.
    """
    return _known[name]


def bodies_of(node: fx.Node) -> tuple[Body, ...]:
    """The bodies that a node runs."""
    found: tuple[Body, ...] = node.meta.get(BODIES, ())
    return found


def all_bodies(graph: fx.Graph) -> Iterator[Body]:
    """The bodies that a graph's nodes run, each after those that it runs itself."""
    for node in graph.nodes:
        for body in bodies_of(node):
            yield from all_bodies(body.graph.graph)
            yield body


def empties(tensors: tuple[Tensor, ...], leading: tuple[int, ...] = ()) -> list[Tensor]:
    """Dense tensors of the same types, with further dimensions before."""
    return [torch.empty((*leading, *t.shape), dtype=t.dtype, device=t.device) for t in tensors]
