"""The same question on other devices, answered by the planner: nothing is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from labkit import words
from labkit.errors import LabError
from labkit.planner import Candidate, Plan, plan
from labkit.text import escaped
from labkit.view import aligned, grid
from labkit_labs.draw.charts import bars
from labkit_labs.draw.picture import Picture, stacked

__all__ = ["Elsewhere", "elsewhere"]

NOTE = (
    "peak: the most memory of a rank at any moment of a step, with ~ from formulas, otherwise rehearsed; each device's "
    "bars have their own scale. "
    "step: its time and the range the planner expects; speeds that you have not measured are assumed from data sheets. "
    "waiting: the part of a step in which a rank waits for other ranks, not for copies from the host. "
    "communication, as memory: buffers for collectives; temporary: what an operation needs only while it runs."
)


class Elsewhere:
    """Rows of a table, and memory by category as bars. By (name, device): `judged` is what a row is about, with its
    `peak`, `step` and `fits`; `plans` has those that were planned for their own sake."""

    def __init__(
        self,
        rows: list[dict[str, str]],
        judged: Mapping[tuple[str, str], Plan | Candidate],
        picture: Picture | None,
        title: str,
    ):
        self.rows, self.judged, self._picture = rows, judged, picture
        self.plans = {key: each for key, each in judged.items() if isinstance(each, Plan)}
        self._title = title or "On other devices"

    def __repr__(self) -> str:
        return f"{self._title} (planned, not run)\n{aligned(self.rows)}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        head = f"<b>{escaped(self._title)}</b> · <i>planned, not run</i>"
        picture = self._picture.html() if self._picture else ""
        table = grid(self.rows, sentences=("", "on", "fits", "step", "note"))  # waiting stays in sight
        whole = f'<div style="max-width:760px">{head}{picture}{table}<small>{NOTE}</small></div>'
        return {"text/plain": f"{self!r}\n{NOTE}", "text/html": whole}


def elsewhere(scripts: Mapping[str, Any], devices: Sequence[str], options: Mapping[str, Any], title: str) -> Elsewhere:
    """A plan for each script and device. If a script cannot be planned, its row says why. Instead of a script there
    may be a tuple (script, options of its own)."""
    rows, judged, pictures = [], dict[tuple[str, str], Plan | Candidate](), []
    for device in devices:
        memory: dict[str, Mapping[str, int]] = {}
        usable, known = 0, dict[str, Candidate]()  # by the script's text: a plan judges the other strategies as well
        for name, value in scripts.items():
            script, own = value if isinstance(value, tuple) else (value, {})
            row, rough, runs = {"": name, "on": _with_size(device)}, "", True
            candidate = None if own else known.get(str(script))
            if candidate is None:
                try:
                    planned = plan(script, device=device, **{**options, **own})
                except LabError as error:
                    rows.append(row | {"note": str(error)})
                    continue
                assert isinstance(planned, Plan)
                judged[name, device], usable = planned, planned.device.usable_by(planned.ranks)
                peak, step, fits = planned.peak, planned.step, planned.fits
                if reason := planned.unfit or planned.failure:
                    row["note"], runs = reason, False
                others = planned.advice.rows[1:] if planned.advice and not own else ()
                known |= {str(each.script): each for each in others if each.peak and each.step and not each.changes}
            else:
                judged[name, device] = candidate
                peak, step, fits, rough = candidate.peak, candidate.step, candidate.fits, "~"  # by formulas
            if peak:
                memory[name] = peak.categories
            rows.append(
                row
                | {
                    "peak": rough + words.gib(peak.bytes if peak else None),
                    "fits": f"{_yes_or_no(fits)}, of {words.gib(usable)}" if runs else "cannot run",
                    "step": words.band(step.seconds, step.low, step.high) if step and fits is not False else "n/a",
                    "waiting": f"{_waiting(step.parts):.0%}" if step and fits is not False else "n/a",
                }
            )
        if memory:
            longest = max(sum(categories.values()) for categories in memory.values())
            limit = usable if usable < 4 * longest else None
            pictures.append(
                bars(predicted=memory, unit="B", title=_with_size(device), limit=limit, limit_name="it has")
            )
    return Elsewhere(rows, judged, stacked(pictures) if pictures else None, title)


def _yes_or_no(fits: bool | None) -> str:
    return {True: "yes", False: "no", None: "cannot be told"}[fits]


def _with_size(device: str) -> str:
    return re.sub(r" (\d+)$", r", \1 GB", re.sub(r"^(\d+)x", r"\1 × ", device))


def _waiting(parts: Mapping[str, float]) -> float:
    """The fraction of a step that is communication which nothing hides, or a pipeline's bubble."""
    return sum(parts.get(name, 0.0) for name in ("communication", "bubble")) / (sum(parts.values()) or 1.0)
