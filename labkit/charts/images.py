"""Gives all pictures their colours and marks, draws curves in the space of a word, and turns SVG into images."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from labkit.record import Peak
from labkit.spans import WAITING
from labkit.text import escaped, plain

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_LETTERS = 24
SPARK_WIDTH, SPARK_HEIGHT, SPARK_POINTS = 96, 20, 32
LETTER, LEGEND_LINE = 6, 14  # pixels: of a letter in a legend, and from line to line
SVG = re.compile(r"<svg ([^>]*)>.*?</svg>", re.DOTALL)
HOVERED = r'<g stroke-width="\d+" pointer-events="stroke">.*?</g>'  # the columns of a chart that have titles
TOOLTIPS = re.compile(rf"{HOVERED}|<title>.*?</title>", re.DOTALL)
MARKUP = re.compile(r"[<>\"'&=]")
FAINT = re.compile(r'(<(?:text|tspan|g)\b[^>]*?) (?:fill-)?opacity="\.[5-9]\d*"')  # fainter still in an image


class Palette:
    """The colours and marks of all pictures: mid-tones with contrast on white and on near-black."""

    LINES = ("#2f81f7", "#d8752b", "#2da44e", "#bf5bd7", "#b08d1c", "#e5534b", "#189aaa", "#8b949e")
    DASHES = ("", "6 3", "2 2", "8 3 2 3", "12 3", "4 6", "1 3", "10 3 2 3 2 3")  # tell ranks apart without colour
    MOST_LINES = 8  # more are indistinguishable
    BLUE, ORANGE, GREEN, PURPLE, AMBER, RED, TEAL, GREY = LINES
    # An image does not inherit the page's colour: a contrast of 4.3 on white and on JupyterLab's dark #111, the most
    # that one colour can have on both.
    BOTH_THEMES = "#797979"
    LIMIT = RED
    # "framework" is the overhead of the driver and the allocator.
    MEMORY = dict(zip((*Peak.CATEGORIES, "framework"), (BLUE, ORANGE, GREEN, PURPLE, AMBER, GREY, TEAL), strict=True))
    SPANS = {
        "forward": BLUE,
        "backward": ORANGE,
        "weights": TEAL,  # unlike a paler orange
        "optimizer": GREEN,
        "input": PURPLE,
        WAITING: "#8a939d",
        "all_reduce": RED,
        "all_gather": TEAL,
        "reduce_scatter": "#c2577e",
        "broadcast": "#8d6e63",
        "send_recv": "#5c6bc0",
        "all_to_all": "#00897b",
        "barrier": GREY,
    }
    STATES = {"starting": GREY, "running": BLUE, "succeeded": GREEN, "failed": RED, "stopped": AMBER, "lost": RED}
    MARKS = {"starting": "◌", "running": "●", "succeeded": "✔", "failed": "✖", "stopped": "■", "lost": "?"}

    @classmethod
    def line(cls, number: int) -> tuple[str, str]:
        """The colour and the dashes of a rank's line, or of another thing that has this number."""
        return cls.LINES[number % len(cls.LINES)], cls.DASHES[number % len(cls.DASHES)]


def in_attribute(text: str) -> str:
    """Text to be read out, without what means something in HTML."""
    return " ".join(MARKUP.sub(" ", plain(text)).split())


@dataclass(frozen=True)
class Picture:
    """A drawing as the `body` of an SVG element. `label` says in words what is to be seen, `size` is that of text, and
    `style` says how wide the element is on a page: by default as wide as the page, but not wider than drawn."""

    body: str
    width: float
    height: float
    label: str
    size: int = 10
    style: str = ""

    @property
    def svg(self) -> str:
        """The SVG element. Its text has the colour of the page."""
        style = self.style or f"width:100%;max-width:{self.width:g}px;height:auto"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:.0f}" role="img" '
            f'aria-label="{in_attribute(self.label)}" style="{style}" '
            f'font-family="system-ui,sans-serif" font-size="{self.size}" fill="currentColor">{self.body}</svg>'
        )

    def without_columns(self) -> Picture:
        """The chart without the values under the pointer."""
        return replace(self, body=re.sub(HOVERED, "", self.body, flags=re.DOTALL))


def swatch(look: str) -> str:
    """The mark, in a legend, of what is filled like this. `look` are attributes."""
    return f'<rect width="16" height="9" rx="2" {look}/>'


def legend(marks: Iterable[tuple[str, str]], left: float, top: float, right: float) -> tuple[str, float]:
    """Marks, each with its name, in as many lines as they need; and where the next line would begin."""
    drawn, x, y = "", left, top
    for mark, name in marks:
        wide = 32 + LETTER * len(name)
        x, y = (left, y + LEGEND_LINE) if x + wide > right and x > left else (x, y)
        drawn += f'<g transform="translate({x:.0f} {y:.0f})">{mark}<text x="20" y="8">{escaped(name)}</text></g>'
        x += wide
    return drawn, y + LEGEND_LINE if drawn else y


def as_image(page: str) -> str:
    """The page with its SVG as `<img>`: JupyterLab strips SVG in untrusted HTML down to its text."""
    return SVG.sub(_replaced, page)


def _replaced(match: re.Match[str]) -> str:
    head = dict(re.findall(r'([\w-]+)="([^"]*)"', match[1]))
    width = head.get("width") or head["viewBox"].split()[2]
    space = "" if "xmlns" in head else 'xmlns="http://www.w3.org/2000/svg" '
    drawing = FAINT.sub(r"\1", TOOLTIPS.sub("", match[0])).replace(
        "<svg ", f'<svg {space}color="{Palette.BOTH_THEMES}" ', 1
    )
    source = base64.b64encode(drawing.encode()).decode()
    style = head.get("style") or "max-width:none;display:inline"  # a mark or a curve among text
    return (
        f'<img src="data:image/svg+xml;base64,{source}" width="{width}" alt="{head.get("aria-label", "")}" '
        f'style="{style};margin:0">'
    )


def spark_text(values: Sequence[float]) -> str:
    """A curve of at most 24 characters, scaled from the minimum to the maximum; a spike within a character is kept."""
    group = -(-len(values) // SPARK_LETTERS) or 1
    tops = [max(values[i : i + group]) for i in range(0, len(values), group)]
    return "".join(SPARKS[round(height * (len(SPARKS) - 1))] for height in _scaled(tops))


def spark_svg(values: Sequence[float], line: int | None = 0) -> str:
    """A small curve in the style of a chart's `line`, or in grey; empty without values."""
    group = -(-len(values) // SPARK_POINTS) or 1
    heights = _scaled(values[group - 1 :: group])
    step = (SPARK_WIDTH - 2) / max(1, len(heights) - 1)
    points = " ".join(
        f"{1 + i * step:.0f} {SPARK_HEIGHT - 2 - (SPARK_HEIGHT - 4) * y:.1f}" for i, y in enumerate(heights)
    )
    if not points:
        return ""
    colour, dash = (Palette.GREY, "") if line is None else Palette.line(line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SPARK_WIDTH} {SPARK_HEIGHT}" width="{SPARK_WIDTH}" '
        f'height="{SPARK_HEIGHT}" '
        f'role="img" aria-label="from {values[0]:.4g} to {values[-1]:.4g}"><path d="M{points}" fill="none" '
        f'stroke="{colour}" stroke-width="1.4" stroke-dasharray="{dash}"/></svg>'
    )


def _scaled(values: Sequence[float]) -> list[float]:
    """The values scaled to 0 for the lowest and 1 for the highest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return [(value - low) / ((high - low) or 1.0) for value in values]


def dot(rank: int) -> str:
    """A rank's line style as a mark for tables."""
    colour, dash = Palette.line(rank)
    return (
        f'<svg width="26" height="8" aria-hidden="true"><path d="M0 4H26" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dash}"/></svg>'
    )
