"""Cut the joint graph of a body in two: what forward keeps, and what backward computes from it.

With     fixed=(1,)
Before   %x: f32[n] = input("0")
         %w: f32[n] = input("1")
         %t: f32[n] = tangent("0")
         %h = aten.tanh(%x)                                in forward
         %s = aten.neg(%w)                                 in forward
         %y = aten.mul(%h, %s)                             in forward
         %g = aten.tanh_backward(aten.mul(%t, %s), %h)     in backward
         return (%y, gradient("0", %g))
After    def forward(%x: f32[n], %w: f32[n]):
             %h = aten.tanh(%x)                            in forward
             %s = aten.neg(%w)                             in forward
             %y = aten.mul(%h, %s)                         in forward
             return (%y, %h)
         def backward(%h: f32[n], %w: f32[n], %t: f32[n]):
             %h                                            in forward
             %s = aten.neg(%w)                             in forward
             %g = aten.tanh_backward(aten.mul(%t, %s), %h)  in backward
             return (%g,)
         Directions(forward, backward, 1, (1,))
Keeps    every operator and its line. Views, constants, and what no iteration changes, backward
         computes again: to keep them would take memory in every iteration.
Source   PyTorch's functorch cuts whole graphs likewise; see `SplitDirections`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD, Joint, OutputRole, Placeholder
from ipu_dynamo.capture.control_flow.trace_control_flow import writes_from_outside
from ipu_dynamo.capture.private.aot import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, may_draw, needed_for
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.ops.private.node_meta import DESC
from ipu_dynamo.passes.aot.read_stages import is_backward
from ipu_dynamo.passes.graph.extract import subgraph
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Directions


class CutBody(Pass):
    """The pass. `fixed` has the numbers of the inputs that are the same in all iterations."""

    level = "joint"
    needed = "the gradient of a loop reads what its iterations kept"

    fixed: tuple[int, ...] = ()

    def __call__(self, joint: Joint) -> Directions:
        graph = joint.graph.graph
        inputs = [node for node, role in joint.roles().items() if role.kind == "input"]
        tangents = [node for node, role in joint.roles().items() if role.kind == "tangent"]
        results, gradients = _of_kind(joint, "value"), _of_kind(joint, "gradient")
        fixed = {inputs[number] for number in self.fixed}
        for node in graph.nodes:
            if node.op == "call_function" and _is_fixed(node, fixed):
                fixed.add(node)
        plan = _Plan(fixed)
        for gradient in gradients:
            plan.read(gradient)
        kept = [node for node in graph.nodes if node in plan.kept]
        read = tuple(number for number, node in enumerate(inputs) if node in plan.reached)
        ahead = needed_for([*results, *kept])
        taken = [*kept, *(inputs[number] for number in read), *tangents]
        return Directions(
            _module(graph, ahead, inputs, [*results, *kept]),
            _module(graph, plan.computed, taken, gradients),
            len(kept),
            read,
        )


@dataclass(frozen=True)
class BodyGradient:
    """A body and its gradient.

    Args:
        joint: both in one graph; inputs, results and gradients are called by their numbers.
        cut: forward takes the inputs, and returns the results and the kept values. Backward takes
            these, the inputs that it reads, and the tangents; it returns the gradients.
    """

    joint: Joint
    cut: Directions

    @property
    def results(self) -> list[fx.Node]:
        return _of_kind(self.joint, "value")

    @property
    def tangents(self) -> list[int]:
        """The numbers of the results with a gradient."""
        return [int(role.name) for role in self.joint.placeholders if role.kind == "tangent"]

    @property
    def gradients(self) -> list[int]:
        """The numbers of the inputs with a gradient."""
        return [int(role.name) for role in self.joint.outputs if role.kind == "gradient"]

    @property
    def kept(self) -> list[Tensor]:
        """Fake tensors like the kept values."""
        nodes = list(self.cut.backward.graph.find_nodes(op="placeholder"))
        return [node.meta["val"] for node in nodes[: self.cut.kept]]


def cut_body(module: fx.GraphModule, fixed: Iterable[int]) -> BodyGradient:
    """Cut the joint graph that AOTAutograd made of a body.

    Args:
        fixed: numbers of the inputs that are the same in all iterations.
    """
    joint = describe_body(module)
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta[BACKWARD] = is_backward(node)
    return BodyGradient(joint, CutBody(tuple(fixed))(joint))


def describe_body(module: fx.GraphModule) -> Joint:
    """The joint graph of a body, with roles by AOTAutograd's descriptions."""
    placeholders = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = node.meta[DESC]
        if isinstance(source, PlainAOTInput):
            placeholders.append(Placeholder(str(source.idx), "input"))
        elif isinstance(source, TangentAOTInput) and isinstance(source.output, PlainAOTOutput):
            placeholders.append(Placeholder(str(source.output.idx), "tangent"))
        else:
            raise AssertionError(f"a body has no input of kind {source!r}")
    result = module.graph.output_node()
    results: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    returned: Sequence[fx.Node | None] = result.args[0]  # type: ignore[assignment]
    for node, target in zip(returned, result.meta.pop(DESC), strict=True):
        if isinstance(target, PlainAOTOutput):
            assert node is not None
            results[target.idx] = node
        elif isinstance(target, GradAOTOutput) and isinstance(target.grad_of, PlainAOTInput):
            if node is not None:
                gradients[target.grad_of.idx] = node
        elif isinstance(target, InputMutationAOTOutput):  # from Dynamo, which traces bodies itself
            assert node is not None
            raise writes_from_outside(node)
        elif target is not None:  # None: an input without a gradient
            raise AssertionError(f"a body has no result of kind {target!r}")
    for node in module.graph.nodes:
        node.meta.setdefault("val", None)
    outputs = {
        **{OutputRole("value", str(n)): results[n] for n in sorted(results)},
        **{OutputRole("gradient", str(n)): gradients[n] for n in sorted(gradients)},
    }
    result.args = (tuple(outputs.values()),)
    return Joint(graph=module, placeholders=tuple(placeholders), outputs=tuple(outputs))


def _of_kind(joint: Joint, kind: str) -> list[fx.Node]:
    """The outputs of a kind."""
    pairs = zip(joint.returned, joint.outputs, strict=True)
    return [node for node, role in pairs if role.kind == kind and node is not None]


class _Plan:
    """The nodes that backward computes, and those that it receives.

    Invariant: all inputs of `computed` nodes are in `computed`, `kept` or `reached`.
    """

    def __init__(self, fixed: set[fx.Node]) -> None:
        self.fixed = fixed
        self.computed: set[fx.Node] = set()
        self.kept: set[fx.Node] = set()
        self.reached: set[fx.Node] = set()

    def read(self, node: fx.Node) -> None:
        """Let backward have a value, with all that it needs for that."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node in self.computed or node in self.kept or node in self.reached:
                continue
            if node.op == "placeholder":
                self.reached.add(node)
            elif self.repeats(node) or not isinstance(node.meta["val"], torch.Tensor):
                self.computed.add(node)
                todo += node.all_input_nodes
            else:
                self.kept.add(node)

    def repeats(self, node: fx.Node) -> bool:
        """Whether backward computes a value itself."""
        if node.meta[BACKWARD]:
            return True
        return is_view(node) or makes_constant(node) or node in self.fixed


def _is_fixed(node: fx.Node, fixed: set[fx.Node]) -> bool:
    """Whether a node computes the same in all iterations."""
    return not may_draw(node) and all(source in fixed for source in node.all_input_nodes)


def _module(
    graph: fx.Graph, computed: set[fx.Node], inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    nodes = [node for node in graph.nodes if node in computed and node.op == "call_function"]
    copied, copies = subgraph(nodes, inputs)
    copied.output(tuple(copies[node] for node in results)).meta["val"] = None
    return module_of(copied)
