"""Explains what became of nodes and of torchrun when no rank tells: a node that never started or was lost, hosts that
lost contact, a torchrun that was killed or that failed by itself."""

from __future__ import annotations

import re

from labkit.files import in_parallel, tail_text
from labkit.launcher.causes import sentences
from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence
from labkit.launcher.causes.failure_advice import FIREWALL
from labkit.launcher.causes.waits import TIMEOUT
from labkit.launcher.peers import MEETING_SECONDS
from labkit.record import Cause, Node, Nodes
from labkit.text import last_line

# What the kernel, gloo and torch's store report when a host has disappeared.
UNREACHABLE = re.compile(
    r"No route to host|Network is unreachable|Connection timed out|Connection closed by peer|Connection reset"
    r"|Broken pipe|failed to recv|connectFullMesh|Connection refused",
    re.IGNORECASE,
)


def missing(evidence: Evidence) -> Cause | None:
    """Nodes that had not started when the others stopped waiting for them."""
    nodes = evidence.nodes
    gave_up = {node for node, end in evidence.outcomes.items() if end.why and end.why.kind == "missing"}
    if nodes is None or not gave_up:
        return None
    absent = [node for node, time in _last_beats(evidence, nodes).items() if time is None]
    absent = absent or [node for node in range(nodes.count) if node not in gave_up]  # they started just too late
    names = [f"{node} ({evidence.host(node)})" for node in absent]
    return Cause("missing", sentences.missing(names, nodes.count, MEETING_SECONDS), nodes=tuple(absent))


def agent_killed(evidence: Evidence) -> Cause | None:
    """A node whose torchrun was killed; its ranks, which the kernel kills with it, could not record anything."""
    for node, end in sorted(evidence.outcomes.items()):
        if end.exit_code is not None and end.exit_code < 0 and end.why is None:
            return Cause("agent", sentences.torchrun_killed(-end.exit_code, evidence.host(node)), node=node)
    return None


def lost(evidence: Evidence) -> Cause | None:
    """Nodes that started and never wrote an outcome."""
    if evidence.nodes is None:
        return None
    times = _last_beats(evidence, evidence.nodes)
    last = {node: time for node, time in times.items() if time is not None and node not in evidence.outcomes}
    if not last:
        return None
    sentence = sentences.lost([evidence.host(node) for node in last], min(last.values()))
    return Cause("host", sentence, node=min(last), nodes=tuple(last))


def lost_contact(evidence: Evidence) -> Cause | None:
    """Hosts that lost contact: ranks of several hosts waited for each other until the process group's timeout,
    and no rank that the others waited for was still running."""
    if evidence.nodes is None:
        return None
    waited = {f.rank: (f, match) for f in evidence.failures if (match := TIMEOUT.search(f.text))}
    cut_off = {f.rank for f in evidence.failures if UNREACHABLE.search(f.text)}
    silent = set(evidence.ranks) - waited.keys() - cut_off
    hosts = sorted({evidence.nodes.of_rank(failure.rank) for failure in evidence.failures})
    if not waited or silent or len(hosts) < 2:
        return None
    # when a rank entered the call that never completed, and how many seconds it waited, 0 if its error does not say
    limits = [(failure.time_ns / 1e9, float(match[1] or 0) / 1000) for failure, match in waited.values()]
    since, limit = min((gave_up - limit, limit) for gave_up, limit in limits)
    sentence = sentences.parted([evidence.host(node) for node in hosts], since, limit)
    return Cause("parted", sentence, nodes=tuple(hosts), advice=(FIREWALL,))


def _last_beats(evidence: Evidence, nodes: Nodes) -> dict[int, float | None]:
    """When each node last sent a heartbeat, in seconds since the epoch; None if it never did."""
    homes = [evidence.folder.node(node) for node in range(nodes.count)]
    beats = in_parallel(lambda home: Node(home).last_beat(), homes)
    return {node: beat.time if beat else None for node, beat in enumerate(beats)}


def unexplained(evidence: Evidence, exit_code: int) -> Cause:
    """No rank left a record: how torchrun ended, or the last line that the interpreter or torchrun printed."""
    if exit_code < 0:
        return Cause("agent", sentences.torchrun_killed(-exit_code))
    logs = (path for home in evidence.homes for path in sorted(home.torchrun_logs.rglob("stderr.log")))
    early = (tail_text(path, LAST_WORDS_BYTES) for path in logs)
    text = next((t for t in early if t.strip()), evidence.log).strip()
    ended_first = None
    if text in evidence.log and evidence.exits:
        rank, code = [*evidence.exits.items()][-1]
        ended_first = evidence.named(rank), code
    sentence = sentences.unexplained(exit_code, last_line(text), ended_first)
    return Cause("torchrun", sentence, traceback=tuple(text.splitlines(keepends=True)[-40:]))
