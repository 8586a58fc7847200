"""Turn the traced graph into a functional one, with the backward pass when training.

Before   capture.training = True
         %w: f32[n,k] = parameter
         %l = aten.mse_loss(aten.linear(%x: f32[m,k], %w), %y: f32[m,n])
         capture.loss = %l
After    capture: Joint
         capture.report.gradients = ("w",)
         %t: f32[] = tangent("tangent")  with meta["desc"] = TangentAOTInput(PlainAOTOutput(0))
         %h = aten.mm(%x, aten.t(%w))                                             in forward
         %l = aten.detach(aten.mse_loss(%h, %y))                                  in forward
         %g = aten.t(aten.mm(aten.t(aten.mse_loss_backward(%t, %h, %y, 1)), %x))  in backward
         %d = aten.t(%g)                                                          in backward
         return (gradient(%w, %d), %l)
Keeps    values; stages and source lines, on forward and backward nodes. High-level operators,
         changes in place and switches of modes become functional ATen operators.
Source   PyTorch's AOTAutograd, whose joint graph is the result.
"""

import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ipu_dynamo.capture.capture import (
    BACKWARD,
    MATMUL_NAME,
    NAME,
    WANTED_GRADIENTS,
    Joint,
    OutputRole,
    Traced,
)
from ipu_dynamo.capture.private.aot import export_joint
from ipu_dynamo.capture.private.tracing import fake_mode_of, shape_of_values
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.control_flow import hold_bodies
from ipu_dynamo.ops.marks.markers import gradient_op
from ipu_dynamo.ops.private.graphs import FakeTensorMode, module_of
from ipu_dynamo.passes.aot.read_stages import is_backward
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.control_flow.lower_control_flow import FlowInterpreter
from ipu_dynamo.passes.traced.describe_joint import describe
from ipu_dynamo.passes.traced.equal_layers.find_stacks import find_stacks
from ipu_dynamo.passes.traced.equal_layers.lengthen_stacks import lengthen
from ipu_dynamo.passes.traced.equal_layers.shorten_stacks import left_out, shorten
from ipu_dynamo.passes.traced.writes.renew_changed import RenewingInterpreter, has_changed, owners
from ipu_dynamo.passes.traced.writes.write_under_mask import refuse_rows

log = logging.getLogger(__name__)


class _Replay(nn.Module):
    """Run a traced graph so that AOTAutograd sees its nodes' annotations.

    When training, the scalar to differentiate comes first and nothing else carries gradients.

    Args:
        renew: values that are changed in place are renewed.
    """

    def __init__(self, graph: fx.GraphModule, training: bool, *, renew: bool = False) -> None:
        super().__init__()
        self.graph = module_of(graph.graph, graph)  # no constants made inputs
        self.training_pass = training
        self.owners = owners(graph.graph) if renew else None
        self.differentiable: set[fx.Node] = set()  # whose value requires a gradient

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        interpreter = _Interpreter(self.graph, self.differentiable)
        if self.owners is not None:
            interpreter = _Renewing(self.graph, self.differentiable, self.owners)
        results = interpreter.run(*tensors)
        if not self.training_pass:
            return tuple(results)
        loss, *returned = results
        return (loss, *[value.detach() for value in returned])


class _Interpreter(FlowInterpreter):
    """Run a traced graph, note which values require a gradient, and mark gradients as wanted."""

    def __init__(self, graph: fx.GraphModule, differentiable: set[fx.Node]) -> None:
        super().__init__(graph)
        self._differentiable = differentiable

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if isinstance(result, Tensor) and result.requires_grad:
            self._differentiable.add(node)
            for name in sorted(node.meta.get(WANTED_GRADIENTS, ())):
                result.register_hook(partial(_mark, name))
        return result


class _Renewing(_Interpreter, RenewingInterpreter):
    """Run a traced graph in the same way, and renew what is changed in place."""

    def __init__(
        self,
        graph: fx.GraphModule,
        differentiable: set[fx.Node],
        owners: Mapping[fx.Node, fx.Node],
    ) -> None:
        RenewingInterpreter.__init__(self, graph, owners)
        self._differentiable = differentiable


def _mark(name: str, gradient: Tensor) -> Tensor:
    marked: Tensor = gradient_op(gradient, name)
    return marked


def _names(node: fx.Node) -> list[str]:
    """What the value of a node is called: one before a bias has the gradient of the one after."""
    return [node.meta[key] for key in (NAME, MATMUL_NAME) if key in node.meta]


class Differentiate(Pass):
    """The pass. Its graph has an input for the gradient of the loss, the `tangent`.

    Args:
        may_train_nothing: accept a loss that depends on no parameter, which then has no gradient.
    """

    level = "traced"
    needed = "a program is made of the functional graph"

    may_train_nothing: bool = False

    def __call__(self, capture: Traced) -> Joint:
        if capture.training:
            assert capture.loss is not None, "IdentityLoss runs before Differentiate"
            _check_loss(capture, capture.loss)
            capture.set_returned(
                [capture.loss, *capture.returned],
                [OutputRole("value", "loss"), *capture.outputs],
            )
        loss, differentiable = capture.loss, dict[str, None]()
        before = _leading_to(loss) if loss is not None else set()
        joint = describe(capture, _export(capture, differentiable))
        trained = [role.name for role in joint.outputs if role.kind == "gradient"]
        if capture.training and not trained and not self.may_train_nothing:
            raise CompileError(
                "the loss depends on no parameter that requires a gradient",
                node=loss,
                hint="look for torch.no_grad, detach, or an integer tensor on the way to the loss",
                id="gradient",
            )
        joint.report.gradients = (*trained, *(n for n in differentiable if n in before))
        for node in joint.graph.graph.nodes:
            node.meta.setdefault("val", None)  # assertions give no value
            if node.op not in ("placeholder", "output"):
                # What a hook computes of a gradient is backward, whoever recorded it.
                follows = any(source.meta.get(BACKWARD) for source in node.all_input_nodes)
                node.meta[BACKWARD] = follows or is_backward(node)
        joint.graph.recompile()
        return joint


def _check_loss(capture: Traced, loss: fx.Node) -> None:
    value = loss.meta["val"]
    if not value.is_floating_point():
        raise CompileError(
            f"the loss has dtype {value.dtype}, which has no gradient",
            node=loss,
            hint="compute the loss in floating point",
            id="loss",
        )
    if not any(p.trainable for p in capture.placeholders):
        raise CompileError(
            "the model has no parameter that requires a gradient",
            node=loss,
            hint="set requires_grad on what is to be trained, or compile for inference",
            id="gradient",
        )


def _leading_to(loss: fx.Node) -> set[str]:
    """The names of the values that the loss is computed from, and its own."""
    todo, seen = [loss], {loss}
    while todo:
        sources = set(todo.pop().all_input_nodes) - seen
        seen |= sources
        todo += sources
    return {name for node in seen for name in _names(node)}


def _export(capture: Traced, differentiable: dict[str, None]) -> fx.GraphModule:
    """The functional graph, joint when training; equal layers are differentiated once.

    Args:
        differentiable: takes the names of values that require a gradient.
    """
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
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error detected in", UserWarning)  # it is handled
            joint = _of_equal_layers(capture, differentiable, examples, mode)
            if joint is None:
                joint = _of_all(capture, differentiable, examples, mode)
    except CompileError as error:
        if not has_changed(error.__cause__):
            raise
        log.debug("autograd reads a value that is changed in place: such values are renewed")
        joint = _of_all(capture, differentiable, examples, mode, renew=True)
    hold_bodies(joint.graph)
    return joint


def _of_all(
    capture: Traced,
    differentiable: dict[str, None],
    examples: Sequence[Tensor],
    mode: FakeTensorMode,
    *,
    renew: bool = False,
) -> fx.GraphModule:
    """The joint graph, made of the whole traced one."""
    replay = _Replay(capture.graph, capture.training, renew=renew)
    joint = _joint(capture, replay, examples, mode)
    _note(capture.graph.graph, replay.differentiable, differentiable)
    return joint


def _of_equal_layers(
    capture: Traced,
    differentiable: dict[str, None],
    examples: Sequence[Tensor],
    mode: FakeTensorMode,
) -> fx.GraphModule | None:
    """The joint graph, made of that of fewer layers; None where none can be left out."""
    stacks = find_stacks(capture.graph.graph, capture.roles())
    if not stacks:
        return None
    shortened = shorten(capture.graph, stacks)
    replay = _Replay(shortened.graph, capture.training)
    joint = _joint(capture, replay, [examples[index] for index in shortened.inputs], mode)
    whole = lengthen(joint, shortened, stacks, capture.placeholder_nodes, examples)
    if whole is None:
        log.debug("layers are equal, but not their gradients: all are differentiated")
        return None
    required = {node for node, copy in shortened.copies.items() if copy in replay.differentiable}
    for stack in stacks:
        for layer in (stack[index] for index in left_out(stack)):
            pairs = zip(layer.operators, stack[1].operators, strict=True)
            required.update(node for node, like in pairs if like in required)
    _note(capture.graph.graph, required, differentiable)
    return whole


def _note(graph: fx.Graph, required: Collection[fx.Node], names: dict[str, None]) -> None:
    """Note the names of what requires a gradient, in order."""
    for node in graph.nodes:
        if node in required:
            names.update(dict.fromkeys(_names(node)))


def _joint(
    capture: Traced, replay: _Replay, examples: Sequence[Tensor], mode: FakeTensorMode
) -> fx.GraphModule:
    with torch.inference_mode(False), torch.set_grad_enabled(capture.training):
        try:
            return export_joint(replay, examples, mode)
        except RuntimeError as error:
            if shape_of_values(error):
                refuse_rows(capture.graph.graph)
            raise CompileError(
                f"PyTorch cannot differentiate the model: {error}",
                node=capture.loss,
                hint="if a tensor was changed in place, write x = x + y in place of x += y",
                id="gradient",
            ) from error
