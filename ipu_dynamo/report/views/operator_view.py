"""Show operators with their costs and places, and the calls that run them."""

from ipu_dynamo.machine.predicted_operators import MARKS, OperatorRow, OperatorUse
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.text import runs_in_step
from ipu_dynamo.report.views.compact import Json, Strings, pack, pack_columns

_NO_FORMULA = len(MARKS) + 1
_COLUMNS = ("compute", "exchange", "relayout", "reduction", "overhead")


def operator_view(prediction: Prediction, strings: Strings) -> dict[str, Json]:
    """Operators in three lists, so that equal layers are there once.

    A kind is an operator with types, line and direction: a row of the table. A row has a
    kind and the costs of a run; places say where rows run, and how often in a micro-batch.
    """
    kinds: dict[tuple[int, ...], int] = {}
    of_rows = [kinds.setdefault(_kind(row, strings), len(kinds)) for row in prediction.operators]
    names = ("operator", "types", "line", "direction")
    places: dict[tuple[OperatorUse, ...], int] = {}
    of_uses = [places.setdefault(row.uses, len(places)) for row in prediction.operators]
    return {
        "kinds": {name: [kind[i] for kind in kinds] for i, name in enumerate(names)},
        "rows": pack_columns({"kind": of_rows, "places": of_uses} | _costs(prediction, strings)),
        "places": [_places(prediction, uses, strings) for uses in places],
        "cycles": sum(
            row.cycles.total * runs_in_step(prediction, row) for row in prediction.operators
        ),
    }


def block_views(prediction: Prediction) -> list[str]:
    """The row of each step, for each block."""
    return [pack(block.operators) for block in prediction.blocks]


def call_view(prediction: Prediction, strings: Strings) -> dict[str, str]:
    """The calls of a micro-batch, in program order."""
    calls = prediction.calls
    return pack_columns(
        {
            "name": [strings(call.name) for call in calls],
            "ipu": [call.ipu for call in calls],
            "stage": [call.stage for call in calls],
            "direction": [strings(call.direction) for call in calls],
            "block": [call.block for call in calls],
            "cycles": [call.cycles for call in calls],
            "line": [strings(call.line) for call in calls],
        }
    )


def _places(
    prediction: Prediction, uses: tuple[OperatorUse, ...], strings: Strings
) -> dict[str, str]:
    """Where rows run, and how often for each of the runs that `_costs` counts."""
    return pack_columns(
        {
            "module": [strings(_module(prediction, use.module)) for use in uses],
            "stage": [use.stage for use in uses],
            "ipu": [use.ipu for use in uses],
            "count": [use.count for use in uses],
        }
    )


def types_text(row: OperatorRow) -> str:
    """The types of an operator: `f16[8,4], f16[4,2] -> f16[8,2]`."""
    return f"{', '.join(row.operands)} -> {', '.join(row.results)}"


def _kind(row: OperatorRow, strings: Strings) -> tuple[int, ...]:
    texts = (row.operator, types_text(row), row.line, row.direction)
    return tuple(map(strings, texts))


def _module(prediction: Prediction, position: int) -> str:
    return prediction.modules[position] if position >= 0 else ""


def _costs(prediction: Prediction, strings: Strings) -> dict[str, list[int]]:
    """Costs of one run of each row."""
    rows = prediction.operators
    columns = {name: [getattr(row.cycles, name) for row in rows] for name in _COLUMNS}
    return columns | {
        "cycles": [row.cycles.total for row in rows],
        "wasted": [row.cycles.total - row.bound for row in rows],
        "flops": [row.flops for row in rows],
        "bound_flops": [row.bound_flops for row in rows],
        "nbytes": [row.nbytes for row in rows],
        "temporary": [row.temporary for row in rows],
        "plan": [strings(row.plan) for row in rows],
        "mark": [_mark(row) for row in rows],
        "times": [runs_in_step(prediction, row) // max(row.count, 1) for row in rows],
    }


def _mark(row: OperatorRow) -> int:
    """The least certain mark: 0 for none, then the order of `MARKS`, then no formula."""
    if not row.known:
        return _NO_FORMULA
    marks = [getattr(row.marks, name) for name in _COLUMNS]
    return max((MARKS.index(mark) + 1 for mark in marks if mark is not None), default=0)
