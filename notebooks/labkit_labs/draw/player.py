"""Plays pictures frame by frame on pages that run scripts; all other viewers show the best frame."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from labkit.text import escaped, plain
from labkit_labs.draw.picture import WIDTH, Picture

__all__ = ["Film", "Frame", "film", "moved"]

SCRIPT = re.sub(r"\s*\n\s*", "\n", Path(__file__).with_name("player.js").read_text(encoding="utf-8")).strip()


class Frame(NamedTuple):
    """`says` is one sentence about what happens; `marks` are SVG, each stored once for all frames that have it."""

    says: str
    marks: Sequence[str]


@dataclass(frozen=True, repr=False)
class Film(Picture):
    """A picture that plays: on a page with scripts it has buttons, a slider and keys, elsewhere it is its frame number
    `best`. `base` is the SVG below all frames, and `seconds` is how long a frame is shown."""

    base: str = ""
    frames: Sequence[Frame] = ()
    seconds: float = 2.0
    best: int = -1

    def still(self) -> Picture:
        return Picture(self.body, self.width, self.height, self.label, self.size)

    def html(self) -> str:
        """The still picture with its sentence, and a script that replaces both by the player."""
        shown: dict[str, list[int]] = {}
        for number, frame in enumerate(self.frames):
            for mark in frame.marks:
                shown.setdefault(mark, []).append(number)
        data: dict[str, Any] = {
            "wide": self.width,
            "tall": round(self.height),
            "label": plain(self.label),
            "base": self.base,
            "marks": [(mark, _ranges(numbers)) for mark, numbers in shown.items()],
            "says": [escaped(frame.says) for frame in self.frames],
            "seconds": self.seconds,
            "best": self.best % len(self.frames),
        }
        packed = base64.b64encode(zlib.compress(json.dumps(data).encode(), 9)).decode()
        still = f"{super().html()}<div>{escaped(self.frames[self.best].says)}</div>"
        return f'<div class="labkit-film">{still}</div><script>({SCRIPT})("{packed}")</script>'


def film(
    base: Sequence[str], frames: Sequence[Frame], height: float, label: str, *, seconds: float = 2.5, best: int = -1
) -> Film:
    below = "".join(base)
    body = below + "".join(frames[best].marks)
    return Film(body, WIDTH, height, label, 13, base=below, frames=frames, seconds=seconds, best=best)


def moved(drawn: str, x: float, y: float) -> str:
    """What is drawn arrives in a frame from a place that is (x, y) away."""
    return f'<g data-from="{x:.0f} {y:.0f}">{drawn}</g>'


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """The same frames as (first, last + 1)."""
    together = [[*run] for _, run in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]
    return [(run[0][1], run[-1][1] + 1) for run in together]
