"""Inline graphs that run under a setting of PyTorch's.

Before   %y: f32[2] = wrap_with_set_grad_enabled(False, @sub, %x)      @sub: %b = aten.sin(%a)
After    %y: f32[2] = aten.sin(%x)
Keeps    values, module paths, notes; gradients are no matter of inference.
Source   torch.export writes `with torch.no_grad():` so, and `with torch.autocast(...):`.
"""

from typing import Any

from torch import fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from ipu_dynamo.ops.private.graphs import HigherOrderOperator
from ipu_dynamo.saved_model.exported.node_names import is_result_of_tuple

_ARGUMENTS_BEFORE_GRAPH = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}


def inline_graphs(program: ExportedProgram) -> None:
    """Rewrite a program in place.

    Raises:
        ValueError: a graph runs under autocast, whose casts are not in it.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if isinstance(node.target, HigherOrderOperator) and node in graph.nodes:
            for old, new in _inline(program.graph_module, node).items():
                program.graph_signature.replace_all_uses(old, new)
    graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    graph.lint()
    program.graph_module.recompile()


def _inline(module: fx.GraphModule, call: fx.Node) -> dict[str, str]:
    """Put the operators of a graph where it is called; the new names of its results."""
    name = call.target.name() if isinstance(call.target, HigherOrderOperator) else ""
    if name not in _ARGUMENTS_BEFORE_GRAPH:
        raise ValueError(f"operator {name!r} with a graph is not supported in saved programs")
    before = _ARGUMENTS_BEFORE_GRAPH[name]
    if name == "wrap_with_autocast" and call.args[2] is not False:
        raise ValueError(
            "the program computes under torch.autocast, whose casts are not in its graph: export "
            "the module with its casts written out"
        )
    body_node, *arguments = call.args[before:]
    body = getattr(module, str(getattr(body_node, "target", "")))
    for inner in list(body.graph.nodes):
        if isinstance(inner.target, HigherOrderOperator):
            _inline(body, inner)
    graph = call.graph
    values: dict[fx.Node, Any] = {}
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    if len(inputs) != len(arguments):
        raise ValueError(f"a graph of {len(inputs)} inputs is called with {len(arguments)}")
    values.update(zip(inputs, arguments, strict=True))
    result: Any = None
    with graph.inserting_before(call):
        for inner in body.graph.nodes:
            if inner.op == "output":
                result = map_arg(inner.args[0], lambda n: values[n])
            elif inner.op == "call_function":
                values[inner] = graph.node_copy(inner, lambda n: values[n])
    renamed = {}
    if isinstance(result, fx.Node):
        call.replace_all_uses_with(result)
        renamed[call.name] = result.name
    else:
        for user in list(call.users):
            if not is_result_of_tuple(user):
                raise ValueError(f"the results of {call.name} are used as a whole")
            user.replace_all_uses_with(result[user.args[1]])
            renamed[user.name] = result[user.args[1]].name
            graph.erase_node(user)
    graph.erase_node(call)
    return renamed
