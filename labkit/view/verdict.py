"""What a good colleague would say who looked over your shoulder: the one or two things that matter about a run.

Pure functions of what the ranks recorded. Each rule is a function that returns a sentence or nothing; the first rules
are the ones to act on first.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from labkit.record import RankHistory, RunReader
from labkit.record.units import gib

__all__ = ["verdict"]

WARM_STEPS = 5  # fewer say nothing
INPUT_BOUND = 0.15  # of the step time
STRAGGLES = 0.10
COMMUNICATES = 0.20
NEARLY_FULL = 0.92
GROWS = 1.10
FLAT = 1.03
PHASES = {"input": "its input wait", "forward": "its forward", "optimizer": "its optimizer"}

Rule = Callable[[list[RankHistory]], str]


def verdict(reader: RunReader, limit: int = 2) -> list[str]:
    """At most `limit` sentences, the most urgent first; empty before there is anything to say."""
    histories = [h for h in reader.ranks.values() if h.totals["steps"] >= WARM_STEPS]
    if not histories:
        return []
    said = [sentence for rule in RULES if (sentence := rule(histories))]
    return said[:limit]


def not_a_number(histories: list[RankHistory]) -> str:
    """A loss that is no number any more is not worth another step."""
    bad = {h: h.lost_at for h in histories if h.lost_at is not None}
    if not bad:
        return ""
    first = [h for h, step in bad.items() if step == min(bad.values())]
    since = f"step {min(bad.values())}"
    when = f"since {since}" if len(first) == len(bad) else f"first on {_names(first)}, at {since}"
    return f"the loss is not a number on {_names(list(bad))}, {when}: lower the learning rate, or look at the data"


def retries(histories: list[RankHistory]) -> str:
    """CUDA's allocator had to give memory back and ask again: the next step may fail."""
    worst = max(histories, key=lambda h: h.allocation_retries)
    if not worst.allocation_retries:
        return ""
    return f"{worst.allocation_retries:.0f} allocation retries on rank {worst.rank}: close to out of memory"


def nearly_full(histories: list[RankHistory]) -> str:
    full = [h for h in histories if h.memory_limit and h.memory_peak > NEARLY_FULL * h.memory_limit]
    if not full:
        return ""
    worst = max(full, key=lambda h: h.memory_peak)
    return f"rank {worst.rank} peaked at {gib(worst.memory_peak)} of {gib(worst.memory_limit)}: close to out of memory"


def input_bound(histories: list[RankHistory]) -> str:
    """The device waits for data: more DataLoader workers, or cheaper samples."""
    worst = max(histories, key=lambda h: h.recent_share("input"))
    share = worst.recent_share("input")
    if share < INPUT_BOUND:
        return ""
    who = "" if len(histories) == 1 else f" on rank {worst.rank}"
    return f"input-bound: {share:.0%} of each step waits for data{who}"


def straggler(histories: list[RankHistory]) -> str:
    """The rank that the others wait for.

    In synchronous training all ranks' step times are alike, because the fast wait in backward for the slow. What a
    rank does on its own, input, forward and optimizer, tells who is late.
    """
    if len(histories) < 2:
        return ""
    step = max(h.recent_step_seconds for h in histories)
    own = {h.rank: sum(h.recent_seconds(phase) for phase in PHASES) for h in histories}
    usual = median(own.values()) if len(own) > 2 else min(own.values())
    late = max(histories, key=lambda h: own[h.rank])
    extra = own[late.rank] - usual
    if not step or extra < STRAGGLES * step:
        return ""
    others = [h for h in histories if h is not late]
    phase = max(PHASES, key=lambda p: late.recent_seconds(p) - median(h.recent_seconds(p) for h in others))
    return f"rank {late.rank} is the straggler: +{extra / step:.0%} of the step time, {PHASES[phase]}"


def communication(histories: list[RankHistory]) -> str:
    """What the links cost: the time that even the rank which waits least for the others waits for collectives."""
    shares = [h.recent_share("communication") for h in histories if h.communicates]
    if len(shares) < max(2, len(histories)) or min(shares) < COMMUNICATES:
        return ""
    return f"communication {min(shares):.0%} of the step"


def grows(histories: list[RankHistory]) -> str:
    """Memory that rises all through a run ends it sooner or later: a list of losses with their graphs, for one."""
    for history in histories:
        lows = [low for _, low, _, _ in history.series["memory"].points()]
        quarter = len(lows) // 4
        if quarter < 4:
            continue
        parts = [min(lows[i * quarter : (i + 1) * quarter]) for i in range(1, 4)]  # the first is warm-up
        if parts[0] * GROWS < parts[1] * GROWS**0.5 < parts[2]:
            return f"memory grows on rank {history.rank}: from {gib(parts[0])} to {gib(parts[2])}"
    return ""


def at_ease(histories: list[RankHistory]) -> str:
    """Nothing to act on: how much memory it takes, and that data come in time."""
    worst = max(histories, key=lambda h: h.memory_peak)
    if not worst.memory_peak:
        return ""
    of = f" of {gib(worst.memory_limit)}" if worst.memory_limit else ""
    lows = [low for _, low, _, _ in worst.series["memory"].points()]
    flat = len(lows) >= 4 and max(lows[1:]) <= FLAT * min(lows[1:])
    return f"memory {'flat at' if flat else 'peaks at'} {gib(worst.memory_peak)}{of}"


RULES: tuple[Rule, ...] = (not_a_number, retries, nearly_full, input_bound, straggler, communication, grows, at_ease)


def _names(histories: list[RankHistory]) -> str:
    return ("rank " if len(histories) == 1 else "ranks ") + ", ".join(str(h.rank) for h in histories)
