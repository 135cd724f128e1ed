"""How a run on several nodes ended, from the records of all nodes: every host would come to the same answer.

Every node writes its own outcome (`outcome.json`); the first live node reads them all. A rank's own failure counts
before the silence of others, and an earlier decision to stop before its consequences.
"""

from __future__ import annotations

from typing import Any

from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.explain import explain, own_failures
from labkit.launcher.causes.node_loss import missing
from labkit.record import RunFolder, StateName, finite

__all__ = ["FOLLOWS", "conclusion"]

# Why a node was stopped when the reason lies with another node.
FOLLOWS = ("others", "missing")


def conclusion(run: RunFolder, attempt: RunFolder) -> tuple[StateName, dict[str, Any] | None]:
    """`(state, cause)` of an attempt whose nodes have all ended or are gone."""
    evidence = Evidence.gather(run, attempt)
    reasons = sorted((_decided(end), str(node)) for node, end in evidence.outcomes.items() if _reason(end))
    own = own_failures(evidence)
    if reasons and not (own and own[0]["time_ns"] / 1e9 < reasons[0][0]):
        why = evidence.outcomes[int(reasons[0][1])]["why"]
        return ("stopped" if why.get("kind") == "stopped" else "failed"), why
    codes = [end.get("exit_code") for end in evidence.outcomes.values()]
    if evidence.nodes and len(codes) == evidence.nodes.count and not any(codes):
        return "succeeded", None
    by_itself = [end.get("exit_code") for _, end in sorted(evidence.outcomes.items()) if not end.get("why")]
    code = next((c for c in by_itself if isinstance(c, int) and c), 1)
    return "failed", missing(evidence) or explain(evidence, code, evidence.outcomes.get(0, {}).get("notice"))


def _reason(outcome: dict[str, Any]) -> bool:
    why = outcome.get("why")
    return isinstance(why, dict) and isinstance(why.get("sentence"), str) and why.get("kind") not in FOLLOWS


def _decided(outcome: dict[str, Any]) -> float:
    return finite(outcome.get("decided")) or 0.0
