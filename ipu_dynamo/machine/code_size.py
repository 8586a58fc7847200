"""Estimate the bytes of code of an IPU, which it has once for equal operators.

No source has sizes of single programs: all numbers are guesses within the ranges that are known.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil

from ipu_dynamo.machine.cost import Cost
from ipu_dynamo.machine.figure import Figure
from ipu_dynamo.machine.predicted_memory import ByteEstimate
from ipu_dynamo.machine.predicted_operators import OperatorRow
from ipu_dynamo.program.machine_operators import MachineOperator

_RANGE = "range of compiled programs"
_MESSAGE_BYTES, _MOST_MESSAGES = 512, 32
_WORKLISTS = 6 * 12  # bytes of the items of six workers; the range of vertices may include them


def _guess(low: float, central: float, high: float) -> tuple[Figure, Figure, Figure]:
    return tuple(Figure(value, "B", "M", _RANGE) for value in (low, central, high))  # type: ignore[return-value]


CODELET = _guess(0.3 * 1024, 0.8 * 1024, 2 * 1024)
VERTEX = _guess(12, 24 + _WORKLISTS, 60 + _WORKLISTS)
MESSAGE = _guess(4, 6, 8)
EXCHANGE = _guess(40, 40, 40)
PROGRAM_STEP = _guess(50, 80, 100)


@dataclass(frozen=True, slots=True)
class CodeSize:
    """Bytes of code on each tile.

    Args:
        vertices: of vertices, their state and their code.
        control: of exchanges and of the program that controls all.
    """

    vertices: ByteEstimate
    control: ByteEstimate


def code_size(
    operators: Iterable[tuple[MachineOperator, Cost]], around: Iterable[OperatorRow]
) -> CodeSize:
    """Estimate the code of an IPU.

    Args:
        operators: those of the micro-batches, with their costs.
        around: rows of the work around the micro-batches.
    """
    codelets: set[object] = set()
    kinds: dict[object, Cost] = {}
    for operator, cost in _parts(operators):
        types = operator.operands, operator.results
        dtypes = tuple(t.dtype for of in types for t in of)
        codelets.add((operator.operator, dtypes))
        kinds[operator.operator, types, cost.plan] = cost
    for row in around:
        types_of_row = row.operands, row.results
        codelets.add((row.operator, tuple(t.partition("[")[0] for of in types_of_row for t in of)))
        kinds[row.operator, types_of_row] = Cost()
    exchanges = [received for cost in kinds.values() for received in cost.exchanges]
    messages = sum(
        min(max(ceil(received / _MESSAGE_BYTES), 1), _MOST_MESSAGES) for received in exchanges
    )
    steps = len(exchanges) + len(kinds)
    vertices = [
        len(codelets) * codelet + len(kinds) * vertex
        for codelet, vertex in zip(CODELET, VERTEX, strict=True)
    ]
    control = [
        messages * message + len(exchanges) * exchange + steps * step
        for message, exchange, step in zip(MESSAGE, EXCHANGE, PROGRAM_STEP, strict=True)
    ]
    return CodeSize(ByteEstimate(*map(round, vertices)), ByteEstimate(*map(round, control)))


def _parts(
    operators: Iterable[tuple[MachineOperator, Cost]],
) -> Iterator[tuple[MachineOperator, Cost]]:
    """The operators, or those that the machine runs in their place."""
    for operator, cost in operators:
        if cost.parts:
            yield from _parts(cost.parts)
        elif cost.cycles or cost.exchanges:
            yield operator, cost
