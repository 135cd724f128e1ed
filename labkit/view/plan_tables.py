"""Shows a plan as text for terminals and as HTML for notebooks: verdict, memory, strategies, assumptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit import words
from labkit.record import CATEGORIES, Peak
from labkit.text import escaped, gib, plain
from labkit.view.charts.bars import Bar, bars, key
from labkit.view.live.tables import grid

__all__ = ["aligned", "band", "memory_rows", "percent_off", "plan_html", "plan_text"]


def plan_text(
    verdict: Sequence[str],
    peaks: Mapping[str, Peak],
    strategies: Sequence[Mapping[str, str]],
    assumptions: Sequence[str],
) -> str:
    """`peaks` by source: "formulas", "rehearsed", "measured". `strategies` has one dictionary of texts per strategy."""
    parts = ["\n".join(verdict)]
    if peaks:
        parts.append("memory of a rank at its peak\n" + aligned(memory_rows(peaks)))
    if strategies:
        parts.append("strategies\n" + aligned(strategies))
    if assumptions:
        parts.append("assumed, not measured\n" + "\n".join(f"  {text}" for text in assumptions))
    return plain("\n\n".join(parts))


def plan_html(
    verdict: Sequence[str],
    peaks: Mapping[str, Peak],
    strategies: Sequence[Mapping[str, str]],
    assumptions: Sequence[str],
    drawn: Sequence[Bar] = (),
    limit: float | None = None,
    limit_name: str = "",
) -> str:
    """The same, with `drawn` as bars against a limit of `limit` bytes."""
    first, *more = verdict or [""]
    head = f"<b>{escaped(first)}</b>" + "".join(f"<div>{escaped(text)}</div>" for text in more)
    picture = bars(drawn, limit, limit_name) + key() if drawn else ""
    assumed = "".join(f"<li>{escaped(text)}</li>" for text in assumptions)
    folded = f"<details><summary>assumed, not measured</summary><ul>{assumed}</ul></details>" if assumed else ""
    memory = [dict(row) for row in memory_rows(peaks)] if peaks else []
    lines = [dict(row) for row in strategies]
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:760px">'
        f"{head}{picture}{grid(memory)}{grid(lines, sentences=('verdict',))}{folded}</div>"
    )


def memory_rows(peaks: Mapping[str, Peak]) -> list[dict[str, str]]:
    """One row per category and one for the total. Percentages are of the first source's total: its own share, and the
    others' deviation from it."""
    first = next(iter(peaks.values()))
    rows = []
    for name in (*CATEGORIES, "total"):
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


def aligned(rows: Sequence[Mapping[str, str]]) -> str:
    """A text table: the first column and a final verdict are left-aligned, figures right-aligned."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [dict(zip(names, names, strict=True)), *rows]
    widths = {name: max(len(str(line.get(name, ""))) for line in lines) for name in names}

    def cell(name: str, text: str) -> str:
        to_left = name == names[0] or (name == names[-1] and len(names) > 2 and name == "verdict")
        return f"{text:<{widths[name]}}" if to_left else f"{text:>{widths[name]}}"

    return "\n".join("  " + "  ".join(cell(name, str(line.get(name, ""))) for name in names).rstrip() for line in lines)


def band(value: float | None, low: float | None, high: float | None) -> str:
    """`0.31 s (0.25 to 0.40 s)`; n/a if the speed is unknown."""
    if value is None:
        return "n/a"
    if low is None or high is None or low == high:
        return words.seconds(value)
    return f"{words.seconds(value)} ({words.seconds(low)} to {words.seconds(high)})"


def percent_off(measured: float | None, predicted: float | None) -> str:
    """` (+12.0%)`: the deviation of a measured value from the predicted one; "" if either is missing."""
    return f" ({measured / predicted - 1:+.1%})" if measured and predicted else ""
