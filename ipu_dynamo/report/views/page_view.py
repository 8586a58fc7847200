"""Join the view models of all sections to that of a page."""

from collections.abc import Sequence

from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.machine.text import headline, items, percent, precision, seconds, step_name, title
from ipu_dynamo.program.ir.types import counted
from ipu_dynamo.report.views.compact import Column, Json, Strings, table
from ipu_dynamo.report.views.memory_view import category_names, ipu_bars, memory_views
from ipu_dynamo.report.views.operator_view import block_views, call_view, operator_view
from ipu_dynamo.report.views.time_view import cycle_table, measured_table, timeline_view
from ipu_dynamo.runtime.execute.timeline import Span

_MARK_WORDS = {
    "F": "read in a public source",
    "D": "derived from figures that were read",
    "fitted": "fitted to measurements",
    "M": "recalled, not read again",
}


def page_view(
    prediction: Prediction, measured: Sequence[Span] = (), calibration: Sequence[Json] = ()
) -> dict[str, Json]:
    """All that a report shows, as JSON. Texts are positions in `strings`.

    Args:
        measured: times of the same program's calls on this computer.
        calibration: rows of `benchmarks/calibration.py`.
    """
    strings = Strings()
    view = {
        "title": title(prediction),
        "headline": headline(prediction),
        "verdict": prediction.verdict.word,
        "chosen": prediction.verdict.ipu,
        "facts": _facts(prediction),
        "limits": prediction.limits,
        "categories": category_names(prediction),
        "ipus": ipu_bars(prediction),
        "operators": operator_view(prediction, strings),
        "blocks": block_views(prediction),
        "calls": call_view(prediction, strings),
        "memory": memory_views(prediction, strings),
        "cycles": cycle_table(prediction, strings),
        "timeline": timeline_view(prediction, strings),
        "measured": measured_table(measured, strings),
        "machine": _machine(prediction, calibration, strings),
        "made": _made(prediction),
    }
    return view | {"strings": strings.texts}


def _facts(prediction: Prediction) -> list[tuple[str, str, str]]:
    """The figures of the first screen: label, value and explanation."""
    rows = prediction.micro_batch_rows
    batches = f"{prediction.micro_batches:,}" + (f" of {counted(rows, 'row')}" if rows else "")
    step = "of one update" if prediction.kind == "training" else "of one call"
    return [
        (f"Time of a {step_name(prediction)}", seconds(prediction.step_seconds), step),
        ("Items/s", items(prediction), "rows of the first host input, of all replicas"),
        ("Idle", percent(prediction.idle), "share of the IPUs' time"),
        ("Re-layout", percent(prediction.relayout), "share of the operators' cycles"),
        ("Replicas", f"{prediction.replicas:,}", ""),
        ("IPUs of a replica", f"{prediction.num_ipus:,}", ""),
        ("Micro-batches", batches, "of each replica in a step"),
        ("Machine types", precision(prediction), "dtypes of parameters; kinds of products"),
    ]


def _machine(
    prediction: Prediction, calibration: Sequence[Json], strings: Strings
) -> dict[str, Json]:
    """Marks, constants, and notes on things that are not modelled."""
    of_marks: list[Column] = [
        ("mark", "Mark", "text"),
        ("share", "Share of cycles", "percent"),
        ("words", "The constant was", "text"),
    ]
    of_unknown: list[Column] = [
        ("operator", "Operator", "text"),
        ("share", "Share of cycles", "percent"),
        ("why", "Assumed", "text"),
        ("line", "Line", "text"),
    ]
    of_constants: list[Column] = [
        ("name", "Constant", "text"),
        ("value", "Value", "text"),
        ("mark", "Mark", "text"),
        ("source", "Source", "text"),
    ]
    of_rows: list[Column] = [
        ("name", "Measurement", "text"),
        ("predicted", "Predicted", "text"),
        ("measured", "Measured", "text"),
        ("error", "Error", "percent"),
        ("source", "Source", "text"),
    ]
    return {
        "paragraphs": list(prediction.notes),
        "marks": table(
            strings,
            "Cycles by mark",
            of_marks,
            [[m.mark, m.share, _MARK_WORDS[m.mark]] for m in prediction.marks],
        ),
        "unknown": table(
            strings,
            "Operators without a formula",
            of_unknown,
            [[u.operator, u.share, u.why, u.line] for u in prediction.unknown],
        ),
        "constants": table(
            strings,
            f"Constants of {prediction.system}",
            of_constants,
            [[c.name, f"{c.value:g} {c.unit}", c.mark, c.source] for c in prediction.machine],
        ),
        "calibration": table(
            strings,
            "Predicted and measured on real systems",
            of_rows,
            [
                [
                    row["name"],
                    f"{_rate(row['predicted'])} {row['unit']}",
                    f"{_rate(row['measured'])} {row['unit']}",
                    row["error"],
                    row["source"],
                ]
                for row in calibration
                if row["predicted"] is not None
            ],
        ),
    }


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _made(prediction: Prediction) -> list[tuple[str, str]]:
    made = prediction.reproduce
    return [
        ("command", made.command or "none: it was predicted in Python"),
        ("versions", ", ".join(made.versions)),
        ("options", ", ".join(made.options) or "defaults"),
    ]
