"""Compare the values of two graphs of one model, and find the first operator that differs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ipu_dynamo.capture.capture import BACKWARD
from ipu_dynamo.debug.snapshots import Snapshot, origin
from ipu_dynamo.debug.values import comparable, differ
from ipu_dynamo.ops.graph_queries import is_view, writes

Values = Mapping[fx.Node, Any]


@dataclass(frozen=True)
class Mismatch:
    """Two nodes that should compute the same, and do not.

    Args:
        expected, found: the nodes; `before`, `after`: the graphs that they are in.
        same: nodes of `after` and the nodes of `before` with the same value.
    """

    expected: fx.Node
    found: fx.Node
    before: Snapshot
    after: Snapshot
    same: Mapping[fx.Node, fx.Node]


def mismatch(
    before: Snapshot, old: Values, after: Snapshot, new: Values, rtol: float | None
) -> Mismatch | None:
    """The first node of `after` that differs from its counterpart in `before`.

    Nodes correspond by name. If the graph was differentiated in between, they correspond by the
    traced node that they were made from. Values that depend on random numbers are left out if
    `after` draws these in another way.
    """
    same: dict[fx.Node, fx.Node] = {}
    wrong: list[tuple[fx.Node, fx.Node]] = []
    anew = after.differentiated and not before.differentiated
    random = before.random(but=() if anew else list(after.by_name))
    for expected, candidates in _counterparts(before, after, anew=anew):
        if expected in random:
            continue
        alike = [n for n in candidates if comparable(new.get(n), old.get(expected))]
        equal = [n for n in alike if not differ(new[n], old[expected], rtol)]
        if not equal and alike:
            wrong.append((expected, alike[-1]))
        elif isinstance(old.get(expected), Tensor):
            same |= dict.fromkeys(equal, expected)
    if not wrong:
        return None
    order = {node: place for place, node in enumerate(after.graph.graph.nodes)}
    expected, found = min(wrong, key=lambda pair: order[pair[1]])
    expected, found = _innermost(expected, found, old, new, rtol)
    return Mismatch(expected, found, before, after, same)


def _counterparts(
    before: Snapshot, after: Snapshot, *, anew: bool
) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Nodes of `before` with those of `after` of which one should have the same value."""
    inputs = {role.name: node for node, role in after.roles.items()}
    pairs = [(node, [inputs[role.name]]) for node, role in before.roles.items()
             if role.name in inputs]  # fmt: skip
    if anew:
        made = after.made_from()
        changed = _changed_in_place(before.by_name.values())
        pairs += [
            (node, made[name])
            for name, node in before.by_name.items()
            if name in made and node not in changed
        ]
    else:
        pairs += [
            (node, [after.by_name[name]])
            for name, node in before.by_name.items()
            if name in after.by_name and node not in before.roles
        ]
    returned = {role: node for node, role in after.outputs if node is not None}
    pairs += [
        (node, [returned[role]])
        for node, role in before.outputs
        if node is not None and role in returned
    ]
    return pairs


def _changed_in_place(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes whose memory an operator writes.

    Differentiation removes such operators: nodes of the same origin then hold the value at another
    time, and cannot be compared.
    """
    memory: dict[fx.Node, fx.Node] = {}
    written: set[fx.Node] = set()
    for node in nodes:
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        looks = source is not None and (writes(node) or is_view(node))
        memory[node] = memory.get(source, source) if looks and source else node
        if writes(node) and source is not None:
            written.add(memory[node])
    return {node for node, where in memory.items() if where in written}


def _innermost(
    expected: fx.Node, found: fx.Node, old: Values, new: Values, rtol: float | None
) -> tuple[fx.Node, fx.Node]:
    """Follow differing arguments back to operators all of whose own arguments agree."""
    while True:
        mine, theirs = found.all_input_nodes, expected.all_input_nodes
        if len(mine) != len(theirs):
            return expected, found
        pairs = zip(theirs, mine, strict=True)
        for e, f in pairs:
            if comparable(new.get(f), old.get(e)) and differ(new[f], old[e], rtol):
                expected, found = e, f
                break
        else:
            return expected, found


def faulty_backward(
    gradients: Mapping[fx.Node, Tensor], after: Snapshot, new: Values, rtol: float | None
) -> fx.Node | None:
    """Find the first operator of the backward pass with a wrong gradient.

    Args:
        gradients: of the loss with respect to the values of the graph before.

    Returns:
        A node of the graph before whose backward is wrong: the gradient of its result is right, and
        that of one of its inputs is not. Or a node of `after` between two such operators. None if
        all gradients of values in between are right.
    """
    backward = [node for node in after.by_name.values() if node.meta.get(BACKWARD)]

    def holds(nodes: Iterable[fx.Node], gradient: Tensor) -> bool:
        found = (new[n].flatten() for n in nodes if isinstance(new[n], Tensor))
        return any(v.numel() == gradient.numel() and not differ(v, gradient.flatten(), rtol)
                   for v in found)  # fmt: skip

    for node, gradient in reversed(list(gradients.items())):
        if holds(backward, gradient):
            continue
        readers = [user for user in node.users if user in gradients]
        if not readers:
            return node  # the loss itself
        reader = readers[-1]
        own = [n for n in backward if origin(n) is not None and origin(n) == origin(reader)]
        given = [n for one in own for n in one.all_input_nodes if n in backward and n not in own]
        wrong = [n for n in given if comparable(new[n], gradients[reader])]
        return wrong[-1] if wrong and not holds(given, gradients[reader]) else reader
    return None
