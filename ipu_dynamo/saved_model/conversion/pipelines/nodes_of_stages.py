"""List the nodes of a program that get a stage, and derive the stages of the others.

Nodes of stages are of kind OP, on an IPU, and not casts. The work list of a search leaves out
identities. An identity runs after its input; a cast of the conversion runs before its reader.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.saved_model.conversion.drafts.copied_constants import is_copied
from ipu_dynamo.saved_model.conversion.drafts.fixed_program import FixedProgram
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, name_of
from ipu_dynamo.saved_model.conversion.pipelines.cost_constants import CYCLES_PER_SECOND
from ipu_dynamo.saved_model.conversion.pipelines.estimate_costs import tensor_bytes
from ipu_dynamo.saved_model.conversion.pipelines.work_list import WorkNode

_IDENTITIES = (aten.alias.default, aten.detach.default)


@dataclass(frozen=True, slots=True)
class StageNodes:
    """The groups of a program that run on IPUs.

    Attributes:
        groups: those that a solution names, in the order of data.
        casts: those that a conversion put in.
    """

    groups: tuple[NodeGroup, ...]
    casts: tuple[NodeGroup, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(group.name for group in self.groups)


def stage_nodes(program: FixedProgram) -> StageNodes:
    """The nodes that stages are given for."""
    on_ipu = [g for g in program.groups() if program.placement.on_ipu(g.name) and not g.is_size]
    return StageNodes(
        tuple(group for group in on_ipu if group.is_matched),
        tuple(group for group in on_ipu if group.is_cast),
    )


def is_identity(group: NodeGroup) -> bool:
    """Whether a group only passes its argument on."""
    return all(node.target in _IDENTITIES for node in group.nodes)


def work_list(
    program: FixedProgram,
    cycles: Mapping[fx.Node, int],
    seconds: Mapping[str, float] | None,
) -> list[WorkNode]:
    """Every node of stages with its cost, in the order of data; also identities.

    The first node that reads a cast or a parameter also has the cast's cost or the parameter's
    bytes. A copied constant counts for every node that reads it, as each may be on another IPU.

    Args:
        cycles: of every operator.
        seconds: of every group, if they were measured.
    """
    stages = stage_nodes(program)
    reader = first_readers(stages)
    members: dict[str, list[NodeGroup]] = {group.name: [group] for group in stages.groups}
    for cast in stages.casts:
        members[reader[cast.name]].append(cast)
    result, paid = [], set[fx.Node]()
    for name, groups in members.items():
        nodes = [node for group in groups for node in group.nodes]
        parameters = {s for n in nodes for s in n.all_input_nodes if s in program.tensors} - paid
        paid |= {s for s in parameters if not is_copied(s, program.tensors[s])}
        timed = None if seconds is None else sum(seconds[group.name] for group in groups)
        result.append(
            WorkNode(
                name,
                sum(cycles.get(node, 0) for node in nodes)
                if timed is None
                else round(timed * CYCLES_PER_SECOND),
                sum(tensor_bytes(node.meta["val"]) for node in parameters),
                max(map(_result_bytes, groups)),
                timed,
            )
        )
    return result


def first_readers(stages: StageNodes) -> dict[str, str]:
    """The node of stages that has each cast's cost: the cast's first reader, else its input."""
    names = set(stages.names)
    readers: dict[str, str] = {}
    for group in stages.groups:
        for read in group.reads:
            readers.setdefault(read, group.name)
    result: dict[str, str] = {}
    for cast in stages.casts:
        sources = [read for read in (*cast.reads, *stages.names) if read in names]
        result[cast.name] = readers.get(cast.name) or sources[0]
    return result


def with_all_nodes(program: FixedProgram, found: Mapping[str, int]) -> dict[str, int]:
    """The stage of every node of stages, from those of the work list without identities."""
    stages = dict(found)
    for group in stage_nodes(program).groups:
        if group.name not in stages:
            stages[group.name] = max((stages[r] for r in group.reads if r in stages), default=0)
    return stages


def with_casts(program: FixedProgram, found: Mapping[str, int]) -> dict[str, int]:
    """The stage of every group on an IPU, from those of the nodes of stages."""
    nodes = stage_nodes(program)
    reader = first_readers(nodes)
    stages = {**found, **{cast.name: found[reader[cast.name]] for cast in nodes.casts}}
    for cast in nodes.casts:  # a cast runs before all its readers
        users = [stages[g.name] for g in nodes.groups if cast.name in g.reads]
        stages[cast.name] = min(users, default=stages[cast.name])
    return stages


def parameter_readers(program: FixedProgram, names: Collection[str]) -> dict[str, list[str]]:
    """For every parameter the nodes that read it, in the order of data; of constants those that
    are not copied.

    Args:
        names: of the nodes that are looked at.
    """
    readers: dict[str, list[str]] = {}
    for group in program.groups():
        if group.name in names:
            for source in dict.fromkeys(s for n in group.nodes for s in n.all_input_nodes):
                if source in program.tensors and not is_copied(source, program.tensors[source]):
                    readers.setdefault(name_of(source), []).append(group.name)
    return readers


def check_searchable(groups: Sequence[NodeGroup]) -> None:
    """Raise ValueError for a program whose stages cannot be searched."""
    for group in groups:
        values = [node.meta["val"] for node in group.nodes]
        if group.value.meta["val"] is None or all(value is None for value in values):
            raise ValueError(
                f"pipeline_cfg with converter 'auto': node {group.name!r} ({group.operator}) gives "
                "no value: it has a side effect; exclude it (excluded_nodes)"
            )
        if getattr(group.value.meta["val"], "dtype", None) == torch.int64:
            raise ValueError(
                f"pipeline_cfg with converter 'auto': node {group.name!r} is int64; use "
                "int64_to_int32_conversion"
            )


def _result_bytes(group: NodeGroup) -> int:
    """Bytes of a group's results that others read."""
    members = set(group.nodes)
    given = [n for n in group.nodes if n is group.value or set(n.users) - members]
    return sum(tensor_bytes(node.meta["val"]) for node in given if not _is_tuple(node))


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], tuple | list)
