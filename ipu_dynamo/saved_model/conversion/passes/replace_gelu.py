"""Replace nodes that compute a GELU by one operator.

Before   %i = aten.linear(...); %e = aten.erf(%i / 1.41); %g = %i * 0.5 * (1 + %e); %o = f(%g)
After    %g = aten.gelu(%i)  "<i>/IpuGelu"; %o = f(%g)
Keeps    values to 1e-6: the nodes are computed and compared before they go.
Source   IPU TensorFlow Addons, "IPU SavedModel CLI": gelu_replacement.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import NodeGroup, owners
from ipu_dynamo.saved_model.conversion.passes.edit import (
    drop_unread,
    external_inputs,
    insert_call,
    matches,
)
from ipu_dynamo.saved_model.conversion.passes.gelu_check import check_is_gelu
from ipu_dynamo.saved_model.conversion.settings.options import GeluReplacement
from ipu_dynamo.saved_model.exported.node_names import Kind, short_name

_ERF = {"erf", "erfc", "special_erf", "special_erfc"}


@dataclass(frozen=True, slots=True)
class Gelu:
    """The decision that `reader` reads the GELU of `source` instead of `value`.

    Attributes:
        approximate: `tanh` or `none`.
    """

    source: fx.Node
    approximate: str
    reader: NodeGroup
    value: fx.Node


@dataclass(frozen=True, slots=True)
class Plan:
    """GELUs, and the groups to remove."""

    gelus: tuple[Gelu, ...]
    removed: tuple[NodeGroup, ...]


def plan(draft: Draft, config: GeluReplacement) -> Plan | None:
    """Decide which nodes are replaced; None if no node is the input of a GELU.

    Raises:
        ValueError: a reader of the nodes, or one of their inputs, does not match its expression.
    """
    groups = draft.groups()
    inner = {g.name: g for g in groups if g.is_matched and matches(g.name, config.nodes)}
    inputs = {
        g.name
        for g in groups
        if g.is_matched and g.name not in inner and matches(g.name, config.node_as_gelu_input)
    }
    if not inputs:
        return None
    chains = _Chains(draft, groups, inner, inputs)
    for output, node in draft.outputs.items():
        if chains.owner[node].name in inner:
            raise ValueError(f"result {output!r} is what a node of gelu_replacement gives")
    gelus = []
    for group in groups:
        if group.name in inner:
            continue
        for value in external_inputs(group):
            if chains.owner[value].name not in inner:
                continue
            if not (group.is_matched and matches(group.name, config.node_use_gelu_output)):
                raise ValueError(
                    f"node {group.name!r} reads {chains.owner[value].name!r} of gelu_replacement, "
                    "and no expression of node_use_gelu_output matches it"
                )
            gelus.append(chains.gelu(group, value))
    return Plan(tuple(gelus), tuple(inner.values()))


class _Chains:
    """Follows nodes of GELUs to where they start."""

    def __init__(
        self,
        draft: Draft,
        groups: tuple[NodeGroup, ...],
        inner: Mapping[str, NodeGroup],
        inputs: set[str],
    ) -> None:
        self._draft, self._inner, self._inputs = draft, inner, inputs
        self.owner = owners(groups)

    def gelu(self, reader: NodeGroup, value: fx.Node) -> Gelu:
        """The GELU that computes an input of a group.

        Raises:
            ValueError: the chain starts nowhere, at several places, or computes something else.
        """
        chain, sources, foreign = self._follow(value)
        where = f"gelu_replacement: what node {reader.name!r} reads ({self.owner[value].name!r})"
        if foreign or len(sources) != 1:
            begins = [self.owner[node].name for node in sources] + [g.name for g in foreign]
            raise ValueError(
                f"{where} has to start at one node of node_as_gelu_input, and starts at "
                f"{', '.join(map(repr, begins)) or 'none'}"
            )
        (source,) = sources
        if not source.meta["val"].dtype.is_floating_point:
            raise ValueError(f"{where} starts at {self.owner[source].name!r}, which is no float")
        approximate = _variant(chain, where)
        check_is_gelu(self._draft, chain, source, value, approximate, where)
        return Gelu(source, approximate, reader, value)

    def _follow(self, value: fx.Node) -> tuple[list[NodeGroup], list[fx.Node], list[NodeGroup]]:
        """The groups of a chain, where it starts, and what else it reads that is no constant."""
        chain: dict[str, NodeGroup] = {}
        sources: dict[fx.Node, None] = {}
        foreign: dict[str, NodeGroup] = {}
        todo = [self.owner[value]]
        while todo:
            group = todo.pop()
            if group.name in chain:
                continue
            chain[group.name] = group
            for node in external_inputs(group):
                before = self.owner[node]
                if before.name in self._inner:
                    todo.append(before)
                elif before.name in self._inputs:
                    sources[node] = None
                elif before.kind is not Kind.PARAM:
                    foreign[before.name] = before
        return list(chain.values()), list(sources), list(foreign.values())


def _variant(chain: list[NodeGroup], where: str) -> str:
    nodes = [node for group in chain for node in group.nodes]
    names = {short_name(node.target) for node in nodes}
    gelus = [node for node in nodes if short_name(node.target) == "gelu"]
    if gelus and len(nodes) == 1:
        return str(gelus[0].kwargs.get("approximate", "none"))
    exact, tanh = bool(names & _ERF), "tanh" in names
    if exact == tanh:
        raise ValueError(f"{where} has {'both erf and' if tanh else 'neither erf nor'} tanh")
    return "tanh" if tanh else "none"


def apply(draft: Draft, decision: Plan) -> None:
    """Put the operators in, and take the nodes out."""
    graph = draft.graph
    owner = owners(draft.groups())
    gelus: dict[fx.Node, fx.Node] = {}
    for gelu in decision.gelus:
        if gelu.source not in gelus:
            with graph.inserting_after(gelu.source):
                gelus[gelu.source] = insert_call(
                    graph,
                    aten.gelu.default,
                    gelu.source,
                    approximate=gelu.approximate,
                    name=f"{owner[gelu.source].name}/IpuGelu",
                    value=gelu.source.meta["val"],
                )
        if gelus[gelu.source].kwargs["approximate"] != gelu.approximate:
            raise ValueError(
                f"gelu_replacement: {owner[gelu.source].name!r} has GELUs of both forms"
            )
        for node in gelu.reader.nodes:
            node.replace_input_with(gelu.value, gelus[gelu.source])
    if decision.gelus:
        inner = {node for group in decision.removed for node in group.nodes}
        for node in reversed(list(graph.nodes)):
            if node in inner and not node.users:
                graph.erase_node(node)
        drop_unread(graph, draft.tensors)


@dataclass(frozen=True, slots=True)
class ReplaceGelu:
    """The pass."""

    name: ClassVar[str] = "ReplaceGelu"
    gelu_replacement: GeluReplacement | None = None

    def __call__(self, draft: Draft) -> bool:
        """Rewrite `draft` in place; return whether anything changed."""
        if self.gelu_replacement is None:
            return False
        decision = plan(draft, self.gelu_replacement)
        if decision is None:
            warnings.warn(
                "gelu_replacement: node_as_gelu_input matches no node; nothing is replaced",
                stacklevel=2,
            )
            return False
        apply(draft, decision)
        return bool(decision.gelus)
