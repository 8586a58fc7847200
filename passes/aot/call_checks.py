"""Call operators that only check a value as plain operators.

Before   %t: f32[0] = token
         %check = aten._linalg_check_errors.default
         %done = with_effects(%t, %check, %info: i32[], "inv", is_matrix=True)
         return (%done[0],)
After    aten._linalg_check_errors(%info, "inv", is_matrix=True)
         del %t
         return (None,)
Keeps    the check, at its place: a singular matrix is an error when the program runs.
Source   PyTorch's AOTAutograd orders operators that have an effect by tokens: inputs that pass
         through them to outputs. Checks commute, so they need none.
"""

from torch import fx

from ipu_dynamo.capture.capture import Joint
from ipu_dynamo.capture.private.aot import with_effects
from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.passes.contents import Contents
from ipu_dynamo.passes.kit import GraphPass

_CHECKS = (aten._linalg_check_errors.default,)


class CallChecks(GraphPass):
    """The pass."""

    level = "joint"
    needed = "programs have no tokens"

    def applies(self, capture: Joint, contents: Contents) -> bool:
        return with_effects in contents.targets or any(
            role.kind == "token" for role in capture.placeholders
        )

    def rewrite(self, capture: Joint) -> bool:
        graph = capture.graph.graph
        checks = plan(graph)
        tokens = {apply(graph, node): None for node in checks}
        capture.remove_inputs([token for token in tokens if _is_idle(token)])
        for node, role in capture.roles().items():
            if role.kind == "token":
                raise CompileError("an input that orders effects has no meaning here", node=node)
        return bool(checks)


def plan(graph: fx.Graph) -> list[fx.Node]:
    """The checks that are called with a token. Reads the graph only."""
    effects = graph.find_nodes(op="call_function", target=with_effects)
    return [node for node in effects if node.args[1] in _CHECKS]


def apply(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Call a check without its token; return the token."""
    token, operator, *rest = node.args
    assert isinstance(token, fx.Node)
    with graph.inserting_before(node):
        check = graph.call_function(operator, tuple(rest), dict(node.kwargs))  # type: ignore[arg-type]
    check.meta = {**node.meta, "val": None}
    for done in list(node.users):
        done.replace_all_uses_with(token)
        graph.erase_node(done)
    graph.erase_node(node)
    return token


def _is_idle(token: fx.Node) -> bool:
    return token.op == "placeholder" and all(user.op == "output" for user in token.users)
