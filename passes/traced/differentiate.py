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
Before   capture.training = True
         %w: f32[n] = parameter
         %r = aten.relu(%w)
         %l = aten.sum(aten.mul_(%r, %mask: f32[n]))
         capture.loss = %l
After    capture: Joint
         capture.report.gradients = ("w",)
         %t: f32[] = tangent("tangent")  with meta["desc"] = TangentAOTInput(PlainAOTOutput(0))
         %r = aten.relu(%w)                                                  in forward
         %k = aten.detach(%r)                                                in forward
         %l = aten.detach(aten.sum(aten.mul(aten.clone(%r), %mask)))         in forward
         %d = aten.mul(aten.expand(%t, [n]), %mask)                          in backward
         %g = aten.threshold_backward(%d, aten.detach(%k), 0)                in backward
         return (gradient(%w, %g), %l)
Before   def body(%c: f32[n]):
             %d = aten.mul(%c, 0.5)
             return (%d,)
         %r = ipu.control_flow([%x: f32[n]], GraphFlow("loop", 1, 0, 10, "", bodies=(body,)))
         %y = %r[0]
         return %y
After    capture: Joint
         def body(%c: f32[n]):
             %d = aten.mul(%c, 0.5)
             return (%d,)
         %r = ipu.loop([%x], [], [], 10, body)                               in forward
         %y = %r[0]                                                          in forward
         return %y
Keeps    values; stages and source lines, on forward and backward nodes. High-level operators,
         changes in place and switches of modes become functional ATen operators. PyTorch refuses to
         differentiate a graph if a gradient reads a value that changes in place, as %r here.
         Only then is a change in place a new tensor, which all later readers read.
Source   PyTorch's AOTAutograd, whose joint graph is the result; PopTorch, whose tensors have one
         value each.
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

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
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.control_flow import hold_bodies
from ipu_dynamo.ops.graph_queries import needed_for, writes, written_arguments
from ipu_dynamo.ops.marks.markers import gradient_op
from ipu_dynamo.ops.private.graphs import FakeTensorMode, OpOverload, module_of
from ipu_dynamo.passes.aot.read_stages import is_backward
from ipu_dynamo.passes.graph.builder import evaluate
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.traced.control_flow.flow_interpreter import FlowInterpreter
from ipu_dynamo.passes.traced.describe_joint import describe
from ipu_dynamo.passes.traced.writes.write_under_mask import refuse_rows

log = logging.getLogger(__name__)
_REFUSED = ("modified by an inplace operation", "returned an invalid gradient")  # by PyTorch


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
        self.owners = _owners(graph.graph) if renew else None
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


class _Renewing(_Interpreter):
    """Run a traced graph; a change of a value in place makes a new one, and the old one stays.

    Inputs and buffers of the model change in place as before.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        differentiable: set[fx.Node],
        owners: Mapping[fx.Node, fx.Node],
    ) -> None:
        super().__init__(graph, differentiable)
        self._nodes = list(graph.graph.nodes)
        self.garbage_collect_values = False  # a view is renewed from its base
        self._owners = owners
        self._untransposed: dict[fx.Node, Any] = {}  # tensors before their turns in place

    def run_node(self, n: fx.Node) -> Any:
        if _only_turns(n):
            return self._transposed(n)
        for owner in dict.fromkeys(self._owners[source] for source in written_arguments(n)):
            if owner.op != "placeholder":
                self._renew(owner)
        return super().run_node(n)

    def _renew(self, owner: fx.Node) -> None:
        """Let later nodes read a copy of `owner`, and make its views views of that copy."""
        with torch.enable_grad():  # the copy depends on the original, also after later changes
            self.env[owner] = self._untransposed.pop(owner, self.env[owner]).clone()
            for node in self._nodes:
                if node in self.env and node is not owner and self._owners[node] is owner:
                    self.env[node] = self._looked_at(node)

    def _looked_at(self, node: fx.Node) -> Any:
        if _only_turns(node):
            return self._transposed(node)
        if writes(node):
            return self.env[written_arguments(node)[0]]
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return getattr(self, node.op)(node.target, args, kwargs)

    def _transposed(self, node: fx.Node) -> Any:
        """Return a view that autograd can follow, in place of a change of the tensor's own view."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        name = str(node.target).split(".")[1].removesuffix("_")
        view = getattr(aten, name)
        (written,) = written_arguments(node)
        self._untransposed.setdefault(written, self.env[written])
        self.env[written] = view(*args, **kwargs)
        return self.env[written]


def _mark(name: str, gradient: Tensor) -> Tensor:
    marked: Tensor = gradient_op(gradient, name)
    return marked


def names_of(node: fx.Node) -> list[str]:
    """Return the names of a node's value: one before a bias has the gradient of the one after."""
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
        leading = needed_for([] if loss is None else [loss])
        before = {name for node in leading for name in names_of(node)}
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
                # A hook's operators on a gradient are backward, however they were recorded.
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


def _export(capture: Traced, differentiable: dict[str, None]) -> fx.GraphModule:
    """The functional graph, joint when training.

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
            joint = _replayed(capture, differentiable, examples, mode)
    except CompileError as error:
        if not any(text in str(error.__cause__) for text in _REFUSED):
            raise
        log.debug("autograd reads a value that is changed in place: such values are renewed")
        joint = _replayed(capture, differentiable, examples, mode, renew=True)
    hold_bodies(joint.graph)
    return joint


def _replayed(
    capture: Traced,
    differentiable: dict[str, None],
    examples: Sequence[Tensor],
    mode: FakeTensorMode,
    *,
    renew: bool = False,
) -> fx.GraphModule:
    """Run AOTAutograd on the traced graph; return the joint graph."""
    replay = _Replay(capture.graph, capture.training, renew=renew)
    joint = _joint(capture, replay, examples, mode)
    for node in capture.graph.graph.nodes:
        if node in replay.differentiable:
            differentiable.update(dict.fromkeys(names_of(node)))
    return joint


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


def _owners(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
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
    """Return the arguments that share memory with a result.

    The node runs to find them, as not every schema says so: `einsum` and dropout in evaluation
    return their argument itself, and `contiguous` copies only if it has to.
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
