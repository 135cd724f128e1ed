"""Failures between hosts: a node that never started, one that is gone, two that no longer reach each other.

Each function reads the evidence of all nodes, so that every host would come to the same answer; on one machine it is
None.
"""

from __future__ import annotations

import re
import time
from typing import Any

from labkit.files import in_parallel
from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.signals import signal_name
from labkit.record import Nodes, last_beat

__all__ = ["MEETING_SECONDS", "agent_killed", "gone", "missing", "parted"]

# How long the first host waits for the last; a shared file system may take half of it to show a new file.
MEETING_SECONDS = 60.0
TIMED_OUT = re.compile(r"Timed out waiting (?:(\d+)\s?ms)?|Socket Timeout|timed out", re.IGNORECASE)
# What the kernel, gloo and torch's store report when a host has disappeared.
UNREACHABLE = re.compile(
    r"No route to host|Network is unreachable|Connection timed out|Connection closed by peer|Connection reset"
    r"|Broken pipe|failed to recv|connectFullMesh|Connection refused",
    re.IGNORECASE,
)


def missing(evidence: Evidence) -> dict[str, Any] | None:
    """Nodes that had not started when the others stopped waiting for them."""
    nodes = evidence.nodes
    if nodes is None or not any(_why(end) == "missing" for end in evidence.outcomes.values()):
        return None
    absent = [node for node, beat in enumerate(_beats(evidence, nodes)) if beat is None]
    if not absent:  # it started just too late
        absent = [node for node in range(nodes.count) if _why(evidence.outcomes.get(node)) != "missing"]
    names = ", ".join(f"{node} ({evidence.host(node)})" for node in absent)
    sentence = (
        f"{'node' if len(absent) == 1 else 'nodes'} {names} of {nodes.count} did not connect within "
        f"{MEETING_SECONDS:.0f} s"
    )
    return {"kind": "missing", "nodes": absent, "sentence": sentence}


def agent_killed(evidence: Evidence) -> dict[str, Any] | None:
    """A node whose torchrun was killed; its ranks, which the kernel kills with it, could not record anything."""
    for node, end in sorted(evidence.outcomes.items()):
        code = end.get("exit_code")
        if isinstance(code, int) and code < 0 and _why(end) is None:
            sentence = f"torchrun on {evidence.host(node)} was killed ({signal_name(-code)}), and its ranks with it"
            return {"kind": "agent", "node": node, "sentence": sentence}
    return None


def gone(evidence: Evidence) -> dict[str, Any] | None:
    """Nodes that started and never wrote an outcome."""
    if evidence.nodes is None:
        return None
    beats = _beats(evidence, evidence.nodes)
    last = {node: beat["time"] for node, beat in enumerate(beats) if beat and node not in evidence.outcomes}
    if not last:
        return None
    names = ", ".join(evidence.host(node) for node in last)
    sentence = (
        f"{'host' if len(last) == 1 else 'hosts'} {names} {'was' if len(last) == 1 else 'were'} lost at "
        f"{_clock(min(last.values()))}: its supervisor is gone (killed, or the machine went down)"
    )
    return {"kind": "host", "node": min(last), "nodes": list(last), "sentence": sentence}


def parted(evidence: Evidence) -> dict[str, Any] | None:
    """Hosts that lost contact: ranks of several hosts waited for each other until the process group's timeout,
    and no rank that the others waited for was still running."""
    if evidence.nodes is None:
        return None
    texts = {f["rank"]: "".join(f["traceback"]) + f["message"] for f in evidence.failures}
    waited = {rank: match for rank, text in texts.items() if (match := TIMED_OUT.search(text))}
    cut_off = {rank for rank, text in texts.items() if UNREACHABLE.search(text)}
    silent = set(evidence.ranks) - waited.keys() - cut_off
    hosts = sorted({evidence.nodes.of_rank(rank) for rank in texts})
    if not waited or silent or len(hosts) < 2:
        return None
    start, limit = min(_wait_start(evidence, rank, match) for rank, match in waited.items())
    names = [evidence.host(node) for node in hosts]
    sentence = (
        f"hosts {', '.join(names[:-1])} and {names[-1]} lost contact at {_clock(start)}: their ranks waited for each "
        f"other until the process group's timeout{f' ({limit:g} s)' if limit else ''}"
    )
    advice = "check that the network between them is up and that no firewall blocks it: ranks connect to any port"
    return {"kind": "parted", "nodes": hosts, "sentence": sentence, "advice": advice}


def _wait_start(evidence: Evidence, rank: int, match: re.Match[str]) -> tuple[float, float]:
    """When a rank entered the call that never completed, in seconds since the epoch, and how many seconds it waited (0
    if its error does not say)."""
    gave_up = next(f["time_ns"] for f in evidence.failures if f["rank"] == rank) / 1e9
    limit = float(match[1] or 0) / 1000
    return gave_up - limit, limit


def _beats(evidence: Evidence, nodes: Nodes) -> list[dict[str, Any] | None]:
    return in_parallel(last_beat, [evidence.folder.node(node) for node in range(nodes.count)])


def _why(outcome: dict[str, Any] | None) -> str | None:
    why = outcome.get("why") if outcome else None
    return str(why.get("kind")) if isinstance(why, dict) else None


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
