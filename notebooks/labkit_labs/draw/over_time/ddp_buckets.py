"""Draws DDP's buckets: gradients in the order in which backward makes them, and the all-reduces that carry them."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.text import gib
from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, colour_of, frames, sheet, words

__all__ = ["buckets", "filled"]

MIB = 2**20
LEFT, LABEL = 96.0, 58.0
BACKWARD = (WIDTH - LEFT) / 1.6  # leaves room for one bucket sent after it


def filled(sizes: Mapping[str, int], bucket_cap_mb: float | None = None) -> list[list[str]]:
    """The names in each bucket. `sizes` are bytes in the order of backward; a bucket is closed when it has reached its
    limit: `bucket_cap_mb` MiB, or by default 1 for the first and 25 for the others (torch/nn/parallel/distributed.py).
    """
    first, others = (1.0, 25.0) if bucket_cap_mb is None else (bucket_cap_mb, bucket_cap_mb)
    result: list[list[str]] = [[]]
    full, limit = 0.0, first * MIB
    for name, size in sizes.items():
        if full >= limit:
            result.append([])
            full, limit = 0.0, others * MIB
        result[-1].append(name)
        full += size
    return result


def buckets(sizes: Mapping[str, int], bucket_cap_mb: float | None = None) -> Picture:
    """Time runs to the right: above, backward; below, what is sent, each bucket once its last gradient is there. All
    buckets are drawn to one scale: sending everything takes half as long as backward."""
    groups = filled(sizes, bucket_cap_mb)
    step = BACKWARD / max(1, len(sizes))
    number = {name: i for i, names in enumerate(groups) for name in names}
    parts = [words(0, 40, "backward", bold=True), words(0, 116, "all_reduce", bold=True)]
    shown, done = [], ""
    free = named = LEFT  # where the last bucket, and the text below it, end
    for i, name in enumerate(sizes):
        colour = colour_of(number[name])
        done += box(LEFT + i * step, 22, step - 2, 30, colour)
        if step > 34:
            done += words(LEFT + i * step + step / 2 - 1, 41, name[:8], anchor="middle", size=11, fill="#fff")
        names = groups[number[name]]
        if name == names[-1]:
            total = sum(sizes[each] for each in names)
            ready = LEFT + (i + 1) * step
            begin, width = max(free, ready), BACKWARD / 2 * total / sum(sizes.values())
            text = max(begin, named)
            done += (
                f'<path d="M{ready:.0f} 54V{96}" stroke="{colour}" stroke-dasharray="3 3"/>'
                + box(begin, 98, max(1.0, width - 1), 30, colour, opacity=0.8)
                + words(text, 144, f"bucket {number[name] + 1}", size=11)
                + words(text, 158, gib(total), size=11)
            )
            free, named = begin + width, text + LABEL
        shown.append(done)
    edge = box(LEFT, 22, len(sizes) * step - 2, 30, line=GREY)
    sent = ", ".join(gib(sum(sizes[name] for name in names)) for names in groups)
    label = f"backward fills {len(groups)} buckets, in this order: {sent}; each is sent when it is full"
    return sheet([*parts, edge, frames(shown, 0.6)], 166, label)
