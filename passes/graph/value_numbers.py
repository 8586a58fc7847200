"""Number values so that equal ones have the same number, across the functions of several calls.

An operator's number stands for its name, arguments, the numbers of its inputs, and the layout of
its result. Source: Cocke and Schwartz, "Programming Languages and Their Compilers" (1970).
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import count

from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import draws, root
from ipu_dynamo.program.ir.function import written_by
from ipu_dynamo.program.ir.layout import Layout
from ipu_dynamo.program.text.graph_text import GraphForm, node_text
from ipu_dynamo.program.text.literals import write

_FORM = GraphForm(marks=lambda node: {})  # marks change no value


class ValueNumbers:
    """Give out numbers. Invariant: values with the same number have the same bits and layout."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._next = count()

    def of(self, key: Hashable) -> int:
        """The number of a value that is named by a key."""
        if key not in self._numbers:
            self._numbers[key] = self.new()
        return self._numbers[key]

    def new(self) -> int:
        """A number for a value that equals no other."""
        return next(self._next)

    def of_nodes(
        self,
        graph: fx.Graph,
        inputs: Sequence[int],
        known: Mapping[fx.Node, tuple[fx.Node, int, int]] = {},
    ) -> dict[fx.Node, int]:
        """The number of each node.

        A copy in the layout of its source has the source's number. Operators that write, draw from
        a generator, or read memory after a write in the function, get numbers of their own.

        Args:
            inputs: the numbers of the placeholders.
            known: nodes whose value follows from an earlier one and two integers.
        """
        numbers: dict[fx.Node, int] = {}
        text = partial(write, name_of=lambda node: str(numbers[node]), otherwise=repr)
        placeholders = iter(inputs)
        written: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op == "placeholder":
                numbers[node] = next(placeholders)
                continue
            changes = written_by(node)
            stale = any(root(source) in written for source in node.all_input_nodes)
            if changes or stale or draws(node):
                numbers[node] = self.new()
                written.update(changes)
            elif node in known:
                source, *rest = known[node]
                numbers[node] = self.of((numbers[source], *rest))
            elif _copies(node):
                numbers[node] = numbers[node.all_input_nodes[0]]
            else:
                numbers[node] = self.of(node_text(node, text, str, _FORM))
        return numbers


def _copies(node: fx.Node) -> bool:
    """Whether a node is a copy in the layout of its source."""
    if node.target is not aten.clone.default:
        return False
    own, source = (n.meta["val"] for n in (node, node.all_input_nodes[0]))
    assert isinstance(own, Tensor)
    return Layout.of(own) == Layout.of(source)
