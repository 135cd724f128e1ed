"""Finds why a run failed: the first rank with a failure of its own, or else what records, nodes and torchrun show.

torchrun blames the rank that exited first, which for hangs, early returns and mismatched collectives is a victim.
Here every rank writes its own record, and a rank that only lost its peer counts for less than the others. With several
nodes, each writes its own outcome, and the first live node reads them all: every host would come to the same answer.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from labkit.files import finite, in_parallel, number, read_object, tail_text
from labkit.launcher.causes import sentences
from labkit.launcher.causes.background_errors import raised_beside
from labkit.launcher.causes.collectives import disagreement
from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence, Failure, Whereabouts
from labkit.launcher.causes.failure_advice import (
    ALONE,
    BLOCKING,
    FIREWALL,
    LONGER,
    disk_advice,
    fragmented,
    memory_advice,
)
from labkit.launcher.causes.stacks import crash_frames
from labkit.launcher.peers import MEETING_SECONDS
from labkit.record import Cause, End, Node, Nodes, RankHistory, RunFolder, StateName
from labkit.ring import IN_BACKWARD, RingReader
from labkit.text import last_line
from labkit.witness import Findings

# Later calls report these errors of a kernel.
LATE = re.compile(
    r"CUDA error: (device-side assert|an illegal|misaligned|unspecified launch|CUBLAS)|CUDNN_STATUS_EXECUTION_FAILED"
)
DEVICE_ASSERTION = re.compile(r": block: \[.*(Assertion `.*` failed)")  # printed by the kernel
# A DataLoader's words about its worker: its pid, the signal that killed it, or its exit code.
WORKER_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d+)[\d, ]*\) (?:is killed by signal: ([^.]+)|exited unexpectedly)"
    r"(?: with exit code (\d+))?"
)
CRASHES = [-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)]
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # variables with its settings
UNFLUSHED = "120"  # the exit code of a Python that has run a script but cannot write what was printed
TRACEBACK = re.compile(r"^.*Traceback \(most recent call last\)", re.MULTILINE)
LINES = re.compile(r"\bline (\d+)")
PRINTED = "It printed"  # what a command has, for worker/failure.py
THROWN = re.compile(r"^\s*what\(\):\s*(.*)$", re.MULTILINE)  # of an uncaught C++ exception
# What a wait for other ranks ends with; gloo tells for how long.
TIMEOUT = re.compile(
    r"Timed out waiting (?:(\d+)\s?ms)?|Socket Timeout|collective operation timeout|timed out|Application timeout",
    re.IGNORECASE,
)
# Marks a wait for other ranks in a message or traceback; a script may wait for other things, too.
COMMUNICATION = re.compile(r"torch[./]distributed|gloo|nccl|c10d", re.IGNORECASE)
# What the kernel, gloo and torch's store report when a host has disappeared.
UNREACHABLE = re.compile(
    r"No route to host|Network is unreachable|Connection timed out|Connection closed by peer|Connection reset"
    r"|Broken pipe|failed to recv|connectFullMesh|Connection refused",
    re.IGNORECASE,
)
SLIPS = ("slip", "skip", "join")  # findings after which the ranks' collectives meet others
PARTED = ("slip", "disagree", "early", "hang")  # causes that may rest on what one rank decides
# Why a node was stopped when the reason lies with another node.
FOLLOWS = ("others", "missing")


def find_cause(run: RunFolder, folder: RunFolder, exit_code: int, notice: str | None = None) -> Cause:
    """The cause of an attempt that ended with torchrun's `exit_code`. `folder` is the attempt's. `notice` is what the
    supervisor last reported about stalled ranks."""
    return _explain(Evidence.gather(run, folder), exit_code, notice)


def conclusion(run: RunFolder, attempt: RunFolder) -> tuple[StateName, Cause | None]:
    """`(state, cause)` of an attempt whose nodes have all ended or are gone. A rank's own failure counts before the
    silence of others, and an earlier decision to stop before its consequences."""
    evidence = Evidence.gather(run, attempt)
    outcomes = [outcome for _, outcome in sorted(evidence.outcomes.items())]
    stopped = [(end.decided, end.why) for end in outcomes if end.why and end.why.kind not in FOLLOWS]
    decided, why = min(stopped, key=lambda each: each[0], default=(0.0, None))
    own = _own_failures(evidence)
    if why and not (own and own[0].time_ns / 1e9 < decided):
        return ("stopped" if why.kind == "stopped" else "failed"), why
    if evidence.nodes and len(outcomes) == evidence.nodes.count and all(end.exit_code == 0 for end in outcomes):
        return "succeeded", None
    code = next((end.exit_code for end in outcomes if not end.why and end.exit_code), 1)
    notice = evidence.outcomes[0].notice if 0 in evidence.outcomes else None
    return "failed", _missing(evidence) or _explain(evidence, code, notice)


def survived_errors(run: RunFolder, attempt: RunFolder, ranks: Sequence[int]) -> str | None:
    """What ranks, their threads, atexit handlers and child processes raised, although they went on or exited with 0;
    None if nothing."""
    evidence = Evidence.gather(run, attempt)
    if any(attempt.error(rank).exists() for rank in ranks):
        return f"{_explain(evidence, 0, None).sentence}, and then exited with 0"
    beside = raised_beside(evidence, ranks)
    return beside.sentence if beside else None


def _explain(evidence: Evidence, exit_code: int, notice: str | None) -> Cause:
    if own := _failed(_own_failures(evidence), evidence):
        return own
    cause, beside = _of_no_error(evidence, exit_code, notice), raised_beside(evidence, evidence.ranks)
    cause = _with_text(cause, evidence) if cause.kind in PARTED and LONGER not in cause.advice else cause
    if not beside:
        return cause
    if cause.kind not in (*PARTED, "torchrun"):
        return replace(cause, sentence=f"{cause.sentence}. Besides, {beside.sentence}")
    sentence = f"{beside.sentence}. {sentences.capitalized(cause.sentence)}"
    return replace(cause, sentence=sentence, ranks=beside.ranks, where=beside.where, advice=())


def _with_text(cause: Cause, evidence: Evidence) -> Cause:
    """The cause, with what the script's text shows: why not all ranks get to a line that one of them was in."""
    from labkit.checking import check  # only a failure needs it, and most supervisors see none

    lines = {cause.where.line} if cause.where else set()
    lines |= {failure.line for failure in evidence.failures if failure.line}
    with suppress(Exception):  # the cause matters more
        for finding in check(evidence.script):
            told = {finding.line, *map(int, LINES.findall(finding.message))}
            if finding.kind == "hangs" and told & lines:
                return replace(cause, sentence=f"{cause.sentence}. {sentences.in_text(finding.line, finding.message)}")
    return cause


def _of_no_error(evidence: Evidence, exit_code: int, notice: str | None) -> Cause:
    exited = [failure for failure in _exited(evidence) if not failure.mentions_others]
    return (
        _killed(evidence)
        or _agent_killed(evidence)
        or _lost(evidence)
        or _failed(exited, evidence)
        or _slipped(evidence)
        or _disagreed(evidence)
        or _left_early(evidence)
        or _parted(evidence)
        or _hung(evidence, notice)
        or _vanished(evidence)
        or _failed(evidence.failures, evidence)
        or _unexplained(evidence, exit_code)
    )


def _own_failures(evidence: Evidence) -> list[Failure]:
    """The records of ranks that failed for a reason of their own, oldest first."""
    return [failure for failure in evidence.failures if not failure.is_collateral]


# ranks that failed by themselves


def _failed(failures: Sequence[Failure], evidence: Evidence) -> Cause | None:
    """The first of these failures as a cause, if there is one, with what was in memory or on the disk and what to
    change."""
    if not failures:
        return None
    first, *rest = (_with_last_words(evidence.folder, failure) for failure in failures)
    same = [first, *(one for one in rest if one.summary == first.summary)]  # further lines may name the rank
    others = [failure for failure in rest if failure not in same and not failure.is_collateral]
    ranks = [failure.rank for failure in same]
    who = sentences.ranks_in_words(sorted(ranks)) if len(same) > 1 else evidence.named(first.rank)
    where, out_of_memory, detail, advice = evidence.locate(first.line), first.out_of_memory, "", ""
    said = WORKER_DIED.search("\n".join([first.message, *first.causes]))
    if said or first.workers:
        pid, code = _dead_worker(first, said)
        by = killer(evidence.home(first.rank)) if code == -signal.SIGKILL else None
        out_of_memory = "host" if by == "system" else None
        advice = memory_advice("host", evidence.script, {}) if out_of_memory else ""
        advice = advice or (ALONE if code in CRASHES else "")
        sentence = sentences.worker_died(who, pid, code, by)
    else:
        detail, advice = _detail(first, evidence)
        sentence = sentences.failed(who, first, where, detail, others)
    return Cause(
        first.kind,
        sentence,
        ranks=tuple(ranks),
        exception=first.exception,
        message=first.message,
        where=where,
        step=first.step,
        time_ns=first.time_ns,
        traceback=first.traceback if first.kind == "exception" else (),
        out_of_memory=out_of_memory,
        memory=first.memory,
        advice=(advice,) if advice else (),
    )


def _dead_worker(failure: Failure, said: re.Match[str] | None) -> tuple[str, int | None]:
    """The pid of the DataLoader's worker that died and its exit code, negative if a signal killed it, None if unknown.
    `said` are torch's words about it."""
    if said is None or said[1] in failure.workers:
        return next(iter(failure.workers.items()))
    killed = (-number for number in signal.valid_signals() if signal.strsignal(number) == said[2])
    return said[1], int(said[3]) if said[3] else next(killed, None)


def _with_last_words(folder: RunFolder, failure: Failure) -> Failure:
    """A bare exit code explains nothing, of the rank's or of a command that it ran; the last line printed before it,
    such as argparse's, often does."""
    of_command = failure.exception.endswith("CalledProcessError") and PRINTED not in failure.message
    if not of_command and (failure.kind != "exit" or not failure.message.lstrip("-").isdigit()):
        return failure
    printed = tail_text(folder.log(failure.rank, "stderr"), LAST_WORDS_BYTES)
    last = last_line(TRACEBACK.split(printed)[0] if of_command else printed)
    end = End.read(folder.metrics(failure.rank))
    if failure.message == UNFLUSHED and end and end.outcome == "finished":
        last = sentences.unflushed(last)
    joined = f"{failure.message} {PRINTED}: {last}" if of_command else f"{failure.message}: {last}"
    return replace(failure, message=joined) if last else failure


def _detail(failure: Failure, evidence: Evidence) -> tuple[str, str]:
    """What a failure's sentence says after its place, and the advice."""
    memory = failure.memory
    if kind := failure.out_of_memory:
        settings = (str(evidence.manifest.env.get(name)) for name in ALLOCATOR)
        fragments = 0.0 if any("expandable_segments:True" in text for text in settings) else fragmented(memory)
        advice = memory_advice(kind, evidence.script, evidence.manifest.parameters, evidence.manifest.facts, fragments)
        return sentences.memory_in_words(kind, memory, evidence.history(failure.rank)), advice
    if LATE.search(failure.message):
        printed = DEVICE_ASSERTION.search(tail_text(evidence.folder.log(failure.rank, "stderr")))
        return f": {printed[1]}" if printed else "", BLOCKING
    if failure.perhaps_out_of_memory:
        advice = memory_advice("device", evidence.script, evidence.manifest.parameters, evidence.manifest.facts)
        detail = sentences.perhaps_out_of_memory(memory.get("free"), memory.get("total"))
        return detail, f"if it was the memory, {advice}"
    advice = disk_advice(evidence.run, failure.text)
    return "; the disk is full" if advice else "", advice


def _exited(evidence: Evidence) -> list[Failure]:
    """Ranks that ended with an exit code according to torchrun's log and left no record, torchrun's root cause first:
    `os._exit(3)`, a library's `exit`, a record that did not fit on the disk."""
    silent = set(evidence.ranks) - {failure.rank for failure in evidence.failures}
    failures = []
    for rank, code in reversed(evidence.exits.items()):
        if code > 0 and rank in silent:
            words = tail_text(evidence.folder.log(rank, "stderr"), LAST_WORDS_BYTES).splitlines(keepends=True)
            failures.append(Failure(rank, "exit", str(code), step=evidence.ends[rank].step, traceback=tuple(words)))
    return failures


def _killed(evidence: Evidence) -> Cause | None:
    """The first rank that a signal killed; torchrun lists its root cause last, and may have sent a TERM itself."""
    ranks = [
        r
        for r, c in evidence.exits.items()
        if c < 0 and (-c != signal.SIGTERM or _was_terminated(evidence, r)) and r not in evidence.aborted
    ]
    if not ranks:
        return None
    rank, code = ranks[-1], -evidence.exits[ranks[-1]]
    name, history = sentences.signal_name(code), evidence.history(rank)
    reports = evidence.folder.stacks(rank), evidence.folder.log(rank, "stderr")  # the latter with PYTHONFAULTHANDLER
    frames = next(filter(None, map(crash_frames, reports)), [])  # KILL leaves none
    where = evidence.locate(next((frame.line for frame in frames if frame.file == evidence.path), None))
    function = frames[0].function if frames and frames[0].file != evidence.path else ""
    by = killer(evidence.home(rank)) if code == signal.SIGKILL else None
    held = max(history.memory_peak, _resident(evidence, rank, history)) if history else 0.0
    thrown = next(iter(THROWN.findall(tail_text(evidence.folder.log(rank, "stderr")))[-1:]), "").strip()
    met = code == signal.SIGABRT and "gloo" in thrown  # its collective met another one
    if met and (slip := _slipped(evidence, sentences.met(evidence.named(rank), function, where))):
        return slip
    advice = [BLOCKING] if code == signal.SIGABRT and "CUDA error" in thrown else []
    if by == "system":
        advice.append(memory_advice("host", evidence.script, {}))
    return Cause(
        "signal",
        sentences.killed(
            evidence.named(rank), name, by, function=function, where=where, history=history, held=held, thrown=thrown
        ),
        ranks=(rank,),
        signal=name,
        where=where,
        step=history.step if history else None,
        out_of_memory="host" if by == "system" else None,
        advice=tuple(advice),
    )


def _was_terminated(evidence: Evidence, rank: int) -> bool:
    """Whether a process other than torchrun sent the TERM that killed torchrun's root cause."""
    return rank == [*evidence.exits][-1] and evidence.closed_by_torchrun(rank) is False and not evidence.was_ended(rank)


def _resident(evidence: Evidence, rank: int, history: RankHistory) -> float:
    """The resident set in bytes at the last heartbeat, which may be newer than the last step."""
    beat = read_object(evidence.folder.heartbeat(rank)) if history.memory_name == "resident set" else {}
    return number(beat.get("rss")) or 0.0


def killer(home: RunFolder) -> sentences.Killer:
    """Who sent a KILL, as far as the system reports it. `home` is the run's folder, or that of a node, which recorded
    its own system's count."""
    outcome = read_object(home.outcome)
    before = finite(read_object(home.agent).get("oom_kills"))
    now = finite(outcome.get("oom_kills")) if outcome else oom_kills()
    if before is None or now is None:
        return "unknown"
    return "system" if now > before else "process"


def oom_kills() -> int | None:
    """How many processes the kernel has killed since boot because memory ran out; None if it does not report it."""
    try:
        fields = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(fields["oom_kill"])
    except (OSError, KeyError, ValueError):
        return None


# ranks without an error of their own


def _slipped(evidence: Evidence, then: str = "") -> Cause | None:
    """What the ranks have witnessed of a collective or a batch that one of them left out; `then` is how that ended."""
    for found in Findings.read(evidence.folder).certain:
        if found.kind in SLIPS:
            where, advice = evidence.locate(found.line), (found.advice,) if found.advice else ()
            sentence = f"{f'in step {found.since} ' if found.since else ''}{found.claim}{then}"
            return Cause("slip", sentence, ranks=found.ranks, step=found.since, where=where, advice=advice)
    return None


def _disagreed(evidence: Evidence) -> Cause | None:
    """Ranks whose calls differ according to torch's flight recorder."""
    differ = disagreement(evidence.collectives())
    return Cause("disagree", sentences.disagreed(*differ)) if differ else None


def _hung(evidence: Evidence, notice: str | None) -> Cause | None:
    """Ranks that timed out waited for the one that did something else. If all waited, none is to blame; one that did
    not say where it was is, or that made the least progress."""
    waited = {f.rank: f for f in evidence.failures if TIMEOUT.search(f.message) and COMMUNICATION.search(f.text)}
    timed_out = waited.keys() | evidence.aborted
    if not timed_out or len(evidence.ranks) < 2:
        return None
    absent = [rank for rank in evidence.ranks if rank not in timed_out]
    first = next(iter(waited.values()), None)
    places = {rank: evidence.whereabouts(first, rank) for rank in absent if first and not evidence.program(rank)}
    elsewhere = {rank: place for rank, place in places.items() if place and not place.waits}
    if first and elsewhere:
        rank = min(elsewhere, key=lambda each: evidence.ends[each].step)
        others = len(evidence.ranks) - len(elsewhere) - 1
        return _awaited(rank, elsewhere[rank], first, others, evidence, notice)
    if first and all(places.get(rank) for rank in absent):
        lines = {rank: failure.line for rank, failure in waited.items()}
        lines |= {rank: place.line for rank, place in places.items() if place}
        told = [evidence.named(rank) + evidence.located(line) for rank, line in sorted(lines.items())]
        return Cause("hang", sentences.waited_mutually(told), step=evidence.ends[first.rank].step)
    silent = [rank for rank in absent if not places.get(rank)] or evidence.ranks
    culprit = min((evidence.ends[rank] for rank in silent), key=lambda history: history.step)
    who, waiting = evidence.named(culprit.rank), sorted(timed_out - {culprit.rank})
    sentence = sentences.hung(who, evidence.program(culprit.rank), culprit.step, waiting, notice)
    return Cause("hang", sentence, ranks=(culprit.rank,), step=culprit.step)


def _awaited(
    rank: int, place: Whereabouts, first: Failure, others: int, evidence: Evidence, notice: str | None
) -> Cause:
    """The rank that the others waited for, of which the `first` timed out."""
    who, waiter = evidence.named(rank), evidence.named(first.rank) + evidence.located(first.line)
    sentence = sentences.waited_for(who, place, evidence.located(place.line), waiter, others)
    if place.worker:
        sentence = sentences.waited_for_worker(who, place, waiter, others, notice)
    where, step = evidence.locate(place.line), evidence.ends[rank].step
    return Cause("hang", sentence, (rank,), where=where, step=step, advice=() if place.worker else (LONGER,))


def _left_early(evidence: Evidence) -> Cause | None:
    """A rank whose script ended without an error while other ranks still ran."""
    finished = [h for h in evidence.ends.values() if h.end and h.end.outcome in ("finished", "exited")]
    running = [h for h in evidence.ends.values() if h not in finished]
    if not finished or not running:
        return None
    first = min(finished, key=lambda h: h.step)
    who, line = evidence.named(first.rank), first.end.line if first.end else None
    if line:
        sentence = sentences.exited_early(who, first.step, evidence.located(line), running[0])
        return Cause("early", sentence, ranks=(first.rank,), where=evidence.locate(line), step=first.step)
    now = RingReader(evidence.folder.ring(running[0].rank)).now()
    in_backward = evidence.locate(now.line) if now and now.flags & IN_BACKWARD else None
    failure = next((failure for failure in evidence.failures if failure.rank == running[0].rank), None)
    waiting = evidence.located(failure.line) if failure else ""
    sentence = sentences.left_early(who, first.step, running[0], waiting, in_backward)
    return Cause("early", sentence, ranks=(first.rank,), step=first.step)


def _vanished(evidence: Evidence) -> Cause | None:
    """A rank that left no record and that torchrun did not stop: `os._exit`, or a library that calls it."""
    explained = {failure.rank for failure in evidence.failures} | evidence.exits.keys()
    for rank in sorted(rank for rank in set(evidence.ranks) - explained if not evidence.was_ended(rank)):
        if evidence.failures and evidence.closed_by_torchrun(rank) is False:
            step, waiting = evidence.ends[rank].step, evidence.failures[0].rank
            sentence = sentences.vanished(evidence.named(rank), evidence.program(rank), step, waiting)
            return Cause("early", sentence, ranks=(rank,), step=step)
    return None


# nodes, and torchrun itself


def _missing(evidence: Evidence) -> Cause | None:
    """Nodes that had not started when the others stopped waiting for them."""
    nodes = evidence.nodes
    gave_up = {node for node, end in evidence.outcomes.items() if end.why and end.why.kind == "missing"}
    if nodes is None or not gave_up:
        return None
    absent = [node for node, time in _last_beats(evidence, nodes).items() if time is None]
    absent = absent or [node for node in range(nodes.count) if node not in gave_up]  # they started just too late
    names = [f"{node} ({evidence.host(node)})" for node in absent]
    return Cause("missing", sentences.missing(names, nodes.count, MEETING_SECONDS), nodes=tuple(absent))


def _agent_killed(evidence: Evidence) -> Cause | None:
    """A node whose torchrun was killed; its ranks, which the kernel kills with it, could not record anything."""
    for node, end in sorted(evidence.outcomes.items()):
        if end.exit_code is not None and end.exit_code < 0 and end.why is None:
            return Cause("agent", sentences.torchrun_killed(-end.exit_code, evidence.host(node)), node=node)
    return None


def _lost(evidence: Evidence) -> Cause | None:
    """Nodes that started and never wrote an outcome."""
    if evidence.nodes is None:
        return None
    times = _last_beats(evidence, evidence.nodes)
    last = {node: time for node, time in times.items() if time is not None and node not in evidence.outcomes}
    if not last:
        return None
    sentence = sentences.lost([evidence.host(node) for node in last], min(last.values()))
    return Cause("host", sentence, node=min(last), nodes=tuple(last))


def _parted(evidence: Evidence) -> Cause | None:
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


def _unexplained(evidence: Evidence, exit_code: int) -> Cause:
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
