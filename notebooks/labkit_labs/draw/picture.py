"""Makes drawings as SVG that every viewer shows: JupyterLab, a page without scripts, GitHub."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

from labkit import charts
from labkit.charts import Palette
from labkit.text import escaped

__all__ = ["GREY", "WIDTH", "Picture", "box", "boxes", "colour_of", "drawn", "key", "sheet", "stacked", "words"]

WIDTH = 700
INK = (
    "#747c86"  # contrast 4.2 on white and 4.5 on JupyterLab's dark background; an image does not know the page's theme
)
GREY = "#8b949e"
SCALE = re.compile(r"scale\(([\d.]+)\)")
READABLE = 11  # pixels that the smallest text has on a page, however narrow


class Picture(charts.Picture):
    """A drawing that a notebook displays."""

    @property
    def svg(self) -> str:
        return super().svg.replace('style="', f'style="color:{INK};', 1)

    def still(self) -> Picture:
        """The picture as viewers that play nothing show it."""
        return self

    def html(self) -> str:
        """An image that a narrow page scrolls, for smaller text could not be read."""
        smallest = _smallest_text(ElementTree.fromstring(self.svg), self.size)
        style = f"{self._style};min-width:{self.width * READABLE / smallest:.0f}px"
        image = charts.as_image(replace(self.still(), style=style).svg)
        return f'<div class="labkit-picture" style="overflow-x:auto">{image}</div>'

    @property
    def _style(self) -> str:
        return self.style or f"width:100%;max-width:{self.width:g}px;height:auto"

    def __repr__(self) -> str:
        return self.label

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.label}  # its image is in the HTML


def _smallest_text(element: ElementTree.Element, size: float, scale: float = 1) -> float:
    """The size of the smallest text in an element of SVG, in units of the picture."""
    size = float(element.get("font-size", size))
    scale *= float((SCALE.search(element.get("transform", "")) or ("", 1))[1])
    own = size * scale if element.tag.endswith("text") else math.inf
    return min([own, *(_smallest_text(each, size, scale) for each in element)])


def drawn(data: charts.Chart | charts.Bars | charts.Lanes) -> Picture:
    """The data as labkit draws it."""
    made = charts.picture(data)
    return Picture(made.body, made.width, made.height, made.label, made.size)


def sheet(parts: Sequence[str], height: float, label: str) -> Picture:
    return Picture("".join(parts), WIDTH, height, label, 13)


def stacked(pictures: Sequence[Picture], titles: Sequence[str] = ()) -> Picture:
    """Pictures below each other, each under its title."""
    titled = [*zip(pictures, [*titles, *[""] * (len(pictures) - len(titles))], strict=True)]
    body, y = "", 0.0
    for picture, title in titled:
        if title:
            body += words(0, y + 16, title, bold=True)
            y += 26
        scale = WIDTH / picture.width
        body += f'<g transform="translate(0 {y:.0f}) scale({scale:.3g})" font-size="{picture.size}">{picture.body}</g>'
        y += picture.height * scale + 10
    label = "; ".join(f"{title}: {each.label}" if title else each.label for each, title in titled)
    return sheet([body], y, label)


def colour_of(number: int) -> str:
    """The colour of a rank, the same as in labkit's charts."""
    return Palette.LINES[number % len(Palette.LINES)]


def words(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, fill: str = "", bold: bool = False
) -> str:
    style = f' fill="{fill}"' if fill else ""
    style += ' font-weight="600"' if bold else ""
    style += f' text-anchor="{anchor}"' if anchor != "start" else ""
    style += f' font-size="{size}"' if size != 13 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{escaped(text)}</text>'


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str = "none",
    *,
    line: str = "",
    opacity: float = 1,
    round: int = 2,
) -> str:
    edge = f' stroke="{line}" stroke-width="1.2"' if line else ""
    faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" rx="{round}" '
        f'fill="{fill}"{faint}{edge}/>'
    )


def key(marks: Iterable[tuple[str, str]], left: float, y: float) -> str:
    """Colours with what they mean, beside each other, with text at `y`."""
    drawn = ""
    for colour, text in marks:
        drawn += box(left, y - 9, 10, 10, colour) + words(left + 14, y, text, size=12)
        left += 34 + 8 * len(text)
    return drawn


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def boxes(places: Iterable[tuple[float, float, float, float]], fill: str, more: str = "") -> str:
    """Many rectangles (x, y, width, height) of one colour, as one path."""
    path = "".join("M{0} {1}h{2}v{3}h-{2}z".format(*map(_short, place)) for place in places)
    return f'<path d="{path}" fill="{fill}"{more}/>' if path else ""
