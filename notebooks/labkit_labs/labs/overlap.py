"""Calculates which all-reduces of a DDP step backward hides and who waits for whom; reads the same from a profile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from statistics import median

from labkit.run import Run
from labkit.spans import COMMUNICATION, COMPUTE, WAITING, Span, intersection, subtracted, total, union
from labkit.write import Script
from labkit_labs.lesson import ONE_CORE
from labkit_labs.on_ranks import cells_text

__all__ = ["all_reduces", "parts", "pauses", "simulated", "sleeping", "straggler"]

HIDDEN = 0.5  # of an all-reduce's time: from here on it counts as hidden


def simulated(
    layers: int,
    forward: float,
    backward: float,
    send: float,
    *,
    buckets: int | None = None,
    slow: float = 0.0,
    slow_rank: int = 1,
    ranks: int = 2,
) -> list[Span]:
    """`forward` and `backward` are seconds of a layer, `send` those of all gradients in one all-reduce, which ends when
    the last rank has joined and `send / buckets` has passed. `slow_rank` starts to compute `slow` seconds later, within
    its forward. By default each layer is a bucket."""
    buckets = buckets or layers
    begins = [layers * forward + (slow if rank == slow_rank else 0.0) for rank in range(ranks)]
    spans = [Span(rank, "forward", 0.0, begin) for rank, begin in enumerate(begins)]
    spans += [Span(rank, "backward", begin, begin + layers * backward) for rank, begin in enumerate(begins)]
    free = 0.0  # when the last all-reduce has ended
    for bucket in range(1, buckets + 1):
        ready = [begin + layers * backward * bucket / buckets for begin in begins]
        end = max(*ready, free) + send / buckets
        spans += [Span(rank, "all_reduce", max(free, at), end) for rank, at in enumerate(ready)]
        free = end
    return spans + [Span(rank, WAITING, begin + layers * backward, free) for rank, begin in enumerate(begins)]


def sleeping(strategy: str) -> Script:
    """A script of that strategy whose layers sleep, as `pauses` says; its samples are noise."""
    cells = Script.parse(cells_text("sleeping_model")).cells
    return Script.load(strategy).with_cells(model=cells["model"].text, data=cells["data"].text)


def pauses(layers: int, forward: float, backward: float, slow: float = 0.0, slow_rank: int = -1) -> dict[str, str]:
    """The environment of a launch of `sleeping`. As in `simulated`; by default no rank is slow. Sleep needs no GPU."""
    settings = {"layers": layers, "forward": forward, "backward": backward, "slow": slow, "slow_rank": slow_rank}
    return {**ONE_CORE, "PAUSES": json.dumps(settings)}


def straggler(run: Run) -> int:
    """The rank that the run's verdict names as the straggler; -1 if none."""
    named = re.search(r"rank (\d+) is the straggler", "; ".join(run.verdict()))
    return int(named[1]) if named else -1


def all_reduces(run: Run) -> tuple[float, float]:
    """How many all-reduces a step of a profiled run has, and how many of them backward hides: medians over ranks and
    steps. The last recorded step is left out, because its all-reduces may end after the profiler has."""
    timeline = run.timeline()
    counts, hidden = [], []
    for rank in timeline.ranks:
        mine = [span for span in timeline.spans if span.rank == rank]
        computing = union((span.start, span.end) for span in mine if span.kind == "backward")
        for step in timeline.steps[:-1]:
            sent = [(span.start, span.end) for span in mine if span.kind == "all_reduce" and span.step == step]
            counts.append(len(sent))
            hidden.append(sum(total(intersection([each], computing)) > HIDDEN * total([each]) for each in sent))
    return median(counts), median(hidden)


def parts(runs: Mapping[str, Run]) -> dict[str, dict[str, float]]:
    """Seconds of a step, for each rank of profiled runs: computing alone, computing while it sends, waiting."""
    result = {}
    for name, run in runs.items():
        timeline = run.timeline()
        for rank in timeline.ranks:
            mine = [span for span in timeline.spans if span.rank == rank]
            sending = union((span.start, span.end) for span in mine if span.kind in COMMUNICATION)
            computing = union((span.start, span.end) for span in mine if span.kind in COMPUTE)
            waiting = union((span.start, span.end) for span in mine if span.kind == WAITING)
            both = intersection(computing, sending)
            times = {"computes": subtracted(computing, both), "computes and sends": both, "waits": waiting}
            result[f"{name}, rank {rank}"] = {k: total(each) / len(timeline.steps) for k, each in times.items()}
    return result
