"""SVG in a page, converted to images that every viewer displays."""

from __future__ import annotations

import base64
import re

__all__ = ["BOTH_THEMES", "as_image"]

SVG = re.compile(r"<svg ([^>]*)>.*?</svg>", re.DOTALL)
TOOLTIPS = re.compile(r'<g fill="none" pointer-events="all">.*?</g>|<title>.*?</title>', re.DOTALL)  # images show none
BOTH_THEMES = "#7d8590"  # an image does not inherit the page's colour: readable on white and on black


def as_image(page: str) -> str:
    """The page with its SVG as `<img>`: JupyterLab strips SVG in untrusted HTML down to its text."""
    return SVG.sub(_replaced, page)


def _replaced(match: re.Match[str]) -> str:
    head = dict(re.findall(r'([\w-]+)="([^"]*)"', match[1]))
    width = head.get("width") or head["viewBox"].split()[2]
    space = "" if "xmlns" in head else 'xmlns="http://www.w3.org/2000/svg" '
    drawing = TOOLTIPS.sub("", match[0]).replace("<svg ", f'<svg {space}color="{BOTH_THEMES}" ', 1)
    source = base64.b64encode(drawing.encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{source}" width="{width}" alt="{head.get("aria-label", "")}" '
        'style="max-width:100%;margin:0;display:inline">'
    )
