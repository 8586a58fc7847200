"""Follow the memory of the values of a function, operator by operator, as the machine runs it.

    memory = FunctionMemory.of(MachineGraph(function.graph), "forward")

A loop is a step, before the steps of one round of its body. Its operands and results are live until
this round ends. A branch is a step, before those of each body. Values that the machine only looks
at another way share memory, and tensors filled with a number have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any, Self

from torch import Tensor, fx

from ipu_dynamo.errors import source_line
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.control_flow import branch_op, loop_op
from ipu_dynamo.ops.graph_queries import makes_constant
from ipu_dynamo.program.ir.function import graph_outputs
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_operators import MachineGraph, MachineOperator
from ipu_dynamo.program.text.operator_text import operator_text

_FILLED = (  # constants with one number everywhere
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.scalar_tensor.default,
)
Memory = tuple[int, ...]  # numbers of the pieces of memory that a value is in


@dataclass(frozen=True, slots=True)
class MemoryPiece:
    """Memory that an operator allocates, or that an input comes in.

    Args:
        name: of the value.
        made: the step that makes it; None: an input, or a constant.
        constant: the operator that makes it without tensors, as text; empty: it is no constant.
    """

    name: str
    type: TensorType | None
    made: int | None
    constant: str = ""


@dataclass(frozen=True, slots=True)
class OperatorStep:
    """An operator that a function runs.

    Args:
        place: of `operator` in the list of the function; a body has that of its loop.
        source: the user's line.
        operands: the memory of each operand of `operator`.
        results: the memory that it allocates.
        end: the last step of its bodies; its own number, if it has none.
    """

    operator: MachineOperator
    place: int
    source: str
    operands: tuple[Memory, ...]
    results: Memory
    end: int


@dataclass(frozen=True, slots=True)
class FunctionMemory:
    """The steps of a function, and the pieces of memory that its values are in.

    Args:
        pieces: the inputs first, one for each.
        reads: piece, and a step that reads it.
        results: the memory of each result.
    """

    steps: tuple[OperatorStep, ...]
    pieces: tuple[MemoryPiece, ...]
    reads: tuple[tuple[int, int], ...]
    results: tuple[Memory, ...]

    @classmethod
    def of(cls, graph: MachineGraph, direction: str) -> Self:
        """Follow a function.

        Args:
            direction: of the call.
        """
        walk = _Walk()
        inputs = graph.graph.graph.find_nodes(op="placeholder")
        for node in inputs:
            walk.pieces.append(MemoryPiece(node.name, None, None))
        results = walk.run(graph, graph.listed(direction), [(i,) for i in range(len(inputs))])
        return cls(tuple(walk.steps), tuple(walk.pieces), tuple(walk.reads), tuple(results))


class _Walk:
    """The steps of a graph and of its bodies, under construction."""

    def __init__(self) -> None:
        self.steps: list[OperatorStep] = []
        self.pieces: list[MemoryPiece] = []
        self.reads: list[tuple[int, int]] = []

    def run(
        self,
        graph: MachineGraph,
        operators: Sequence[MachineOperator],
        inputs: Sequence[Memory],
        place: int | None = None,
    ) -> list[Memory]:
        """Run a graph once; return the memory of its results.

        Args:
            place: of the operator whose body it is; None: it is the function itself.
        """
        nodes = graph.graph.graph.find_nodes(op="placeholder")
        at: dict[fx.Node, Memory] = {
            node: memory if graph.value(node) else ()
            for node, memory in zip(nodes, inputs, strict=True)
        }
        for number, operator in enumerate(operators):
            self._step(graph, operator, at, number if place is None else place)
        outputs = graph_outputs(graph.graph)
        return [
            self._seen(graph, node, at) if isinstance(node, fx.Node) else () for node in outputs
        ]

    def _seen(self, graph: MachineGraph, node: fx.Node, at: dict[fx.Node, Memory]) -> Memory:
        """Return the memory of a value."""
        owner = graph.memory(node)
        if owner not in at:
            constant = makes_constant(owner) and not graph.is_nothing(owner)
            at[owner] = self._constant(owner) if constant else ()
        return at[owner]

    def _constant(self, node: fx.Node) -> Memory:
        value = node.meta.get("val")
        if node.target in _FILLED or not isinstance(value, Tensor):
            return ()
        computed = operator_text(node).partition(": ")[2]  # without its name
        return (self._piece(node.name, TensorType.of(value), None, computed),)

    def _piece(self, name: str, type_: TensorType, made: int | None, constant: str = "") -> int:
        self.pieces.append(MemoryPiece(name, type_, made, constant))
        return len(self.pieces) - 1

    def _step(
        self,
        graph: MachineGraph,
        operator: MachineOperator,
        at: dict[fx.Node, Memory],
        place: int,
    ) -> None:
        """Add the step of an operator, and those of its bodies."""
        node, number = operator.node, len(self.steps)
        assert node is not None
        values = [value for value in graph.operands(node) if graph.value(value)]
        operands = tuple(self._seen(graph, value, at) for value in values)
        made: list[int] = []
        for part in _parts(graph, node):
            type_ = graph.value(part)
            at[part] = () if type_ is None else (self._piece(part.name, type_, number),)
            made += at[part]
        step = OperatorStep(operator, place, source_line(node), operands, tuple(made), number)
        self.steps.append(step)
        self._bodies(graph, operator, node, at, place)
        end = len(self.steps) - 1
        self.steps[number] = replace(step, end=end)
        self.reads += [(piece, end) for memory in (*operands, made) for piece in memory]

    def _bodies(
        self,
        graph: MachineGraph,
        operator: MachineOperator,
        node: fx.Node,
        at: dict[fx.Node, Memory],
        place: int,
    ) -> None:
        """Run each body of a loop or a branch once.

        Values that a loop carries on are in the memory of its results, if these are read.
        """
        bodies = graph.bodies(node)
        if not bodies:
            return
        lists: Any = node.args[1:2] if node.target is branch_op else node.args[:2]
        lists = node.args[:3] if node.target is loop_op else lists
        inputs = [self._seen(graph, value, at) for group in lists for value in group]
        carried = 0 if node.target is branch_op else len(lists[0])
        parts: dict[Any, Memory] = {p.args[1]: at[p] for p in _parts(graph, node)}
        own: list[int] = []
        for i in range(carried):
            type_ = graph.value(lists[0][i])
            if i not in parts and type_ is not None:
                own.append(self._piece(f"{node.name}_{i}", type_, len(self.steps) - 1))
                parts[i] = (own[-1],)
            inputs[i] = parts.get(i, ())
        for body, operators in zip(bodies, operator.bodies, strict=True):
            returned = self.run(body, operators, inputs, place)
            last = len(self.steps) - 1
            self.reads += [(piece, last) for memory in returned for piece in memory]
        self.reads += [(piece, len(self.steps) - 1) for piece in own]


def _parts(graph: MachineGraph, node: fx.Node) -> list[fx.Node]:
    """The nodes of the tensors that an operator makes: itself, or each of several results."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [part for part in node.users if part.target is getitem and part in graph.needed]
