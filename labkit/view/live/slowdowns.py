"""Finds what takes a rank longer than it did earlier in the same run, and since when.

Whether that is the rank or the script can only be told if other ranks do the same work and have not become slower: a
rank that is alone, or like all others, may have got more to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit import words
from labkit.record import RankHistory, RunReader, State
from labkit.view.live.disturbances import disturbances
from labkit.view.live.hosts import by_host, names_of

NAMES = {
    "input": "input wait",
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "between": "time between steps",
}
SINCE_SECONDS, DISTURBED_SECONDS = 15.0, 45.0  # at least; the longer one while something disturbs the machine
MOST_RANKS = 16  # on several hosts
OWN, SLOWER = 0.5, 1.2  # of what was added; and times as long, without what another rank's steps take longer
SHORTEST = 1e-6  # seconds


@dataclass(frozen=True)
class Slowdown:
    """One part of the step takes `now` seconds instead of `before` since about `step`, for `seconds` now, on the ranks
    `who`. `is_own`: other ranks do the same and have not become slower."""

    who: str
    phase: str
    step: int
    seconds: float
    before: float
    now: float
    is_own: bool

    def sentence(self, state: State) -> str:
        """`rank 1's forward pass takes 1.4 times as long since about step 412 (2 min 3 s): 28 ms instead of 20 ms`"""
        takes, since, after = ("took", "from", " on") if state.is_final else ("takes", "since", "")
        when = f"{since} about step {self.step:,}{after} ({words.seconds(round(self.seconds))})"
        how = f"{words.seconds(self.now)} instead of {words.seconds(self.before)}"
        times = self.now / max(self.before, SHORTEST)
        doubt = "" if self.is_own else "; whether the script does more per step cannot be told"
        return f"{self.who}'s {NAMES[self.phase]} {takes} {times:.1f} times as long {when}: {how}{doubt}"


def slowdowns(reader: RunReader, state: State) -> list[Slowdown]:
    """What has become slower and still is, what it adds to a step most first. What other programs or heat do to the
    machine for a moment is no slowdown. Of so many ranks on several hosts that they are folded, nothing is known."""
    ranks = [*reader.current.values()]
    if not ranks or reader.folds or (len(ranks) > MOST_RANKS and len(by_host(ranks)) > 1):
        return []
    is_disturbed = bool(disturbances(reader, state))
    shortest = DISTURBED_SECONDS if is_disturbed else SINCE_SECONDS
    told = [*NAMES] if len(ranks) == 1 or all(h.communicates for h in ranks) else ["input"]  # others may be waits
    found: list[Slowdown] = []
    for phase in told:
        slow = [h for h in ranks if (change := h.pace.change(phase)) and h.seen - change.t >= shortest]
        slow.sort(key=lambda h: _added(h, phase), reverse=True)
        if own := [h for h in slow if _is_alone(h, phase, ranks)]:
            found += [_slowdown(who, phase, each, is_own=True) for who, each in _named(own, ranks).items()]
        elif len(slow) == len(ranks) and not is_disturbed:
            who = "every rank" if len(ranks) > 1 else f"rank {slow[0].rank}"
            found.append(_slowdown(who, phase, slow[0], is_own=False))
    return sorted(found, key=lambda each: each.before - each.now)


def _added(history: RankHistory, phase: str) -> float:
    change = history.pace.change(phase)
    return change.now - change.before if change else 0.0


def _is_alone(history: RankHistory, phase: str, ranks: list[RankHistory]) -> bool:
    """Whether another rank has not become slower with this one in the same part of the step."""
    change = history.pace.change(phase)
    if change is None:
        return False
    others = [other.pace.times_around(phase, change.t) for other in ranks if other is not history]
    added = [since - before for before, since in filter(None, others)]
    own = change.now - change.before - max(0.0, min(added, default=0.0))
    return bool(added) and own >= max(OWN * (change.now - change.before), (SLOWER - 1) * change.before)


def _named(slow: list[RankHistory], ranks: list[RankHistory]) -> dict[str, RankHistory]:
    """The slow ranks by their names, or as one host if they are all of its ranks."""
    hosts = by_host(ranks)
    names, named = names_of(hosts), dict[str, RankHistory]()
    for host, there in hosts.items():
        is_whole = len(hosts) > 1 and len(there) > 1 and all(h in slow for h in there)
        where = f" on {names[host]}" if len(hosts) > 1 else ""
        for history in (h for h in slow if h in there):
            named.setdefault(f"host {names[host]}" if is_whole else f"rank {history.rank}{where}", history)
    return named


def _slowdown(who: str, phase: str, history: RankHistory, *, is_own: bool) -> Slowdown:
    change = history.pace.change(phase)
    assert change is not None
    return Slowdown(who, phase, change.step, history.seen - change.t, change.before, change.now, is_own)
