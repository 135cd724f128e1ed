"""Draws batches that are loaded while earlier ones are computed on."""

from __future__ import annotations

from labkit.view import Palette
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, sheet, sweep, words

__all__ = ["loader"]

LEFT, ROW, TOP, AHEAD = 84.0, 30, 24, 2
Bar = tuple[int, str, int, float, float]  # row, kind, batch, begin, end


def loader(load: float, compute: float, workers: int, *, steps: int = 6, moving: bool = False) -> Picture:
    """A row for the rank and one for each of its workers; grey is waiting. `load` and `compute` are the times of a
    batch, in the same unit. Without workers the rank loads, too."""
    bars = _simulated(load, compute, workers, steps)
    end = max(bar[-1] for bar in bars)
    scale = (WIDTH - LEFT - 4) / max(end, steps * (load + compute))  # as long as without workers
    drawn = ""
    for row, kind, batch, begin, finish in bars:
        x, y, width = LEFT + begin * scale, TOP + row * ROW, (finish - begin) * scale - 1
        drawn += box(x, y, width, ROW - 6, Palette.SPANS[kind], round=0)
        drawn += words(x + width / 2, y + 17, str(batch), anchor="middle", size=11, fill="#fff") if width > 11 else ""
    names = words(0, TOP + 17, "rank", bold=True) + box(LEFT, TOP, end * scale, ROW - 6, GREY, opacity=0.3, round=0)
    names += "".join(words(0, TOP + (1 + w) * ROW + 17, f"worker {w}", size=12) for w in range(workers))
    height = TOP + (1 + workers) * ROW
    waits = sum(finish - begin for _, kind, _, begin, finish in bars if kind == "forward") / end
    key = box(WIDTH - 132, 5, 10, 10, Palette.SPANS["input"]) + words(WIDTH - 118, 15, "load", size=12)
    key += box(WIDTH - 76, 5, 10, 10, Palette.SPANS["forward"]) + words(WIDTH - 62, 15, "compute", size=12)
    title = f"{workers} workers: the rank computes {waits:.0%} of the time" if workers else "no workers"
    label = f"{steps} batches, {load:g} to load, {compute:g} to compute, {workers} workers: {end:g} in all"
    return sheet([words(LEFT, 15, title, bold=True), key, names, sweep(drawn, LEFT, height, moving)], height, label)


def _simulated(load: float, compute: float, workers: int, steps: int) -> list[Bar]:
    """Worker w loads batches w, w + workers, …; AHEAD of them before the first is taken (torch's prefetch_factor)."""
    bars: list[Bar] = []
    free, taken, rank_free = [0.0] * workers, list[float](), 0.0
    for batch in range(steps):
        if workers:
            asked = batch - AHEAD * workers
            begin = max(free[batch % workers], taken[asked] if asked >= 0 else 0.0)
            row, ready = 1 + batch % workers, begin + load
            free[batch % workers] = ready
        else:
            row, begin, ready = 0, rank_free, rank_free + load
        bars.append((row, "input", batch, begin, ready))
        taken.append(max(rank_free, ready))
        rank_free = taken[-1] + compute
        bars.append((0, "forward", batch, taken[-1], rank_free))
    return bars
