"""Join the nodes of a work list that read one parameter, so that no cut between stages parts them.

Before   nodes a, b, c, d, e, of which b and d read %w
After    blocks (a), (b, c, d), (e)
Keeps    the order of nodes; without shared parameters each node is a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ipu_dynamo.saved_model.conversion.drafts.fixed_program import FixedProgram
from ipu_dynamo.saved_model.conversion.pipelines.nodes_of_stages import (
    parameter_readers,
    with_all_nodes,
    with_casts,
)
from ipu_dynamo.saved_model.conversion.pipelines.work_list import WorkNode

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbours in a work list that go into one stage.

    Attributes:
        parameters: why: those that nodes of the block share; none if it is a single node.
    """

    nodes: tuple[WorkNode, ...]
    parameters: tuple[str, ...] = ()

    def joined(self) -> WorkNode:
        """The block as one node, with the cost of its nodes and the memory of a stage of them."""
        return WorkNode(
            self.nodes[0].name,
            sum(node.cycles for node in self.nodes),
            sum(node.always_live_bytes for node in self.nodes),
            max(node.transient_bytes for node in self.nodes),
        )


Span = tuple[int, int, str]  # the places of the first and the last reader, and the parameter


def blocks(program: FixedProgram, work: Sequence[WorkNode]) -> tuple[Block, ...]:
    """The blocks of a work list, in its order."""
    return join(work, _spans(program, work))


def join(work: Sequence[WorkNode], spans: Sequence[Span]) -> tuple[Block, ...]:
    """The blocks of a work list; every span is in one.

    Args:
        spans: in the order of their first places.
    """
    result: list[Block] = []
    start = 0
    while start < len(work):
        end, parameters = start, list[str]()
        for first, last, parameter in spans:
            if start <= first <= end:
                end = max(end, last)
                parameters.append(parameter)
        result.append(Block(tuple(work[start : end + 1]), tuple(parameters)))
        start = end + 1
    return tuple(result)


def why_tied(tied: Sequence[Block]) -> str:
    """What to add to an error about stages: which nodes have to stay together, and why."""
    listed = [
        f"{', '.join(map(repr, block.parameters[:_SHOWN]))} by nodes from {block.nodes[0].name!r} "
        f"to {block.nodes[-1].name!r}"
        for block in tied
        if block.parameters
    ]
    if not listed:
        return ""
    return (
        f"; one stage has to have all that read one parameter: {'; '.join(listed[:_SHOWN])} "
        "(converter 'load' takes stages that share parameters, on one IPU)"
    )


def _spans(program: FixedProgram, work: Sequence[WorkNode]) -> list[Span]:
    """For every shared parameter the places of its first and last reader."""
    # stages grow with places, so rules for stages give the same result on places
    places = {node.name: place for place, node in enumerate(work)}
    places = with_casts(program, with_all_nodes(program, places))
    spans = []
    for parameter, readers in parameter_readers(program, places).items():
        first, last = min(places[n] for n in readers), max(places[n] for n in readers)
        if first < last:
            spans.append((first, last, parameter))
    return sorted(spans)
