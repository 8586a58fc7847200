"""Run a traced graph with a new tensor for what changes in place a value that autograd has kept.

Before   %r = aten.relu(%h);  %d = aten.mul_(%r, %mask)      the gradient of relu reads %r
After    %r = aten.relu(%h);  %c = aten.clone(%r);  %d = aten.mul_(%c, %mask), and so for readers
Keeps    values: whoever reads %r, or a view of it, behind the change reads the changed one.
Source   PopTorch, whose tensors have one value each: a change in place is a new tensor there.

PyTorch refuses such a graph, so nothing is renewed where it does not.
"""

from collections.abc import Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import writes, written_arguments
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.graph.builder import evaluate
from ipu_dynamo.passes.traced.control_flow.lower_control_flow import FlowInterpreter

_REFUSED = ("modified by an inplace operation", "returned an invalid gradient")


def has_changed(error: BaseException | None) -> bool:
    """Whether PyTorch says that a value is not the one any more that a gradient reads."""
    return error is not None and any(text in str(error) for text in _REFUSED)


class RenewingInterpreter(FlowInterpreter):
    """Run a traced graph; where a value is changed in place, the old one stays as it is.

    What the model is given, its buffers and inputs, changes in place as before.
    """

    def __init__(self, graph: fx.GraphModule, owners: Mapping[fx.Node, fx.Node]) -> None:
        super().__init__(graph)
        self._nodes = list(graph.graph.nodes)
        self.garbage_collect_values = False  # a tensor is renewed by what it is a view of
        self._owners = owners
        self._unturned: dict[fx.Node, Any] = {}  # what was turned in place, as it was before

    def run_node(self, n: fx.Node) -> Any:
        if _only_turns(n):
            return self._turned(n)
        for owner in dict.fromkeys(self._owners[source] for source in written_arguments(n)):
            if owner.op != "placeholder":
                self._renew(owner)
        return super().run_node(n)

    def _renew(self, owner: fx.Node) -> None:
        """Let later nodes read a copy, and what looks at the memory of `owner` look at that."""
        with torch.enable_grad():  # the copy follows the original, whatever is changed in it
            self.env[owner] = self._unturned.pop(owner, self.env[owner]).clone()
            for node in self._nodes:
                if node in self.env and node is not owner and self._owners[node] is owner:
                    self.env[node] = self._looked_at(node)

    def _looked_at(self, node: fx.Node) -> Any:
        if _only_turns(node):
            return self._turned(node)
        if writes(node):
            return self.env[written_arguments(node)[0]]
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _turned(self, node: fx.Node) -> Any:
        """What looks at the memory in another way, which autograd follows, in place of the view."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        name = str(node.target).split(".")[1].removesuffix("_")
        view = getattr(aten, name)
        (written,) = written_arguments(node)
        self._unturned.setdefault(written, self.env[written])
        self.env[written] = view(*args, **kwargs)
        return self.env[written]


def owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one that has made its memory, which may be itself."""
    owner_of: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if written := written_arguments(node):
            owner_of[node] = owner_of[written[0]]
        else:
            owner_of[node] = next((owner_of[source] for source in _shared(node)), node)
    return owner_of


def _only_turns(node: fx.Node) -> bool:
    """Whether `node` looks at a tensor's memory in another way from then on, as `transpose_`."""
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags


def _shared(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a result looks at.

    Found by running it, as not every schema says so: `einsum` and dropout in evaluation return what
    they are given, and `contiguous` copies where it has to.
    """
    if node.target is getitem:
        (source,) = node.all_input_nodes
        return [source] if _shared(source) else []
    if not isinstance(node.target, OpOverload):
        return []
    value = evaluate(node)
    results = value if isinstance(value, list | tuple) else [value]
    memory = {_memory(result) for result in results if isinstance(result, Tensor)}
    return [
        source
        for source in node.all_input_nodes
        if isinstance(source.meta.get("val"), Tensor) and _memory(source.meta["val"]) in memory
    ]


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
