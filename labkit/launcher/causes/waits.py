"""Finds whom the ranks waited for when none has an error of its own: a rank that left out a collective, was somewhere
else, had left, or nobody in particular."""

from __future__ import annotations

import re
from collections.abc import Iterable

from labkit.launcher.causes import sentences
from labkit.launcher.causes.evidence import NOT_AT_BARRIER, NOT_JOINED, Evidence, Failure, Whereabouts
from labkit.launcher.causes.failure_advice import LONGER
from labkit.launcher.causes.flight_recorder import disagreement
from labkit.record import Cause
from labkit.ring import IN_BACKWARD, RingReader
from labkit.witness import Findings

# What a wait for other ranks ends with; gloo tells for how long.
TIMEOUT = re.compile(
    r"Timed out waiting (?:(\d+)\s?ms)?|Socket Timeout|collective operation timeout|timed out|Application timeout"
    r"|failed to pass monitoredBarrier",
    re.IGNORECASE,
)
# Marks a wait for other ranks in a message or traceback; a script may wait for other things, too.
COMMUNICATION = re.compile(r"torch[./]distributed|gloo|nccl|c10d", re.IGNORECASE)
SLIPS = ("slip", "skip", "join")  # findings after which the ranks' collectives meet others


def slipped(evidence: Evidence, then: str = "") -> Cause | None:
    """What the ranks have witnessed of a collective or a batch that one of them left out; `then` is how that ended."""
    for found in Findings.read(evidence.folder).certain:
        if found.kind in SLIPS:
            where, advice = evidence.locate(found.line), (found.advice,) if found.advice else ()
            sentence = f"{f'in step {found.since} ' if found.since else ''}{found.claim}{then}"
            return Cause("slip", sentence, ranks=found.ranks, step=found.since, where=where, advice=advice)
    return None


def disagreed(evidence: Evidence) -> Cause | None:
    """Ranks whose calls differ according to torch's flight recorder."""
    differ = disagreement(evidence.collectives())
    return Cause("disagree", sentences.disagreed(*differ)) if differ else None


def never_joined(evidence: Evidence) -> Cause | None:
    """A rank that had not called init_process_group when another one, which had, reached its time limit."""
    for failure in evidence.failures:
        if said := NOT_JOINED.search(failure.message):
            rank, waiter = int(said["rank"]), evidence.named(failure.rank) + evidence.located(failure.line)
            size, history = evidence.manifest.world_size, evidence.ends.get(rank)
            if rank >= size:
                return Cause("hang", sentences.too_many_ranks(rank, size, waiter))
            place, ended = evidence.whereabouts(failure, rank), history.end.outcome if history and history.end else ""
            what = f"it {sentences.instead(place, evidence.located(place.line))}" if place else ""
            if history and (ended == "finished" or (ended == "exited" and not place)):  # torchrun may have told it to
                what = f"it ended at step {history.step} without an error"
            where, seconds = evidence.locate(place.line) if place else None, int(said["ms"]) / 1000
            sentence = sentences.never_joined(evidence.named(rank), what, waiter, seconds)
            return Cause("hang", sentence, (rank,), where=where, step=history.step if history else None)
    return None


def hung(evidence: Evidence, notice: str | None) -> Cause | None:
    """Ranks that timed out waited for the one that did something else. If all waited, none is to blame; one that did
    not say where it was is, or that made the least progress."""
    waited = {f.rank: f for f in evidence.failures if TIMEOUT.search(f.message) and COMMUNICATION.search(f.text)}
    timed_out = waited.keys() | evidence.aborted
    if not timed_out or len(evidence.ranks) < 2:
        return None
    absent = [rank for rank in _missed(waited.values()) or evidence.ranks if rank not in timed_out]
    first = next(iter(waited.values()), None)
    places = {rank: evidence.whereabouts(first, rank) for rank in absent if first and not evidence.program(rank)}
    elsewhere = {rank: place for rank, place in places.items() if place and not place.waits}
    if first and elsewhere:
        rank = min(elsewhere, key=lambda each: evidence.ends[each].step)
        others = len(evidence.ranks) - len(elsewhere) - 1
        return _awaited(rank, elsewhere[rank], first, others, evidence, notice)
    if first and all(places.get(rank) for rank in absent):
        calls = {rank: (at.line, at.call) for rank, at in [*waited.items(), *places.items()] if at}
        told = [
            sentences.waiter(evidence.named(rank), call, evidence.located(line))
            for rank, (line, call) in sorted(calls.items())
        ]
        return Cause("hang", sentences.waited_mutually(told), step=evidence.ends[first.rank].step)
    silent = [rank for rank in absent if not places.get(rank)] or evidence.ranks
    culprit = min((evidence.ends[rank] for rank in silent), key=lambda history: history.step)
    who, waiting = evidence.named(culprit.rank), sorted(timed_out - {culprit.rank})
    sentence = sentences.hung(who, evidence.program(culprit.rank), culprit.step, waiting, notice)
    return Cause("hang", sentence, ranks=(culprit.rank,), step=culprit.step)


def _missed(failures: Iterable[Failure]) -> list[int]:
    """The ranks that monitored_barrier names, which counts those of its group: here of the default one."""
    of_default = (failure for failure in failures if " of " not in failure.call)
    said = next(filter(None, (NOT_AT_BARRIER.search(failure.message) for failure in of_default)), None)
    return [int(rank) for rank in said["ranks"].split(",")] if said else []


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


def left_early(evidence: Evidence) -> Cause | None:
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


def vanished(evidence: Evidence) -> Cause | None:
    """A rank that left no record and that torchrun did not stop: `os._exit`, or a library that calls it."""
    explained = {failure.rank for failure in evidence.failures} | evidence.exits.keys()
    for rank in sorted(rank for rank in set(evidence.ranks) - explained if not evidence.was_ended(rank)):
        if evidence.failures and evidence.closed_by_torchrun(rank) is False:
            step, waiting = evidence.ends[rank].step, evidence.failures[0].rank
            sentence = sentences.vanished(evidence.named(rank), evidence.program(rank), step, waiting)
            return Cause("early", sentence, ranks=(rank,), step=step)
    return None
