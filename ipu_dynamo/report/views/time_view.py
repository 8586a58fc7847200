"""Show the cycles of each IPU by kind of work, and the timeline of a step."""

from collections.abc import Sequence
from statistics import median
from typing import get_args

from ipu_dynamo.machine.predicted_time import TimelineSection, Work
from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.report.views.compact import Column, Json, Strings, pack_columns, table
from ipu_dynamo.runtime.execute.timeline import Span

_WORKS: tuple[Work, ...] = get_args(Work)
_OPERATORS = ("compute", "exchange", "relayout", "reduction", "overhead")
_OTHERS = ("copies", "host_io", "off_chip", "replicas", "update", "host", "idle")
_LABELS = {
    "relayout": "Re-layout",
    "host_io": "Host IO",
    "off_chip": "Off chip",
    "host": "Host's update",
}


def cycle_table(prediction: Prediction, strings: Strings) -> dict[str, Json]:
    """The cycles of each IPU in a step, by kind of work. A row's figures sum up to the step."""
    names = [*_OPERATORS, *_OTHERS, "total"]
    columns: list[Column] = [("ipu", "IPU", "text")]
    columns += [(name, _LABELS.get(name, name.capitalize()), "cycles") for name in names]
    rows = [
        [
            f"IPU {i}",
            *(getattr(ipu.cycles.operators, name) for name in _OPERATORS),
            *(getattr(ipu.cycles, name) for name in _OTHERS),
            ipu.cycles.total,
        ]
        for i, ipu in enumerate(prediction.ipus)
    ]
    return table(strings, "Cycles of each IPU", columns, rows)


def timeline_view(prediction: Prediction, strings: Strings) -> dict[str, Json]:
    """The sections of a step with their spans."""
    return {
        "works": list(_WORKS),
        "sections": [_section(section, strings) for section in prediction.timeline],
    }


def measured_table(spans: Sequence[Span], strings: Strings) -> dict[str, Json]:
    """Times of the stage passes on this computer, those of all micro-batches together."""
    times: dict[tuple[str, int, int], list[float]] = {}
    for span in spans:
        times.setdefault((span.title, span.stage, span.ipu), []).append(span.end - span.start)
    columns: list[Column] = [
        ("call", "Call", "text"),
        ("ipu", "IPU", "text"),
        ("stage", "Stage", "text"),
        ("count", "Runs", "count"),
        ("median", "Median", "seconds"),
        ("sum", "All runs", "seconds"),
    ]
    rows = [
        [name, f"IPU {ipu}", str(stage), len(of), median(of), sum(of)]
        for (name, stage, ipu), of in times.items()
    ]
    return table(strings, "Measured on this computer", columns, rows)


def _section(section: TimelineSection, strings: Strings) -> dict[str, Json]:
    spans = section.spans
    return {
        "name": section.name,
        "count": section.count,
        "cycles": section.cycles,
        "spans": pack_columns(
            {
                "track": [span.track for span in spans],
                "start": [span.start for span in spans],
                "cycles": [span.cycles for span in spans],
                "work": [_WORKS.index(span.work) for span in spans],
                "name": [strings(span.name) for span in spans],
                "call": [span.call for span in spans],
                "micro_batch": [span.micro_batch for span in spans],
            }
        ),
    }
