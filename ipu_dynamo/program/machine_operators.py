"""List the operators of a program that an IPU would run; this computer may run others.

    for call, operators in machine_operators(program):
        for operator in operators: ...

Marks (`machine_marks.py`) say which operators emulate others. A node that the machine does not run
is looked through: its readers read its operands. Views and constants cost nothing on the machine,
so they are values and no operators. So are dense copies, which the machine reads through, and
tensors filled with a number. Checks of floating-point numbers, and copies that only keep memory
apart, are nothing without a mark. Dtypes are those of the machine; strides and devices do not
count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import getitem
from typing import Any, Literal

from torch import Tensor, fx

from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.bodies import Body, bodies_of
from ipu_dynamo.ops.control_flow import branch_op, loop_op
from ipu_dynamo.ops.graph_queries import is_view, makes_constant, root
from ipu_dynamo.ops.operators import operator_name
from ipu_dynamo.ops.precision.float_check import check
from ipu_dynamo.ops.precision.stochastic_rounding import round_stochastically_op
from ipu_dynamo.program.ir.base_instruction import BaseInstruction
from ipu_dynamo.program.ir.function import graph_outputs
from ipu_dynamo.program.ir.instructions import Call
from ipu_dynamo.program.ir.program import Program
from ipu_dynamo.program.ir.types import TensorType
from ipu_dynamo.program.machine_marks import mark_of
from ipu_dynamo.program.text.graph_text import DIRECTION, OWN_MEMORY

_CAST = str(aten._to_copy.default)
_CASTS = (aten._to_copy.default, round_stochastically_op)
_COPIES = (
    aten.clone.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.alias_copy.default,
    aten.expand_copy.default,
    aten.permute_copy.default,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.t_copy.default,
    aten.transpose_copy.int,
    aten.unsqueeze_copy.default,
    aten.view_copy.default,
)
_FILLED = (  # with a number
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.empty_like.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.fill.Scalar,
    aten.zero.default,
)
Seen = TensorType | None  # a value on the machine; None: the machine does not have it
Source = int | Literal["constant"] | None
Values = Mapping[str, Seen]  # by name in the program


@dataclass(frozen=True, slots=True)
class MachineOperator:
    """An operator that the machine runs.

    Args:
        operator: its name with the overload.
        operands: the tensors that it reads, each once, in the order of its arguments.
        results: the tensors that it makes and that are read.
        direction: of the pass that it belongs to.
        bodies: the graphs that a loop or a branch runs.
        node: where it is in the function; it has the other arguments, and the source line.
        sources: for each operand, the number of the function's input that it is or is a view of;
            or "constant", or None. Bodies have those of the function around them.
        dying: places of operands whose memory nothing reads later in the function.
        places: the place of the operand that each argument of `node` reads.
    """

    operator: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    direction: Literal["forward", "backward"]
    bodies: tuple[tuple["MachineOperator", ...], ...] = ()
    node: fx.Node | None = field(default=None, compare=False, repr=False)
    sources: tuple[Source, ...] = field(default=(), compare=False, repr=False)
    dying: frozenset[int] = field(default=frozenset(), compare=False, repr=False)
    places: Mapping[fx.Node, int] = field(default_factory=dict, compare=False, repr=False)


class MachineGraph:
    """A graph of a function as the machine runs it.

    Args:
        graph: of a function of a program.
        inputs: their types on the machine; empty: those in the graph.
        sources: of a body, the function's input that each of its inputs is, by number.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Seen] = (),
        sources: Sequence[Source] | None = None,
    ) -> None:
        self.graph = graph
        nodes = graph.graph.find_nodes(op="placeholder")
        self._is_body = sources is not None
        self._sources: dict[fx.Node, Source] = dict(
            zip(nodes, range(len(nodes)) if sources is None else sources, strict=True)
        )
        self._inputs: dict[fx.Node, Seen] = dict(zip(nodes, inputs, strict=bool(inputs)))
        self._reads: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._types: dict[fx.Node, Seen] = {}
        self._bodies: dict[fx.Node, tuple[MachineGraph, ...]] = {}
        for node in graph.graph.nodes:  # in order, so that nothing has to be followed far
            if isinstance(node.meta.get("val"), Tensor):
                self._types[node] = self._type(node)
            self._reads[node] = self._read(node)

    @cached_property
    def results(self) -> tuple[Seen, ...]:
        """The type of each result on the machine."""
        return tuple(
            self.value(node) if isinstance(node, fx.Node) else None
            for node in graph_outputs(self.graph)
        )

    @cached_property
    def operators(self) -> tuple[fx.Node, ...]:
        """The nodes that the machine runs, in order: those that a result or an effect needs."""
        nodes = list(self.graph.graph.nodes)
        needed: set[fx.Node] = set()
        run = []
        for node in reversed(nodes):
            effect = node.op == "output" or (node.is_impure() and node.op != "placeholder")
            if (node not in needed and not effect) or self.is_nothing(node):
                continue
            if node.target not in _FILLED:
                needed.update(self.operands(node))
            if node.op == "call_function" and not _is_value_only(node):
                run.append(node)
        self.needed = needed
        return tuple(reversed(run))

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that a node reads on the machine, each once."""
        if node.target is getitem and _looks(node):
            return tuple(node.all_input_nodes)
        return tuple(dict.fromkeys(v for n in node.all_input_nodes for v in self._reads[n]))

    def memory(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a value looks at: itself, unless it is a view or a copy."""
        while node.op != "placeholder":
            read = self._reads[node] if self.is_nothing(node) else ()
            if not read and not (_looks(node) and (is_view(node) or node.target in _COPIES)):
                break
            node = read[0] if read else node.all_input_nodes[0]
        return node

    @cached_property
    def last_readers(self) -> dict[fx.Node, fx.Node | None]:
        """The last operator that reads the memory of a node; None: the function returns it."""
        readers = {self.memory(v): node for node in self.operators for v in self.operands(node)}
        returned = [node for node in graph_outputs(self.graph) if isinstance(node, fx.Node)]
        return readers | dict.fromkeys(self.memory(v) for n in returned for v in self._reads[n])

    def source(self, node: fx.Node) -> Source:
        """Return the source of a value: an input's number, "constant" or None (see `sources`)."""
        owner = self.memory(node)
        return self._sources.get(owner, "constant" if _is_constant(owner) else None)

    def bodies(self, node: fx.Node) -> tuple["MachineGraph", ...]:
        """The graphs that a loop or a branch runs."""
        return self._bodies.get(node, ())

    def value(self, node: fx.Node) -> Seen:
        """Return the type of a node on the machine; None: the machine does not have its value.

        A node that the machine does not run has the dtype of its first operand.
        """
        read = self._reads[node]
        if not read:
            return None
        own, first = self._types[node], self._types[read[0]]
        if read == (node,) or own is None or first is None:
            return own
        return replace(own, dtype=first.dtype)

    def is_nothing(self, node: fx.Node) -> bool:
        """Whether the machine does not run a node."""
        mark = mark_of(node)
        if mark.nothing or mark.operator:
            return mark.nothing
        if node.target is check or OWN_MEMORY in node.meta:
            return True
        if node.target not in _CASTS:
            return False
        source, made = self._types[node.all_input_nodes[0]], self._types[node]
        return source is not None and made is not None and source.dtype == made.dtype

    def listed(self, direction: str = "forward_backward") -> tuple[MachineOperator, ...]:
        """The operators that the machine runs.

        Args:
            direction: of the call; in one of both passes the nodes have theirs.
        """
        return tuple(self._operator(node, direction) for node in self.operators)

    def _operator(self, node: fx.Node, direction: str) -> MachineOperator:
        name = mark_of(node).operator or operator_name(node.target)
        backward = direction in ("backward", "weights") or DIRECTION in node.meta
        parts = sorted(
            (part for part in node.users if part.target is getitem and part in self.needed),
            key=lambda part: int(part.args[1]),  # type: ignore[arg-type]
        )
        several = not isinstance(node.meta["val"], Tensor)
        operands = [value for value in self.operands(node) if self._types.get(value) is not None]
        place: Literal["forward", "backward"] = "backward" if backward else "forward"
        return MachineOperator(
            _CAST if node.target is round_stochastically_op and name == str(node.target) else name,
            tuple(filter(None, map(self._types.get, operands))),
            tuple(filter(None, (self._types.get(made) for made in (parts if several else [node])))),
            place,
            tuple(body.listed(place) for body in self.bodies(node)),
            node,
            tuple(map(self.source, operands)),
            frozenset(i for i, value in enumerate(operands) if self._dies(value, node)),
            {
                argument: operands.index(read[0])
                for argument in node.all_input_nodes
                if (read := self._reads[argument]) and read[0] in operands
            },
        )

    def _dies(self, value: fx.Node, reader: fx.Node) -> bool:
        """Whether nothing needs the memory of a value after `reader`."""
        owner = self.memory(value)
        of_caller = self._is_body and owner.op == "placeholder"
        return self.last_readers[owner] is reader and not of_caller

    def _read(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the values that a reader of `node` reads on the machine."""
        if bodies := bodies_of(node):
            self._bodies[node] = self._within(node, bodies)
        source = node.all_input_nodes[0] if node.target is getitem else node
        if source is not node and source in self._bodies:
            place: Any = node.args[1]
            run = self._bodies[source][0 if source.target is branch_op else -1 :]
            return (node,) if any(body.results[place] for body in run) else ()
        if node.op == "placeholder":
            has = self._types.get(node) is not None and not mark_of(node).nothing
            return (node,) if has else ()
        operands = self.operands(node)
        if self.is_nothing(node):
            return operands
        if _looks(node):
            return (node,) if any(map(self._reads.__getitem__, node.all_input_nodes)) else ()
        return (node,)

    def _type(self, node: fx.Node) -> Seen:
        """The type of a tensor on the machine; None: of an input that the machine does not have."""
        own = TensorType.of(node.meta["val"])
        if node in self._inputs:
            return self._inputs[node]
        if not own.dtype.is_floating_point:
            return own
        dtype = mark_of(node).dtype
        if dtype is None and is_view(node):
            base = root(node)
            seen = self._types[base]
            if seen is not None and base.meta["val"].dtype == own.dtype:
                dtype = seen.dtype
        elif dtype is None and node.target is getitem:
            dtype = mark_of(node.all_input_nodes[0]).dtype
        return own if dtype is None else replace(own, dtype=dtype)

    def _source_of_argument(self, node: fx.Node) -> Source:
        """Return the source of the argument that a body gets as `node`."""
        read = self._reads[node]
        return self.source(read[0]) if read else None

    def _within(self, node: fx.Node, bodies: Sequence[Body]) -> tuple["MachineGraph", ...]:
        """Return the bodies of a loop or branch, with the types of their inputs on the machine.

        A carried value whose type differs after an iteration has the type of the body's input.
        """
        lists: Any = node.args[1:2] if node.target is branch_op else node.args[:2]
        lists = node.args[:3] if node.target is loop_op else lists
        values = [self.value(value) for group in lists for value in group]
        carried = 0 if node.target is branch_op else len(lists[0])
        types = [TensorType.of(value) for value in bodies[-1].inputs]
        inputs = [
            None if seen is None else replace(own, dtype=seen.dtype)
            for own, seen in zip(types, values, strict=True)
        ]
        sources = [self._source_of_argument(value) for group in lists for value in group]
        sources[:carried] = [None] * carried
        while True:
            graphs = tuple(MachineGraph(body.graph, inputs, sources) for body in bodies)
            after = graphs[-1].results[:carried]
            changed = [i for i, seen in enumerate(after) if seen != inputs[i]]
            if all(inputs[i] == types[i] for i in changed):
                return graphs
            for i in changed:
                inputs[i] = types[i]


def machine_operators(program: Program) -> Iterator[tuple[Call, tuple[MachineOperator, ...]]]:
    """Each call of a program with the operators that the machine runs for it, in program order."""
    for call, graph in machine_calls(program):
        yield call, graph.listed(call.direction)


def machine_calls(
    program: Program, values: dict[str, Seen] | None = None
) -> Iterator[tuple[Call, MachineGraph]]:
    """Each call of a program with the graph that the machine runs; equal calls share it.

    Args:
        values: gets the result of `machine_values`.
    """
    graphs: dict[tuple[str, tuple[Seen, ...]], MachineGraph] = {}
    for call, inputs in _inputs_of_calls(program, graphs, values):
        yield call, graphs[call.function, inputs]


def machine_values(program: Program) -> Values:
    """Return the types of values on the machine, by name: of results of calls and of copies."""
    values: dict[str, Seen] = {}
    for _ in _inputs_of_calls(program, {}, values):
        pass
    return values


def _inputs_of_calls(
    program: Program,
    graphs: dict[tuple[str, tuple[Seen, ...]], MachineGraph],
    values: dict[str, Seen] | None = None,
) -> Iterator[tuple[Call, tuple[Seen, ...]]]:
    """Yield each call with the types of its arguments; fill `graphs` and `values`."""
    values = {} if values is None else values
    functions = {function.name: function for function in program.functions}
    for instruction in program.walk():
        if not isinstance(instruction, Call):
            values.update(_moved(instruction, values))
            continue
        function = functions[instruction.function]
        inputs = tuple(
            values.get(name, type_)
            for name, type_ in zip(instruction.arguments, function.inputs, strict=True)
        )
        key = function.name, inputs
        if key not in graphs:
            graphs[key] = MachineGraph(function.graph, inputs)
        results = graphs[key].results
        values.update((n, seen) for n, seen in zip(instruction.results, results, strict=True) if n)
        yield instruction, inputs


def _moved(instruction: BaseInstruction, values: Values) -> Iterator[tuple[str, Seen]]:
    """Yield the new name of a moved value, and its type on the machine."""
    reads, makes = instruction.read_names, instruction.made_names
    if len(reads) == len(makes) == 1 and reads[0] in values:
        seen, made = values[reads[0]], [use.type for use in instruction.makes]
        if seen is not None and made and made[0] is not None:
            seen = replace(made[0], dtype=seen.dtype)
        yield makes[0], seen


def _is_value_only(node: fx.Node) -> bool:
    """Whether the machine has the value of a node without an operator that makes it."""
    return _looks(node) or _is_constant(node)


def _is_constant(node: fx.Node) -> bool:
    """Whether a value is one of the program's constants, or filled with a number."""
    constant = makes_constant(node) or node.target in _FILLED
    return not mark_of(node).operator and constant


def _looks(node: fx.Node) -> bool:
    """Whether the machine sees another value in a node: a view, a copy, one of several results."""
    mark = mark_of(node)
    if mark.nothing or mark.operator or OWN_MEMORY in node.meta:
        return False
    return is_view(node) or node.target is getitem or node.target in _COPIES
