"""Compute a flat list of TensorFlow's nodes, node by node, as a module that can be exported."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ipu_dynamo.saved_model.exported.node_names import NAME
from ipu_dynamo.saved_model.tf_graphs.constants import constant_tensor
from ipu_dynamo.saved_model.tf_graphs.flatten import TfNode
from ipu_dynamo.saved_model.tf_graphs.operators.registry import PAIRS, Call, HostInts
from ipu_dynamo.saved_model.tf_graphs.operators.table import function_of
from ipu_dynamo.saved_model.tf_graphs.variables import VARIABLES, Variables, variable_name

_INTEGERS = (torch.int32, torch.int64)
_MOST_HOST_INTS = 1024
_READS = frozenset(["ReadVariableOp"])
KNOWN = frozenset(["Const", "Placeholder"]) | VARIABLES | _READS


def unsupported(nodes: Sequence[TfNode]) -> dict[str, str]:
    """Operators that there is no function for, each with the name of one node."""
    missing: dict[str, str] = {}
    for node in nodes:
        if node.op not in KNOWN and function_of(node.op) is None:
            missing.setdefault(node.op, node.name)
    return missing


class GraphModule(nn.Module):
    """The nodes of a signature as the forward pass of a module.

    Args:
        nodes: in the order of data.
        inputs: the placeholders, in the order of the arguments.
        outputs: which result of which node each result is.
    """

    def __init__(
        self,
        nodes: Sequence[TfNode],
        inputs: Sequence[TfNode],
        outputs: Sequence[tuple[TfNode, int]],
        variables: Variables,
    ) -> None:
        super().__init__()
        self._nodes, self._inputs, self._outputs = list(nodes), list(inputs), list(outputs)
        self._constants: dict[TfNode, Tensor] = {}
        self._integers: dict[TfNode, HostInts] = {}
        self._attributes: dict[TfNode, str] = {}
        self.parameter_names: dict[str, str] = {}
        self.annotated = False
        for node in nodes:
            if node.op == "Const":
                value = constant_tensor(node.attributes["value"], f"node {node.name!r}")
                self._constants[node] = value
                if value.dtype in _INTEGERS and value.dim() == 2 and value.shape[1] == 2:
                    node.attributes[PAIRS] = value.tolist()
                if _is_host(value):
                    make = partial(self._constant, node)
                    self._integers[node] = HostInts(value.tolist(), value.dtype, make)
            elif node.op in VARIABLES:
                self._hold(node, variables.value(node), variable_name(node))

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        values: dict[TfNode, Any] = dict(zip(self._inputs, arguments, strict=True))
        left = self._readers()
        for node in self._nodes:
            if node not in values:
                with self._named(node):
                    values[node] = self._value(node, values)
            for source, _ in node.inputs:
                left[source] -= 1
                if not left[source]:
                    values.pop(source, None)  # a large graph's values take more than its weights
        results = [_result(values[node], index) for node, index in self._outputs]
        return tuple(r.tensor() if isinstance(r, HostInts) else r for r in results)

    def _readers(self) -> Counter[TfNode]:
        """How often the values of each node are read, as results, too."""
        read = [source for node in self._nodes for source, _ in node.inputs]
        return Counter([*read, *(node for node, _ in self._outputs)])

    def _value(self, node: TfNode, values: dict[TfNode, Any]) -> Any:
        if node.op == "Const":
            return self._integers.get(node) or self._constant(node)
        if node.op in VARIABLES:
            return getattr(self, self._attributes[node])
        inputs = [_result(values[source], index) for source, index in node.inputs]
        if node.op in _READS:
            return inputs[0]
        function = function_of(node.op)
        if function is None:
            raise NotImplementedError(f"no operator {node.op!r} (node {node.name!r})")
        try:
            return function(Call(node, inputs))
        except NotImplementedError:
            raise
        except Exception as error:
            raise ValueError(f"node {node.name!r} ({node.op}): {error}") from error

    def _constant(self, node: TfNode) -> Tensor:
        if node not in self._attributes:
            self._hold(node, self._constants[node], node.name)
        return getattr(self, self._attributes[node])  # type: ignore[no-any-return]

    def _hold(self, node: TfNode, value: Tensor, name: str) -> None:
        attribute = f"tensor_{len(self._attributes)}"
        self._attributes[node] = attribute
        self.parameter_names[attribute] = name
        self.register_buffer(attribute, value, persistent=node.op in VARIABLES)

    def _named(self, node: TfNode) -> AbstractContextManager[Any]:
        """A block in which recorded operators get the node's name."""
        if not self.annotated:
            return nullcontext()
        return torch.fx.traceback.annotate({NAME: node.name})


def _is_host(value: Tensor) -> bool:
    """Whether a constant is known integers, as sizes are."""
    return value.dtype in _INTEGERS and value.dim() <= 1 and value.numel() <= _MOST_HOST_INTS


def _result(value: Any, index: int) -> Any:
    if isinstance(value, tuple):
        return value[index]
    if index:
        raise ValueError(f"result {index} of an operator that gives one")
    return value
