"""Walk back from the outputs of a signature to one flat list of nodes, with functions inlined.

Before   out = call f(x);  f: y = MatMul(a, w); z = Identity(y); return z
After    y = MatMul(x, w)
Keeps    the order of data; names of nodes as they are in the innermost function. Nodes that only
         return their argument are left out, and so are nodes that only control edges reach. Of
         branches with a known predicate one is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ipu_dynamo.saved_model.tf_graphs.attributes import attributes_of
from ipu_dynamo.saved_model.tf_graphs.constants import constant_tensor
from ipu_dynamo.saved_model.tf_graphs.features import (
    FEATURES,
    PARSERS,
    features_of,
    sparse_results,
)

DEEPEST = 100
MOST_NODES = 1_000_000  # once functions are inlined
PASSING = frozenset(
    [
        *("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics"),
        *("EnsureShape", "Snapshot", "PlaceholderWithDefault"),
    ]
)
_CALLS = frozenset(["PartitionedCall", "StatefulPartitionedCall"])
_FUSED_NORM = ["y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2"]
# names of results in functions, where an operator has several
_RESULTS = {
    "FusedBatchNorm": _FUSED_NORM,
    "FusedBatchNormV2": _FUSED_NORM,
    "FusedBatchNormV3": [*_FUSED_NORM, "reserve_space_3"],
    "TopKV2": ["values", "indices"],
    "Switch": ["output_false", "output_true"],
    "Merge": ["output", "value_index"],
}


@dataclass(eq=False)
class TfNode:
    """An operator after inlining.

    Attributes:
        name: canonical, unique in the list.
        inputs: which result of which node each is.
    """

    name: str
    op: str
    attributes: dict[str, Any]
    inputs: list[tuple["TfNode", int]] = field(default_factory=list)


@dataclass(eq=False)
class _Scope:
    """The graph, or one call of a function: its nodes, and what its arguments are outside."""

    nodes: dict[str, Any]
    arguments: dict[str, int] = field(default_factory=dict)
    returns: list[str] = field(default_factory=list)
    caller: "_Scope | None" = None
    inputs: list[str] = field(default_factory=list)  # of the call, in the caller
    functions: tuple[str, ...] = ()

    @property
    def is_function(self) -> bool:
        return self.caller is not None


class Flattening:
    """Nodes that tensors of a graph depend on.

    Args:
        graph: a message with its functions.
        fed: tensors that the signature feeds, by name; they are not looked behind.
    """

    def __init__(self, graph: Any, fed: dict[str, str]) -> None:
        self._functions = {f.signature.name: f for f in graph.library.function}
        self._top = _Scope({node.name: node for node in graph.node})
        self._fed = {_tensor(name): key for name, key in fed.items()}
        self._scopes: dict[tuple[_Scope, str], _Scope] = {}
        self._done: dict[tuple[_Scope, str], TfNode] = {}
        self._names: dict[str, int] = {}
        self._predicates: dict[tuple[_Scope, str], bool | None] = {}
        self._deciding: dict[tuple[_Scope, str], None] = {}  # switches, from the outermost
        self.nodes: list[TfNode] = []
        self.inputs: dict[str, TfNode] = {}

    def result(self, tensor: str) -> tuple[TfNode, int]:
        """The node and result behind a tensor of the graph; nodes are added to the list.

        Raises:
            ValueError: a tensor or function is not there, or calls are endless.
        """
        scope, name, index = self._origin(self._top, tensor)
        stack: list[tuple[_Scope, str, Iterator[str]]] = []
        self._enter(stack, scope, name)
        entered = {(scope, name)}
        while stack:
            at, current, inputs = stack[-1]
            for text in inputs:
                source, source_name, _ = self._origin(at, text)
                if (source, source_name) in self._done:
                    continue
                if (source, source_name) in entered:
                    raise ValueError(f"node {source_name!r} depends on itself")
                entered.add((source, source_name))
                self._enter(stack, source, source_name)
                break
            else:
                stack.pop()
                self._finish(at, current)
        return self._done[scope, name], index

    def _enter(self, stack: Any, scope: _Scope, name: str) -> None:
        if (scope, name) not in self._done:
            stack.append((scope, name, iter(self._inputs(scope, name))))

    def _inputs(self, scope: _Scope, name: str) -> list[str]:
        if scope is self._top and any(node == name for node, _ in self._fed):
            return []
        message = scope.nodes[name]
        return [] if message.op in PARSERS else data_inputs(message)

    def _finish(self, scope: _Scope, name: str) -> None:
        message = scope.nodes[name]
        node = TfNode(self._unique(name), message.op, attributes_of(message))
        if message.op in PARSERS:
            node.attributes[FEATURES] = features_of(message, scope.nodes)
        key = self._fed.get((name, 0)) if scope is self._top else None
        if key is not None:
            node.op = "Placeholder"
            self.inputs[key] = node
        for text in self._inputs(scope, name):
            source, source_name, index = self._origin(scope, text)
            node.inputs.append((self._done[source, source_name], index))
        if len(self.nodes) >= MOST_NODES:
            raise ValueError(f"more than {MOST_NODES} nodes once functions are inlined")
        self._done[scope, name] = node
        self.nodes.append(node)

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return f"{name}_{count}" if count else name

    def _origin(self, scope: _Scope, text: str) -> tuple[_Scope, str, int]:
        """The node that computes a tensor, behind calls, arguments and what passes it on."""
        seen: set[tuple[_Scope, str]] = set()
        while True:
            name, result = _split(text)
            if (scope, text) in seen:
                raise ValueError(f"node {name!r} depends on itself")
            seen.add((scope, text))
            if scope.is_function and name in scope.arguments:
                text, scope = scope.inputs[scope.arguments[name]], scope.caller or scope
                continue
            if name not in scope.nodes:
                raise ValueError(f"the graph has no node {name!r}, which another one reads")
            message = scope.nodes[name]
            index = _index(message, result)
            if scope is self._top and (name, index) in self._fed:
                return scope, name, index
            if message.op in _CALLS:
                scope = self._called(scope, message)
                if index >= len(scope.returns):
                    raise ValueError(f"{name!r} has no result {index}")
                text = scope.returns[index]
            elif message.op in PASSING:
                text = _input(message, index)
            elif message.op == "Switch" and self._predicate(scope, message) == bool(index):
                text = _input(message, 0)
            elif message.op == "Merge" and not index and (live := self._live(scope, message)):
                text = live
            else:
                return scope, name, index

    def _predicate(self, scope: _Scope, switch: Any) -> bool | None:
        """The predicate of a branch, if the graph fixes it; None if a call decides."""
        key = scope, switch.name
        if key in self._deciding:
            raise ValueError(f"node {switch.name!r} depends on itself")
        if len(self._deciding) >= DEEPEST:
            raise ValueError(f"node {switch.name!r}: predicates are more than {DEEPEST} deep")
        if key not in self._predicates:
            self._deciding[key] = None
            try:
                self._predicates[key] = self._decided(scope, _input(switch, 1))
            finally:
                del self._deciding[key]
        return self._predicates[key]

    def _decided(self, scope: _Scope, text: str) -> bool | None:
        """The value of a predicate that is a constant, or its negation."""
        negated, seen = False, set()
        while True:
            scope, name, _ = self._origin(scope, text)
            if (scope, name) in seen:
                raise ValueError(f"node {name!r} depends on itself")
            seen.add((scope, name))
            message = scope.nodes[name]
            fed = scope is self._top and any(node == name for node, _ in self._fed)
            if fed or message.op not in ("LogicalNot", "Const"):
                return None
            if message.op == "Const":
                value = constant_tensor(attributes_of(message)["value"], f"node {name!r}")
                if value.numel() != 1:
                    raise ValueError(f"node {name!r}: a predicate of {value.numel()} elements")
                return bool(value.item()) != negated
            text, negated = _input(message, 0), not negated

    def _live(self, scope: _Scope, merge: Any) -> str | None:
        """The input of a branch's end that is computed, where its predicate is known."""
        for text in data_inputs(merge):
            todo, seen = [text], set()
            while todo:
                name, result = _split(todo.pop())
                if name in seen or name not in scope.nodes:
                    continue
                seen.add(name)
                message = scope.nodes[name]
                if message.op != "Switch":
                    todo += _all_inputs(message)
                    continue
                taken = self._predicate(scope, message)
                # a control edge from `switch_t` says as much as data from it
                if taken is not None and taken == bool(_index(message, result)):
                    return text
        return None

    def _called(self, scope: _Scope, message: Any) -> _Scope:
        """The scope of a call, one for each."""
        if (scope, message.name) in self._scopes:
            return self._scopes[scope, message.name]
        name = attributes_of(message).get("f", "")
        if name not in self._functions:
            raise ValueError(f"the graph has no function {name!r}, which {message.name!r} calls")
        if name in scope.functions or len(scope.functions) >= DEEPEST:
            raise ValueError(
                f"function {name!r} calls itself, or calls are more than {DEEPEST} deep"
            )
        function = self._functions[name]
        returns = {entry.key: entry.value for entry in function.ret}
        inner = _Scope(
            {node.name: node for node in function.node_def},
            {argument.name: i for i, argument in enumerate(function.signature.input_arg)},
            [returns[argument.name] for argument in function.signature.output_arg],
            scope,
            data_inputs(message),
            (*scope.functions, name),
        )
        if len(inner.inputs) != len(inner.arguments):
            raise ValueError(f"{message.name!r} calls {name!r} with {len(inner.inputs)} arguments")
        self._scopes[scope, message.name] = inner
        return inner


def data_inputs(message: Any) -> list[str]:
    """The inputs of a node without those that only say that another one comes before."""
    return [text for text in message.input if not text.startswith("^")]


def _input(message: Any, index: int) -> str:
    """The input at a position, of those that are data.

    Raises:
        ValueError: the node has fewer.
    """
    texts = data_inputs(message)
    if index >= len(texts):
        raise ValueError(f"node {message.name!r} ({message.op}) has no input {index}")
    return texts[index]


def _tensor(text: str) -> tuple[str, int]:
    name, result = _split(text)
    return name, int(result[-1]) if result else 0


def _split(text: str) -> tuple[str, list[str]]:
    name, *result = text.split(":")
    return name, result


def _all_inputs(message: Any) -> list[str]:
    """The inputs of a node, with those that only say that another one comes before."""
    return [text.removeprefix("^") for text in message.input]


def _index(message: Any, result: list[str]) -> int:
    """Which result `node`, `node:1` or, in a function, `node:name:0` is."""
    op = message.op
    if not result:
        return 0
    if not result[-1].isdigit() or len(result) > 2:
        raise ValueError(f"no result of {op}: {':'.join(result)!r}")
    offset = 0
    if len(result) == 2 and op in _RESULTS:
        if result[0] not in _RESULTS[op]:
            raise ValueError(f"{op} has no result {result[0]!r}")
        offset = _RESULTS[op].index(result[0])
    if len(result) == 2 and op in PARSERS and result[0] == "dense_values":
        offset = sparse_results(message)
    return offset + int(result[-1])
