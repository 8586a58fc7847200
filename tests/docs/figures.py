"""Gather the figures of the README from the pages that have them, and draw its picture.

Pages say when and where a figure was measured; the README only repeats it.
"""

import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import ipu_dynamo

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "schedules.svg"
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
_OURS = "compile_training"


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


def _speed() -> Iterator[str]:
    """Our time as a share of the time of others, by the table of the page."""
    lines = iter(_page("speed").splitlines())
    for begin, title in _TIMED.items():
        row = next(line for line in lines if line.startswith(f"| {begin}"))
        shares = dict[str, float]()
        while _OURS not in shares:
            _, who, _, ratio, *_ = [cell.strip() for cell in row.removeprefix("|").split("|")]
            shares[who] = 1 / float(ratio)
            row = next(lines)
        texts = [f"{shares[who]:.2f} of {whose}" for who, whose in _OTHERS.items()]
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


def picture() -> str:
    """One pipeline of four stages and eight micro-batches by two schedules."""
    kinds = {"PopTorch's schedule": "grouped", "zero bubble": "zero_bubble"}
    return ipu_dynamo.draw_schedules({title: _pipeline(kind) for title, kind in kinds.items()})


def _pipeline(schedule: str) -> "ipu_dynamo.CompiledModel":
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for ipu, layer in enumerate(layers):
        ipu_dynamo.BeginBlock(layer, ipu_id=ipu)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(x), x)

    model = Model()
    strategy = ipu_dynamo.Strategy(kind="pipelined", schedule=schedule)
    options = ipu_dynamo.Options(
        engine="eager", strategy=strategy, gradient_accumulation=8, recompute="off"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ipu_dynamo.compile_training(model, optimizer, options)
    step.compile(torch.ones(8, 4))
    return step


def refresh_readme() -> None:
    """Write the README's figures, and its picture."""
    readme = ROOT / "README.md"
    readme.write_text(with_figures(readme.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(f"{picture()}\n", encoding="utf-8")
