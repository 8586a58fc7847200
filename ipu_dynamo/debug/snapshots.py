"""Keep the graph as each pass leaves it, and compute every value in it with eager PyTorch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD, Capture, Joint, OutputRole, Placeholder, Traced
from ipu_dynamo.debug.values import kept
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import draws
from ipu_dynamo.ops.private.node_meta import annotate, annotation
from ipu_dynamo.passes.graph.extract import copied, copy_of
from ipu_dynamo.passes.levels import Model, Partitioned
from ipu_dynamo.program import HostProgram, Program

NAME = "ipu.name"  # key of node.meta: name after the last pass, which copies in stages keep
_ORIGIN = "ipu_origin"  # key of meta["custom"]: name in the traced graph, which AOTAutograd copies


@dataclass(frozen=True)
class Snapshot:
    """A copy of a capture's graph.

    Args:
        made_by: the pass that left it so; "traced" for the first.
        differentiated: forward and backward are in it.
        graph: shares the fake values with the capture, and nothing else.
        by_name: the copied nodes, by the names of the originals.
        roles: of placeholders; `outputs`: of results.
        loss: the node to differentiate, while it is known and not yet differentiated.
        tensors: of parameters, buffers and constants.
    """

    made_by: str
    differentiated: bool
    graph: fx.GraphModule
    by_name: Mapping[str, fx.Node]
    roles: Mapping[fx.Node, Placeholder]
    outputs: Sequence[tuple[fx.Node | None, OutputRole]]
    loss: fx.Node | None
    tensors: Mapping[str, Tensor]

    def made_from(self) -> dict[str, list[fx.Node]]:
        """Forward nodes by the name of the traced node that they were made from."""
        made: dict[str, list[fx.Node]] = {}
        for node in self.by_name.values():
            name = origin(node)
            if name is not None and not node.meta.get(BACKWARD):
                made.setdefault(name, []).append(node)
        return made

    def random(self, but: Sequence[str] = ()) -> set[fx.Node]:
        """Nodes whose values depend on a random operator, those named `but` excepted."""
        found: set[fx.Node] = set()
        for name, node in self.by_name.items():
            if (draws(node) and name not in but) or found.intersection(node.all_input_nodes):
                found.add(node)
        return found


def origin(node: fx.Node) -> str | None:
    """The name of the traced node that a node was made from, forward or backward."""
    name: str | None = annotation(node, _ORIGIN)
    return name


class PassWatcher:
    """Copies the graph before the first pass and after each one, for a `PassManager`.

    Args:
        start: the gradient of the loss that the backward pass begins with.
        snapshots: of the whole graph.
        last: the whole graph that the last of them is a copy of.
        parts: copies of the stages' graphs after each pass, with its name.
        programs: of each later pass, its name and its program; these passes change no program in
            place.
    """

    def __init__(self, start: float = 1.0) -> None:
        self.start = start
        self.snapshots: list[Snapshot] = []
        self.last: Capture | None = None
        self.parts: list[tuple[str, Partitioned]] = []
        self.programs: list[tuple[str, Program]] = []

    def __call__(self, name: str, model: Model) -> None:
        if isinstance(model, Partitioned):
            self.parts.append((name, _copied_parts(model)))
        elif isinstance(model, Program):
            self.programs.append((name, model))
        elif isinstance(model, HostProgram):
            self.programs.append((name, model.inlined))
        elif isinstance(model, Capture) and model.whole is None:  # else layers are left out
            for node in model.graph.graph.nodes:
                node.meta[NAME] = node.name
                if not self.snapshots:
                    annotate(node, _ORIGIN, node.name)
            self.snapshots.append(_copy(model, name, self.start))
            self.last = model


def _copied_parts(partitioned: Partitioned) -> Partitioned:
    parts = tuple(replace(part, graph=copy_of(part.graph)) for part in partitioned.parts)
    return replace(partitioned, parts=parts)


def _copy(capture: Capture, made_by: str, start: float) -> Snapshot:
    graph, copies = copied(capture.graph.graph)
    roles = {copies[node]: role for node, role in capture.roles().items()}
    for node, role in capture.roles().items():
        if role.kind == "tangent":
            del roles[copies[node]]
            copies[node] = _begun(graph, copies[node], start)
    loss = capture.loss if isinstance(capture, Traced) else None
    return Snapshot(
        made_by=made_by,
        differentiated=isinstance(capture, Joint),
        graph=fx.GraphModule(capture.graph, graph),
        by_name={node.name: copy for node, copy in copies.items()},
        roles=roles,
        outputs=[
            (None if node is None else copies[node], role)
            for node, role in zip(capture.returned, capture.outputs, strict=True)
        ],
        loss=None if loss is None else copies[loss],
        tensors=capture.report.tensors,
    )


def _begun(graph: fx.Graph, tangent: fx.Node, start: float) -> fx.Node:
    """Replace the placeholder of the loss's gradient by a constant of `start`."""
    value = tangent.meta["val"]
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        begin = graph.call_function(
            aten.full.default,
            (list(value.shape), start),
            {"dtype": value.dtype, "device": value.device},
        )
    begin.meta = {**tangent.meta, BACKWARD: True}
    tangent.replace_all_uses_with(begin)
    graph.erase_node(tangent)
    return begin


class _Recorder(fx.Interpreter):
    """Run a graph; keep what every node computes."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.values[n] = kept(result)
        return result


def arguments(snapshot: Snapshot, given: Mapping[str, Tensor]) -> list[Tensor]:
    """Copy the arguments of the graph's placeholders, in their dtypes."""
    return [
        (given[role.name] if role.name in given else snapshot.tensors[role.name])
        .detach()
        .to(node.meta["val"].dtype, copy=True)
        for node, role in snapshot.roles.items()
    ]


def compute(snapshot: Snapshot, given: Mapping[str, Tensor]) -> dict[fx.Node, Any]:
    """The value of every node at the time when it is computed.

    Args:
        given: tensors of the inputs, by name; variables come from the snapshot.
    """
    recorder = _Recorder(snapshot.graph)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        recorder.run(*arguments(snapshot, given))
    return recorder.values


@dataclass(frozen=True)
class EagerGradients:
    """Gradients of eager autograd: of trained parameters by name, and of values in between."""

    parameters: Mapping[str, Tensor]
    values: Mapping[fx.Node, Tensor]


def gradients(snapshot: Snapshot, given: Mapping[str, Tensor], start: float) -> EagerGradients:
    """Differentiate a graph with a known loss; `start` is the gradient of the loss."""
    leaves = arguments(snapshot, given)
    trained = {}
    for (node, role), leaf in zip(snapshot.roles.items(), leaves, strict=True):
        if role.trainable and node.meta["val"].is_floating_point():
            trained[role.name] = leaf.requires_grad_()
    interpreter = fx.Interpreter(snapshot.graph, garbage_collect_values=False)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        interpreter.run(*leaves)
        assert snapshot.loss is not None
        between = {
            node: value
            for node, value in interpreter.env.items()
            if isinstance(value, Tensor) and value.requires_grad and node not in snapshot.roles
        }
        loss = interpreter.env[snapshot.loss].sum() * start
        wanted = [*trained.values(), *between.values()]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    of_parameters = {name: g for name, g in zip(trained, found, strict=False) if g is not None}
    of_values = {node: g for node, g in zip(between, found, strict=True) if g is not None}
    return EagerGradients(of_parameters, of_values)
