"""Shows a plan as text for terminals, as HTML for notebooks, and as charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from labkit.charts import Bars, Chart, Points, drawn
from labkit.planner.scaling import Point
from labkit.record import Peak
from labkit.text import escaped, framed, gib, plain
from labkit.view import aligned, grid


def plan_text(
    verdict: Sequence[str],
    peak: Peak | None,
    strategies: Sequence[Mapping[str, str]],
    assumptions: Sequence[str],
) -> str:
    """`strategies` has one dictionary of texts per strategy."""
    parts = ["\n".join(verdict)]
    if peak:
        parts.append("memory of a rank at its peak\n" + aligned(memory_rows({"planned": peak})))
    if strategies:
        parts.append("strategies\n" + aligned(strategies))
    if assumptions:
        parts.append("assumed, not measured\n" + "\n".join(f"  {text}" for text in assumptions))
    return plain("\n\n".join(parts))


def plan_html(
    verdict: Sequence[str],
    peak: Peak | None,
    strategies: Sequence[Mapping[str, str]],
    assumptions: Sequence[str],
    bars: Bars,
) -> str:
    """The plan as HTML."""
    first, *more = verdict or [""]
    head = f"<b>{escaped(first)}</b>" + "".join(f"<div>{escaped(text)}</div>" for text in more)
    assumed = "".join(f"<li>{escaped(text)}</li>" for text in assumptions)
    folded = f"<details><summary>assumed, not measured</summary><ul>{assumed}</ul></details>" if assumed else ""
    memory = memory_rows({"planned": peak}) if peak else []
    return framed(f"{head}{drawn(bars)}{grid(memory)}{grid(strategies, sentences=('verdict',))}{folded}")


def memory_rows(peaks: Mapping[str, Peak]) -> list[dict[str, str]]:
    """One row per category and one for the total. Percentages are of the first source's total: its own share, and the
    others' deviation from it."""
    first = next(iter(peaks.values()))
    rows = []
    for name in (*Peak.CATEGORIES, "total"):
        row = {"category": name}
        for source, peak in peaks.items():
            size = peak.bytes if name == "total" else peak.categories.get(name, 0)
            reference = first.bytes if name == "total" else first.categories.get(name, 0)
            deviation = (size - reference) / first.bytes if first.bytes and peak is not first else 0.0
            share = f"{deviation:+.1%}" + (" of total" if name != "total" else "")
            row[source] = gib(size) + (f" ({share})" if abs(deviation) >= 0.0005 else "")
            if peak is first:
                row["of total"] = f"{size / first.bytes:.0%}" if first.bytes else ""
        rows.append(row)
    return [*rows, {"category": "at", **{source: peak.phase or "n/a" for source, peak in peaks.items()}}]


def scaling_chart(curves: Mapping[str, Sequence[Point]], box: int, name: str) -> Chart:
    """Throughput over ranks, both logarithmic, with its band; the dotted line is linear scaling from the fewest ranks.
    Beyond `box` ranks there are several identical machines."""
    title = f"Scaling on {name} (predicted; beyond {box} rank{'s' if box > 1 else ''} over a network)"
    return Chart.over_ranks(title, curves, "tokens/s over all ranks", log=True)


def break_even_chart(points: Sequence[Point]) -> Chart:
    """Speed of two devices relative to one, over the tokens per rank and step.

    Below 1 the second device does not pay for its all_reduce.
    """
    crossing = _crossing(points)
    return Chart(
        "When a second device pays off",
        {0: Points(points)},
        "{:.2f}x".format,
        note="speed of two devices relative to one",
        over="tokens",
        ticks=tuple(point.x for point in points[:: max(1, len(points) // 6)]),
        levels={1.0: "one device", 2.0: "twice as fast"},
        changes=((crossing, f"break-even: {crossing:,.0f} tokens"),) if crossing is not None else (),
        label=lambda _: "predicted",
    )


def _crossing(points: Sequence[Point]) -> float | None:
    """The x at which the curve first reaches 1, interpolated linearly on the logarithmic axis on which it is drawn."""
    for before, after in pairwise(points):
        if before.value < 1 <= after.value:
            share = (1 - before.value) / (after.value - before.value)
            return float(before.x * (after.x / before.x) ** share)
    return None
