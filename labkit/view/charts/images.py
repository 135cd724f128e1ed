"""SVG in a page, as pictures that any viewer shows."""

from __future__ import annotations

import base64
import re

__all__ = ["as_image"]

SVG = re.compile(r"<svg ([^>]*)>.*?</svg>", re.DOTALL)
BOTH_THEMES = "#7d8590"  # a picture does not know the page's colour: readable on white and on black


def as_image(page: str) -> str:
    """The page, its drawings as `<img>`: JupyterLab strips SVG out of HTML that somebody else has made down to its
    letters."""
    return SVG.sub(_replaced, page)


def _replaced(found: re.Match[str]) -> str:
    head = dict(re.findall(r'([\w-]+)="([^"]*)"', found[1]))
    width = head.get("width") or head["viewBox"].split()[2]
    space = "" if "xmlns" in head else 'xmlns="http://www.w3.org/2000/svg" '
    drawing = found[0].replace("<svg ", f'<svg {space}color="{BOTH_THEMES}" ', 1)
    source = base64.b64encode(drawing.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{source}" width="{width}" alt="{head.get("aria-label", "")}" '
        'style="max-width:100%;margin:0;display:inline">'
    )
