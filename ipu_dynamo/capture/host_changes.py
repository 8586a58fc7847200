"""Find the changes that forward, which is traced once, makes to plain tensors of the model.

`self.count += 1` on a tensor that is not registered happens on the host, while Python runs. A trace
knows no values, so the operators that lead to such a change are run afterwards.
"""

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.capture.capture import Traced
from ipu_dynamo.capture.private.tracing import outside_function_modes, outside_modes
from ipu_dynamo.ops.graph_queries import written_arguments
from ipu_dynamo.ops.private.graphs import OpOverload


def changed_attributes(capture: Traced) -> list[tuple[Tensor, Tensor]]:
    """The plain tensors of modules that forward changes in place, each with its new value.

    Not those whose new value depends on inputs, parameters, buffers or random numbers. Reads a
    freshly traced graph, changes nothing.
    """
    graph = capture.graph
    held = {str(node.target): node for node in graph.graph.find_nodes(op="get_attr")}
    tensors = {name: getattr(graph, name, None) for name in held}
    attributes = {
        name: capture.report.attributes[id(tensor)][1]
        for name, tensor in tensors.items()
        if id(tensor) in capture.report.attributes
    }
    if not attributes or not any(map(written_arguments, graph.graph.nodes)):
        return []
    with torch.no_grad(), outside_modes():
        # Operators on stand-ins of attributes alone run in the trace, so these may have changed.
        # They are on the device on which the program runs.
        copies = {
            name: attributes.get(name, stand_in).to(stand_in.device, copy=True)
            for name, stand_in in tensors.items()
            if isinstance(stand_in, Tensor)
        }
        _, lost = _run(graph.graph, copies)
    return [
        (tensor, copies[name])
        for name, tensor in attributes.items()
        if copies[name]._version and _memory(copies[name]) not in lost
    ]


def known_values(module: fx.GraphModule, nodes: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
    """The final values of those of `nodes` that depend on constants only.

    Reads a freshly traced graph, changes nothing.
    """
    held = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    with torch.no_grad(), outside_modes(), outside_function_modes():
        copies = {
            name: value.detach().clone()
            for name in held
            if isinstance(value := getattr(module, name, None), Tensor)
        }
        known, lost = _run(module.graph, copies)
    return {
        node: known[node] for node in nodes if node in known and _memory(known[node]) not in lost
    }


def _run(graph: fx.Graph, copies: Mapping[str, Tensor]) -> tuple[dict[fx.Node, Any], set[int]]:
    """Run what depends on `copies` alone, which stand for the tensors that the graph holds.

    Returns:
        the computed values by node; the memory of tensors that unknown values were written to.
    """
    known: dict[fx.Node, Any] = {}
    lost: set[int] = set()
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in copies:
            known[node] = copies[str(node.target)]
        elif node.op == "call_function" and _runs_alone(node) and _all_known(node, known, lost):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
        else:
            lost |= {_memory(known[n]) for n in written_arguments(node) if n in known}
    return known, lost


def _is_here(value: Any) -> bool:
    """Whether this computer has the device of a result: programs are traced for others, too."""
    kind = value.device.type if isinstance(value, Tensor) else "cpu"
    return kind != "cuda" or torch.cuda.is_available()


def _runs_alone(node: fx.Node) -> bool:
    """Whether an operator's result follows from its arguments, and it has no other effect."""
    if node.target is getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and node.target.namespace == "aten"
        and _is_here(node.meta.get("val"))
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _all_known(node: fx.Node, known: dict[fx.Node, Any], lost: set[int]) -> bool:
    inputs = [known.get(source) for source in node.all_input_nodes]
    return all(value is not None and _memory(value) not in lost for value in inputs)


def _memory(value: Any) -> int:
    """The address of a tensor's memory; 0 if `value` is no tensor."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else 0
