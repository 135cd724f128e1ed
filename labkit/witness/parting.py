"""Says why replicas have parted, as far as it is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from labkit.tail import Tail
from labkit.witness.checks import Set, agree, first_of, setting
from labkit.witness.evidence import Evidence, Line

Cause = tuple[str, str]  # why, and what to do
UNKNOWN = "Print the parameter on both ranks before and after optimizer.step() of this step."


class Parting:
    """A check at which a set of parameters is not equal. `ranks` differ from the others, or all from each other; `pair`
    are two that differ, `names` the parameters in which they do, and `of` how many parameters the set has."""

    def __init__(self, evidence: Evidence, parted: Set, check: Mapping[int, Line]):
        self.evidence, self.set, self.check = evidence, parted, check
        counts = Counter(line.values["sum"] for line in check.values())
        usual = max(counts, key=lambda each: counts[each])
        others = sorted(rank for rank, line in check.items() if line.values["sum"] != usual)
        self.has_majority = counts[usual] * 2 > len(check)
        self.ranks = others if self.has_majority else sorted(check)
        self.pair = next(rank for rank in sorted(check) if check[rank].values["sum"] == usual), others[0]
        (names, digests, self._graded), (_, other, self._other_graded) = map(self._details, self.pair)
        self.is_complete = bool(digests and other)  # ranks write the digests of single parameters after their check
        self.names = [name for name in names if self.is_complete and digests[name] != other.get(name)]
        self.of = len(names)

    def _details(self, rank: int) -> tuple[list[str], dict[str, int], dict[str, bool]]:
        """The names of the set's parameters, the digest of each, and whether it had a gradient."""
        known, at = self.check[rank].values["set"], self.check[rank].values["at"]
        names: list[str] = []
        for record in Tail(self.evidence.ranks[rank].details, lambda record: record).read_all():
            if record["set"] == known and record["k"] == "names":
                names = record["names"]
            elif record["set"] == known and record["at"] == at:
                graded = [flag == "1" for flag in record["graded"]]
                return names, dict(zip(names, record["sums"], strict=True)), dict(zip(names, graded, strict=True))
        return [], {}, {}

    def cause(self) -> Cause:
        """Why, and what to do. Why is empty if it is not known."""
        of_ddp = (_local, _unreduced, _one_gradient, _partly_synchronized, _bypassed, _loaded)
        finders = (
            _unlike_settings,
            _never_equal,
            *(of_ddp if self.set.kind == "ddp" else ()),
            _scaled,
            _left_out,
            _unlike_gradients,
            _written,
        )
        return next((cause for find in finders if (cause := find(self))), ("", UNKNOWN))

    @property
    def called(self) -> str:
        """What the script calls the DDP model that has the parameters; empty if there is none, or it is unknown."""
        rank = self.pair[0]
        declared = self.evidence.ranks[rank].of("declared", set=self.check[rank].values["set"])
        return str(declared[0].values["called"]) if declared else ""

    @property
    def one(self) -> Line:
        return self.check[self.pair[0]]

    def forwards(self) -> tuple[int, int] | None:
        """In how many of how many steps since the ranks were equal the DDP model was called; None if unknown."""
        rank = self.pair[0]
        before, after = (self.set.equal or {}).get(rank), (self.set.newest or self.check)[rank]
        known = after.values["forwards"], before.values["forwards"] if before else 0
        if None in known:
            return None
        return known[0] - known[1], after.values["at"] - (before.values["at"] if before else 0)

    @property
    def may_average_by_hand(self) -> bool:
        """Whether the DDP model was never called, and the script calls collectives of its own over its group."""
        before, after = (self.set.equal or {}).get(self.pair[0]), (self.set.newest or self.check)[self.pair[0]]
        calls = after.values["calls"] - (before or self.one).values["calls"]
        return (self.forwards() or (1, 1))[0] == 0 and calls > 0

    def lines(self, kind: str) -> list[Line]:
        """What either rank of the pair has seen of this DDP model."""
        return [line for rank in self.pair for line in self.evidence.ranks[rank].of(kind, n=self.set.model)]

    def gradients_on_one(self) -> list[tuple[str, int]]:
        """Parameters that differ and have a gradient on one rank of the pair only, and on which."""
        has = [(name, self._graded[name], self._other_graded[name]) for name in self.names]
        return [(name, self.pair[0] if one else self.pair[1]) for name, one, other in has if one != other]


def _unlike_settings(parting: Parting) -> Cause | None:
    unlike = parting.set.unlike
    if unlike is None or first_of(unlike).step > parting.one.step:
        return None
    return (
        f"they step with different {setting(unlike)}",
        "Let all ranks step with the same values. A scheduler needs a metric that was averaged over the ranks.",
    )


def _never_equal(parting: Parting) -> Cause | None:
    if parting.set.equal is not None:
        return None
    if parting.set.kind == "mesh":
        return (
            "they have never been the same; fully_shard() and DTensor do not make initial weights equal",
            "Initialize with the same seed on the ranks that replicate, or broadcast before the first step.",
        )
    if parting.set.was_unequal:
        return (
            "they differed already when DDP had wrapped the model: it did not broadcast rank 0's (init_sync=False)",
            "Leave out init_sync=False, or give all ranks the same weights before DDP wraps the model.",
        )
    return None


def _left_out(parting: Parting) -> Cause | None:
    is_averaged = any(parting.evidence.ranks[rank].of("fsdp") for rank in parting.pair)
    is_beside = parting.set.kind == "plain" and parting.set.began_equal and is_averaged
    if not is_beside or agree(parting.check, "gradients"):
        return None
    return (
        "fully_shard() has left them out, so that nothing averages their gradients",
        "Call fully_shard() of the whole model, too, after that of its blocks.",
    )


def _unlike_gradients(parting: Parting) -> Cause | None:
    if parting.set.kind not in ("mesh", "plain") or agree(parting.check, "gradients"):
        return None
    return (
        "the ranks step with other gradients of them, which nothing averages",
        "Let the ranks of a tensor parallel mesh read the same samples, and average the gradients of others.",
    )


def _local(parting: Parting) -> Cause | None:
    local = {rank: bool(parting.check[rank].values["local"]) for rank in parting.pair}
    if len(set(local.values())) == 1:
        return None
    one = next(rank for rank, is_local in local.items() if is_local)
    return (
        f"rank {one} has made a step of which no backward pass was synchronized (within no_sync, or left out), and the "
        "others have not",
        "Let every rank make the last backward pass of each step, outside of no_sync.",
    )


def _unreduced(parting: Parting) -> Cause | None:
    for line in parting.lines("unreduced"):
        for how, what in (("unfrozen", "were frozen"), ("added", "did not exist yet")):
            if names := line.values[how]:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                return (
                    f"{names[0]}{more} {what} when DDP wrapped the model, and have gradients now, which DDP does not "
                    "average",
                    "Wrap the model in DDP after the last change of its parameters, or again after each.",
                )
    return None


def _one_gradient(parting: Parting) -> Cause | None:
    for name, rank in parting.gradients_on_one():
        return (
            f"{name} has a gradient on rank {rank} alone; the others did not use it in the forward pass",
            "Let all ranks use the same parameters, or give DDP find_unused_parameters=True.",
        )
    return None


def _partly_synchronized(parting: Parting) -> Cause | None:
    passes, synchronized, is_newest = parting.one.values["passes"] or (0, 0, True)
    if passes > 1 and synchronized and not is_newest:
        return (
            f"the last of the {passes} backward passes of a step is within no_sync: what it adds is never averaged",
            "Leave no_sync for the last micro-batch of a step, before its forward pass.",
        )
    return None


def _bypassed(parting: Parting) -> Cause | None:
    made, steps = parting.forwards() or (0, 0)
    if made >= steps - 1:  # torch counts a pass when the next one begins
        return None
    how = "is not called in every step" if made > 0 else "is never called"
    return (
        f"the DDP model itself {how}: gradients of model.module(...) are not averaged",
        "Call the DDP model, not its .module.",
    )


def _loaded(parting: Parting) -> Cause | None:
    loads: dict[int, list[Line]] = {}
    for rank in parting.pair:
        lines = parting.evidence.ranks[rank].of("loaded", n=parting.set.model)
        loads[rank] = [line for line in lines if line.number < parting.one.number]
    few, many = sorted(loads, key=lambda rank: len(loads[rank]))
    if len(loads[few]) == len(loads[many]):
        return None
    newest = loads[many][-1]
    place = parting.evidence.at(newest.line)
    return (
        f"after step {newest.step} rank {many} called load_state_dict{place}, and rank {few} did not",
        "Load on all ranks, or broadcast the weights afterwards.",
    )


def _scaled(parting: Parting) -> Cause | None:
    if parting.gradients_on_one():
        return None  # there are more of them to be changed on one of the ranks
    what = "changed their gradients in place unequally often, as by clipping them,"
    return _uneven(parting, "scalings", what, "Clip or scale the gradients on all ranks, or on none.")


def _written(parting: Parting) -> Cause | None:
    """Something else than the optimizer has changed the parameters in place, which torch counts."""
    advice = "Look for what changes parameters besides optimizer.step(): copy_(), load_state_dict(), an initialization."
    return _uneven(parting, "writes", "changed these parameters in place unequally often", advice)


def _uneven(parting: Parting, name: str, what: str, advice: str) -> Cause | None:
    counts = {rank: parting.check[rank].values[name] for rank in parting.pair}
    if len(set(counts.values())) == 1:
        return None
    shown = ", ".join(f"rank {rank}: {count} times" for rank, count in counts.items())
    return f"the ranks {what} by step {parting.one.step} ({shown})", advice
