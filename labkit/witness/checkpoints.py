"""Finds checkpoints of which nothing was loaded, and files that ranks write or read at the same time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from labkit.witness.evidence import Evidence, Line, by_place
from labkit.witness.finding import Finding, named
from labkit.witness.rule import Rule

File = tuple[str, str]  # its host and path
Use = tuple[int, Line]  # which rank saves or loads it
NEWEST = 100  # uses of a file, with which a new one is compared


class Unloaded(Rule):
    kind = "unloaded"
    title = "Nothing of a checkpoint was loaded"
    declared = "Module.load_state_dict: the keys that it is given, and the names of the module's own parameters"
    observed = (
        "with strict=False no key matched; or those that did not would all match without the name that a wrapper of "
        "torch's puts into them, like `module.` or `_orig_mod.`"
    )
    silent = (
        "a part is loaded (LoRA, another head); an empty state; the module, one in it or around it is loaded before "
        "the next optimizer step; nobody uses the module any more"
    )
    limits = "weights that the script then copies by hand are not seen"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "unloaded"):
            values = line.values
            wanted, of, change = values["wanted"], values["of"], str(values["change"])
            what = (
                f"loaded none of the {of} parameters" if wanted == of else f"did not load {wanted} of {of} parameters"
            )
            why = f"the keys are like {values['key']}, the module's names like {values['own']}"
            advice = "Load with strict=True, or look at what load_state_dict returns."
            if change:
                prefix = change[1:]
                change = f"Remove {prefix} from the keys" if change[0] == "+" else f"Put {prefix} in front of the keys"
                advice = f"{change}. {advice}"
            yield self.found(
                line,
                f"load_state_dict{evidence.at(line.line)} {what}",
                why,
                advice,
                since=line.step,
                parameters=(str(values["own"]),),
            )


class FileRace(Rule):
    kind = "file race"
    title = "A file was read or written while another rank wrote it"
    declared = "torch.save and torch.load with the same path, and the numbers of collectives of the ranks' groups then"
    observed = (
        "two ranks of a host write it at the same time, or one reads it before or while another writes it, and no "
        "collective that both call is between"
    )
    silent = (
        "a collective of a common group is between; the file was read after it was complete, which a script may ensure "
        "by a store, a lock or another file; paths on different hosts"
    )
    limits = (
        "files that the script opens itself; a race that the reader lost by luck is not seen in this run; each use of "
        "a file is compared with the 100 before it"
    )

    def __init__(self) -> None:
        self._read: Counter[tuple[int, str]] = Counter()
        self._newest: dict[File, deque[Use]] = {}
        self._found: dict[File, Finding] = {}

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for file, use in sorted(self._new(evidence), key=lambda each: each[1][1].t):
            if file in self._found:
                continue
            newest = self._newest.setdefault(file, deque(maxlen=NEWEST))
            pairs = (pair for other in newest for pair in ((use, other), (other, use)))
            raced = (_raced(evidence, Path(file[1]).name, *one, *other) for one, other in pairs)
            if found := next(filter(None, raced), None):
                self._found[file] = found
            newest.append(use)
        return list(self._found.values())

    def _new(self, evidence: Evidence) -> Iterator[tuple[File, Use]]:
        """The uses of files since the look before."""
        for rank, testimony in evidence.ranks.items():
            for kind in ("save", "load"):
                lines = testimony.lines.get(kind, [])[self._read[rank, kind] :]
                self._read[rank, kind] += len(lines)
                for line in lines:
                    yield (line.values["host"], line.values["path"]), (rank, line)


def _raced(evidence: Evidence, name: str, rank: int, save: Line, other: int, use: Line) -> Finding | None:
    """Whether `rank` saves a file when the other one uses it. Of two that save it, `rank` is the lower one."""
    if save.kind == "load" or other == rank or (use.kind == "save" and other < rank):
        return None
    was_before = use.t <= save.values["began"]
    # Steps without collectives may be between a read and a write that is not about the same version.
    is_apart = was_before and (use.kind == "save" or use.number != save.number or not use.values["calls"])
    if use.values["began"] >= save.t or is_apart or _is_ordered(save, use):
        return None
    where = f"{name} after step {save.step}{evidence.at(save.line)}"
    if use.kind == "save":
        what = f"{named([rank, other])} write the file {where} at the same time: it may hold parts of both"
        advice = "Save on one rank, or into a file of each rank's own."
    else:
        when = "before" if was_before else "while"
        what = f"{named([other])} reads {name}{evidence.at(use.line)} {when} {named([rank])} writes it"
        what += f"{evidence.at(save.line)}, and no collective is between"
        advice = "Call torch.distributed.barrier() after the file is written and before it is read."
    return Finding(
        "file race",
        what,
        advice=advice,
        since=max(1, save.step),
        ranks=(rank, other) if use.kind == "save" else (other,),
        line=use.line,
    )


def _is_ordered(one: Line, other: Line) -> bool:
    """Whether there is a collective between: one of the ranks had called it already, the other called it later."""
    first, second = one.values["calls"], other.values["calls"]
    return any(first[group] != second[group] for group in set(first) & set(second))


class LonePart(Rule):
    kind = "lone part"
    title = "One part of a sharded model is saved, and the others are not"
    declared = "DTensor: Shard, and the ranks of its mesh"
    observed = (
        "in a run that has succeeded one rank has saved a state of such tensors by torch.save, each of which is its "
        "part, and no rank that has another part has ever saved anything"
    )
    silent = (
        "full tensors; a file of each rank's own; torch.distributed.checkpoint; states of several ranks in one file; "
        "files that are not named, as in memory"
    )
    limits = "FSDP1's flat parameters, models that are saved whole, and states in lists"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "part") if evidence.outcome == "succeeded" else ():
            values, ranks = line.values, set(line.values["ranks"])
            saved = {rank for rank in ranks & set(evidence.ranks) if evidence.ranks[rank].of("saves")}
            if len(line.ranks) > 1 or saved != set(line.ranks) or not ranks <= set(evidence.ranks):
                continue
            more = f" and {values['parted'] - 1} more" if values["parted"] > 1 else ""
            yield self.found(
                line,
                f"{named(line.ranks)} saves its own part of {values['name']}{more} in {values['file']}"
                f"{evidence.at(line.line)}, one of {values['of']}, and no rank saves the others",
                "state_dict() of a sharded model has this rank's shards only",
                "Gather the state on all ranks (get_model_state_dict with full_state_dict=True, or full_tensor()), or "
                "let all ranks call torch.distributed.checkpoint.save.",
                since=max(1, line.step),
                parameters=(str(values["name"]),),
            )
