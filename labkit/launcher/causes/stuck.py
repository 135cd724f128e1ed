"""Explains why a run makes no progress: what each rank was doing, in a sentence that blames none without evidence.

The order of evidence: a process that is stopped or gone; ranks that called different collectives; a rank that has
not entered the collective that the others wait in; ranks that wait for each other; otherwise where each rank is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from labkit.dataclass_json import to_json
from labkit.files import Json, lines_of, read_source
from labkit.launcher.causes.background_errors import raised_beside
from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.explain import explained, with_text
from labkit.launcher.causes.flight_recorder import absent, disagreement, mutual_waiting, waits_in
from labkit.launcher.causes.loader_workers import ask_workers, awaits_worker
from labkit.launcher.causes.sentences import capitalized, disagreed, ranks_in_words
from labkit.launcher.causes.stacks import RankStack, WorkerStack, ask, threads
from labkit.launcher.causes.waits import slipped
from labkit.record import Cause, RunFolder
from labkit.text import escaped, in_lines, plain
from labkit.write import Script

NAMED_RANKS = 4  # more would be unreadable; the details list all
JOINING = ("_shutdown", "_join_thread", "join", "_wait_for_tstate_lock")  # Python waits for threads
ACQUIRING = ("acquire", "__enter__", "wait")
OF_LOADERS = ("_feed", "_pin_memory_loop")  # the outermost functions of threads that send batches on
WRAPPERS = ("wrapper", "_bootstrap", "<module>", "_wrapped_call_impl", "_call_impl", "inner")  # of torch and Python


@dataclass(frozen=True)
class Stacks:
    """What every rank was doing. `sentence` summarizes it; `ranks` holds the evidence. `late` are those that the others
    wait for, as far as that is known, and `places` is the part of the sentence that says where each rank was."""

    sentence: str
    ranks: list[RankStack]
    late: tuple[int, ...] = ()
    places: str = ""

    @property
    def are_gone(self) -> bool:
        """Whether all ranks ended during the inspection, so that it is unknown where they were."""
        return bool(self.ranks) and all(rank.process == "gone" for rank in self.ranks)

    @property
    def _details(self) -> Iterator[tuple[str, str]]:
        """A title and the stack of every rank, each followed by the workers of its DataLoaders."""
        for rank in self.ranks:
            yield f"rank {rank.rank}, step {rank.step}, {rank.process}", rank.text.strip()
            for worker in rank.workers:
                where = f" in {worker.sleeps_in}" if worker.sleeps_in else ""
                title = f"rank {rank.rank}'s DataLoader worker (pid {worker.pid}), {worker.process}{where}"
                yield title, worker.text.strip()

    def to_dict(self) -> dict[str, Json]:
        """The stacks for a program, as `labkit stacks --json` prints them (docs/reference/json.md)."""
        ranks = [to_json(rank) for rank in self.ranks]
        return {"schema": "labkit.stacks/1", "sentence": plain(self.sentence), "late": [*self.late], "ranks": ranks}

    def __repr__(self) -> str:
        return plain("\n\n".join([self.sentence, *(f"== {title} ==\n{text}" for title, text in self._details)]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        folded = "".join(
            f"<details><summary>{escaped(title)}</summary><pre>{escaped(text)}</pre></details>"
            for title, text in self._details
        )
        return {"text/plain": repr(self), "text/html": in_lines(self.sentence) + folded}


def look_at(folder: RunFolder, run: RunFolder) -> Stacks:
    """Ask every rank of an attempt where it is. Takes about 5 seconds if ranks do not answer."""
    manifest = run.read_manifest()
    path = str(manifest.script.path or run.script)
    script = Script.parse(read_source(run.script), name=Path(path).name)
    ranks = ask_workers(run, ask(folder, run))
    raised = raised_beside(Evidence.gather(run, folder), [rank.rank for rank in ranks])
    stacks = explain(ranks, script, path)
    return replace(stacks, sentence=f"{stacks.sentence}. {capitalized(raised.sentence)}") if raised else stacks


def explain(ranks: list[RankStack], script: Script, path: str) -> Stacks:
    """What ranks do that were inspected together. `path` is the script's file name in their stacks."""
    if not ranks:
        return Stacks("no rank has started yet", ranks)
    places = {r.rank: _place(r, script, path) + _awaited(r, script, path) for r in ranks}
    where = _where(ranks, places)

    def late(some: Sequence[RankStack], *clauses: str) -> Stacks:
        sentence = "; ".join(filter(None, [*clauses, _where(_rest(ranks, some), places)]))
        return Stacks(sentence, ranks, tuple(r.rank for r in some), where)

    if ended := [r for r in ranks if r.outcome]:
        return late(ended, *_ended(ended, places))
    if gone := [r for r in ranks if r.process == "gone"]:
        return late(gone, f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone")
    if stopped := [r for r in ranks if r.process == "stopped"]:
        are = f"{_names(stopped)} {'is' if len(stopped) == 1 else 'are'}"
        return late(stopped, f"{are} stopped by a signal (SIGSTOP, or a debugger) at step {stopped[0].step}")
    calls = {r.rank: r.calls for r in ranks}
    if differ := disagreement(calls):
        return Stacks(f"{disagreed(*differ)}. {capitalized(where)}", ranks, (), where)
    if awaited := absent(calls):
        call, numbers = awaited
        behind = [r for r in ranks if r.rank in numbers]
        have = f"{_names(behind)} {'has' if len(behind) == 1 else 'have'} not entered {call}"
        told = late(behind, f"{have}. {capitalized(_where(behind, places))}")
        return replace(told, late=()) if any(r.peer is not None for r in behind) else told  # they wait themselves
    if edges := mutual_waiting(calls):
        waits = (
            f"rank {rank} waits in {call} for {ranks_in_words(others)}" for rank, call, others in edges[:NAMED_RANKS]
        )
        each = f"the ranks are waiting for each other: {'; '.join(waits)}"
        return Stacks(f"{each}. {capitalized(where)}", ranks, (), where)
    waited = {(oldest.group, oldest.number): oldest for own in calls.values() if (oldest := waits_in(own))}
    if len(ranks) > 1 and len(waited) == 1 and all(waits_in(r.calls) for r in ranks):
        all_are = f"all ranks are in {next(iter(waited.values()))}, which does not complete"
        return Stacks(f"{all_are}; {where}", ranks, (), where)
    return Stacks(where, ranks, (), where)


def cause_of(stacks: Stacks, run: RunFolder, attempt: RunFolder) -> Cause:
    """Why ranks that were inspected made no progress: how they failed, what they have witnessed, or else what their
    stacks show."""
    evidence = Evidence.gather(run, attempt)
    if evidence.failures:  # its ranks are about to exit
        return explained(evidence, 1, None)
    own = (
        (rank.rank, frame.line) for rank in stacks.ranks for frame in rank.frames[::-1] if frame.file == evidence.path
    )
    lines = dict(own)  # the innermost one of each
    if slip := slipped(evidence):
        cause = with_text(slip, evidence, {*lines.values()})
        return replace(cause, sentence=f"{cause.sentence}. {capitalized(stacks.places)}")
    where = evidence.locate(next((lines[rank] for rank in stacks.late if rank in lines), None))
    return with_text(Cause("stuck", stacks.sentence, stacks.late, where=where), evidence, {*lines.values()})


def _ended(ranks: Sequence[RankStack], places: Mapping[int, str]) -> Iterator[str]:
    """Ranks whose script has ended: those that have exited, and each whose process is still alive."""
    exited = [r for r in ranks if r.process in ("gone", "unknown")]
    if exited:
        yield f"{_names(exited)} {'has' if len(exited) == 1 else 'have'} finished"
    for rank in _rest(ranks, exited)[:NAMED_RANKS]:
        ended = "failed" if rank.outcome == "raised" else "finished its script"
        why = "an atexit handler, or a non-daemon thread"
        yield f"rank {rank.rank} has {ended} and is still exiting{places[rank.rank]} ({why})"


def _where(ranks: Sequence[RankStack], places: Mapping[int, str]) -> str:
    texts = [
        f"rank {r.rank} has become `{r.program}` (pid {r.pid}), which labkit cannot see into"
        if r.program
        else f"rank {r.rank} is at step {r.step}{places[r.rank]}"
        for r in ranks[:NAMED_RANKS]
    ]
    more = len(ranks) - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _place(rank: RankStack, script: Script, path: str) -> str:
    """`, in all_reduce (train.py line 88)`, or the text of the line if the rank is in the script itself."""
    if rank.frames[:1] and rank.frames[0].function in JOINING:
        others = (frames for frames in threads(rank.text)[:-1] if any(f.file == path for f in frames))
        rank = replace(rank, frames=next(others, rank.frames))
    ours = next((f for f in rank.frames if f.file == path), None)
    holds = ", and holds the GIL" if rank.answered == "signal" else ""
    if ours is None:
        if rank.is_compiling:
            return f", compiling in torch.compile{holds}"
        inner = next((f for f in rank.frames if f.function not in WRAPPERS), None)
        return (f", in `{inner.function}` ({Path(inner.file).name} line {inner.line})" if inner else "") + holds
    cell = script.cell_at(ours.line)
    where = f"{Path(path).name} line {ours.line}" + (f", cell `{cell[0].title}`" if cell else "")
    if rank.frames[0] is ours:
        lines = lines_of(str(script))
        text = lines[ours.line - 1].strip() if ours.line <= len(lines) else ""
        return f" in {where}: `{text}`{holds}"
    inner = rank.frames[0]
    called = next((f for f in reversed(rank.frames[: rank.frames.index(ours)]) if f.function not in WRAPPERS), inner)
    if rank.is_compiling:
        return f", compiling in torch.compile ({where}){holds}"
    within, call = f"`{called.function}`", rank.call
    verb = "waiting in" if waits_in(rank.calls) or rank.peer is not None else "in"
    if call and not call.startswith(within):
        return f", in {within}, waiting in {call} ({where}){holds}"
    return f", {verb} {call or within} ({where}){holds}"


def _awaited(rank: RankStack, script: Script, path: str) -> str:
    """`, waiting for its DataLoader's worker (pid 71), which is in train.py line 22: `with CACHE:`"""
    if not awaits_worker(rank):
        return ""
    who = f", waiting for its DataLoader's worker (pid {rank.awaited})"
    worker = next((worker for worker in rank.workers if worker.pid == rank.awaited), None)
    if worker is None or worker.process == "gone":
        return f"{who}, which is gone"
    if worker.process == "stopped":
        return f"{who}, which is stopped by a signal (SIGSTOP, or a debugger)"
    if not worker.frames:
        sleeps = f" in the kernel's `{worker.sleeps_in}`" if worker.sleeps_in else ""
        return f"{who}, which is {worker.process}{sleeps}; its stack cannot be read"
    asked = replace(rank, frames=worker.frames, text=worker.text, collectives=[], answered="itself")
    return f"{who}, which is{_place(asked, script, path).removeprefix(',')}{_lock(rank, worker, script, path)}"


def _lock(rank: RankStack, worker: WorkerStack, script: Script, path: str) -> str:
    """That the worker may wait for a lock that it can never get: another thread of the rank held it at the fork."""
    line = worker.frames[0].line if worker.frames[0].file == path else 0
    text = lines_of(str(script))[line - 1 : line] if line else []
    acquires = worker.frames[0].function in ACQUIRING or any(re.search(r"\bwith\b|\.acquire\(", one) for one in text)
    holders = [frames for frames in threads(rank.text)[:-1] if frames and frames[-1].function not in OF_LOADERS]
    own = [f for frames in holders for f in frames if f.file == path]
    if not (holders and acquires and worker.sleeps_in.startswith("futex")):
        return ""
    thread = f"thread in `{own[0].function}` ({Path(path).name} line {own[0].line})" if own else "other threads"
    return (
        f", a lock that the rank's {thread} may have held when the worker was forked: make a new lock in every "
        "worker (worker_init_fn), or set multiprocessing_context='spawn'"
    )


def _names(ranks: Sequence[RankStack]) -> str:
    return ranks_in_words([r.rank for r in ranks])


def _rest(ranks: Sequence[RankStack], some: Sequence[RankStack]) -> list[RankStack]:
    return [r for r in ranks if r not in some]
