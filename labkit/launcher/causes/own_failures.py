"""Explains the failure of a rank by its own record: what it raised, or how it exited."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from labkit.files import tail_text
from labkit.launcher.causes import sentences
from labkit.launcher.causes.evidence import LAST_WORDS_BYTES, Evidence, Failure
from labkit.launcher.causes.failure_advice import ALONE, BLOCKING, disk_advice, fragmented, memory_advice
from labkit.launcher.causes.killed import killer
from labkit.record import Cause, End, RunFolder
from labkit.text import last_line

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
PRINTED = "It printed"  # what a command has, for worker/failure.py


def own_failures(evidence: Evidence) -> list[Failure]:
    """The records of ranks that failed for a reason of their own, oldest first."""
    return [failure for failure in evidence.failures if not failure.is_collateral]


def failed(failures: Sequence[Failure], evidence: Evidence) -> Cause | None:
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


def exited(evidence: Evidence) -> list[Failure]:
    """Ranks that ended with an exit code according to torchrun's log and left no record, torchrun's root cause first:
    `os._exit(3)`, a library's `exit`, a record that did not fit on the disk."""
    silent = set(evidence.ranks) - {failure.rank for failure in evidence.failures}
    failures = []
    for rank, code in reversed(evidence.exits.items()):
        if code > 0 and rank in silent:
            words = tail_text(evidence.folder.log(rank, "stderr"), LAST_WORDS_BYTES).splitlines(keepends=True)
            failures.append(Failure(rank, "exit", str(code), step=evidence.ends[rank].step, traceback=tuple(words)))
    return [failure for failure in failures if not failure.mentions_others]
