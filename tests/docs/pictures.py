"""Draw the pictures of the guide and the README: what each shows, and how it is drawn.

A picture is three files of `docs/pictures`: NAME.json has the drawn data, NAME-light.svg and
NAME-dark.svg show it, with a digest of it. `make pictures` writes them; the tests compute the data
again and compare.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ipu_dynamo
from ipu_dynamo.machine.prediction import Prediction, Reproduce
from ipu_dynamo.program import Program
from ipu_dynamo.program.schedule.schedule import Schedule
from ipu_dynamo.report.html_page import html_page
from ipu_dynamo.report.memory_picture import memory_picture
from ipu_dynamo.report.views.memory_view import category_names, ipu_bars
from ipu_dynamo.svg_picture import Picture
from tests.docs.example_pictures import (
    bert_data,
    choices_data,
    digits_data,
    gpt_data,
    keras_data,
    predict_data,
)
from tests.docs.figures import speedups
from tests.docs.plots import bars, curves, points
from tests.report.browser import screenshot

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
Names = Mapping[str, Any]  # of a page: what its programs have made
Json = Any
_ROOT = re.compile(r"<svg\b[^>]*>")


@dataclass(frozen=True)
class Shown:
    """A picture.

    Args:
        data: what is drawn: a dictionary as JSON has it. Its `losses` are the same up to rounding
            when it is computed again, its `measured` times are not, and the rest is exact.
        draw: the text of an SVG picture of such data, for a dark page or a light one.
        page: whose programs make what `data` takes; empty: it takes nothing.
        drawn_alike: drawn again on any machine, the picture has the same text.
        takes_long: the data takes about a minute to compute.
    """

    data: Callable[[Names], Json]
    draw: Callable[[Json, bool], str]
    page: str = ""
    drawn_alike: bool = True
    takes_long: bool = False


def digest(data: Json) -> str:
    """What an SVG picture says of its data."""
    return f"data {sha256(as_text(data).encode()).hexdigest()[:32]}"


def as_text(data: Json) -> str:
    """The text of a JSON file: a line for each entry, or for each line of a text."""
    lines = [f" {json.dumps(key)}: {_entry(value)}" for key, value in data.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _entry(value: Json) -> str:
    if isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        return "[\n" + ",\n".join(f"  {json.dumps(line)}" for line in value) + "]"
    return json.dumps(value, separators=(",", ":"))


def stored(name: str) -> Json:
    """The data of a picture, as its file has it."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def drawn(name: str, data: Json, *, dark: bool) -> str:
    """The text of the picture's file."""
    svg = PICTURES[name].draw(data, dark)
    note = f"<metadata>{digest(data)}</metadata>"
    return _ROOT.sub(lambda match: f"{match[0]}\n{note}", svg.strip(), count=1) + "\n"


def measured_table(name: str) -> str:
    """What a picture's example has predicted and measured, as Markdown."""
    data = stored(name)
    rows = [
        f"| {what[0].upper()}{what[1:]} | {figure} |"
        for key in ("measured", "predicted")
        for what, figure in data.get(key, {}).items()
    ]
    return "\n".join(["", "| Figure | |", "|---|---|", *rows, "", ""])


def differences(name: str, names: Names) -> list[str]:
    """The entries of a picture's data that the code computes otherwise now.

    Args:
        names: of its page.
    """
    old, new = stored(name), json.loads(json.dumps(PICTURES[name].data(names)))
    return [key for key in old | new if not _same(key, old.get(key), new.get(key))]


def _same(key: str, old: Json, new: Json) -> bool:
    if key not in ("losses", "measured") or old is None or new is None:
        return bool(old == new)
    if key == "measured" or old.keys() != new.keys():
        return bool(old.keys() == new.keys())
    return all(
        len(old[who]) == len(new[who])
        and all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(old[who], new[who], strict=True))
        for who in old
    )


def write(name: str, names: Names) -> None:
    """Write the files of a picture.

    Args:
        names: of its page.
    """
    data = json.loads(json.dumps(PICTURES[name].data(names)))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(as_text(data), encoding="utf-8")
    for theme in ("light", "dark"):
        file = FOLDER / f"{name}-{theme}.svg"
        file.write_text(drawn(name, data, dark=theme == "dark"), encoding="utf-8")
    if name == "report":
        (FOLDER / "report.html").write_text(_report_page(data), encoding="utf-8")


def _themed(picture: Picture, dark: bool) -> str:
    return picture.dark() if dark else picture


def _pipeline(schedule: str) -> "ipu_dynamo.CompiledModel":
    """Four stages and eight micro-batches."""
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


def _two_schedules(names: Names) -> Json:
    kinds = {"PopTorch's schedule": "grouped", "zero bubble": "zero_bubble"}
    return _schedules({title: _pipeline(kind) for title, kind in kinds.items()})


def _schedules(steps: Mapping[str, Any]) -> Json:
    """The text of each schedule, without the lines of the model."""
    plain = {}
    for title, step in steps.items():
        passes = tuple(replace(one, source="") for one in step.schedule.passes)
        plain[title] = str(replace(step.schedule, passes=passes)).splitlines()
    return plain


def _draw_schedules(data: Json, dark: bool) -> str:
    schedules = {title: Schedule.parse("\n".join(lines)) for title, lines in data.items()}
    return _themed(ipu_dynamo.draw_schedules(schedules), dark)


def _draw_program(data: Json, dark: bool) -> str:
    return _themed(ipu_dynamo.draw_program(Program.parse("\n".join([*data["program"], ""]))), dark)


def _memory(names: Names) -> Json:
    prediction = names["prediction"]
    return {"categories": category_names(prediction), "ipus": ipu_bars(prediction)}


def _draw_memory(data: Json, dark: bool) -> str:
    return _themed(memory_picture(data["categories"], data["ipus"]), dark)


def _prediction(names: Names) -> Json:
    """The prediction without how it was made: versions differ."""
    plain = replace(names["prediction"], reproduce=Reproduce("", (), ()))
    return json.loads(plain.to_json())


def _report_page(data: Json) -> str:
    return html_page(Prediction.from_json(json.dumps(data).encode()))


def _draw_report(data: Json, dark: bool) -> str:
    return screenshot(_report_page(data), dark=dark)


def _example(data: Callable[[], Json], draw: Callable[[Json, bool], str]) -> Shown:
    alike = draw is _draw_memory
    return Shown(lambda names: data(), draw, drawn_alike=alike, takes_long=True)


PICTURES = {
    "schedules": Shown(_two_schedules, _draw_schedules),
    "named_schedules": Shown(
        lambda names: _schedules(names["steps"]), _draw_schedules, "pipelines"
    ),
    "speed": Shown(lambda names: speedups(), bars, drawn_alike=False),
    "memory": Shown(_memory, _draw_memory, "predicting"),
    "program": Shown(
        lambda names: {"program": names["step"].program.text().splitlines()},
        _draw_program,
        "reading_programs",
    ),
    "report": Shown(_prediction, _draw_report, "predicting", drawn_alike=False),
    "gpt": _example(gpt_data, curves),
    "predict_a_model": _example(predict_data, _draw_memory),
    "choices": _example(choices_data, points),
    "digits": _example(digits_data, curves),
    "bert": _example(bert_data, curves),
    "keras_digits": _example(keras_data, curves),
}


def of_page(page: str) -> list[str]:
    """The pictures whose data the programs of a page make."""
    return [name for name, picture in PICTURES.items() if picture.page == page]
