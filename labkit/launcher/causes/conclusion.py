"""How a run on several nodes ended, from what all of them left behind: the same answer whichever host asks.

Every node writes down its own end first (`outcome.json`), then looks at everybody's. A rank's own words count before
the silence of others, an earlier decision to stop before what it led to.
"""

from __future__ import annotations

from typing import Any

from labkit.launcher.causes.cause import explain, own_failures
from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.node_loss import missing
from labkit.record import RunFolder
from labkit.record.records import finite
from labkit.record.state import StateName

__all__ = ["FOLLOWS", "conclusion"]

# Why a node was ended when the reason lies with another: no reason to name.
FOLLOWS = ("others", "missing")


def conclusion(run: RunFolder, attempt: RunFolder) -> tuple[StateName, dict[str, Any] | None]:
    """`(state, cause)` of an attempt of which every node has ended or is gone."""
    found = Evidence.gather(run, attempt)
    reasons = sorted((_decided(end), str(node)) for node, end in found.outcomes.items() if _reason(end))
    own = own_failures(found)
    if reasons and not (own and own[0]["time_ns"] / 1e9 < reasons[0][0]):
        why = found.outcomes[int(reasons[0][1])]["why"]
        return ("stopped" if why.get("kind") == "stopped" else "failed"), why
    codes = [end.get("exit_code") for end in found.outcomes.values()]
    if found.nodes and len(codes) == found.nodes.count and not any(codes):
        return "succeeded", None
    by_itself = [end.get("exit_code") for _, end in sorted(found.outcomes.items()) if not end.get("why")]
    code = next((c for c in by_itself if isinstance(c, int) and c), 1)
    return "failed", missing(found) or explain(found, code, found.outcomes.get(0, {}).get("notice"))


def _reason(outcome: dict[str, Any]) -> bool:
    why = outcome.get("why")
    return isinstance(why, dict) and isinstance(why.get("sentence"), str) and why.get("kind") not in FOLLOWS


def _decided(outcome: dict[str, Any]) -> float:
    return finite(outcome.get("decided")) or 0.0
