"""Draw the memory of each IPU at its peak, by category, next to the memory that an IPU has."""

from collections.abc import Mapping, Sequence
from typing import Any

from ipu_dynamo.machine.prediction import Prediction
from ipu_dynamo.program.ir.types import byte_text
from ipu_dynamo.program.liveness.live_tensors import CATEGORIES
from ipu_dynamo.report.views.memory_view import category_names, ipu_bars
from ipu_dynamo.svg_picture import (
    CHARACTER,
    GROUND,
    IDLE,
    SERIES,
    TEXT,
    Picture,
    frame,
    picture,
    rect,
    text,
    titled,
)

_WIDTH, _BAR, _GAP, _MARGIN, _LINE = 480, 24, 8, 12, 22  # pixels
_COLOURS: Mapping[str, str] = dict(zip(CATEGORIES, SERIES, strict=True))


def draw_memory(prediction: Prediction) -> Picture:
    """Draw the predicted memory of each IPU at its peak: a bar of categories.

    A grey bar is the memory that an IPU has. Of more than 16 IPUs the fullest and the slowest are
    drawn, as on the first screen of the report.

    Args:
        prediction: of `predict`.

    Returns:
        The text of an SVG picture. A notebook shows it as a picture. Its `dark()` is the same for
        a dark page.
    """
    return memory_picture(category_names(prediction), ipu_bars(prediction))


def memory_picture(categories: Sequence[str], ipus: Sequence[Mapping[str, Any]]) -> Picture:
    """Draw bars.

    Args:
        categories: their names, in the order of `bytes`.
        ipus: those of `ipu_bars`.
    """
    ipus = [ipu for ipu in ipus if ipu["first"]]
    most = max((max(ipu["limit"], sum(ipu["bytes"])) for ipu in ipus), default=1) or 1
    left = 2 * _MARGIN + CHARACTER * max((len(ipu["name"]) for ipu in ipus), default=0)
    parts, y, width = list[str](), float(_MARGIN), 0.0
    for ipu in ipus:
        parts.append(text(_MARGIN, y + _BAR - 7, ipu["name"]))
        parts.append(rect(left, y, _WIDTH * ipu["limit"] / most, _BAR, IDLE))
        x = float(left)
        for name, nbytes in zip(categories, ipu["bytes"], strict=True):
            here = _WIDTH * nbytes / most
            bar = [rect(x, y, here, _BAR, _COLOURS[name]), frame(x, y, here, _BAR, GROUND)]
            parts.append(titled(f"{ipu['name']}, {name}: {byte_text(nbytes)}", bar))
            x += here
        limit = left + _WIDTH * ipu["limit"] / most
        parts.append(rect(limit, y - 2, 2, _BAR + 4, TEXT))
        words = f"{byte_text(sum(ipu['bytes']))} of {byte_text(ipu['limit'])}: {ipu['word']}"
        parts.append(text(left + _WIDTH + _MARGIN, y + _BAR - 7, words))
        width = max(width, left + _WIDTH + 2 * _MARGIN + CHARACTER * len(words))
        y += _BAR + _GAP
    y += _MARGIN
    x = float(_MARGIN)
    shown = [n for i, n in enumerate(categories) if any(ipu["bytes"][i] for ipu in ipus)]
    for name in shown:
        wide = 20 + CHARACTER * (len(name) + 2)
        if x + wide > width and x > _MARGIN:
            x, y = float(_MARGIN), y + _LINE
        parts += [rect(x, y, 14, 14, _COLOURS[name]), text(x + 20, y + 12, name)]
        x += wide
    return picture(width, y + _LINE + _MARGIN, "memory of each IPU at its peak", parts)
