"""Write SVG pictures that stand alone: their parts, and their colours on light and dark pages."""

import re
from collections.abc import Iterable
from html import escape

# of a light page
GROUND, TEXT, QUIET, IDLE = "#ffffff", "#1c2330", "#5b6472", "#e4e4e4"
# the same colours on dark pages
ON_DARK = {GROUND: "#14171c", TEXT: "#e4e7ec", QUIET: "#9aa3b0", IDLE: "#343a44"}
# of text in boxes, whose colours are the same on all pages
ON_LIGHT_BOX, ON_DARK_BOX = "#111", "#fff"
# of categories, in order; those of the report on a light page
SERIES = (
    "#2f6db5",
    "#74aede",
    "#7b68b8",
    "#1f9486",
    "#9ac07d",
    "#7d838d",
    "#b4b9c2",
    "#e6a02f",
    "#cf5a36",
)
FONT = 13  # pixels
CHARACTER = 8  # pixels, the width of one of that size
_COLOUR = re.compile(r'(?<==")#[0-9a-f]{6}(?=")')  # texts have no quotes: they are escaped


class Picture(str):
    """The text of an SVG picture. Notebooks show it as a picture."""

    __slots__ = ()

    def dark(self) -> "Picture":
        """The same picture for a dark page."""
        return Picture(_COLOUR.sub(lambda match: ON_DARK.get(match[0], match[0]), self))

    def _repr_svg_(self) -> str:
        return str(self)


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> Picture:
    """Join parts to a picture of so many pixels. Text is in a font of fixed width."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" font-family="monospace" '
        f'font-size="{FONT}" fill="{TEXT}">\n'
        f"<title>{escape(title)}</title>"
    )
    return Picture("\n".join([head, rect(0, 0, width, height, GROUND), *parts, "</svg>"]))


def rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    """A rectangle, from its left upper corner."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{fill}"/>'


def frame(x: float, y: float, width: float, height: float, stroke: str) -> str:
    """The outline of a rectangle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="none" stroke="{stroke}"/>'


def text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    *,
    bold: bool = False,
    fill: str = "",
    size: int = FONT,
) -> str:
    """Words on a line at `y`; without a fill they have the colour of text on the page."""
    style = ' font-weight="bold"' * bold + f' fill="{fill}"' * bool(fill)
    style += f' font-size="{size}"' * (size != FONT)
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{escape(words)}</text>'


def titled(title: str, parts: Iterable[str]) -> str:
    """Parts that show a title under the mouse pointer."""
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"
