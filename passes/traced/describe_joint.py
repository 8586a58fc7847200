"""Read the roles of a joint graph's inputs and outputs from AOTAutograd's descriptors."""

from typing import Any

from torch import fx

from ipu_dynamo.capture.capture import Joint, OutputRole, Placeholder, Traced, unused
from ipu_dynamo.capture.private.aot import (
    BackwardTokenAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.private.node_meta import DESC


def describe(capture: Traced, joint: fx.GraphModule) -> Joint:
    """Describe the joint graph of `capture`, with roles read from AOTAutograd's descriptors."""
    names = [role.name for role in capture.placeholders]
    roles = {role.name: role for role in capture.placeholders}
    placeholders = []
    for node in joint.graph.find_nodes(op="placeholder"):
        source = node.meta[DESC]
        if isinstance(source, PlainAOTInput):
            placeholders.append(roles[names[source.idx]])
        elif isinstance(source, TangentAOTInput):
            placeholders.append(Placeholder(unused("tangent", capture.placeholders), "tangent"))
        elif isinstance(source, ForwardTokenAOTInput | BackwardTokenAOTInput):
            placeholders.append(Placeholder("token", "token"))
        else:
            raise CompileError(f"an input of kind {source!r} has no meaning here", node=node)
    (result,) = joint.graph.find_nodes(op="output")
    nodes: list[fx.Node | None] = []
    outputs: list[OutputRole] = []
    values: dict[int, fx.Node | None] = {}
    for value, target in zip(result.args[0], result.meta[DESC], strict=True):
        role = _output_role(target, names)
        if isinstance(role, int):
            values[role] = value
        elif role is not None and isinstance(value, fx.Node):
            _refuse_change(role, roles[role.name], value, training=capture.training)
            _refuse_shared_memory(role, capture, value)
            nodes.append(value)
            outputs.append(role)
    first = 1 if capture.training else 0
    for index, role in enumerate(capture.outputs[first:]):
        nodes.append(values[index + first])
        outputs.append(role)
    del result.meta[DESC]  # the roles say it from here on
    result.args = (tuple(nodes),)
    return Joint(
        graph=joint,
        placeholders=tuple(placeholders),
        outputs=tuple(outputs),
        training=capture.training,
        ipus=capture.ipus,
        keeps_stages=capture.keeps_stages,
        separate_last=capture.separate_last,
        phases=capture.phases,
        whole=capture.whole,
        report=capture.report,
    )


def _output_role(target: Any, names: list[str]) -> OutputRole | int | None:
    """Return the role of an output; an int for the n-th value that the replayed graph returned."""
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


def _refuse_change(
    role: OutputRole, changed: Placeholder, value: fx.Node, *, training: bool
) -> None:
    if role.kind != "mutation":
        return
    if changed.kind == "constant":
        raise CompileError(
            f"forward changes the tensor {role.name} in place, which is neither an input nor "
            f"registered in the model",
            node=value,
            hint="make it a buffer with register_buffer, or pass it as an input",
            id="in-place",
        )
    if training and changed.trainable:
        raise CompileError(
            f"forward changes parameter {role.name} in place, which the optimiser updates",
            node=value,
            hint="make it a buffer, or change it outside the model",
            id="in-place",
        )


def _refuse_shared_memory(role: OutputRole, capture: Traced, value: fx.Node) -> None:
    """Raise for a changed buffer that shares memory: each tensor would have its own."""
    if role.kind != "mutation" or role.name not in capture.report.tensors:
        return
    memory = capture.report.tensors[role.name].untyped_storage().data_ptr()
    for name, tensor in capture.report.tensors.items():
        if name != role.name and memory and tensor.untyped_storage().data_ptr() == memory:
            raise CompileError(
                f"forward changes {role.name}, which shares its memory with {name}",
                node=value,
                hint="register one of them, and take the other from it as a view in forward",
                id="in-place",
            )
