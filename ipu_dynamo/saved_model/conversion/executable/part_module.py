"""Run a part of a program as a module that the core compiles."""

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.fx.traceback import preserve_node_meta

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.marks.markers import begin_block
from ipu_dynamo.ops.private.graphs import module_of
from ipu_dynamo.saved_model.conversion.drafts.node_groups import name_of, set_name
from ipu_dynamo.saved_model.conversion.executable.compiled_part import CompiledPart
from ipu_dynamo.saved_model.conversion.partitions.mark_blocks import mark_blocks


def block_of_stage(stage: int) -> str:
    """The name of a stage's block."""
    return f"stage {stage}"


class PartModule(nn.Module):
    """The operators of a part, each in the block of its stage or IPU, and their tensors.

    Nodes that are traced carry the canonical names, and messages name them.

    Args:
        stacked: inputs and results have a dimension more in front, of size 1: a call is a
            micro-batch as a whole, and there are several in a step.
    """

    def __init__(self, part: CompiledPart, *, stacked: bool) -> None:
        super().__init__()
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(part.graph, values))
        _mark(graph, part, values)
        if stacked:
            _stack(graph, len(part.inputs))
        for index, node in enumerate(graph.nodes):
            if node.op == "call_function" and node.target is not begin_block:
                node.meta["stack_trace"] = _line(index, node)
        self._graph = [module_of(graph)]
        self._names = [f"tensor_{index}" for index in range(len(part.tensors))]
        for name, tensor in zip(self._names, part.tensors, strict=True):
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        own = [getattr(self, name) for name in self._names]
        with preserve_node_meta(), torch.no_grad():
            results: tuple[Tensor, ...] = fx.Interpreter(self._graph[0]).run(*inputs, *own)
        return results


def _mark(graph: fx.Graph, part: CompiledPart, values: Mapping[fx.Node, fx.Node]) -> None:
    """Put blocks around the operators: those of stages, or those of IPUs if there are several."""
    placement = part.placement
    if not placement.stages:
        ipus = {name_of(node): placement.ipus[name_of(node)] for node in _calls(graph)}
        if set(ipus.values()) != {0}:
            mark_blocks(graph, ipus)
        return
    current = None
    for node in _calls(graph):
        stage = placement.stages[name_of(node)]
        if stage != current:
            with graph.inserting_before(node):
                ipu = placement.device_mapping[stage]
                graph.call_function(begin_block, (block_of_stage(stage), ipu))
            current = stage


def _stack(graph: fx.Graph, inputs: int) -> None:
    """Remove the first dimension of inputs where they are read, and add one to results.

    Both are done in the blocks of the operators that read inputs or make results.
    """
    for placeholder in list(graph.find_nodes(op="placeholder"))[:inputs]:
        for user in list(placeholder.users):
            with graph.inserting_before(user):
                value = graph.call_function(aten.squeeze.dim, (placeholder, 0))
            set_name(value, name_of(user))
            user.replace_input_with(placeholder, value)
    output = graph.output_node()
    for node in list(output.all_input_nodes):
        with graph.inserting_after(node):
            value = graph.call_function(aten.unsqueeze.default, (node, 0))
        set_name(value, name_of(node))
        output.replace_input_with(node, value)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _line(index: int, node: fx.Node) -> str:
    """The text in place of an operator's source line: its position and its canonical name."""
    return f'File "node", line {index}, in {name_of(node)}\n    {node.target}'
