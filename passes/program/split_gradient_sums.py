"""Write the terms of a gradient one by one, so that none waits for the others.

Before   (%g) = step0(...): g = %a + %b, the gradients of two uses; accumulate (%w..grad) += (%g)
After    (%a, %b) = step0(...); accumulate (%w..grad) += (%a); accumulate (%w..grad) += (%b)
Keeps    values up to the order of one sum: first the term of a serialised loss, then matrix
         products as they are computed, then others as autograd adds them. Small gradients, and sums
         without a term whose operator could add it, stay.
Source   the `beta` of BLAS's `gemm`: see `accumulate_matmuls` and `accumulate_in_loop`, which add
         terms where they are computed. A tied embedding holds no dense gradient to the end.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx

from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.graph.gradient_sums import (
    alike,
    erase_unread,
    is_large,
    loop_of,
    matmul_of,
    rows_are_few,
    sum_of,
)
from ipu_dynamo.passes.kit import Pass
from ipu_dynamo.passes.levels import Part, Partitioned, PartWrite
from ipu_dynamo.program import graph_outputs


@dataclass(frozen=True, slots=True)
class Sum:
    """A gradient to be written term by term.

    Args:
        write: of the sum.
        terms: in the order in which they are written.
        sums: the additions, the last one first.
    """

    write: PartWrite
    terms: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]


def plan(part: Part, read: Collection[str], values: Mapping[str, Tensor]) -> tuple[Sum, ...]:
    """The sums of a part that are worth it. Reads the graph only.

    Args:
        read: names that parts read, or that are returned.
        values: of parameters, whose types and layouts accumulators have.
    """
    results = dict(zip(part.outputs, graph_outputs(part.graph), strict=True))
    times = Counter(write.value for write in part.writes)
    uses = Counter(results.values())
    order = {node: place for place, node in enumerate(part.graph.graph.nodes)}
    found = []
    for write in part.writes:
        node = results[write.value]
        if write.rule not in ("store", "+=") or not write.parameter:
            continue
        if write.value in read or times[write.value] > 1 or uses[node] > 1:
            continue
        terms, sums = sum_of(part.graph.graph.output_node(), node)
        ordered = _ordered(terms, order, write, values[write.parameter])
        if ordered:
            found.append(Sum(write, tuple(ordered), tuple(sums)))
    return tuple(found)


def _ordered(
    terms: Sequence[fx.Node], order: Mapping[fx.Node, int], write: PartWrite, total: Tensor
) -> list[fx.Node]:
    """The terms as they are to be written; none where the sum stays."""
    if len(terms) < 2:
        return []
    loops = [term for term in terms if terms.count(term) == 1 and loop_of(term) is not None]
    matmuls = [term for term in terms if matmul_of(term) is not None]
    if loops:
        first = loops[:1]
    elif not is_large(total, write.rule) or not alike(total, terms[0].meta["val"]):
        return []
    elif matmuls:
        first = sorted(matmuls, key=lambda term: order[matmul_of(term) or term])
    elif write.rule == "+=" and any(map(rows_are_few, terms)):
        first = []
    else:
        return []
    return [*first, *(term for term in terms if term not in first)]


class SplitGradientSums(Pass):
    """The pass."""

    level = "parts"

    def applies(self, partitioned: Partitioned, contents: Contents) -> bool:
        return any(part.writes for part in partitioned.parts)

    def __call__(self, partitioned: Partitioned) -> Partitioned:
        capture = partitioned.capture
        values = {role.name: node.meta["val"] for node, role in capture.roles().items()}
        read = partitioned.reads
        taken = partitioned.named
        taken.update(role.name for role in capture.placeholders)
        parts = [_split(part, plan(part, read, values), taken) for part in partitioned.parts]
        if all(one is other for one, other in zip(parts, partitioned.parts, strict=True)):
            return partitioned
        return replace(partitioned, parts=tuple(parts))


def _split(part: Part, sums: Sequence[Sum], taken: set[str]) -> Part:
    if not sums:
        return part
    results = dict(zip(part.outputs, graph_outputs(part.graph), strict=True))
    of_write = {one.write: one for one in sums}
    writes: list[PartWrite] = []
    for write in part.writes:
        if write not in of_write:
            writes.append(write)
            continue
        del results[write.value]
        rule = write.rule
        for term in of_write[write].terms:
            name = _free(term.name, taken)
            results[name] = term
            writes.append(replace(write, value=name, rule=rule))
            rule = "+="
    output = part.graph.graph.output_node()
    output.args = (tuple(results.values()),)
    for one in sums:
        for node in one.sums:
            erase_unread(node)
    part.graph.recompile()
    return replace(part, outputs=tuple(results), writes=tuple(writes))


def _free(name: str, taken: set[str]) -> str:
    """Take `name`, with a mark after it if the name is taken already."""
    while name in taken:
        name += "'"
    taken.add(name)
    return name
