"""What can only go wrong between hosts: a node that never came, one that is gone, two that no longer reach each other.

Each looks at the evidence of all nodes, so that every host comes to the same answer; on one machine there is none.
"""

from __future__ import annotations

import re
import time
from typing import Any

from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.signals import signal_name
from labkit.record.nodes import last_beat

__all__ = ["MEETING_SECONDS", "agent_killed", "gone", "missing", "parted"]

# How long the first host waits for the last; a shared file system may take half of it to show a new file.
MEETING_SECONDS = 60.0
TIMED_OUT = re.compile(r"Timed out waiting (?:(\d+)\s?ms)?|Socket Timeout|timed out", re.IGNORECASE)
# What the kernel, gloo and torch's store say of a host that was there before.
UNREACHABLE = re.compile(
    r"No route to host|Network is unreachable|Connection timed out|Connection closed by peer|Connection reset"
    r"|Broken pipe|failed to recv|connectFullMesh|Connection refused",
    re.IGNORECASE,
)


def missing(found: Evidence) -> dict[str, Any] | None:
    """Nodes that had not begun when the others gave up waiting for them."""
    nodes = found.nodes
    if nodes is None or not any(_why(end) == "missing" for end in found.outcomes.values()):
        return None
    absent = [node for node in range(nodes.count) if last_beat(found.folder.node(node)) is None]
    if not absent:  # it came just too late
        absent = [node for node in range(nodes.count) if _why(found.outcomes.get(node)) != "missing"]
    who = ", ".join(map(str, absent))
    names = ", ".join(found.host(node) for node in absent)
    one = len(absent) == 1
    sentence = (
        f"waited {MEETING_SECONDS:.0f} s for {'host' if one else 'hosts'} {who} of {nodes.count} ({names}); "
        f"{'it has' if one else 'they have'} not connected"
    )
    return {"kind": "missing", "nodes": absent, "sentence": sentence}


def agent_killed(found: Evidence) -> dict[str, Any] | None:
    """A node whose torchrun was killed; its ranks, which the kernel ends with it, had no time for a word."""
    for node, end in sorted(found.outcomes.items()):
        code = end.get("exit_code")
        if isinstance(code, int) and code < 0 and _why(end) is None:
            said = f"torchrun on {found.host(node)} was killed ({signal_name(-code)}); its ranks were ended with it"
            return {"kind": "agent", "node": node, "sentence": said}
    return None


def gone(found: Evidence) -> dict[str, Any] | None:
    """Nodes that began and were never heard to end."""
    if found.nodes is None:
        return None
    beats = {node: last_beat(found.folder.node(node)) for node in range(found.nodes.count)}
    last = {node: said["time"] for node, said in beats.items() if said and node not in found.outcomes}
    if not last:
        return None
    names = ", ".join(found.host(node) for node in last)
    sentence = (
        f"{'host' if len(last) == 1 else 'hosts'} {names} {'was' if len(last) == 1 else 'were'} lost at "
        f"{_clock(min(last.values()))}: the process that watched its ranks is gone (killed, or the machine went down)"
    )
    return {"kind": "host", "node": min(last), "nodes": list(last), "sentence": sentence}


def parted(found: Evidence) -> dict[str, Any] | None:
    """Hosts that lost each other: ranks waited for those of another host until the process group's time limit, and
    there is no rank that others waited for and that did not wait itself."""
    if found.nodes is None:
        return None
    said = {f["rank"]: "".join(f["traceback"]) + f["message"] for f in found.failures}
    waited = {rank: match for rank, text in said.items() if (match := TIMED_OUT.search(text))}
    cut_off = {rank for rank, text in said.items() if UNREACHABLE.search(text)}
    silent = found.histories.keys() - waited.keys() - cut_off
    hosts = sorted({found.nodes.of_rank(rank) for rank in said})
    if not waited or silent or len(hosts) < 2:
        return None
    began, limit = min(_began_to_wait(found, rank, match) for rank, match in waited.items())
    names = [found.host(node) for node in hosts]
    sentence = (
        f"hosts {', '.join(names[:-1])} and {names[-1]} lost each other at {_clock(began)}: their ranks waited for one "
        f"another until the process group's time limit{f' ({limit:g} s)' if limit else ''}"
    )
    advice = "see that the network between them is up, and that no firewall closes it: ranks connect to any port"
    return {"kind": "parted", "nodes": hosts, "sentence": sentence, "advice": advice}


def _began_to_wait(found: Evidence, rank: int, match: re.Match[str]) -> tuple[float, float]:
    """When a rank entered the call that never ended, in seconds since the epoch, and for how long it waited (0 where
    its error does not tell)."""
    gave_up = next(f["time_ns"] for f in found.failures if f["rank"] == rank) / 1e9
    limit = float(match[1] or 0) / 1000
    return gave_up - limit, limit


def _why(outcome: dict[str, Any] | None) -> str | None:
    why = outcome.get("why") if outcome else None
    return str(why.get("kind")) if isinstance(why, dict) else None


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
