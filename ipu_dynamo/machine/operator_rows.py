"""Collect the operators that run: equal ones are one row, and equal calls one block of rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ipu_dynamo.errors import NO_LINE, source_line
from ipu_dynamo.machine.cost import COLUMNS, Cost
from ipu_dynamo.machine.costs.basics import machine_bytes
from ipu_dynamo.machine.predicted_operators import (
    ColumnMarks,
    Cycles,
    OperatorBlock,
    OperatorRow,
    OperatorUse,
    Where,
)
from ipu_dynamo.program.machine_operators import MachineOperator


def whole_cycles(cost: Cost) -> Cycles:
    """The columns of a cost in whole cycles."""
    columns = cost.compute, cost.exchange, cost.relayout, cost.reduction, cost.overhead
    return Cycles(*map(round, columns))


@dataclass
class OperatorRows:
    """Rows, blocks and modules under construction. Equal rows and blocks have one position."""

    rows: list[OperatorRow] = field(default_factory=list)  # without their uses
    _positions: dict[OperatorRow, int] = field(default_factory=dict)
    _uses: list[Counter[tuple[int, int, int]]] = field(default_factory=list)
    _blocks: dict[tuple[int, ...], int] = field(default_factory=dict)
    _functions: list[str] = field(default_factory=list)
    _modules: dict[str, int] = field(default_factory=lambda: {"": 0})

    def row(
        self,
        name: str,
        operands: Iterable[object],
        results: Iterable[object],
        line: str,
        where: Where,
        cost: Cost,
        nbytes: int,
    ) -> int:
        """The position of a row."""
        bounds = cost.bounds
        row = OperatorRow(
            operator=name,
            operands=tuple(map(str, operands)),
            results=tuple(map(str, results)),
            line="" if line == NO_LINE else line,
            direction=where,
            cycles=whole_cycles(cost),
            marks=ColumnMarks(*(cost.marks.get(column) for column in COLUMNS)),
            flops=cost.flops,
            bound_flops=int(bounds.flops),
            bound_exchange=int(bounds.exchange),
            bound_memory=int(bounds.memory),
            nbytes=nbytes,
            temporary=cost.temporary,
            plan="" if cost.plan is None else str(cost.plan),
            steps=1 if cost.plan is None else cost.plan.steps,
            known=cost.known,
            uses=(),
            warning=cost.warning,
        )
        position = self._positions.setdefault(row, len(self.rows))
        if position == len(self.rows):
            self.rows.append(row)
            self._uses.append(Counter())
        return position

    def operator(self, operator: MachineOperator, cost: Cost) -> int:
        """The position of the row of an operator of a call."""
        operands, results = operator.operands, operator.results
        line = "" if operator.node is None else source_line(operator.node)
        nbytes = machine_bytes(*operands, *results)
        return self.row(
            operator.operator, operands, results, line, operator.direction, cost, nbytes
        )

    def use(self, row: int, ipu: int, stage: int, module: str) -> None:
        """Count a run of a row."""
        number = self._modules.setdefault(module, len(self._modules))
        self._uses[row][ipu, stage, number] += 1

    def block(self, function: str, rows: Sequence[int]) -> int:
        """The position of a block."""
        position = self._blocks.setdefault(tuple(rows), len(self._blocks))
        if position == len(self._functions):
            self._functions.append(function)
        return position

    @property
    def used_rows(self) -> tuple[OperatorRow, ...]:
        """The rows with their uses."""
        return tuple(
            replace(row, uses=tuple(OperatorUse(*use, count) for use, count in uses.items()))
            for row, uses in zip(self.rows, self._uses, strict=True)
        )

    @property
    def blocks(self) -> tuple[OperatorBlock, ...]:
        return tuple(
            OperatorBlock(function, rows)
            for function, rows in zip(self._functions, self._blocks, strict=True)
        )

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self._modules)
