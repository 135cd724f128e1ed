"""Draws the README's badges from pyproject.toml, so that they need no service.

python docs/badges.py
"""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NARROW, LETTER = 4.0, 6.7  # pixels that a letter takes in a font of 11 pixels
MARGIN, HEIGHT = 7, 20
SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img">
<title>{name}: {value}</title>
<clipPath id="c"><rect width="{width}" height="{height}" rx="4"/></clipPath>
<g clip-path="url(#c)"><rect width="{left}" height="{height}" fill="#444d56"/>
<rect x="{left}" width="{right}" height="{height}" fill="#0969da"/></g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{margin}" y="14" textLength="{name_length}">{name}</text>
<text x="{value_at}" y="14" textLength="{value_length}">{value}</text></g>
</svg>
"""


def badges() -> dict[str, str]:
    """The SVG of each badge by the name of its file."""
    low, high = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    pythons = " | ".join(f"3.{minor}" for minor in range(int(low), int(high)))
    (torch,) = (each.removeprefix("torch>=") for each in PROJECT["dependencies"] if each.startswith("torch>="))
    values = {
        "license": PROJECT["license"],
        "python": pythons,
        "torch": f"{torch} and newer",
        "devices": "CPU (gloo) | NVIDIA GPUs (nccl)",
    }
    return {f"badge-{name}.svg": badge(name, value) for name, value in values.items()}


def badge(name: str, value: str) -> str:
    name_length, value_length = (
        round(sum(NARROW if each in " .|()ijlrtf" else LETTER for each in text)) for text in (name, value)
    )
    left, right = name_length + 2 * MARGIN, value_length + 2 * MARGIN
    return SVG.format(
        name=escape(name),
        value=escape(value),
        name_length=name_length,
        value_length=value_length,
        left=left,
        right=right,
        width=left + right,
        height=HEIGHT,
        margin=MARGIN,
        value_at=left + MARGIN,
    )


if __name__ == "__main__":
    for file, svg in badges().items():
        (IMAGES / file).write_text(svg, encoding="utf-8")
