"""Draws FSDP: units that are gathered before they compute and freed afterwards, and what a rank holds meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from labkit_labs.draw.picture import GREY, WIDTH, Picture, box, boxes, colour_of, frames, sheet, words

__all__ = ["moments", "shards"]

LEFT, ROW, BARS = 78.0, 34, 66


def moments(units: int, *, reshard: bool = True) -> Iterator[tuple[str, int, set[int]]]:
    """(phase, unit that computes, units that are whole) in a step. With `reshard` they are freed after forward."""
    whole: set[int] = set()
    for unit in range(units):
        whole = {unit} if reshard else whole | {unit}
        yield "forward", unit, set(whole)
    for unit in reversed(range(units)):
        whole = {unit} if reshard else whole
        yield "backward", unit, set(whole)
        whole = whole - {unit}
    yield "optimizer", -1, set()


def shards(units: int, ranks: int, *, reshard: bool = True) -> Picture:
    """Above, the units on every rank: pale is the part that lives elsewhere. Below, parameters held over the step. The
    still picture shows the end of forward."""
    wide = (WIDTH - LEFT - 10) / units
    steps = list(moments(units, reshard=reshard))
    bar = (WIDTH - LEFT - 10) / len(steps)
    base = 34 + ranks * ROW + BARS + 30
    shown, curve = [], ""
    for i, (phase, now, whole) in enumerate(steps):
        drawn = words(LEFT, 16, _caption(phase, now, reshard), bold=True)
        cell = wide - 4
        for rank in range(ranks):
            y, part, x = 26 + rank * ROW, cell / ranks, [LEFT + unit * wide for unit in range(units)]
            whole_units = [(x[unit], y, cell, ROW - 8) for unit in sorted(whole)]
            drawn += boxes(whole_units, colour_of(rank), ' fill-opacity=".45"')
            drawn += boxes([(left + rank * part, y, part, ROW - 8) for left in x], colour_of(rank))
            drawn += boxes([(left, y, cell, ROW - 8) for left in x], "none", f' stroke="{GREY}"')
            if now >= 0:
                drawn += box(x[now], y, cell, ROW - 8, line=colour_of(5), round=0)
        share = (len(whole) + (units - len(whole)) / ranks) / units
        curve += box(LEFT + i * bar, base - BARS * share, bar - 1, BARS * share, GREY, opacity=0.7, round=0)
        here = box(LEFT + i * bar, base + 3, bar - 1, 4, colour_of(5))
        shown.append(drawn + here)
    names = "".join(
        words(0, 26 + rank * ROW + 17, f"rank {rank}", fill=colour_of(rank), bold=True) for rank in range(ranks)
    )
    axis = (
        f'<path d="M{LEFT} {base - BARS}H{WIDTH - 10}" stroke="{GREY}" stroke-dasharray="4 3"/>'
        + words(LEFT - 6, base - BARS + 4, "all of it", anchor="end", size=11)
        + words(LEFT - 6, base - BARS / ranks + 4, f"1/{ranks}", anchor="end", size=11)
        + words(0, base - BARS - 10, "what a rank holds of the parameters", size=12)
        + words(LEFT + units * bar / 2, base + 22, "forward", anchor="middle", size=12)
        + words(LEFT + units * bar * 1.5, base + 22, "backward", anchor="middle", size=12)
        + words(WIDTH - 10, base + 22, "optimizer", anchor="end", size=12)
    )
    most = max(len(whole) for _, _, whole in steps)
    label = f"{units} units on {ranks} ranks: at most {most} of them whole at the same time"
    return sheet([names, curve, axis, frames(shown, 0.9, units - 1)], base + 30, label)


def _caption(phase: str, unit: int, reshard: bool) -> str:
    if phase == "optimizer":
        return "optimizer: each rank updates its own shards"
    gather = "" if phase == "backward" and not reshard else "gather it, "
    after = ", scatter its gradients, free it" if phase == "backward" else ", free it" if reshard else ""
    return f"{phase}, unit {unit + 1}: {gather}compute{after}"
