"""Draw bars and curves with matplotlib, as SVG files that are the same at every run."""

import io
import textwrap
from collections.abc import Callable
from typing import Any

from ipu_dynamo.svg_picture import GROUND, IDLE, ON_DARK, QUIET, TEXT

_SETTINGS = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": TEXT,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "grid.color": IDLE,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "ipu_dynamo",
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
_COLOURS = ("#2f6db5", "#e6a02f", "#1f9486", "#b5467f")  # of series, in order
_UNDATED = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def bars(data: Any, dark: bool) -> str:
    """Draw groups of horizontal bars, each with its number.

    Args:
        data: `groups` has numbers by series, by the name of the group; `axis` says what they are;
            `line` is the number that they are compared with.
    """
    groups = data["groups"]
    series = list(dict.fromkeys(name for group in groups.values() for name in group))

    def draw(axes: Any) -> None:
        y, places = 0.0, []
        box = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.5}
        for group in groups.values():
            middle = y + (len(group) - 1) / 2
            for name, number in group.items():
                axes.barh(y, number, 0.86, color=_COLOURS[series.index(name)])
                axes.text(number, y, f" {number:.2f}", va="center", fontsize=8, bbox=box)
                y += 1
            places.append(middle)
            y += 0.8
        axes.set_yticks(places, [textwrap.fill(name, 30) for name in groups], fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.08, y=0.01)
        axes.axvline(
            data["line"], color=axes.xaxis.label.get_color(), linewidth=1, linestyle="--", zorder=0
        )
        axes.set_xlabel(data["axis"])
        handles = [
            axes.barh(0, 0, color=colour, label=name)
            for name, colour in zip(series, _COLOURS, strict=False)
        ]
        axes.legend(handles=handles, loc="lower right")

    rows = sum(len(group) + 0.8 for group in groups.values())
    return _drawn(draw, (7.6, 0.9 + 0.2 * rows), dark)


def curves(data: Any, dark: bool) -> str:
    """Draw the losses of trainings over their steps.

    Args:
        data: `losses` has a list for each training, over `x`. The first is a thick line, so that
            others on the same values can be seen.
    """

    def draw(axes: Any) -> None:
        for number, (name, losses) in enumerate(data["losses"].items()):
            style = {"linewidth": 5, "alpha": 0.7} if number == 0 else {"linewidth": 1.5}
            axes.plot(range(len(losses)), losses, label=name, color=_COLOURS[number], **style)
        axes.set_xlabel(data["x"])
        axes.set_ylabel("loss")
        axes.grid(axis="y")
        axes.legend()

    return _drawn(draw, (7.6, 3.6), dark)


def points(data: Any, dark: bool) -> str:
    """Draw points with labels, joined by lines, and a limit that they should stay below.

    Args:
        data: `series` has points by name, each `[x, y, label]`; `limit` is a number of the y axis;
            `axes` says what x and y are.
    """

    def draw(axes: Any) -> None:
        for (name, of), colour in zip(data["series"].items(), _COLOURS, strict=False):
            axes.plot([x for x, *_ in of], [y for _, y, _ in of], "o-", color=colour, label=name)
            for x, y, label in of:
                place = {"xytext": (6, 5), "textcoords": "offset points", "fontsize": 9}
                axes.annotate(label, (x, y), **place)
        colour = axes.xaxis.label.get_color()
        axes.axhline(data["limit"], color=colour, linewidth=1, linestyle="--", label="limit")
        axes.margins(x=0.2, y=0.1)
        axes.set_xlabel(data["axes"][0])
        axes.set_ylabel(data["axes"][1])
        axes.legend()

    return _drawn(draw, (7.6, 3.8), dark)


def _drawn(draw: Callable[[Any], None], size: tuple[float, float], dark: bool) -> str:
    """The text of an SVG picture of so many inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colours = ON_DARK if dark else {}
    with mpl.rc_context({key: colours.get(str(value), value) for key, value in _SETTINGS.items()}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=_UNDATED)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())
