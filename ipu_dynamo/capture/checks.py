"""Call operators that only check a value as plain operators.

Before   %done, = with_effects(%token, aten._linalg_check_errors.default, %info, ...)
After    aten._linalg_check_errors.default(%info, ...)
Keeps    the check, at its place: a singular matrix is an error when the program runs.
"""

import torch
from torch import fx

from ipu_dynamo.capture.private.tracing import with_effects

_CHECKS = (torch.ops.aten._linalg_check_errors.default,)


def call_checks(graph: fx.Graph) -> list[fx.Node]:
    """Rewrite the checks in a graph that AOTAutograd made.

    AOTAutograd orders operators that have an effect by tokens: inputs that pass through them to
    outputs. Checks commute, so they need none.

    Returns:
        The placeholders of tokens that nothing reads any more; their outputs are None.
    """
    tokens = set()
    for node in graph.find_nodes(op="call_function", target=with_effects):
        token, operator, *rest = node.args
        if operator not in _CHECKS:
            continue
        with graph.inserting_before(node):
            check = graph.call_function(operator, tuple(rest), dict(node.kwargs))
        check.meta = {**node.meta, "val": None}
        for done in list(node.users):
            done.replace_all_uses_with(token)
            graph.erase_node(done)
        graph.erase_node(node)
        tokens.add(token)
    idle = [t for t in tokens if t.op == "placeholder" and all(u.op == "output" for u in t.users)]
    for token in idle:
        for user in list(token.users):
            user.args = (tuple(None if value is token else value for value in user.args[0]),)
        token.meta["val"] = None
    return idle
