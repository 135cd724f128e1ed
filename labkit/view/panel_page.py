"""What stands under the panel's controls: a verdict, the bars of all strategies, and the runs that were made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from labkit.record.text import escaped
from labkit.view.charts.bars import Bar, bars, key
from labkit.view.live.tables import grid

__all__ = ["panel_page"]

TINTS = {"fits": "#2da44e", "does not fit": "#e5534b", "impossible": "#c9a227", "": "#8b949e"}


def panel_page(
    verdict: str,
    sentence: str,
    drawn: Sequence[Bar],
    limit: float | None,
    limit_name: str,
    runs: Sequence[Mapping[str, str]],
) -> str:
    """`verdict` is "fits", "does not fit", "impossible" or "" while nothing is known; `runs` are rows of texts."""
    tint = TINTS[verdict]
    pill = (
        f'<b style="color:{tint};border:1px solid {tint};border-radius:10px;padding:0 9px;white-space:nowrap">'
        f"{escaped(verdict)}</b> "
    )
    head = f'<div style="min-height:3em">{pill if verdict else ""}{escaped(sentence)}</div>'
    picture = bars(drawn, limit, limit_name) + key() if drawn else ""
    made = [dict(run) for run in runs]
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:760px">'
        f"{head}{picture}{grid(made)}</div>"
    )
