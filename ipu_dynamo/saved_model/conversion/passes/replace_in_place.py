"""Replace operators that write an argument by those that return the new value.

Before   %y = aten.relu_(%x); ... = f(%x)
After    %y = aten.relu(%x);  ... = f(%y)
Keeps    values, names, order. An operator that writes a view, a parameter or an input is refused.
Source   torch.export keeps `inplace=True` of modules as it is written.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.private.graphs import OpOverload, schema_of
from ipu_dynamo.passes.graph.builder import evaluate
from ipu_dynamo.saved_model.conversion.drafts.draft import Draft
from ipu_dynamo.saved_model.conversion.drafts.node_groups import name_of


@dataclass(frozen=True, slots=True)
class Write:
    """The decision that `node`, which writes `written`, becomes a call of `target`."""

    node: fx.Node
    written: fx.Node
    target: OpOverload


def plan(graph: fx.Graph) -> tuple[Write, ...]:
    """Find the operators that write an argument.

    Raises:
        NotImplementedError: a written tensor has views, or is not the result of an operator.
    """
    writes = []
    for node in graph.nodes:
        if not (isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable):
            continue
        target = _functional(node.target)
        written = node.args[0] if node.args else None
        if target is None or not isinstance(written, fx.Node):
            raise _refusal(node, "has no form that returns its result")
        if written.op != "call_function" or _is_view(written):
            raise _refusal(node, f"writes {name_of(written)!r}, which others see as well")
        if any(_is_view(user) for user in written.users if user is not node):
            raise _refusal(node, f"writes {name_of(written)!r}, of which there are views")
        writes.append(Write(node, written, target))
    return tuple(writes)


def apply(graph: fx.Graph, write: Write) -> None:
    """Replace one operator; later readers of the written tensor read its result."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    write.node.target = write.target
    write.node.meta["val"] = evaluate(write.node)
    later = [user for user in write.written.users if order[user] > order[write.node]]
    for user in later:
        user.replace_input_with(write.written, write.node)


def _functional(target: OpOverload) -> OpOverload | None:
    """`aten.relu.default` of `aten.relu_.default`."""
    namespace, _, rest = str(target).partition(".")
    packet, _, overload = rest.partition(".")
    if namespace != "aten" or not packet.endswith("_") or packet.endswith("__"):
        return None
    found: Any = getattr(getattr(aten, packet[:-1], None), overload, None)
    return found if isinstance(found, OpOverload) and not schema_of(found).is_mutable else None


def _is_view(node: fx.Node) -> bool:
    """Whether a result may share memory with an argument."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"  # takes a result out
    schema = schema_of(node.target)
    maybe = {"reshape", "contiguous", "to", "flatten", "expand_as", "type_as"}  # or a copy
    return (any(result.alias_info is not None for result in schema.returns) and not (
        schema.is_mutable
    )) or schema.name.partition("::")[2] in maybe  # fmt: skip


def _refusal(node: fx.Node, problem: str) -> NotImplementedError:
    return NotImplementedError(
        f"node {name_of(node)!r} ({node.target}) {problem}; write it without changing its argument"
    )


@dataclass(frozen=True, slots=True)
class ReplaceInPlace:
    """The pass."""

    name: ClassVar[str] = "ReplaceInPlace"

    def __call__(self, draft: Draft) -> bool:
        """Rewrite `draft` in place; return whether anything changed."""
        writes = plan(draft.graph)
        for write in writes:
            apply(draft.graph, write)
            for name, node in draft.outputs.items():
                if node is write.written:
                    draft.outputs[name] = write.node
        return bool(writes)
