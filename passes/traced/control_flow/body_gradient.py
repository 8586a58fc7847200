"""Cut the joint graph of a body in two: forward keeps values, backward computes from them.

Before   (%y, %grad_x) of %x, %w and the tangent %dy, in one graph
After    %y and the kept %h, of %x and %w; %grad_x, of %h, %dy and what it reads of %x and %w
Keeps    every operator and its line. Views, constants, and what no iteration changes, backward
         computes again: to keep them would take memory in every iteration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

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
from ipu_dynamo.ops.private.node_meta import BACKWARD_TAG, DESC, TAG
from ipu_dynamo.passes.graph.extract import subgraph


@dataclass
class JointBody:
    """A body and its gradient in one graph, as AOTAutograd makes it.

    Args:
        inputs: in the order of the body.
        tangents: the gradient of each differentiable result, by its number.
        results: in the order of the body.
        gradients: of each input that has one, by its number.
    """

    inputs: list[fx.Node]
    tangents: dict[int, fx.Node] = field(default_factory=dict)
    results: list[fx.Node] = field(default_factory=list)
    gradients: dict[int, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True)
class CutBody:
    """A body in two directions.

    Args:
        kept: values that forward returns after the results, and backward reads.
        read: numbers of the inputs that backward reads as well.
        forward: takes the inputs; returns the results and the kept values.
        backward: takes the kept values, the inputs in `read`, and the tangents in order; returns
            the gradients in order.
    """

    joint: JointBody
    kept: tuple[fx.Node, ...]
    read: tuple[int, ...]
    forward: fx.GraphModule
    backward: fx.GraphModule


def read_joint(graph: fx.Graph) -> JointBody:
    """Find inputs, results and gradients in a joint graph, by AOTAutograd's descriptions."""
    inputs: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        source = node.meta[DESC]
        if isinstance(source, PlainAOTInput):
            inputs[source.idx] = node
        elif isinstance(source, TangentAOTInput) and isinstance(source.output, PlainAOTOutput):
            tangents[source.output.idx] = node
        else:
            raise AssertionError(f"a body has no input of kind {source!r}")
    (result,) = graph.find_nodes(op="output")
    results: dict[int, fx.Node] = {}
    gradients: dict[int, fx.Node] = {}
    for node, target in zip(result.args[0], result.meta[DESC], strict=True):
        if isinstance(target, PlainAOTOutput):
            results[target.idx] = node
        elif isinstance(target, GradAOTOutput) and isinstance(target.grad_of, PlainAOTInput):
            if node is not None:
                gradients[target.grad_of.idx] = node
        elif isinstance(target, InputMutationAOTOutput):  # from Dynamo, which traces bodies itself
            raise writes_from_outside(node)
        elif target is not None:  # None: an input without a gradient
            raise AssertionError(f"a body has no result of kind {target!r}")
    return JointBody(
        [inputs[i] for i in range(len(inputs))],
        dict(sorted(tangents.items())),
        [results[i] for i in range(len(results))],
        dict(sorted(gradients.items())),
    )


def cut_body(graph: fx.Graph, constant: Callable[[int], bool]) -> CutBody:
    """Cut a joint graph.

    Args:
        constant: whether the input of that number is the same in all iterations.
    """
    joint = read_joint(graph)
    fixed = {node for number, node in enumerate(joint.inputs) if constant(number)}
    for node in graph.nodes:
        if node.op == "call_function" and _is_fixed(node, fixed):
            fixed.add(node)
    plan = _Plan(joint, fixed)
    for gradient in joint.gradients.values():
        plan.read(gradient)
    kept = tuple(node for node in graph.nodes if node in plan.kept)
    read = tuple(i for i, node in enumerate(joint.inputs) if node in plan.reached)
    ahead = needed_for([*joint.results, *kept])
    forward = _module(graph, ahead, joint.inputs, [*joint.results, *kept])
    inputs = [*kept, *(joint.inputs[i] for i in read), *joint.tangents.values()]
    backward = _module(graph, plan.computed, inputs, list(joint.gradients.values()))
    return CutBody(joint, kept, read, forward, backward)


class _Plan:
    """The nodes that backward computes, and those that it receives.

    Invariant: all inputs of `computed` nodes are in `computed`, `kept` or `reached`.
    """

    def __init__(self, joint: JointBody, fixed: set[fx.Node]) -> None:
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
        if node.meta.get(TAG) == BACKWARD_TAG:
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
