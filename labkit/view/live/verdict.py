"""States the one or two most important observations about a run, such as a straggler or slow input.

Pure functions of what the ranks recorded and of the run's state. Each rule returns a sentence or an empty string; the
most urgent rules come first. Once a run has ended, its verdict is about the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from operator import itemgetter
from statistics import median, quantiles

from labkit import words
from labkit.metric_names import Directions, is_a_loss, is_evaluated
from labkit.record import RankHistory, RunReader, State
from labkit.series import Point, Series
from labkit.text import gib
from labkit.view.live.disturbances import disturbances
from labkit.view.live.hosts import by_host, names_of, rank_ranges, watched
from labkit.view.live.slowdowns import slowdowns
from labkit.words import seconds

SENTENCES = 3  # that are shown: whether it learns, what limits it, whether it fits
WARM_STEPS = 5  # no verdict before that
INPUT_BOUND = 0.15  # fraction of the step time, as are the next three
STRAGGLES = 0.10
COMMUNICATES = 0.20
COMPUTES = 0.50
NEARLY_FULL = 0.92
GROWS = 1.10
COPIED = 0.01  # of the host's memory
LEAK_STEPS = 20  # before them memory also grows without a leak
LEAK_SHARE, LEAK_SECONDS = 0.02, 60.0  # of the memory there is, and how long at least, if it deserves an alert
PHASES = {"input": "input wait", "forward": "forward", "optimizer": "optimizer"}
X = itemgetter(0)
FEWEST = 4  # evaluations
PATIENCE = 3  # evaluations without a better value
RISES = 1.05  # a loss this many times its best
LOSSES = 50  # fewest of them
APART = 5  # of fewer, the fewest at the start and at the end
NEWEST, SHARE = 20, 0.2  # losses whose halves are compared: at least this many, in a long run this share
OUTLIER = 3.0  # interquartile ranges above the upper quartile: no scatter
ERRORS = 3.0  # standard errors by which means differ, if that is not noise


@dataclass(frozen=True)
class Ranks:
    """Holds the ranks' histories and what several rules derive from them, which is computed once, because there may be
    thousands of ranks."""

    histories: list[RankHistory]

    @cached_property
    def hosts(self) -> dict[str, list[RankHistory]]:
        return by_host(self.histories)

    @cached_property
    def names(self) -> dict[str, str]:
        """The hosts' names as they are shown."""
        return names_of(self.hosts)

    @cached_property
    def step_seconds(self) -> float:
        """The step time of the slowest rank."""
        return max((h.recent_step_seconds for h in self.histories), default=0.0)

    @cached_property
    def late_host(self) -> tuple[str, float, str] | None:
        """The host all of whose ranks are later than the others, as (host, lateness as a fraction of a step, phase)."""
        if len(self.hosts) < 2 or not self.step_seconds:
            return None
        least = {host: min(h.own_seconds for h in own) for host, own in self.hosts.items()}
        late = max(least, key=lambda host: least[host])
        others = [h for host, own in self.hosts.items() if host != late for h in own]
        extra = (least[late] - median(h.own_seconds for h in others)) / self.step_seconds
        return (late, extra, _most_apart(self.hosts[late], others)) if extra >= STRAGGLES else None

    @cached_property
    def late_rank(self) -> tuple[RankHistory, float, str] | None:
        """The rank that the others wait for, as (history, seconds that it is behind in a step, phase); None if they
        wait for its whole host."""
        if len(self.histories) < 2 or slow_host(self):
            return None
        late = max(self.histories, key=lambda h: h.own_seconds)
        own = [h.own_seconds for h in self.histories]
        extra = late.own_seconds - (median(own) if len(own) > 2 else min(own))
        if not self.step_seconds or extra < STRAGGLES * self.step_seconds:
            return None
        return late, extra, _most_apart([late], [h for h in self.histories if h is not late])

    @cached_property
    def waiting_hosts(self) -> dict[str, float]:
        """Hosts all of whose ranks wait for data, with the smallest fraction of a step that one of them waits."""
        least = {host: min(h.recent_share("input") for h in own) for host, own in self.hosts.items()}
        return {host: share for host, share in least.items() if share >= INPUT_BOUND}

    def name(self, history: RankHistory) -> str:
        """`rank 3`, or with several hosts `rank 3 on node1`."""
        where = f" on {self.names[history.host]}" if len(self.names) > 1 else ""
        return f"rank {history.rank}{where}"


Rule = Callable[[Ranks], str]


def verdict(reader: RunReader, state: State, limit: int = SENTENCES) -> list[str]:
    """At most `limit` sentences, the most urgent first; empty during warm-up."""
    matters, others = weighed(reader, state)
    return [*matters, *others][:limit]


def weighed(reader: RunReader, state: State) -> tuple[list[str], list[str]]:
    """What matters, the most urgent first, and what else there is to say, of which no sentence deserves to lead."""
    ranks = _warm(reader)
    if not ranks.histories:
        return [], []
    risks = [] if _is_out_of_memory(state) else [host_memory(ranks, reader), retries(ranks), nearly_full(ranks)]
    limits = [sentence for rule in LIMITS if (sentence := rule(ranks))]
    lost = not_a_number(ranks.histories)
    matters = [
        lost,
        *([] if state.is_final else risks),
        "" if lost else learning(ranks.histories, state, reader.folder.directions()) or training_loss(reader, state),
        "; ".join(each.sentence for each in disturbances(reader, state)),
        *[each.sentence(state) for each in slowdowns(reader, state)[:1]],
        *limits[:1],
        copies(ranks, reader),
        *limits[1:],
        grows(ranks) or workers_grow(ranks, reader),
        *(risks if state.is_final else []),
    ]
    others = ["" if limits else compute_bound(ranks), "" if lost or not _is_at_ease(state) else no_problem(ranks)]
    return [sentence for sentence in matters if sentence], [sentence for sentence in others if sentence]


def _is_out_of_memory(state: State) -> bool:
    return bool(state.cause and state.cause.out_of_memory)


def _is_at_ease(state: State) -> bool:
    """Whether nothing says that the run went wrong, of which its memory could be the reason."""
    return not state.cause and not state.wrong and state.stuck_since is None


def _warm(reader: RunReader) -> Ranks:
    return Ranks([h for h in reader.current.values() if h.totals["steps"] >= WARM_STEPS])


def host_verdicts(reader: RunReader) -> dict[str, str]:
    """Each host's problem in a few words, or an empty string; no hosts if there is only one."""
    ranks = _warm(reader)
    verdicts = {}
    for host in ranks.hosts if len(ranks.hosts) > 1 else ():
        verdicts[host] = _filled(reader, host).partition(",")[0]  # the table has the figures
        if (late := ranks.late_host) and late[0] == host and not verdicts[host]:
            verdicts[host] = f"slow: +{late[1]:.0%}, {PHASES[late[2]]}"
        if host in ranks.waiting_hosts and not verdicts[host]:
            verdicts[host] = f"waits for data: {ranks.waiting_hosts[host]:.0%}"
    return verdicts


def not_a_number(histories: Iterable[RankHistory]) -> str:
    """Once the loss is nan or infinite, further steps are wasted, unless it has become finite again."""
    bad = {h: h.lost_at for h in histories if h.lost_at is not None and h.has_lost_loss}
    if not bad:
        return ""
    step = min(bad.values())
    first = [h for h in bad if h.finite_at < step]  # or maybe: the steps between two records are not recorded
    at = f"step {step}" if all(h.finite_at == step - 1 for h in first) else f"step {step} at the latest"
    when = f"since {at}" if len(first) == len(bad) else f"(first on {_names(first)}, at {at})"
    return f"the loss is NaN or infinite on {_names(list(bad))} {when}: lower the learning rate or check the data"


def host_memory(ranks: Ranks, reader: RunReader) -> str:
    """On a host whose memory is full, the system kills a process. Reported only with several hosts."""
    names = ranks.names
    sentences = [
        f"host {name}: {filled}" for host, name in names.items() if len(names) > 1 and (filled := _filled(reader, host))
    ]
    return "; ".join(sentences[:2])


def retries(ranks: Ranks) -> str:
    """CUDA's allocator had to free cached memory and retry: the next step may run out of memory."""
    worst = max(ranks.histories, key=lambda h: h.allocation_retries)
    if not worst.allocation_retries:
        return ""
    return f"{worst.allocation_retries:.0f} allocation retries on {ranks.name(worst)}: nearly out of memory"


def nearly_full(ranks: Ranks) -> str:
    full = [h for h in ranks.histories if h.memory_limit and h.memory_peak > NEARLY_FULL * h.memory_limit]
    if not full:
        return ""
    worst = max(full, key=lambda h: h.memory_peak)
    of = f"{gib(worst.memory_peak)} of {gib(worst.memory_limit)}"
    return f"{ranks.name(worst)} peaked at {of}: nearly out of memory"


def input_bound(ranks: Ranks) -> str:
    """The device waits for data: use more DataLoader workers or cheaper samples."""
    worst = max(ranks.histories, key=lambda h: h.recent_share("input"))
    share = worst.recent_share("input")
    if share < INPUT_BOUND:
        return ""
    who = "" if len(ranks.histories) == 1 else f" on {ranks.name(worst)}"
    if worst.recent_share("restarts") > share / 2:
        waits, total = (seconds(worst.totals[name]) for name in ("restarts", "seconds"))
        return (
            f"the first step of each epoch waits until the DataLoader has started its workers again: {waits} of {total}"
            f"{who}; persistent_workers=True keeps them"
        )
    alone = sum(h.recent_share("input") >= INPUT_BOUND for h in ranks.histories) == 1
    if alone and (behind := ranks.late_rank) and (behind[0], behind[2]) == (worst, "input"):
        return ""  # straggler reports it
    waiting = ranks.waiting_hosts
    if waiting and len(waiting) < len(ranks.hosts):
        host = max(waiting, key=lambda name: waiting[name])
        if (late := ranks.late_host) and (late[0], late[2]) == (host, "input"):
            return ""  # slow_host reports it
        every = f"every rank of host {ranks.names[host]}"
        return f"input-bound: {waiting[host]:.0%} of each step is spent waiting for data on {every}"
    return f"input-bound: {share:.0%} of each step is spent waiting for data{who}"


def slow_host(ranks: Ranks) -> str:
    """The host that the others wait for: all of its ranks are late, by the measure used in `straggler`."""
    if ranks.late_host is None:
        return ""
    host, extra, phase = ranks.late_host
    numbers = {rank for h in ranks.hosts[host] for rank in h.node_ranks}
    if len(numbers) < 2:
        return ""
    behind = f"{seconds(extra * ranks.step_seconds)} ({extra:.0%} of the step) behind the others"
    late = rank_ranges(numbers)
    return f"host {ranks.names[host]} is the straggler: its ranks {late} are {behind}, mostly {PHASES[phase]}"


def straggler(ranks: Ranks) -> str:
    """The rank that the others wait for.

    In synchronous training all ranks have similar step times, because fast ranks wait in backward for slow ones. The
    time that a rank spends on its own work (input, forward, optimizer) shows which one is late.
    """
    if ranks.late_rank is None:
        return ""
    late, extra, phase = ranks.late_rank
    others = [h for h in ranks.histories if h is not late]
    other = ranks.name(others[0]) if len(others) == 1 else "the median rank"
    behind = f"{seconds(extra)} ({extra / ranks.step_seconds:.0%} of the step) behind {other}"
    return f"{ranks.name(late)} is the straggler: {behind}, mostly {PHASES[phase]}"


def communication(ranks: Ranks) -> str:
    """The cost of the links: the time in collectives of the rank that waits least for the others."""
    shares = [h.recent_share("communication") for h in ranks.histories if h.communicates]
    if len(shares) < max(2, len(ranks.histories)) or min(shares) < COMMUNICATES:
        return ""
    return f"communication takes {min(shares):.0%} of the step"


def leak(reader: RunReader) -> str:
    """As `grows` and `workers_grow`, but only of what has grown for a minute, by a part of the memory that matters."""
    ranks = _warm(reader)
    return grows(ranks, LEAK_SHARE, LEAK_SECONDS) or workers_grow(ranks, reader, LEAK_SHARE, LEAK_SECONDS)


def grows(ranks: Ranks, share: float = 0.0, least: float = 0.0) -> str:
    """Memory that keeps growing, for example by a list of losses with their graphs, ends in an out-of-memory error. It
    has grown by this `share` of the memory there is, and for at `least` seconds."""
    for history in ranks.histories:
        enough = share * (history.memory_limit or 0.0)
        if history.totals["steps"] >= LEAK_STEPS and (growth := _growth(history.series["memory"], enough, least)):
            return f"memory is growing on {ranks.name(history)}: {growth}"
    return ""


def workers_grow(ranks: Ranks, reader: RunReader, share: float = 0.0, least: float = 0.0) -> str:
    """As `grows`, of the workers of DataLoaders, which for example keep what they have decoded."""
    for history in ranks.histories:
        samples = watched(reader, history.host)
        pss = samples.workers_pss.get(history.rank) if samples else None
        if samples and pss and (growth := _growth(pss, share * (samples.memory_total or 0.0), least)):
            return f"memory is growing in the DataLoader workers of {ranks.name(history)}: {growth} (PSS)"
    return ""


def _growth(memory: Series, enough: float, least: float) -> str:
    points = memory.points()
    lows = [low for _, low, _, _ in points]
    quarter = len(lows) // 4
    if quarter < 4 or points[-1][0] - points[0][0] < least:
        return ""
    parts = [min(lows[i * quarter : (i + 1) * quarter]) for i in range(1, 4)]  # the first is warm-up
    grew = parts[0] * GROWS < parts[1] * GROWS**0.5 < parts[2]
    return f"from {gib(parts[0])} to {gib(parts[2])}" if grew and parts[2] - parts[0] >= enough else ""


def copies(ranks: Ranks, reader: RunReader) -> str:
    """A Python list or dict that forked workers read is copied page by page, because reading an object writes its
    reference count. What that takes does not matter everywhere."""
    for host in ranks.hosts:
        samples = watched(reader, host)
        if samples and samples.memory_total and samples.copied > COPIED * samples.memory_total:
            where = f" on {ranks.names[host]}" if len(ranks.names) > 1 else ""
            return (
                f"DataLoader workers{where} have copied {gib(samples.copied)} of memory that they share with their "
                "ranks: a list or dict of Python objects is copied as they read it; a tensor, numpy or pyarrow array "
                "is not"
            )
    return ""


def no_problem(ranks: Ranks) -> str:
    """Nothing to act on: report the memory. Ranks on the CPU share that of their host."""
    worst = max(ranks.histories, key=lambda h: h.memory_peak)
    if not worst.memory_peak:
        return ""
    if not worst.memory_limit:
        return f"memory peaks at {gib(worst.memory_peak)}"
    shares_it = (
        [h for h in ranks.histories if h.device == "cpu" and h.host == worst.host] if worst.device == "cpu" else [worst]
    )
    peak, together = sum(h.memory_peak for h in shares_it), f" of {len(shares_it)} ranks" if len(shares_it) > 1 else ""
    return f"memory fits: peak {gib(peak)}{together}, {peak / worst.memory_limit:.0%} of {gib(worst.memory_limit)}"


def compute_bound(ranks: Ranks) -> str:
    """Name the phases of a step on the rank that waits least. Empty if they are unknown, or if it is unknown how long
    several ranks wait for each other in backward."""
    if len(ranks.histories) > 1 and not all(h.communicates for h in ranks.histories):
        return ""
    least = min(ranks.histories, key=lambda h: h.recent_share("input") + h.recent_share("communication"))
    waits = {phase: least.recent_share(phase) for phase in ("communication", "input")}
    computes = sum(least.recent_share(phase) for phase in ("forward", "backward", "optimizer"))
    if computes < COMPUTES:
        return ""
    shares = {name: round(share, 2) for name, share in {"compute": computes, **waits}.items()}
    shares["other"] = 1 - sum(shares.values())  # so that all add up to 100%
    return "compute-bound: " + ", ".join(f"{share:.0%} {name}" for name, share in shares.items() if share >= 0.005)


LIMITS: tuple[Rule, ...] = (slow_host, input_bound, straggler, communication)  # of the speed


def _filled(reader: RunReader, host: str) -> str:
    samples = watched(reader, host)
    if samples is None or not samples.memory_total or (samples.memory_used or 0.0) < NEARLY_FULL * samples.memory_total:
        return ""
    return f"memory nearly full, {gib(samples.memory_used)} of {gib(samples.memory_total)}"


def _most_apart(late: list[RankHistory], others: list[RankHistory]) -> str:
    """The phase with the largest difference in median seconds."""
    return max(
        PHASES, key=lambda p: median(h.recent_seconds(p) for h in late) - median(h.recent_seconds(p) for h in others)
    )


def _names(histories: list[RankHistory]) -> str:
    return ("rank " if len(histories) == 1 else "ranks ") + rank_ranges(h.rank for h in histories)


def learning(histories: list[RankHistory], state: State, directions: Directions) -> str:
    """`val_loss has risen since step 300 (best 0.5) while the training loss fell: overfitting`. If several metrics are
    evaluated, a loss counts, otherwise the first. One or two worse evaluations are only stated. Empty for fewer than
    four evaluations, and unless it is known whether lower or higher values are better."""
    evaluated = [
        (name, history)
        for history in histories[:1]
        for name in history.scalars
        if is_evaluated(name) and directions.better(name) and len(history.scalars[name].points()) >= FEWEST
    ]
    if not evaluated:
        return ""
    name, history = next((each for each in evaluated if is_a_loss(each[0])), evaluated[0])
    series, is_lower = history.scalars[name], directions.better(name) == "lower"
    points = series.points()
    values = [low if is_lower else -high for _, low, high, _ in points]
    best = min(range(len(points)), key=values.__getitem__)
    since = len(points) - 1 - best
    at, value, newest = points[best][0], values[best] if is_lower else -values[best], points[-1][3]
    are_alone = series.added == len(points)  # each evaluation in a bin of its own
    figure = words.quantity(value, 4)
    if not since and newest == value:
        improves = "was still improving at the end" if state.is_final else "is still improving"
        before = f" ({words.quantity(points[-1 - PATIENCE][3], 4)} three evaluations before)" if are_alone else ""
        return f"{name} {improves}: {figure}, the best so far{before}"
    where = _step_of(history, name, value, at)
    if since < PATIENCE:
        return f"{name}: {words.quantity(newest, 4)}, best {figure} at {where}"
    if is_a_loss(name) and newest > RISES * value > 0 and _falls(history, at):
        return f"{name} has risen since {where} (best {figure}) while the training loss fell: overfitting"
    return f"{name} was best at {where}: {figure}, no better {f'in {since} evaluations ' if are_alone else ''}since"


def training_loss(reader: RunReader, state: State) -> str:
    """`loss is still falling: median 1.87 over the last 40 steps, 2.31 over the 40 before`, or since which step it has
    not fallen. It compares places in the order of all losses, which a few very large losses do not decide. Only a
    change of more than three standard errors counts; that of a longer part counts if the newest losses do not
    contradict it. Of fewer than 50 losses only the first and the last quarter are compared."""
    steps = next((points for line in reader.lines("step").values() if (points := line.points())), [])
    losses = _mean_losses(reader)
    count, means = len(losses), [mean for _, mean in losses]
    if count < LOSSES or not steps:
        return _apart(means)
    newest = max(NEWEST, round(SHARE * count))
    parts = [*range(newest, count, newest), count]  # of the losses, from the end
    ordered = sorted(means)
    places = [(bisect_left(ordered, mean) + bisect_right(ordered, mean)) / 2 for mean in means]
    halves = {part: _halves(places[-part:]) for part in parts}
    changed = next((part for part in parts if abs(halves[part].change) > halves[part].noise), 0)
    flat = max((part for part in parts if part < (changed or part + 1)), default=newest)
    first, last = (_step_at(steps, losses[-part][0]) for part in (changed or flat, 1))
    if changed and abs(halves[changed].change * flat / changed - halves[flat].change) <= halves[flat].noise:
        falls, (be, at_the_end) = halves[changed].change < 0, ("was", " at the end") if state.is_final else ("is", "")
        how = f"{be} {'still falling' if falls else 'rising'}{at_the_end}"
        half = changed // 2
        before, after = (words.quantity(median(part), 4) for part in (means[-changed:][:half], means[-half:]))
        steps_each = (last - first) // 2 + 1
        return f"loss {how}: median {after} over the last {steps_each:,} steps, {before} over the {steps_each:,} before"
    if not changed:
        flat = count - _outliers_before_scatter(means)
    start = "the restart" if reader.restarts else "the start"
    since = start if flat == count else f"step {_step_at(steps, losses[-flat][0]):,}"
    typical = words.quantity(median(means[-flat:]), 4)
    return f"loss has not fallen by more than its noise since {since}: median {typical}"


def _apart(means: Sequence[float]) -> str:
    """Whether all of the last losses are lower, or higher, than all of the first. That is chance in one of 126 runs."""
    quarter = len(means) // 4
    first, last = means[:quarter], means[-quarter:]
    if quarter < APART or max(min(first), min(last)) <= min(max(first), max(last)):
        return ""
    before, after = (words.quantity(median(part), 4) for part in (first, last))
    how = "fell" if max(last) < min(first) else "rose"
    return f"loss {how} from {before} to {after} (medians of the first and the last {quarter} losses recorded)"


def _mean_losses(reader: RunReader) -> list[tuple[float, float]]:
    """(x, mean over the ranks) since the last restart, because a restarted run repeats some steps."""
    restart = max(reader.restarts, default=0.0)
    lines = [line.points() for line in reader.lines("loss").values()]
    ranks = [new for points in lines if (new := points[bisect_left(points, restart, key=X) :])]
    if not ranks:
        return []
    count = min(map(len, ranks))
    each = zip(*([point[3] for point in points[-count:]] for points in ranks), strict=True)
    return [(point[0], sum(losses) / len(losses)) for point, losses in zip(ranks[0][-count:], each, strict=True)]


@dataclass(frozen=True)
class _Halves:
    """How much the means of the first and the second half of some places differ, and may differ by chance."""

    change: float
    noise: float


def _halves(places: Sequence[float]) -> _Halves:
    half = len(places) // 2
    parts = places[:half], places[-half:]
    before, after = (sum(part) / half for part in parts)
    squares = sum(
        (place - mean) * (place - mean) for part, mean in zip(parts, (before, after), strict=True) for place in part
    )
    return _Halves(after - before, ERRORS * sqrt(squares / (half * (half - 1))))


def _outliers_before_scatter(means: Sequence[float]) -> int:
    """How many of the first losses are above all that the scatter of the second half explains, in which the order of
    losses counts a short steep fall for as little as any other."""
    lower, _, upper = quantiles(means[len(means) // 2 :])
    highest = upper + OUTLIER * (upper - lower)
    return next(i for i, mean in enumerate(means) if mean <= highest)


def _step_of(history: RankHistory, name: str, value: float, x: float) -> str:
    """`step 120`, at which a value was first reported; if that is not known, `about step 120` at x."""
    if (step := history.steps_of_extremes.get(name, {}).get(value)) is not None:
        return f"step {step:,}"
    return f"about step {_step_at(history.series['step'].points(), x):,}"


def _step_at(steps: Sequence[Point], x: float) -> int:
    return int(steps[max(0, bisect_right(steps, x, key=X) - 1)][3]) if steps else 0


def _falls(history: RankHistory, since: float) -> bool:
    """Whether the mean training loss of the last third since then is below that of the first third."""
    losses = [last for x, _, _, last in history.series["loss"].points() if x >= since]
    third = len(losses) // 3
    return third > 0 and sum(losses[-third:]) < sum(losses[:third])
