"""Gather the figures of the README and of the picture of speed from the pages that have them.

Pages say when and where a figure was measured; README and picture only repeat it.
"""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->\n)", re.DOTALL)
_TIMED = {
    "MLP 784-128-10": "a perceptron (784-128-10, batch 16)",
    "4 layers, width 256": "a language model (4 layers, width 256, 8 micro-batches, AdamW)",
}  # how rows of the page on speed begin, and what they are
_OTHERS = {
    "eager": "eager PyTorch's time",
    "torch.compile, optimiser too": "compiled PyTorch's (Inductor, the optimiser too)",
    "JAX": "JAX's",
}
_EAGER = ("eager", "eager, one core", "PyTorch")  # of the page, whichever a case has
_COMPILED = ("torch.compile, optimiser too", "torch.compile", "torch.compile, Inductor")
_BENCHMARKS = re.compile(r"<!-- (?:end of )?benchmarks -->")


def with_figures(readme: str) -> str:
    """The README with the figures that the pages have now."""
    return _FIGURES.sub(lambda match: f"{match[1]}\n{figures()}\n\n{match[2]}", readme)


def figures() -> str:
    """A list of what is measured, with the page of each figure."""
    return "\n".join(
        f"- {what}"
        for what in (
            *_speed(),
            "Weights after 10 updates of a convolutional network, next to plain PyTorch's: at most "
            f"{_weights()} of the largest value apart, "
            "[rounding](docs/randomness_and_rounding.md).",
            _known_wrong(),
            f"Predicted throughput of whole models next to {_published()}, "
            "[predicting](docs/predicting.md).",
        )
    )


def speed_table() -> dict[str, dict[str, float]]:
    """For each row of the page on speed, how many times our time each contender takes."""
    table = dict[str, dict[str, float]]()
    _, rows, _ = _BENCHMARKS.split(_page("speed"))
    for row in re.findall(r"^\| (?!Work ).*", rows, re.M):
        work, who, _, times, *_ = [cell.strip() for cell in row.removeprefix("|").split("|")]
        if work:
            of_work = table.setdefault(work, {})
        if re.fullmatch(r"[\d.]+", times):  # else its values differ from PyTorch's
            of_work[who] = float(times)
    return table


def speedups() -> dict[str, Any]:
    """How many times faster than eager PyTorch each contender is."""
    groups = {}
    for work, times in speed_table().items():
        eager = next((number for who, number in times.items() if who in _EAGER), None)
        if eager is None:  # it compares something else
            continue
        ours = list(times)[-1]
        compiled = next((times[who] for who in _COMPILED if who in times), None)
        of = {"ipu_dynamo": times[ours], "Inductor": compiled, "JAX": times.get("JAX")}
        groups[work] = {who: round(eager / t, 2) for who, t in of.items() if t is not None}
    return {"axis": "times as fast as eager PyTorch", "line": 1, "groups": groups}


def _speed() -> Iterator[str]:
    """Our time as a share of the time of others, by the table of the page."""
    table = speed_table()
    for begin, title in _TIMED.items():
        times = next(times for work, times in table.items() if work.startswith(begin))
        texts = [f"{1 / times[who]:.2f} of {whose}" for who, whose in _OTHERS.items()]
        yield f"A training step of {title} takes {', '.join(texts)}, [speed](docs/speed.md)."


def _weights() -> str:
    return _found("randomness_and_rounding", r"agree with plain PyTorch to (\S+) of")[0]


def _known_wrong() -> str:
    count, wrong, right = _found(
        "compiled_code",
        r"runs (\d+) programs after public reports.*? is wrong in (\d+) of them.*?"
        r"compute (\d+) as plain PyTorch does",
    )
    return (
        f"Of {count} programs after public reports of wrong numbers PyTorch's own compiler gets "
        f"{wrong} wrong. Here {right} are right, and the rest is refused, "
        "[compiled code](docs/compiled_code.md)."
    )


def _published() -> str:
    errors = [
        abs(float(error))
        for error in re.findall(r"items/s \| ([+-][\d.]+)% \|", _page("predicting"))
    ]
    middle, worst = statistics.median(errors), max(errors)
    return (
        f"{len(errors)} published measurements: off by {middle:.0f}% in the median, {worst:.0f}% "
        "at most"
    )


def _found(name: str, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in a page, whose line breaks do not count."""
    found = re.search(pattern, " ".join(_page(name).split()))
    assert found, f"docs/{name}.md has no longer {pattern!r}"
    return found.groups()


def _page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def refresh_readme() -> None:
    """Write the README's figures."""
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text(encoding="utf-8")), encoding="utf-8")
