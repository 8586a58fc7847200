"""Turn the traced graph into a functional one, with the backward pass when training.

Before   %l = aten.mse_loss(%h, %y)                 high-level operators, in-place changes, modes
After    %l = aten.mse_loss(...); %g = aten.mse_loss_backward(%one, ...)   functional ATen
Keeps    values; stages and source lines, on forward and backward nodes.
Source   PyTorch's AOTAutograd, whose joint graph is the result.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.capture import BACKWARD, START, Capture, OutputRole, Placeholder
from ipu_dynamo.capture.checks import call_checks
from ipu_dynamo.capture.idle_dropout import remove_idle_dropout
from ipu_dynamo.capture.private.tracing import (
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    export_joint,
    fake_mode_of,
)
from ipu_dynamo.capture.unsupported import refuse_graphs_in_graphs, refuse_sparse
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.markers import recomputation_checkpoint_op
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.passes.graph.builder import call
from ipu_dynamo.passes.joint.annotate_stages import read_stages, write_stages

aten = torch.ops.aten


class _Replay(nn.Module):
    """Run a traced graph so that AOTAutograd sees its nodes' annotations.

    When training, the scalar to differentiate comes first and nothing else carries gradients.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.graph = module_of(capture.graph.graph, capture.graph)  # no constants made inputs
        self.training_pass = capture.training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = fx.Interpreter(self.graph).run(*tensors)
        if not self.training_pass:
            return tuple(results)
        loss, *returned = results
        return (loss, *[value.detach() for value in returned])


@dataclass(frozen=True)
class Differentiate:
    """The pass. `start` is the gradient that the backward pass begins with."""

    start: float = 1.0

    def __call__(self, capture: Capture) -> bool:
        if any(BACKWARD in node.meta for node in capture.graph.graph.nodes):
            return False
        names = [p.name for p in capture.placeholders]
        if capture.training:
            assert capture.loss is not None, "the identity_loss pass runs before differentiate"
            _check_loss(capture, capture.loss)
            capture.loss = _as_number(capture.graph.graph, capture.loss)
            capture.set_returned(
                [capture.loss, *capture.returned],
                [OutputRole("value", "loss"), *capture.outputs],
            )
        refuse_graphs_in_graphs(capture.graph.graph)
        remove_idle_dropout(capture.graph)
        write_stages(capture.graph.graph)
        joint = _export(capture)
        for token in call_checks(joint.graph):
            joint.graph.erase_node(token)
        refuse_sparse(joint.graph)
        _describe(capture, joint, names)
        capture.loss = None
        _remove_detach(joint.graph)
        _start_backward(capture, self.start)
        _remove_idle_marks(joint.graph)
        joint.graph.eliminate_dead_code(_has_effects)
        for node in joint.graph.nodes:
            node.meta.setdefault("val", None)  # assertions give no value
        _trace_repeated_views(joint.graph)
        read_stages(capture)
        joint.recompile()
        return True


def _trace_repeated_views(graph: fx.Graph) -> None:
    """Give views of tensors that were changed in place the source line of the change: PyTorch
    makes them again behind it, with none."""
    for node in graph.nodes:
        if node.op == "call_function" and not node.meta.get("stack_trace"):
            lines = (source.meta.get("stack_trace") for source in node.all_input_nodes)
            if line := next(filter(None, lines), None):
                node.meta["stack_trace"] = line


def _as_number(graph: fx.Graph, loss: fx.Node) -> fx.Node:
    """The sum of the loss: to differentiate it is to differentiate every element."""
    if loss.meta["val"].dim() == 0:
        return loss
    with graph.inserting_before(graph.output_node()):
        return call(graph, aten.sum.default, loss, origin=loss)


def _remove_idle_marks(graph: fx.Graph) -> None:
    """Remove marks for recomputation from values that nothing else needs. They would stay, and what
    draws random numbers for them would count, so that a mark changed the numbers of others."""
    marks = graph.find_nodes(op="call_function", target=recomputation_checkpoint_op)
    needed = set(filter(_has_effects, graph.nodes)).difference(marks)
    found = [*needed, graph.output_node()]
    while found:
        sources = set(found.pop().all_input_nodes) - needed
        needed |= sources
        found += sources
    for mark in marks:
        if mark.args[0] not in needed:
            graph.erase_node(mark)


def _has_effects(node: fx.Node) -> bool:
    """Whether a node stays though nobody reads it; one that only draws random numbers goes."""
    return node.is_impure(impure_random=False)


def _check_loss(capture: Capture, loss: fx.Node) -> None:
    value = loss.meta["val"]
    if not value.is_floating_point():
        raise CompileError(
            f"the loss has dtype {value.dtype}, which has no gradient",
            node=loss,
            hint="compute the loss in floating point",
        )
    if not any(p.trainable for p in capture.placeholders):
        raise CompileError(
            "the model has no parameter that requires a gradient",
            node=loss,
            hint="set requires_grad on what is to be trained, or compile for inference",
        )


def _export(capture: Capture) -> fx.GraphModule:
    """The functional graph, joint when training."""
    nodes = capture.placeholder_nodes
    mode = fake_mode_of([node.meta["val"] for node in nodes])
    with mode:
        examples = [
            torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=value.device
            ).requires_grad_(capture.training and role.trainable)
            for role, value in zip(
                capture.placeholders, (node.meta["val"] for node in nodes), strict=True
            )
        ]
    with torch.inference_mode(False), torch.set_grad_enabled(capture.training):
        try:
            return export_joint(_Replay(capture), examples, mode)
        except RuntimeError as error:
            raise CompileError(
                f"PyTorch cannot differentiate the model: {error}",
                node=capture.loss,
                hint="if a tensor was changed in place, write x = x + y in place of x += y",
            ) from error


def _describe(capture: Capture, joint: fx.GraphModule, names: list[str]) -> None:
    """Move `capture` to the new graph, with roles read from AOTAutograd's descriptors."""
    roles = {role.name: role for role in capture.placeholders}
    placeholders = []
    for node in joint.graph.find_nodes(op="placeholder"):
        source = node.meta["desc"]
        if isinstance(source, PlainAOTInput):
            placeholders.append(roles[names[source.idx]])
        elif isinstance(source, TangentAOTInput):
            placeholders.append(Placeholder("tangent", "tangent"))
        else:
            raise CompileError(f"an input of kind {source!r} has no meaning here", node=node)
    (result,) = joint.graph.find_nodes(op="output")
    nodes: list[fx.Node | None] = []
    outputs: list[OutputRole] = []
    values: dict[int, fx.Node | None] = {}
    for value, target in zip(result.args[0], result.meta["desc"], strict=True):
        role = _output_role(target, names)
        if isinstance(role, int):
            values[role] = value
        elif role is not None and isinstance(value, fx.Node):
            _refuse_change(role, roles, value)
            _refuse_shared_memory(role, capture, value)
            nodes.append(value)
            outputs.append(role)
    first = 1 if capture.training else 0
    for index, role in enumerate(capture.outputs[first:]):
        nodes.append(values[index + first])
        outputs.append(role)
    if capture.training and not any(role.kind == "gradient" for role in outputs):
        assert capture.loss is not None
        raise CompileError(
            "the loss depends on no parameter that requires a gradient",
            node=capture.loss,
            hint="look for torch.no_grad, detach, or an integer tensor on the way to the loss",
        )
    capture.graph, capture.placeholders = joint, tuple(placeholders)
    capture.set_returned(nodes, outputs)


def _output_role(target: Any, names: list[str]) -> OutputRole | int | None:
    """What an output is; an int for the n-th value that the replayed graph returned."""
    if isinstance(target, PlainAOTOutput):
        return int(target.idx)
    if isinstance(target, InputMutationAOTOutput):
        return OutputRole("mutation", names[_index(target.mutated_input)])
    if isinstance(target, GradAOTOutput):
        return OutputRole("gradient", names[_index(target.grad_of)])
    if target is None or isinstance(target, ForwardTokenAOTOutput):
        return None
    raise CompileError(f"an output of kind {target!r} has no meaning here")


def _index(source: Any) -> int:
    """Position of an input among those that the replayed graph takes."""
    assert isinstance(source, PlainAOTInput), f"the replay takes plain inputs, not {source!r}"
    return source.idx


def _refuse_change(role: OutputRole, roles: dict[str, Placeholder], value: fx.Node) -> None:
    if role.kind != "mutation":
        return
    if roles[role.name].kind == "constant":
        raise CompileError(
            f"forward changes the tensor {role.name} in place, which is neither an input nor "
            f"registered in the model",
            node=value,
            hint="make it a buffer with register_buffer, or pass it as an input",
        )
    if roles[role.name].trainable:
        raise CompileError(
            f"forward changes parameter {role.name} in place, which the optimiser updates",
            node=value,
            hint="make it a buffer, or change it outside the model",
        )


def _refuse_shared_memory(role: OutputRole, capture: Capture, value: fx.Node) -> None:
    """Raise for a changed buffer in whose memory another tensor lies: each would have its own."""
    if role.kind != "mutation" or role.name not in capture.tensors:
        return
    memory = capture.tensors[role.name].untyped_storage().data_ptr()
    for name, tensor in capture.tensors.items():
        if name != role.name and memory and tensor.untyped_storage().data_ptr() == memory:
            raise CompileError(
                f"forward changes {role.name}, which shares its memory with {name}",
                node=value,
                hint="register one of them, and take the other from it as a view in forward",
            )


def _remove_detach(graph: fx.Graph) -> None:
    """Remove `aten.detach`: without autograd it is its input."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _start_backward(capture: Capture, start: float) -> None:
    """Replace the tangent of the loss, the only one, by a constant."""
    graph = capture.graph.graph
    for node, role in capture.roles().items():
        if role.kind != "tangent":
            continue
        value = node.meta["val"]
        first = next(n for n in graph.nodes if n.op not in ("placeholder",))
        with graph.inserting_before(first):
            begin = graph.call_function(
                aten.full.default,
                (list(value.shape), start),
                {"dtype": value.dtype, "device": value.device},
            )
        begin.meta = {"val": value, "partitioner_tag": "is_backward", START: True}
        user = next(iter(node.users), None)
        if user is not None:
            begin.meta |= {k: user.meta[k] for k in ("custom", "stack_trace") if k in user.meta}
        node.replace_all_uses_with(begin)
        graph.erase_node(node)
    capture.placeholders = tuple(p for p in capture.placeholders if p.kind != "tangent")
