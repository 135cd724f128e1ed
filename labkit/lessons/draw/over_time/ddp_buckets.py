"""DDP's buckets: gradients in the order in which backward makes them, and the all-reduces that carry them."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.lessons.draw.picture import GREY, WIDTH, Picture, box, colour_of, frames, sheet, words
from labkit.record.units import gib

__all__ = ["buckets", "filled"]

MIB = 2**20


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
    """Time runs to the right: above, backward; below, what is sent, each bucket once its last gradient is there."""
    groups = filled(sizes, bucket_cap_mb)
    left, step = 96.0, (WIDTH - 200) / max(1, len(sizes))
    number = {name: i for i, names in enumerate(groups) for name in names}
    parts = [words(0, 40, "backward", bold=True), words(0, 116, "all_reduce", bold=True)]
    shown, done = [], ""
    free = 0.0
    for i, name in enumerate(sizes):
        colour = colour_of(number[name])
        done += box(left + i * step, 22, step - 2, 30, colour)
        if step > 34:
            done += words(
                left + i * step + step / 2 - 1, 41, name.split(".")[0][:6], anchor="middle", size=11, fill="#fff"
            )
        names = groups[number[name]]
        if name == names[-1]:
            total = sum(sizes[each] for each in names)
            begin = max(free, left + (i + 1) * step)
            width = max(46.0, (WIDTH - 200) * 0.6 * total / sum(sizes.values()))
            width = min(width, WIDTH - begin)
            done += (
                f'<path d="M{left + (i + 1) * step:.0f} 54V{96}" stroke="{colour}" stroke-dasharray="3 3"/>'
                + box(begin, 98, width, 30, colour, opacity=0.8)
                + words(begin + 2, 144, f"bucket {number[name] + 1}", size=11)
                + words(begin + 2, 158, gib(total), size=11)
            )
            free = begin + width + 2
        shown.append(done)
    edge = box(left, 22, len(sizes) * step - 2, 30, line=GREY)
    sent = ", ".join(gib(sum(sizes[name] for name in names)) for names in groups)
    label = f"backward fills {len(groups)} buckets, in this order: {sent}; each is sent when it is full"
    return sheet([*parts, edge, frames(shown, 0.6)], 166, label)
