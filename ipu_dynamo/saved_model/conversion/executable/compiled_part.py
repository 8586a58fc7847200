"""Take the operators of IPUs out of a program: what is compiled, and what goes in and out.

Before   host nodes, IPU nodes, host nodes
After    a graph of the IPU nodes by itself, between a head and a tail of the host
Keeps    operators, their names, and their order but for that of stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, fx

from ipu_dynamo.saved_model.conversion.draft import Draft, Placement
from ipu_dynamo.saved_model.conversion.fixed_program import FixedProgram, MicroBatch
from ipu_dynamo.saved_model.conversion.node_groups import KIND, NodeGroup, name_of, node_groups
from ipu_dynamo.saved_model.exported.node_names import Kind


@dataclass(frozen=True, slots=True)
class Border:
    """The nodes of a graph whose values go into what is compiled, and come out of it, by name."""

    inputs: Mapping[str, fx.Node]
    outputs: Mapping[str, fx.Node]


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """What is compiled.

    Attributes:
        graph: takes the inputs and then the tensors, and returns the outputs as a tuple.
        inputs, outputs: values of one micro-batch by name.
        tensors: what the graph holds, in the order of its placeholders.
    """

    graph: fx.Graph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    tensors: tuple[Tensor, ...]
    placement: Placement
    micro_batch: MicroBatch

    def groups(self) -> tuple[NodeGroup, ...]:
        """The compiled groups, in the order of data."""
        return tuple(group for group in node_groups(self.graph) if group.kind is Kind.OP)


def border(draft: Draft) -> Border:
    """What goes into the nodes of IPUs, and comes out of them, in the order of the graph.

    What only tells a size to them goes not: sizes are numbers there.
    """
    placement, needed = draft.placement, set(draft.outputs.values())
    nodes = list(draft.graph.nodes)
    inside = {node for node in nodes if is_inside(node, placement)}
    for node in reversed(nodes):  # what the host computes behind the nodes of IPUs
        if node in needed and node not in inside:
            needed |= set(node.all_input_nodes)
    goes_in = [
        node
        for node in nodes
        if node not in inside
        and node not in draft.tensors
        and isinstance(node.meta.get("val"), Tensor)
        and any(user in inside for user in node.users)
    ]
    comes_out = [node for node in nodes if node in inside and node in needed]
    return Border(_named(goes_in), _named(comes_out))


def is_inside(node: fx.Node, placement: Placement) -> bool:
    """Whether a node is compiled."""
    return node.op == "call_function" and placement.on_ipu(name_of(node))


def compiled_part(program: FixedProgram, draft_edges: Border) -> CompiledPart:
    """The nodes of IPUs of a program, sorted by stage if they have one.

    Args:
        draft_edges: of the draft that `program` was made of.
    """
    placement = program.placement
    edges = Border(
        {name: program.nodes[node] for name, node in draft_edges.inputs.items()},
        {name: program.nodes[node] for name, node in draft_edges.outputs.items()},
    )
    nodes = [node for node in program.graph.nodes if is_inside(node, placement)]
    if placement.stages:
        nodes.sort(key=lambda node: placement.stages[name_of(node)])  # stable
    tensors = [n for n in program.tensors if any(is_inside(u, placement) for u in n.users)]
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (*edges.inputs.values(), *tensors):
        values[node] = graph.placeholder(node.name)
        kind = Kind.PARAM if node in program.tensors else Kind.INPUT
        values[node].meta = {"val": node.meta["val"], "custom": node.meta["custom"], KIND: kind}
    for node in nodes:
        values[node] = graph.node_copy(node, lambda source: values[source])
    graph.output(tuple(values[node] for node in edges.outputs.values()))
    graph.lint()
    return CompiledPart(
        graph,
        {name: node.meta["val"] for name, node in edges.inputs.items()},
        {name: node.meta["val"] for name, node in edges.outputs.items()},
        tuple(program.tensors[node] for node in tensors),
        placement,
        program.micro_batch,
    )


def _named(nodes: list[fx.Node]) -> dict[str, fx.Node]:
    """Nodes by their canonical names; further results of one have a number behind it."""
    names: dict[str, fx.Node] = {}
    for node in nodes:
        name, count = name_of(node), 0
        while name in names:
            count += 1
            name = f"{name_of(node)}_{count}"
        names[name] = node
    return names
