"""Finds ranks that have left out a collective or a batch: from then on their calls meet later ones of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from labkit.files import in_parallel
from labkit.ring import (
    CALLED_IN_JOIN,
    COUNTED,
    IN_BACKWARD,
    JOINED,
    MOST,
    NO_GRAPH,
    REDUCED,
    Now,
    PythonCall,
    RingReader,
    decoded,
)
from labkit.witness.evidence import Evidence, Testimony
from labkit.witness.finding import Finding, named
from labkit.witness.mismatch import Mismatch, first_mismatch
from labkit.witness.rule import Rule

STAYS = 3  # steps: what a rank does in that many is usual, and a difference that lasts as long is no accident of timing
RARELY = 20  # a rank that fetches another batch more often than once in that many steps means to
CONSEQUENCE = "since then each of its collectives meets a later one, and gradients of different steps are averaged"
WITHIN, BETWEEN = "in its backward pass", "between two backward passes"
ADVICE = (
    "Let every rank call every collective: a rank without data takes part with a loss of zero that depends on the "
    "model's output, such as output.sum() * 0, and what one rank decides alone (`continue`, `break`, `if`) is decided "
    "by all, for example by an all_reduce of a flag."
)
ALIKE = (
    "Give every rank a tensor of the same shape and dtype, for example padded to the largest one, and call the same "
    "collectives in the same order on all ranks."
)
OF_FSDP = ("all_gather_into_tensor", "reduce_scatter_tensor")
WORDS = COUNTED.size // 4  # of a step, see COUNTED: number, fetched and passes, calls, optimizer and flags, sum
BATCHES, CALLS, FLAGS = 1, 2, 3


class Slips(Rule):
    kind = "slip"
    title = "A rank left out a collective, a batch (`skip`), or a step"
    declared = "the group over which DDP or FSDP averages gradients: every rank of it makes every one of its calls"
    observed = (
        "after the same backward pass, which averages gradients, the ranks have made different numbers of the group's "
        "collectives, and this stays so; a note, unless the run has failed by it: a rank fetched another batch for a "
        "step"
    )
    silent = (
        "fewer than three steps since, unless the run has failed or is stuck; once the ranks were within Join; passes "
        "that average nothing; groups other than that of the first DDP model; a rank that fetches further batches "
        "more often than in one of twenty steps"
    )
    limits = "ranks that do the same in every step until one of them ends are not seen while they run"
    explains = ("replicas", "settings")

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._mismatch: Finding | None = None

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        groups = evidence.counted
        if not groups and evidence.may_have_failed_by_a_collective:
            groups = [tuple(evidence.ranks)]
        compared = [self._groups.setdefault(ranks, _Group(ranks)) for ranks in groups]
        for group in compared:
            group.compare(evidence)
            if found := group.slip(evidence) or group.skip(evidence, certainly=True):
                return [found]
        is_stuck = evidence.is_stuck and not evidence.outcome
        if is_stuck or evidence.may_have_failed_by_a_collective:
            self._mismatch = _of_mismatch(evidence)
        elif evidence.outcome != "stopped":  # then it was stuck
            self._mismatch = None
        if self._mismatch:
            return [self._mismatch]
        later = (group.behind(evidence) or group.skip(evidence) for group in compared)
        return filter(None, [next(filter(None, later), None)])


@dataclass
class _Group:
    """What is known of the ranks of a group. `apart` is the step since which the numbers of their collectives differ,
    0 if they agree, and `made` how many each made in it; `is_anchored`: the backward passes around it averaged."""

    ranks: tuple[int, ...]
    compared: int = 0  # the newest step that is
    looks: int = 0  # for which they have been apart
    apart: int = 0
    made: dict[int, int] = field(default_factory=dict)
    is_anchored: bool = False
    is_over: bool = False  # their steps are not the same ones any more
    now: dict[int, Now] = field(default_factory=dict)
    skipped: tuple[int, dict[int, int]] | None = None  # the first step with different fetches, and these
    skips: int = 0
    found: Finding | None = None

    def compare(self, evidence: Evidence) -> None:
        """Compare the steps that all ranks have made since the last time. Equal ones are compared as bytes."""
        rings = [evidence.ranks[rank].ring for rank in self.ranks]
        read = in_parallel(lambda ring: ring.since(max(1, self.compared)), rings)
        self.now = {rank: now for rank, (now, _) in zip(self.ranks, read, strict=True) if now}
        newest = min((now.number for now in self.now.values()), default=0)
        self.looks += bool(self.apart)
        if len(self.now) < len(self.ranks) or newest <= self.compared or self.is_over or self.found:
            return
        steps = [memoryview(data[: len(data) // COUNTED.size * COUNTED.size]).cast("I") for _, data in read]
        first = max(each[0] for each in steps)
        versions: dict[bytes, tuple[memoryview, list[int]]] = {}
        for rank, words in zip(self.ranks, steps, strict=True):
            start, end = (first - words[0]) * WORDS, (newest + 1 - words[0]) * WORDS
            columns = b"".join(bytes(words[start + column : end : WORDS]) for column in (BATCHES, CALLS, FLAGS))
            versions.setdefault(columns, (words[start:end], []))[1].append(rank)
        self.is_over = any(flags >> 16 & JOINED for words, _ in versions.values() for flags in words[FLAGS::WORDS])
        if not self.is_over:
            self._compare([*versions.values()], first)
            self.compared = newest

    def _compare(self, versions: list[tuple[memoryview, list[int]]], first: int) -> None:
        if len(versions) == 1:
            self.apart = self.looks = 0
            return
        own = {rank: words for words, ranks in versions for rank in ranks}
        for at in range(0 if first > self.compared else WORDS, len(versions[0][0]), WORDS):
            if len({words[at + CALLS] for words, _ in versions}) == 1:
                self.apart = self.looks = 0
                batches = {words[at + BATCHES] for words, _ in versions}
                if len(batches) > 1 and len({both >> 16 for both in batches}) == 1:
                    self.skips += 1
                    self.skipped = self.skipped or (first + at // WORDS, {r: w[at + 1] & MOST for r, w in own.items()})
            elif not self.apart and at:
                self.apart = first + at // WORDS
                self.made = {rank: words[at + CALLS] - words[at - WORDS + CALLS] for rank, words in own.items()}
                before = all(words[at - WORDS + FLAGS] >> 16 & REDUCED for words, _ in versions)
                self.is_anchored = before and any(words[at + FLAGS] >> 16 & REDUCED for words, _ in versions)
            elif not self.apart:  # since a step that is no longer in the ring
                self.is_over = True
                return

    def slip(self, evidence: Evidence) -> Finding | None:
        """The numbers of collectives differ, and stay apart."""
        if self.found or not self.apart:
            return self.found
        lasts = self.compared - self.apart + 1 >= STAYS and self.looks
        by_hand = evidence.may_have_failed_by_a_collective and self._called_in_every_step(evidence)
        goes_on = not evidence.is_stuck and evidence.outcome != "failed"
        if self.is_over or not (self.is_anchored or by_hand) or (goes_on and not lasts):
            return None
        made, number = self.made, self.apart
        counts = Counter(made.values())
        usual = max(counts, key=lambda calls: (counts[calls], calls))
        wrong = [rank for rank in self.ranks if made[rank] != usual]
        rank, other = wrong[0], next(r for r in self.ranks if made[r] == usual)
        here, there = (_Step.of(evidence.ranks[r].ring, number) for r in (rank, other))
        is_late = 0 < here.passes != there.passes > 0 and here.made * there.passes == there.made * here.passes
        if is_late:
            return self._step_left_out(evidence, *((rank, here) if here.passes > there.passes else (other, there)))
        difference = abs(usual - made[rank])
        is_known = made[rank] < usual and (counts[usual] > len(wrong) or here.has_left_out)
        calls = f"left out {_collectives(difference)}"
        if not is_known:
            calls = f"called {_collectives(difference)} {'fewer' if made[rank] < usual else 'more'} than"
        in_backward = here.before == there.before
        where = WITHIN if in_backward else BETWEEN
        what = f"that {named([other])} called {where}" if is_known else f"{named([other])} {where}"
        found = Finding(
            "slip",
            f"{named(wrong)} {calls} {what}; {CONSEQUENCE}",
            here.why(evidence) if in_backward else f"it went on to its next one{evidence.at(here.line)}",
            advice=ADVICE,
            since=here.step if in_backward else here.step - 1,
            ranks=tuple(wrong),
            line=here.line,
            values=tuple(f"rank {each}: {_collectives(calls)}" for each, calls in made.items()),
        )
        self.found = found if self.is_anchored else None
        return found

    def _step_left_out(self, evidence: Evidence, rank: int, step: _Step) -> Finding:
        """A rank has made the backward passes of two steps in one."""
        late = tuple(each for each in self.ranks if self.made[each] == self.made[rank])
        self.found = Finding(
            "slip",
            f"{named(late)} left out an optimizer step that others made; since then each of its steps is of later "
            "batches",
            f"it went on to its next backward pass{evidence.at(step.line)}",
            "Let all ranks decide alike whether they make a step, for example by an all_reduce of a flag.",
            since=step.step,
            ranks=late,
            line=step.line,
        )
        return self.found

    def _called_in_every_step(self, evidence: Evidence) -> bool:
        """Whether all ranks called collectives in each of the last steps before they parted, so that these are the same
        steps even if no backward pass averages."""
        rings = (evidence.ranks[rank].ring for rank in self.ranks)
        before = range(self.apart - STAYS, self.apart)
        return before[0] > 0 and all(_Step.of(ring, number).made for ring in rings for number in before)

    def behind(self, evidence: Evidence) -> Finding | None:
        """A rank has gone on without a collective that it made in each of its last steps, while another one is in it.
        Only what ended the run shows that it is, so that the cause of the failure decides."""
        if not evidence.may_have_failed_by_a_collective or self.is_over:
            return None
        for rank, now in self.now.items():
            is_in_backward = bool(now.flags & IN_BACKWARD)
            ring, passes = evidence.ranks[rank].ring, now.passes + is_in_backward
            if not passes or not any(_is_earlier(other, now) for other in self.now.values()):
                continue
            steps = [_Step.of(ring, number) for number in range(now.number - STAYS + 1, now.number + 1)]
            made = {step.before if is_in_backward else step.made for step in steps if step.passes == passes}
            calls, last = now.calls - steps[-1].calls, steps[-1]
            if len(made) == 1 and (usual := made.pop()) > calls:
                between = is_in_backward or last.made == last.before
                why = _why(now.flags, now.loss, now.line, evidence)
                return Finding(
                    "slip",
                    f"{named([rank])} left out {_collectives(usual - calls)} {BETWEEN if between else WITHIN} that it "
                    "had called in every step before",
                    f"it went on to its next one{evidence.at(now.line)}" if between else why,
                    advice=ADVICE,
                    since=last.step if between else last.step + 1,
                    ranks=(rank,),
                    line=now.line,
                )
        return None

    def skip(self, evidence: Evidence, *, certainly: bool = False) -> Finding | None:
        """A rank fetched another batch for a step. Its data run out earlier, which is certain to be wrong once the
        others wait for its next backward pass."""
        if self.skipped is None or self.is_over:
            return None
        number, fetched = self.skipped
        counts = Counter(fetched.values())
        usual = max(counts, key=lambda batches: (counts[batches], -batches))
        more = [rank for rank in self.ranks if fetched[rank] > usual]
        if not more or not usual:
            return None
        rank, other = more[0], next(r for r in self.ranks if fetched[r] == usual)
        own = self.now[rank]
        waits = any(now.flags & IN_BACKWARD and now.number >= own.number for now in self.now.values())
        certain = evidence.may_have_failed_by_a_collective and waits and not own.flags & IN_BACKWARD
        if not certain and (certainly or self.skips * RARELY > self.compared):
            return None
        here = _Step.of(evidence.ranks[rank].ring, number)
        then = "its data ran out while others still trained" if certain else "its data run out earlier"
        return Finding(
            "skip",
            f"{named(more)} fetched {_batches(fetched[rank])} for a step for which {named([other])} fetched "
            f"{usual}; {then}",
            "it skipped a batch alone (`continue`?)",
            advice=ADVICE,
            certain=certain,
            since=here.step,
            ranks=tuple(more),
            line=here.line,
            values=tuple(f"rank {each}: {_batches(batches)}" for each, batches in fetched.items()),
        )


def _of_mismatch(evidence: Evidence) -> Finding | None:
    """A collective that some ranks called from Python and others did not, though they have gone on."""
    if any(each.of("join") for each in evidence.ranks.values()):
        return None
    one = first_mismatch(evidence)
    if one is None or one.of_pass:
        return _left_out_of_pass(one, evidence) if one else None
    callers, others, place, there = (
        named(one.callers),
        named(one.others),
        evidence.at(one.call.line),
        evidence.at(one.line),
    )
    called = f"{callers} called {_in_words(one.call, one.instead)}{place}"
    why, advice, ranks = "", ADVICE, one.callers + one.others
    if one.instead:
        what = f"{called} while {others} called {_in_words(one.instead, one.call)}{there}"
        is_own = one.instead.operation == one.call.operation and one.call.operation not in OF_FSDP
        advice = ALIKE if is_own else ADVICE
    elif one.is_due:
        what, ranks = f"{others} left out the `{one.call.operation}` that {callers} called{place}", one.others
        why = f"{'it' if len(ranks) == 1 else 'they'} went on to {one.where}{there}"
    else:
        what = f"{called} while {others} went on to {one.where}{there}"
        why = "since then they do not make the same sequence of calls"
    is_of_next = one.call.passes or one.call.in_backward or one.call.operation in OF_FSDP
    step = one.call.step + bool(is_of_next)
    return Finding("slip", what, why, advice=advice, since=step, ranks=ranks, line=one.call.line)


def _left_out_of_pass(one: Mismatch, evidence: Evidence) -> Finding | None:
    """Ranks that have ended a backward pass without the collectives that others still wait for in it; None if this one
    called some of them, or did not in the pass before."""
    ring, in_pass = evidence.ranks[one.others[0]].ring, evidence.ranks[one.callers[0]].ring.now()
    now = ring.now()
    if in_pass is None or now is None:
        return None
    step, before = _Step.of(ring, in_pass.number + 1), _Step.of(ring, in_pass.number)
    flags, loss, line = (step.flags, step.loss, step.line) if step.calls else (now.flags, now.loss, now.line)
    if flags & REDUCED or not before.flags & REDUCED:
        return None
    what = f"{named(one.others)} left out the collectives of a backward pass that {named(one.callers)} is in"
    why = _why(flags, loss, line, evidence)
    return Finding("slip", what, why, advice=ADVICE, since=in_pass.number + 1, ranks=one.others, line=line)


def _in_words(call: PythonCall, other: PythonCall | None) -> str:
    """`all_reduce` of 4 float32 elements; the size only if that is what differs from the other call."""
    if other is None or other.operation != call.operation:
        return f"`{call.operation}`"
    return f"`{call.operation}` of {call.elements:,} {call.dtype} element{'s' * (call.elements != 1)}"


@dataclass(frozen=True)
class _Step:
    """A step of one rank: how many collectives it had called after it, and of these in it and `before` its backward
    pass; the script's number of the step and the line of the pass."""

    calls: int
    made: int
    before: int
    passes: int
    step: int
    line: int
    loss: float
    flags: int

    @classmethod
    def of(cls, ring: RingReader, number: int) -> _Step:
        steps = decoded(ring.counted(number - 1, number))
        earlier, step, seen = steps.get(number - 1), steps.get(number), ring.seen(number)
        if step is None or seen is None:
            return cls(0, 0, 0, 0, number, 0, float("nan"), 0)
        base = earlier.calls if earlier else 0
        place = seen.step, seen.line, seen.loss
        return cls(step.calls, step.calls - base, seen.before - base, step.passes, *place, step.flags)

    @property
    def has_left_out(self) -> bool:
        return bool(self.flags & NO_GRAPH) or not self.passes

    def why(self, evidence: Evidence) -> str:
        if not self.passes:
            return f"it made a step without a backward pass; its newest one was{evidence.at(self.line)} before"
        return _why(self.flags, self.loss, self.line, evidence)


def _is_earlier(other: Now, now: Now) -> bool:
    """Whether a rank has not got as far as another one, which is in a backward pass or has ended one."""
    if other.number != now.number:
        return other.number < now.number
    if other.passes != now.passes:
        return other.passes < now.passes
    return bool(now.flags & IN_BACKWARD and not other.flags & IN_BACKWARD)


def _collectives(count: int) -> str:
    return "one collective" if count == 1 else f"{count} collectives"


def _batches(count: int) -> str:
    return "one batch" if count == 1 else f"{count} batches"


def _why(flags: int, loss: float, line: int, evidence: Evidence) -> str:
    place = evidence.at(line)
    if not flags & NO_GRAPH:
        return f"it was at{place}" if place else ""
    shown = f", {loss:.4g}," if loss == loss else ""
    return f"the loss of its backward pass{shown} has no graph through the model{place}"


class JoinedCalls(Rule):
    kind = "join"
    title = "A collective within Join that nobody answers"
    declared = "Join: ranks whose inputs have ended answer the collectives of its joinables, and no others"
    observed = "the script calls another collective of Join's group after the inputs of a rank have ended"
    silent = "inputs that are even; joinables of the script's own; `throw_on_early_termination`; other groups"
    limits = (
        "a collective that the script imported by its name before, as in `from torch.distributed import all_reduce`"
    )
    explains = ("slip", "replicas")

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        lines = (line for testimony in evidence.ranks.values() for line in testimony.of("join_call"))
        called = {(line.values["n"], line.values["name"]): line.line for line in lines}
        for (number, name), line in called.items():
            spans = {rank: _span(testimony, number) for rank, testimony in evidence.ranks.items()}
            ended = {rank: span[1] for rank, span in spans.items() if span and span[1] is not None}
            if ended:
                rank, steps = min(ended.items(), key=lambda each: each[1])
                for other, span in spans.items():
                    if span and (step := _called_after(evidence.ranks[other].ring, span, steps)):
                        return [self._finding(evidence, name, line, rank, other, step)]
        return []

    @staticmethod
    def _finding(evidence: Evidence, name: str, line: int, rank: int, other: int, step: int) -> Finding:
        return Finding(
            "join",
            f"{named([other])} calls `{name}`{evidence.at(line)} within Join, and the inputs of {named([rank])} have "
            "ended: it does not call it, and Join answers only the collectives of DDP",
            advice=f"Call `{name}` after the Join, or in a Joinable of your own whose hook answers it.",
            since=step,
            ranks=(other,),
            line=line,
        )


def _span(testimony: Testimony, number: int) -> tuple[int, int | None] | None:
    """The step after which a rank entered a Join, and to how many steps its calls within belong, None if they go on."""
    begins, ends = testimony.of("join", n=number), testimony.of("join_end", n=number)
    if not begins:
        return None
    start = begins[0].number
    return start, ends[0].number - start + bool(ends[0].values["pending"]) if ends else None


def _called_after(ring: RingReader, span: tuple[int, int | None], steps: int) -> int:
    """The first step within a Join with a collective of the script's own after so many steps; 0 if there is none."""
    start, own = span
    now, data = ring.since(start + steps + 1)
    if now is None:
        return 0
    called = [step.number for step in decoded(data).values() if step.flags & CALLED_IN_JOIN]
    called += [now.number + 1] if now.flags & CALLED_IN_JOIN else []
    return next((step for step in called if start + steps < step and (own is None or step <= start + own)), 0)
