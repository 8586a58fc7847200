"""Keep what a checkpoint reads of a tensor that the model changes, for the backward pass.

Before   %y = f(%buffer)                        to be computed again in backward, from what is then
         return %new_buffer, %y                 in the buffer
After    %was = aten.clone(%buffer)             kept
         %y = f(%was)                           to be computed again in backward
Keeps    results, shapes, dtypes, source lines. Gradients are those of the forward pass as it ran.

Batch normalisation in training is the common case: autograd would refuse the changed statistics.
"""

from collections.abc import Collection, Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ipu_dynamo.capture.checkpointed_draws import AGAIN, POLICY

aten = torch.ops.aten


def keep_changed(graph: fx.Graph, changed: Iterable[fx.Node], tangents: Iterable[fx.Node]) -> None:
    """Rewrite a joint graph that AOTAutograd is about to cut in two.

    Args:
        changed: placeholders of the tensors that the model changes in place.
        tangents: placeholders of the gradients of results.
    """
    backward = _behind(tangents)
    for node in changed:
        again = [user for user in node.users if _is_needed_again(user, backward)]
        if not again:
            continue
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            kept = graph.call_function(aten.clone.default, (node,))
        kept.meta = again[0].meta | {"val": node.meta["val"], POLICY: CheckpointPolicy.MUST_SAVE}
        for user in again:
            user.replace_input_with(node, kept)


def _is_needed_again(node: fx.Node, backward: Collection[fx.Node]) -> bool:
    return node.meta.get(POLICY) in AGAIN and not _behind([node]).isdisjoint(backward)


def _behind(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes`, and all that is computed from them."""
    behind: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in behind and node.op != "output":
            behind.add(node)
            pending += node.users
    return behind
