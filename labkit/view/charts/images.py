"""Converts SVG in a page to images that every viewer displays."""

from __future__ import annotations

import base64
import re

__all__ = ["BOTH_THEMES", "as_image"]

SVG = re.compile(r"<svg ([^>]*)>.*?</svg>", re.DOTALL)
TOOLTIPS = re.compile(r'<g stroke-width="\d+" pointer-events="stroke">.*?</g>|<title>.*?</title>', re.DOTALL)
# An image does not inherit the page's colour: a contrast of 4.3 on white and on JupyterLab's dark #111, the most that
# one colour can have on both.
BOTH_THEMES = "#797979"
SMALL = 120  # pixels: a mark or a curve among text
FAINT = re.compile(r'(<(?:text|tspan|g)\b[^>]*?) (?:fill-)?opacity="\.[5-9]\d*"')  # it would be fainter still


def as_image(page: str) -> str:
    """The page with its SVG as `<img>`: JupyterLab strips SVG in untrusted HTML down to its text."""
    return SVG.sub(_replaced, page)


def _replaced(match: re.Match[str]) -> str:
    head = dict(re.findall(r'([\w-]+)="([^"]*)"', match[1]))
    width = head.get("width") or head["viewBox"].split()[2]
    space = "" if "xmlns" in head else 'xmlns="http://www.w3.org/2000/svg" '
    drawing = FAINT.sub(r"\1", TOOLTIPS.sub("", match[0])).replace("<svg ", f'<svg {space}color="{BOTH_THEMES}" ', 1)
    source = base64.b64encode(drawing.encode()).decode()
    fits = "100%" if float(width) > SMALL else "none"  # 100% of a table's cell is no width at all
    return (
        f'<img src="data:image/svg+xml;base64,{source}" width="{width}" alt="{head.get("aria-label", "")}" '
        f'style="max-width:{fits};margin:0;display:inline">'
    )
