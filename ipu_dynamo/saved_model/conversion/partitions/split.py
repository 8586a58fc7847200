"""Split a graph into partitions, each a module that holds the tensors it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module

from ipu_dynamo.saved_model.conversion.drafts.node_groups import name_of
from ipu_dynamo.saved_model.conversion.partitions.partition_order import Partition


class PartitionModule(nn.Module):
    """The operators of a partition, with the tensors that they read.

    Args:
        graph: takes values of other partitions, and the partition's own tensors.
        tensors: those, by the position of the argument.
    """

    def __init__(self, graph: fx.GraphModule, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.graph_module = graph
        self._attributes = {position: f"tensor_{position}" for position in tensors}
        for position, tensor in tensors.items():
            self.register_buffer(self._attributes[position], tensor)

    def forward(self, *inputs: Any) -> Any:
        left = iter(inputs)
        count = len(inputs) + len(self._attributes)
        return self.graph_module(
            *(
                getattr(self, self._attributes[i]) if i in self._attributes else next(left)
                for i in range(count)
            )
        )


@dataclass(frozen=True, slots=True)
class Step:
    """A partition, which values it takes, and which it gives.

    Attributes:
        module: gives one value, or a tuple of several.
        inputs, outputs: names of values.
        single: whether it gives one value.
    """

    device: str
    module: PartitionModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    single: bool


@dataclass(frozen=True, slots=True)
class Split:
    """Steps in order, and the names of the program's inputs and results among their values.

    A result that is an input or a tensor of the program has the name of that placeholder.
    """

    steps: tuple[Step, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    tensors: Mapping[str, Tensor]


def split(
    graph: fx.Graph,
    inputs: Sequence[fx.Node],
    tensors: Mapping[fx.Node, Tensor],
    partitions: Sequence[Partition],
) -> Split:
    """Cut a graph at the borders of partitions.

    Args:
        graph: without sizes.
        inputs, tensors: its placeholders.
        partitions: the operators of each; others are in the partition of their last input.
    """
    number_of = {name: i for i, part in enumerate(partitions) for name in part.nodes}
    _sort(graph, number_of)
    root = fx.GraphModule(nn.Module(), graph)
    by_name = {node.name: tensor for node, tensor in tensors.items()}
    parts = split_module(
        root, root, lambda node: number_of[name_of(node)], keep_original_order=True
    )
    steps: list[Step] = []
    values: dict[fx.Node, str] = {}
    for node in parts.graph.nodes:
        if node.op == "call_module":
            module = getattr(parts, str(node.target))
            steps.append(_step(node, module, values, by_name, partitions))
        elif node.op == "output":
            results = tuple(values[n] for n in node.args[0])
        else:
            values[node] = (
                node.name if node.op == "placeholder" else f"{values[node.args[0]]}.{node.args[1]}"
            )
    return Split(tuple(steps), tuple(node.name for node in inputs), results, by_name)


def _sort(graph: fx.Graph, number_of: dict[str, int]) -> None:
    """Put operators into the order of their partitions."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for node in calls:
        if name_of(node) not in number_of:
            sources = (number_of.get(name_of(n), 0) for n in node.all_input_nodes)
            number_of[name_of(node)] = max(sources, default=0)
    output = graph.output_node()
    for node in sorted(calls, key=lambda node: number_of[name_of(node)]):
        output.prepend(node)
    graph.lint()


def _step(
    call: fx.Node,
    module: fx.GraphModule,
    values: dict[fx.Node, str],
    tensors: Mapping[str, Tensor],
    partitions: Sequence[Partition],
) -> Step:
    arguments = [values[node] for node in call.args if isinstance(node, fx.Node)]
    own = {i: tensors[name] for i, name in enumerate(arguments) if name in tensors}
    values[call] = call.name
    result = module.graph.output_node().args[0]
    count = len(result) if isinstance(result, tuple | list) else None
    outputs = (call.name,) if count is None else tuple(f"{call.name}.{i}" for i in range(count))
    number = int(str(call.target).rpartition("_")[2])
    return Step(
        partitions[number].device,
        PartitionModule(module, own),
        tuple(name for name in arguments if name not in tensors),
        outputs,
        count is None,
    )
