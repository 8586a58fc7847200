"""Prove that a row of a program's result depends on the same row of its inputs only.

Source   the idea of `split_batch`: with as many micro-batches as there are rows, a value of which
         each has a block is one that has a row for each row of the inputs.

The proof uses the table of operators. An operator is refused if it is not in the table, mixes rows,
draws random numbers, or takes values by the position in the batch. A graph of the other operators
may run in parts of any size.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ipu_dynamo.errors import CompileError
from ipu_dynamo.ops.aten import aten
from ipu_dynamo.ops.graph_queries import draws
from ipu_dynamo.ops.precision import half_partial_sums
from ipu_dynamo.ops.private.graphs import OpOverload
from ipu_dynamo.passes.micro_batch.batch_table import (
    RULES,
    OperatorCall,
    Rule,
    batch_norm,
    pattern,
    shape_of,
)
from ipu_dynamo.passes.micro_batch.placements import (
    Kind,
    Placement,
    Placements,
    Shard,
)
from ipu_dynamo.passes.micro_batch.split_batch import Planner
from ipu_dynamo.program import Call, Function, Program
from ipu_dynamo.program.ir.function import graph_outputs

_HINT = "compile it for one number of rows, or leave what mixes or counts rows outside of the model"


def rows_of_results(program: Program) -> dict[str, int]:
    """How many rows of each result belong to a row of the inputs.

    Raises:
        CompileError: a row of a result may depend on other rows, or on its place among them.
    """
    rows = _rows(program)
    values: dict[str, Placement] = {}
    for instruction in program.walk():
        if instruction.writes:
            _refuse("the program writes what lasts, so that a call changes later ones")
        for move in instruction.moves:
            if move.src == "host":
                values[move.result] = Shard(0)
            elif move.dst == "host":
                if values.get(move.value) != Shard(0):
                    problem = f"result {move.result} has no row for each row of the inputs"
                    _refuse(problem, where=getattr(instruction, "source", ""))
            elif move.value in values:
                values[move.result] = values[move.value]
        if isinstance(instruction, Call):
            function = program.function(instruction.function)
            arguments = [values.get(name, Kind.REPLICATE) for name in instruction.arguments]
            placed = _through(function, arguments, rows)
            named = zip(instruction.results, placed, strict=True)
            values |= {name: at for name, at in named if name and at is not None}
        elif instruction.makes:
            _refuse(f"nothing is known of the rows of what this makes: {instruction}")
    return {output.name: output.type.shape[0] // rows for output in program.outputs}


def _rows(program: Program) -> int:
    """How many rows the inputs of a micro-batch have."""
    if program.kind != "inference":
        _refuse(f"a program for {program.kind} has sums over all rows")
    for output in program.outputs:
        if output.mutates or output.printing is not None or output.returns != "all":
            _refuse(f"output {output.name} is not returned from each micro-batch: {output}")
    sizes = {stream.type.shape[:1] for stream in program.inputs}
    if any(stream.source != "host" for stream in program.inputs):
        _refuse("the program draws random numbers, which depend on the place in the batch")
    if len(sizes) != 1 or () in sizes:
        _refuse(f"the inputs have no number of rows in common: {sorted(sizes)}")
    ((rows,),) = sizes
    if rows < 2:
        _refuse("a micro-batch has one row, of which nothing shows what becomes of several")
    return rows


def _through(
    function: Function, arguments: list[Placement], rows: int
) -> Iterator[Placement | None]:
    """Return the placements of a function's results with respect to rows."""
    graph = function.graph.graph
    planner = _Rows(rows, dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True)))
    for node in graph.nodes:
        if node.op != "output":
            planner.place(node)
    for value in graph_outputs(function.graph):
        yield planner.split.of(value) if isinstance(value, fx.Node) else None


class _Rows(Planner):
    """Walks through a function whose micro-batches have a row each."""

    def __init__(self, rows: int, at: Mapping[fx.Node, Placement]) -> None:
        super().__init__(rows, at, ())
        self.constants: dict[fx.Node, Tensor | None] = {}

    def place(self, node: fx.Node) -> None:
        super().place(node)
        placed = self.split.at[node]
        if not isinstance(placed, Shard | tuple) and placed is not Kind.REPLICATE:
            _refuse("this operator may mix rows of the batch", node)
        for source, shard in self.split.slices.get(node, {}).items():
            if not self._same_along(source, shard.dim):
                _refuse("this operator reads values by the place of a row in the batch", node)

    def is_prepared(self, node: fx.Node) -> bool:
        return False

    def placement(self, node: fx.Node, kinds: set[Placements]) -> Placements:
        target: Any = node.target
        if draws(node):
            _refuse(
                "this operator draws random numbers, which differ by the place in a batch", node
            )
        if kinds <= {Kind.REPLICATE}:
            return Kind.REPLICATE
        if rule := _OWN_RULES.get(target):
            op = OperatorCall(node, self.split.n, self.split.at)
            row = rule(op)
            return Kind.DEFERRED if row is None else self.fit(op, row) or Kind.DEFERRED
        if target not in RULES or RULES[target] is batch_norm:
            _refuse("this operator is not known to keep the rows of a batch apart", node)
        return super().placement(node, kinds)

    def _same_along(self, node: fx.Node, dim: int) -> bool:
        """Whether a value that no input reaches is the same at every place along `dim`.

        A value without variables is compared; else its operators decide.
        """
        size = shape_of(node)[dim]
        if size == 1:
            return True
        value = self._constant(node)
        if value is not None:
            return torch.equal(value, value.narrow(dim, 0, 1).expand_as(value))
        if node.target is aten.expand.default:
            shape = shape_of(node.all_input_nodes[0])
            place = dim - len(shape_of(node)) + len(shape)
            return place < 0 or shape[place] < size
        rule = RULES.get(node.target)
        row = rule(OperatorCall(node, self.split.n, self.split.at)) if rule else None
        labels = row.results[0] if row is not None else Kind.REPLICATE
        if row is None or isinstance(labels, Kind) or labels[dim] is None:
            return False
        return all(
            self._same_along(source, own.index(labels[dim]))
            for source, own in row.operands
            if not isinstance(own, Kind) and labels[dim] in own
        )

    def _constant(self, node: fx.Node) -> Tensor | None:
        """The value of a tensor that is made of numbers only."""
        if node not in self.constants:
            args = [self._constant(source) for source in node.all_input_nodes]
            constant = not any(value is None for value in args)
            value = None
            if constant and isinstance(node.target, OpOverload) and node.op == "call_function":
                read = dict(zip(node.all_input_nodes, args, strict=True))
                arguments, options = map_arg((node.args, dict(node.kwargs)), read.__getitem__)
                value = node.target(*arguments, **options)
            self.constants[node] = value if isinstance(value, Tensor) else None
        return self.constants[node]


def _refuse(problem: str, node: fx.Node | None = None, *, where: str = "") -> NoReturn:
    raise CompileError(problem, node=node, where=where, hint=_HINT, id="free-rows")


_OWN_RULES: dict[object, Rule] = {  # other rules than the table's, or operators of inference
    half_partial_sums.matmul: pattern("*i. *.k -> *ik"),
    half_partial_sums.conv: pattern("n.~ ~ -> n.~"),
}
