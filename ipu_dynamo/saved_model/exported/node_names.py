"""Give the nodes of an exported program the names that users' expressions match.

A call is named by the module it was written in, `left/0/dense/linear`; an input as its argument;
a parameter as its module has it, with slashes. All calls of one name are a group. Of an operator,
an input and a parameter that would have one name the first keeps it; others have a number behind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from ipu_dynamo.ops.private.graphs import HigherOrderOperator, OpOverload
from ipu_dynamo.ops.private.node_meta import CUSTOM, MODULE_STACK

NAME = "ipu_name"  # key of a call's meta["custom"], kept in files
_NO_MODULE = "_empty_nn_module_stack"


class Kind(Enum):
    """The kind of a node."""

    INPUT = "input"
    PARAM = "param"
    OP = "op"


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes of one canonical name, in the order of the graph; the last of a call gives results.

    Attributes:
        nodes: at least one.
        value: the node that gives the value; of several results the first.
    """

    name: str
    kind: Kind
    nodes: tuple[fx.Node, ...]
    value: fx.Node


def name_calls(program: ExportedProgram) -> None:
    """Write a canonical name into every call without one; its results get the call's name."""
    graph = program.graph
    taken = {name for node in graph.nodes if (name := _noted(node))} | _other_names(program)
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_result_of_tuple(node):
            _note(node, _noted(node.args[0]) or "")
        elif not _noted(node):
            name = _next(_base_name(node), counts, taken)
            taken.add(name)
            _note(node, name)


def _other_names(program: ExportedProgram) -> set[str]:
    """The names of inputs, parameters, buffers and constants, which no call may have."""
    return {
        str(spec.target).replace(".", "/") if spec.target is not None else str(spec.arg.name)
        for spec in program.graph_signature.input_specs
        if spec.target is not None or hasattr(spec.arg, "name")
    }


def placeholder_names(
    program: ExportedProgram, input_names: Mapping[str, str], parameter_names: Mapping[str, str]
) -> dict[str, str]:
    """The canonical names of inputs and parameters, by the names of their nodes; each is unique.

    Args:
        input_names: of user inputs, by the names of their nodes.
        parameter_names: canonical names that differ from qualified ones with slashes.
    """
    nodes = list(program.graph.nodes)
    taken = {_noted(node) or node.name for node in nodes if node.op == "call_function"}
    placeholders = [node.name for node in nodes if node.op == "placeholder"]
    held = _held(program)
    wanted = {name: input_names.get(name, name) for name in placeholders if name not in held}
    for name in placeholders:
        if name in held:
            wanted[name] = parameter_names.get(held[name], held[name].replace(".", "/"))
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for node_name, base in wanted.items():
        names[node_name] = _next(base, counts, taken)
        taken.add(names[node_name])
    return names


def _held(program: ExportedProgram) -> Mapping[str, str]:
    """The qualified names of parameters, buffers and constants, by the names of their nodes."""
    signature = program.graph_signature
    return {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }


def groups(
    program: ExportedProgram, input_names: Mapping[str, str], parameter_names: Mapping[str, str]
) -> list[Group]:
    """All nodes of a program with their canonical names, in the order of the graph.

    Args:
        input_names, parameter_names: as in `placeholder_names`.
    """
    held, names = _held(program), placeholder_names(program, input_names, parameter_names)
    result: dict[str, Group] = {}
    members: dict[str, list[fx.Node]] = {}
    kinds: dict[str, Kind] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            name, kind = names[node.name], Kind.PARAM if node.name in held else Kind.INPUT
        elif node.op == "call_function":
            name, kind = _noted(node) or node.name, Kind.OP
        else:
            continue
        members.setdefault(name, []).append(node)
        kinds.setdefault(name, kind)
    for name, nodes in members.items():
        calls = [node for node in nodes if not is_result_of_tuple(node)]
        results = [node for node in nodes if is_result_of_tuple(node) and node.args[0] is calls[-1]]
        result[name] = Group(
            name, kinds[name], tuple(nodes), (results or calls)[0 if results else -1]
        )
    return list(result.values())


def is_result_of_tuple(node: fx.Node) -> bool:
    """Whether a node takes one result out of several of a call."""
    target = getattr(node.target, "__name__", "")
    return (
        node.op == "call_function"
        and target == "getitem"
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[0].meta.get("val"), tuple | list)
    )


def operators(group: Group) -> list[str]:
    """The operators of a group, as `aten.add.Tensor`, without those that unpack results."""
    if group.kind is not Kind.OP:
        return []
    return [operator_name(node) for node in group.nodes if not is_result_of_tuple(node)]


def operator_name(node: fx.Node) -> str:
    """The operator of a call, as `aten.add.Tensor`."""
    target = node.target
    return str(target) if isinstance(target, OpOverload) else short_name(target)


def short_name(target: Any) -> str:
    """`linear` of `aten.linear.default`."""
    if isinstance(target, OpOverload):
        return str(target.name()).partition("::")[2].partition(".")[0]
    if isinstance(target, HigherOrderOperator):
        return str(target.name())
    return str(getattr(target, "__name__", target))


def _noted(node: Any) -> str | None:
    custom = node.meta.get(CUSTOM) if isinstance(node, fx.Node) else None
    name = custom.get(NAME) if isinstance(custom, dict) else None
    return name if isinstance(name, str) and name else None


def _note(node: fx.Node, name: str) -> None:
    node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), NAME: name}


def _base_name(node: fx.Node) -> str:
    stack = node.meta.get(MODULE_STACK) or {}
    paths = [entry[0] for entry in stack.values()]
    path = paths[-1] if paths and not paths[-1].startswith(_NO_MODULE) else ""
    # a module that is called twice has `@1` behind its name the second time
    parts = [part.partition("@")[0] for part in path.split(".") if part]
    return "/".join([*parts, short_name(node.target)])


def _next(base: str, counts: dict[str, int], taken: set[str]) -> str:
    while True:
        count = counts.get(base, 0)
        counts[base] = count + 1
        name = f"{base}_{count}" if count else base
        if name not in taken:
            return name
