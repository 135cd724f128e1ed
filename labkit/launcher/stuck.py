"""Why a run does not move: what each rank was seen doing, put into a sentence that accuses nobody without evidence.

The order of evidence: a process that is stopped or gone; ranks that called different collectives; a rank that has
not entered the collective the others wait in; otherwise just where each of them is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.launcher.stacks import RankStack, ask
from labkit.record import RunFolder
from labkit.record.files import read_text
from labkit.record.text import escaped, plain
from labkit.write import Script

__all__ = ["Stacks", "disagreement", "explain", "look_at"]

MOVING_SECONDS = 5.0
NAMED_RANKS = 4  # more would make no sentence; all are in the details
# Where torch's own Python stands between a script and the collective it calls.
WRAPPERS = ("wrapper", "_bootstrap", "<module>", "_wrapped_call_impl", "_call_impl", "inner")


@dataclass(frozen=True)
class Stacks:
    """What every rank was doing when asked. `sentence` says it in words; `ranks` holds the evidence."""

    sentence: str
    ranks: list[RankStack]

    @property
    def are_gone(self) -> bool:
        """Whether all ranks ended while they were asked: then nothing is known of where they were."""
        return bool(self.ranks) and all(rank.process == "gone" for rank in self.ranks)

    def __repr__(self) -> str:
        details = (f"== rank {r.rank}, step {r.step}, {r.process} ==\n{r.text.strip()}" for r in self.ranks)
        return plain("\n\n".join([self.sentence, *details]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        folded = "".join(
            f"<details><summary>rank {r.rank}, step {r.step}, {escaped(r.process)}</summary>"
            f"<pre>{escaped(r.text.strip())}</pre></details>"
            for r in self.ranks
        )
        return {"text/plain": repr(self), "text/html": f"<b>{escaped(self.sentence)}</b>{folded}"}


def look_at(folder: RunFolder, run: RunFolder) -> Stacks:
    """Ask every rank of an attempt where it is, and say it. Takes some five seconds when ranks do not answer."""
    manifest = run.read_manifest()
    path = str(manifest["script"]["path"] or run.script)
    script = Script.parse(read_text(run.script), name=Path(path).name)
    ranks = ask(folder, run)
    return Stacks(explain(ranks, script, path), ranks)


def explain(ranks: Sequence[RankStack], script: Script, path: str) -> str:
    """One sentence about ranks that were asked at the same moment. `path` is the script's file name in their stacks."""
    if not ranks:
        return "no rank has started yet"
    places = {r.rank: _place(r, script, path) for r in ranks}
    if gone := [r for r in ranks if r.process == "gone"]:
        return f"{_names(gone)} {'is' if len(gone) == 1 else 'are'} gone; {_where(_rest(ranks, gone), places)}"
    if stopped := [r for r in ranks if r.process == "stopped"]:
        return (
            f"{_names(stopped)} {'is' if len(stopped) == 1 else 'are'} stopped by a signal (SIGSTOP, or a debugger) "
            f"at step {stopped[0].step}; {_where(_rest(ranks, stopped), places)}"
        )
    newest = {r.rank: newest_of(r.collectives) for r in ranks}
    if differ := disagreement(newest):
        return f"the ranks disagree: {differ}. {_upper(_where(ranks, places))}"
    late = _not_entered(ranks, newest)
    if late:
        awaited = next(newest[r.rank] for r in _rest(ranks, late) if newest[r.rank])
        return (
            f"{_names(late)} {'has' if len(late) == 1 else 'have'} not entered {_call(awaited)}. "
            f"{_upper(_where(late, places))}; {_where(_rest(ranks, late), places)}"
        )
    if len(ranks) > 1 and all(_waits(r) for r in ranks):
        return f"all ranks are in {_call(newest[ranks[0].rank])} and it does not end; {_where(ranks, places)}"
    return _where(ranks, places)


def _where(ranks: Sequence[RankStack], places: Mapping[int, str]) -> str:
    said = [f"rank {r.rank} is at step {r.step}{places[r.rank]}" for r in ranks[:NAMED_RANKS]]
    more = len(ranks) - len(said)
    return "; ".join(said) + (f"; and {more} more" if more > 0 else "")


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _place(rank: RankStack, script: Script, path: str) -> str:
    """`, in all_reduce (train.py line 88)`, or the very line when it is the script's own."""
    ours = next((f for f in rank.frames if f.file == path), None)
    holds = ", and holds the GIL" if rank.answered == "signal" else ""
    if ours is None:
        inner = next((f for f in rank.frames if f.function not in WRAPPERS), None)
        return (f", in `{inner.function}` ({Path(inner.file).name} line {inner.line})" if inner else "") + holds
    cell = script.cell_at(ours.line)
    where = f"{Path(path).name} line {ours.line}" + (f", cell `{cell[0].title}`" if cell else "")
    if rank.frames[0] is ours:
        lines = str(script).splitlines()
        text = lines[ours.line - 1].strip() if ours.line <= len(lines) else ""
        return f" in {where}: `{text}`{holds}"
    inner = rank.frames[0]
    called = next((f for f in reversed(rank.frames[: rank.frames.index(ours)]) if f.function not in WRAPPERS), inner)
    verb = "waits in" if _waits(rank) else "in"
    return f", {verb} `{called.function}` ({where}){holds}"


def newest_of(collectives: Any) -> dict[str, Any]:
    """The newest collective that a rank began, point-to-point messages apart."""
    calls = [c for c in collectives if isinstance(c, dict) and not c.get("is_p2p")]
    return calls[-1] if calls else {}


def _waits(rank: RankStack) -> bool:
    return newest_of(rank.collectives).get("retired") is False


def disagreement(newest: Mapping[int, dict[str, Any]]) -> str:
    """Ranks that gave the same number in the same process group to different calls."""
    seen: dict[Any, tuple[int, dict[str, Any]]] = {}
    for rank, call in newest.items():
        if not call:
            continue
        key = (str(call.get("process_group")), call.get("collective_seq_id"))
        first_rank, first = seen.setdefault(key, (rank, call))
        if _signature(first) != _signature(call):
            number = call.get("collective_seq_id")
            return (
                f"as collective #{number} rank {first_rank} called {_short(first)}, rank {rank} called {_short(call)}"
            )
    return ""


def _not_entered(ranks: Sequence[RankStack], newest: Mapping[int, dict[str, Any]]) -> list[RankStack]:
    """Ranks that have begun fewer collectives of a group than a rank that waits in its newest."""
    waiting = [newest[r.rank] for r in ranks if _waits(r)]
    if not waiting:
        return []
    last = max(waiting, key=_number)
    return [
        r for r in ranks
        if not _waits(r) and _number(newest[r.rank]) < _number(last)
        and newest[r.rank].get("process_group", last.get("process_group")) == last.get("process_group")
    ]  # fmt: skip


def _number(call: Mapping[str, Any]) -> int:
    number = call.get("collective_seq_id")
    return number if isinstance(number, int) else 0


def _signature(call: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(call.get("profiling_name")), str(call.get("input_sizes")), str(call.get("input_dtypes"))


def _short(call: Mapping[str, Any]) -> str:
    name = str(call.get("profiling_name", "a collective")).split(":")[-1]
    sizes, types = call.get("input_sizes") or [], call.get("input_dtypes") or []
    shapes = ", ".join(f"{type} {size}" for type, size in zip(types, sizes, strict=False))
    return f"{name}({shapes})"


def _call(call: Mapping[str, Any]) -> str:
    name = str(call.get("profiling_name", "a collective")).split(":")[-1]
    return f"`{name}` #{call.get('collective_seq_id')}"


def _names(ranks: Sequence[RankStack]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r.rank) for r in ranks)


def _rest(ranks: Sequence[RankStack], some: Sequence[RankStack]) -> list[RankStack]:
    return [r for r in ranks if r not in some]
