"""Finds ranks that have left out a collective: from then on each call of theirs meets a later one of the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from labkit.ring import JOINED, NO_GRAPH, STEPS, Counted, decoded
from labkit.witness.evidence import Evidence
from labkit.witness.finding import Finding, named
from labkit.witness.rule import Rule

STAYS = 3  # steps: other differences are of calls by a thread in the background, which the others make a moment later


class Slips(Rule):
    kind = "slip"
    title = "A rank left out a collective"
    declared = "the group over which DDP or FSDP averages gradients: every rank of it makes every one of its calls"
    observed = "the ranks' counts of the group's collectives differ after the same step, and stay apart"
    silent = "fewer than three steps since, unless the run has failed; within Join; groups that nothing averages over"
    limits = (
        "gloo counts messages between two ranks, too: a script that sends them within the group that averages is not "
        "judged by their number if it makes up for it"
    )
    explains = ("replicas", "settings", "skip")

    def __init__(self) -> None:
        self._agreed: dict[tuple[int, ...], int] = {}  # the newest step up to which the ranks of a group agree

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for group in evidence.replicas:
            steps = self._differing(evidence, group)
            if found := _slip(evidence, group, steps):
                yield found
                return

    def _differing(self, evidence: Evidence, group: tuple[int, ...]) -> dict[int, dict[int, Counted]]:
        """By rank the steps that all ranks have made since they last agreed; empty if they still agree."""
        rings = {rank: evidence.ranks[rank].ring for rank in group}
        now = {rank: ring.now() for rank, ring in rings.items()}
        newest = min((each.number if each else 0 for each in now.values()), default=0)
        first = max(self._agreed.get(group, 0), newest - STEPS + 1)
        if newest <= first:
            return {}
        data = {rank: ring.counted(first, newest) if first else ring.counted(1, newest) for rank, ring in rings.items()}
        if len(set(data.values())) == 1:
            self._agreed[group] = newest
            return {}
        return {rank: decoded(steps) for rank, steps in data.items()}


def _slip(evidence: Evidence, group: tuple[int, ...], steps: Mapping[int, Mapping[int, Counted]]) -> Finding | None:
    common = sorted(set.intersection(*(set(each) for each in steps.values()))) if steps else []
    stays = None
    for number in reversed(common):
        here = [steps[rank][number] for rank in group]
        if len({each.calls for each in here}) == 1 or any(each.flags & JOINED for each in here):
            break
        stays = number
    if stays is None or (common[-1] - stays + 1 < STAYS and evidence.outcome != "failed"):
        return None
    made = {rank: steps[rank][stays].calls - _before(steps[rank], stays) for rank in group}
    counts = Counter(made.values())
    usual = max(counts, key=lambda calls: (counts[calls], calls))
    wrong = [rank for rank in group if made[rank] != usual]
    if not wrong:  # it was before the first step that is still in the ring
        return None
    rank, other = wrong[0], next(r for r in group if made[r] == usual)
    seen = evidence.ranks[rank].ring.seen(stays)
    step, line, loss = (seen.step, seen.line, seen.loss) if seen else (stays, 0, math.nan)
    own = steps[rank][stays]
    verb = "left out" if made[rank] < usual else "made in excess"
    calls = f"{abs(usual - made[rank])} collective{'s' if abs(usual - made[rank]) != 1 else ''}"
    why = ""
    if made[rank] < usual and own.flags & NO_GRAPH:
        shown = f", {loss:.4g}," if loss == loss else ""
        why = f"the loss of its backward pass{shown} has no graph through the model{evidence.at(line)}"
    elif line:
        why = f"it was{evidence.at(line)[1:-1].join([' at ', ''])}" if not own.passes else ""
    return Finding(
        "slip",
        f"{named(wrong)} {verb} {calls} that {named([other])} made in step {step}{'' if why else evidence.at(line)}; "
        "since then each of its collectives meets one of another step, and gradients of different steps are averaged",
        why,
        advice="Let every rank call every collective: a rank without data takes part with a loss of zero that depends "
        "on the model's output, such as output.sum() * 0.",
        since=step,
        ranks=tuple(wrong),
        line=line,
        values=tuple(f"rank {each}: {calls} collectives" for each, calls in made.items()),
    )


def _before(steps: Mapping[int, Counted], number: int) -> int:
    return steps[number - 1].calls if number - 1 in steps else 0
