"""Finds replicas that part: parameters that torch declares to be equal on several ranks, and that are not."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.ring import RingReader, decoded
from labkit.witness.checks import Checks, Key, Set, agree, first_of, setting
from labkit.witness.evidence import Evidence
from labkit.witness.finding import Finding, named
from labkit.witness.parting import Parting
from labkit.witness.rule import Rule

ENOUGH = 3  # checks at which parameters were equal and had moved, without a declaration, until it counts as meant
STAYS = 3  # sums of the scrubber that differ since a check, if there has not been another one


class Replicas(Rule):
    kind = "replicas"
    title = "Replicas are not equal"
    declared = (
        "DDP: every rank of its group has the same parameters, but those in parameters_to_ignore; DTensor: Replicate. "
        "Without a declaration, a note: parameters that were equal at three checks while they moved; that were before "
        "the first step, if the same optimizer has DTensors; or that never were, while all their gradients are, and "
        "collectives are called"
    )
    observed = "exact digests of the parameters differ after the same step of the same optimizer"
    silent = (
        "if they are equal again at a later check; if all backward passes of a step are within no_sync, or gradients "
        "go through a communication hook of the script's own; after ranks have made unequally many steps within Join; "
        "for what is changed after the last step; for buffers, FSDP1's flat parameters and groups of one rank. Without "
        "a declaration also if all parameters part at once, but beside DTensors"
    )
    limits = (
        "checks are at steps 1 2 5 10 20 35 50 75 100 200 500, then every 1000, of more than 64 MiB from step 20 on; "
        "optimizer states are not compared, which show in the weights a step later; between GPUs of different kinds it "
        "is a note; parameters with Replicate that GPUs compute by nondeterministic kernels, without an all-reduce, "
        "drift apart by the last bits, which is found, too"
    )
    explains = ("settings",)

    def __init__(self) -> None:
        self._partings: dict[Key, Parting] = {}

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        found = [
            self._finding(evidence, key, each) or _never_equal(each)
            for key, each in evidence.shared(Checks).read(evidence).items()
            if each.kind not in ("wrapped", "shard")
        ]
        return sorted((finding for finding in found if finding), key=lambda each: (not each.certain, each.until))[:1]

    def _finding(self, evidence: Evidence, key: Key, parted: Set) -> Finding | None:
        check = parted.parted
        is_free = parted.kind == "plain" and not parted.began_equal  # nothing but their equality says that it is meant
        if check is None or (is_free and parted.moves < ENOUGH):
            return None
        parting = self._partings.get(key)
        if parting is None or parting.check is not check or not parting.is_complete:
            parting = self._partings[key] = Parting(evidence, parted, check)  # reads all digests of two ranks
        return _finding(evidence, parting, is_free=is_free)


def _finding(evidence: Evidence, parting: Parting, *, is_free: bool) -> Finding | None:
    check, parted = parting.check, parting.set
    since, until, stays = _span(evidence, parted, parting)
    if parted.newest is check and not evidence.outcome and stays < STAYS:
        return None  # they may be equal at the next check
    names = parting.names or ["a parameter"]
    if is_free and (len(names) == parting.of or not parting.is_complete):
        return None  # each rank trains a model of its own from now on
    why, advice = parting.cause()
    devices = {line.values["device"] for rank in check for line in evidence.ranks[rank].of("declared")}
    some = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    where = f"on {named(parting.ranks)}" if parting.has_majority else f"between {named(parting.ranks)}"
    return Finding(
        "replicas",
        f"the ranks' weights are not the same: {some} differ{'' if len(names) > 1 else 's'} {where}",
        why,
        advice,
        certain=parted.kind != "plain" and len(devices) == 1 and not parting.may_average_by_hand,
        since=since,
        until=until,
        ranks=tuple(parting.ranks),
        line=parting.one.line,
        parameters=tuple(names[:20]),
        ask=f"{parting.called}.module.get_parameter({names[0]!r}).flatten()[:4].tolist()" if parting.called else "",
    )


def _never_equal(each: Set) -> Finding | None:
    """Parameters of which the ranks average all gradients by hand, and which have never been the same."""
    if each.equal or not each.newest or len(each.averaged or ()) < ENOUGH:
        return None
    return Finding(
        "replicas",
        f"the ranks' weights have never been the same, although all their gradients are: {named(sorted(each.newest))} "
        "train different models with one average of the gradients",
        "gradients are averaged by hand, and nothing has made the initial weights equal",
        "Broadcast the parameters and buffers of rank 0 before the first step, or seed all ranks alike before the "
        "model is made.",
        certain=False,
        since=1,
        ranks=tuple(sorted(each.newest)),
        line=first_of(each.newest).line,
    )


def _span(evidence: Evidence, parted: Set, parting: Parting) -> tuple[int, int, int]:
    """The steps since one of which the set has parted, and at how many later ones the scrubber saw it."""
    equal = first_of(parted.equal) if parted.equal else None
    since, until = equal.step + 1 if equal else 1, parting.one.step
    scrubs = [evidence.ranks[rank].of("scrub", n=parted.model)[-1:] for rank in parting.pair]
    if parted.kind != "ddp" or not all(scrubs) or scrubs[0][0].values["pieces"] != scrubs[1][0].values["pieces"]:
        return since, until, 0
    one, other = (evidence.ranks[rank].ring for rank in parting.pair)
    now = one.now()
    first, last = equal.number + 1 if equal else 1, now.number if now else 0
    ours, theirs = decoded(one.counted(first, last)), decoded(other.counted(first, last))
    sums = {n: (ours[n].sum, theirs[n].sum) for n in sorted(set(ours) & set(theirs)) if ours[n].sum and theirs[n].sum}
    differ = [number for number, (a, b) in sums.items() if a != b]
    before = [number for number in sums if number < min([parting.one.number, *differ])]
    if differ and differ[0] < parting.one.number:
        until = _step(one, differ[0], until)
    pieces = scrubs[0][0].values["pieces"]
    if scrubs[0][0].values["whole"] and len(before) >= pieces:  # all were equal at their turn in the last sweep
        since = max(since, _step(one, before[-pieces], 0) + 1)
    return since, until, len([number for number in differ if number > parting.one.number])


def _step(ring: RingReader, number: int, otherwise: int) -> int:
    seen = ring.seen(number)
    return seen.step if seen else otherwise


class Settings(Rule):
    kind = "settings"
    title = "Ranks step the same parameters with different settings"
    declared = "DTensor: the ranks of a mesh hold parts, or copies, of the same parameters"
    observed = "learning rates, weight decays, momenta, betas or eps differ after the same step, and still do later"
    silent = "for DDP, whose weights part then (see replicas), and FSDP1; if they are the same again"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for each in evidence.shared(Checks).read(evidence).values():
            if each.kind not in ("shard", "mesh") or each.unlike is None or each.newest is None:
                continue
            if agree(each.newest, "settings") or (each.newest is each.unlike and not evidence.outcome):
                continue
            return [
                Finding(
                    "settings",
                    f"the ranks step parts of the same parameters with different {setting(each.unlike)}",
                    advice="Let all ranks step with the same values. A scheduler needs a metric that was averaged over "
                    "the ranks.",
                    since=first_of(each.unlike).step,
                    ranks=tuple(sorted(each.unlike)),
                    line=first_of(each.unlike).line,
                )
            ]
        return []
