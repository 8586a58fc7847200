"""Take the operators of IPUs out of a program: the compiled part, its inputs and outputs.

Before   host nodes, IPU nodes, host nodes
After    a graph of the IPU nodes by itself, between a head and a tail of the host
Keeps    operators, their names, and their order but for that of stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, fx

from ipu_dynamo.ops.private.node_meta import CUSTOM
from ipu_dynamo.saved_model.conversion.drafts.copied_constants import is_copied
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft, Placement
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import FixedProgram, MicroBatch
from ipu_dynamo.saved_model.conversion.drafts.node_groups import (
    KIND,
    NodeGroup,
    name_of,
    node_groups,
    set_name,
)
from ipu_dynamo.saved_model.exported.node_names import Kind


@dataclass(frozen=True, slots=True)
class Border:
    """The nodes of a graph that are inputs and outputs of the compiled part, by name."""

    inputs: Mapping[str, fx.Node]
    outputs: Mapping[str, fx.Node]


@dataclass(frozen=True, slots=True)
class CompiledPart:
    """The compiled part of a program.

    Attributes:
        graph: takes the inputs and then the tensors, and returns the outputs as a tuple.
        inputs, outputs: values of one micro-batch by name.
        tensors: of the graph, in the order of its placeholders; for a pipeline's small constants,
            a copy for each IPU that reads them.
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
    """The inputs and outputs of the nodes of IPUs, in the order of the graph.

    Values that these nodes read only for a size are no inputs: sizes are numbers there.
    """
    placement, needed = draft.placement, set(draft.outputs.values())
    nodes = list(draft.graph.nodes)
    inside = {node for node in nodes if is_inside(node, placement)}
    for node in reversed(nodes):  # nodes of the host after those of IPUs
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
    inputs = {node: name for name, node in draft.inputs.items()}
    return Border(_named(goes_in, inputs), _named(comes_out, {}))


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
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    taken = {name_of(node) for node in nodes}
    for node in edges.inputs.values():
        values[node] = _placeholder(graph, node, Kind.INPUT, name_of(node), taken)
    tensors: list[Tensor] = []
    copies: dict[tuple[fx.Node, int], fx.Node] = {}  # of constants, by the IPU that has them
    for node, tensor in program.tensors.items():
        readers = [reader for reader in node.users if is_inside(reader, placement)]
        ipus = sorted({placement.ipus[name_of(reader)] for reader in readers})
        several = placement.stages and is_copied(node, tensor)
        for ipu in ipus if several else ipus[:1]:
            first = ipu == ipus[0]
            name = name_of(node) if first else f"{name_of(node)}/copy_on_ipu{ipu}"
            copy = _placeholder(graph, node, Kind.PARAM, name, taken)
            if first:
                values[node] = copy
            copies[node, ipu] = copy
            tensors.append(tensor if first else tensor.clone())
    for node in nodes:
        ipu = placement.ipus[name_of(node)]
        own = {source: copies.get((source, ipu)) for source in node.all_input_nodes}
        values[node] = graph.node_copy(node, partial(_source, values, own))
    graph.output(tuple(values[node] for node in edges.outputs.values()))
    graph.lint()
    return CompiledPart(
        graph,
        {name: node.meta["val"] for name, node in edges.inputs.items()},
        {name: node.meta["val"] for name, node in edges.outputs.items()},
        tuple(tensors),
        placement,
        program.micro_batch,
    )


def _source(
    values: Mapping[fx.Node, fx.Node], own: Mapping[fx.Node, fx.Node | None], node: fx.Node
) -> fx.Node:
    """The value that is read for `node`: the copy on the reader's IPU, else the value itself."""
    return own.get(node) or values[node]


def _placeholder(
    graph: fx.Graph, source: fx.Node, kind: Kind, name: str, taken: set[str]
) -> fx.Node:
    """A placeholder whose name nothing else has; several results of a host node have one."""
    node, count, unique = graph.placeholder(source.name), 0, name
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    taken.add(unique)
    node.meta = {"val": source.meta["val"], CUSTOM: source.meta[CUSTOM], KIND: kind}
    set_name(node, unique)
    return node


def _named(nodes: list[fx.Node], inputs: Mapping[fx.Node, str]) -> dict[str, fx.Node]:
    """Nodes by name: inputs by the user's names, others by their canonical ones.

    A number makes a name unique, as that of a further result of a node.
    """
    names: dict[str, fx.Node] = {inputs[node]: node for node in nodes if node in inputs}
    for node in nodes:
        if node in inputs:
            continue
        name, count = name_of(node), 0
        while name in names:
            count += 1
            name = f"{name_of(node)}_{count}"
        names[name] = node
    return {name: names[name] for name in sorted(names, key=lambda name: nodes.index(names[name]))}
