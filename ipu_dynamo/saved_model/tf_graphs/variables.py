"""Find the values of a graph's variables in the files next to it."""

from pathlib import Path

from torch import Tensor

from ipu_dynamo.saved_model.tf_graphs.flatten import TfNode
from ipu_dynamo.saved_model.tf_graphs.variable_table import VariableTable

VARIABLES = frozenset(["VariableV2", "Variable", "VarHandleOp"])


class Variables:
    """The values of variables by their names in the graph, from files read at the first question.

    Args:
        folder: of the SavedModel.
    """

    def __init__(self, folder: Path) -> None:
        self._prefix = folder / "variables" / "variables"
        self._table: VariableTable | None = None
        self._keys: dict[str, list[str]] = {}

    def value(self, node: TfNode) -> Tensor:
        """The value of the variable that a node stands for.

        Raises:
            ValueError: no value or two values fit, or the files are damaged.
        """
        table = self._opened(node)
        name = variable_name(node)
        keys = self._keys.get(name, [name] if name in table.names else [])
        if not keys:
            raise ValueError(f"{self._prefix}.index has no value for the variable {name!r}")
        if len(keys) > 1:
            raise ValueError(f"two values fit the variable {name!r}: {keys[0]!r} and {keys[1]!r}")
        return table.tensor(keys[0])

    def _opened(self, node: TfNode) -> VariableTable:
        if self._table is None:
            if not self._prefix.with_name("variables.index").exists():
                raise ValueError(f"variable {node.name!r}: {self._prefix}.index is missing")
            self._table = VariableTable(self._prefix)
            graph = self._table.object_graph()
            for tracked in graph.nodes if graph is not None else ():
                for attribute in tracked.attributes:
                    if attribute.key in self._table.names:
                        self._keys.setdefault(attribute.full_name, []).append(attribute.key)
        return self._table


def variable_name(node: TfNode) -> str:
    """The name of a variable: that of its node, or what handles of it share."""
    shared = node.attributes.get("shared_name") if node.op == "VarHandleOp" else ""
    return str(shared or node.name)
