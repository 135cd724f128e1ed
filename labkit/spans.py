"""What ranks did in the steps that torch's profiler recorded, as spans of time.

A trace holds thousands of operators. They are reduced to a few phases, marked by worker/measures/profile.py or by torch
itself, and to the communication: the collectives of the backend, or on GPUs NCCL's kernels.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

COMPUTE = ("forward", "backward", "weights", "optimizer", "input")
COMMUNICATION = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send_recv", "all_to_all", "barrier")
WAITING = "waiting"
SHORTEST_WAIT = 100e-6  # seconds; shorter gaps between two operators are Python overhead
# The names that torch's operators, gloo and NCCL's kernels use. gloo's "send" ends when the sender waits for it, at any
# later time, so only the receiver's span counts.
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "recv": "send_recv",
    "alltoall": "all_to_all",
    "barrier": "barrier",
}
ON_DEVICE = "gpu_user_annotation"  # Kineto repeats marks on the streams whose kernels were launched within them
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Span(NamedTuple):
    """From `start` to `end`, in seconds since the start of the first recorded step of any rank. `kind` is in COMPUTE,
    in COMMUNICATION, or "waiting"; `label` adds details, such as the block that is gathered. `stage` and `chunk` are
    the pipeline stage and the micro-batch, if any."""

    rank: int
    kind: str
    start: float
    end: float
    label: str = ""
    stage: int | None = None
    chunk: int | None = None
    step: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class _Event(NamedTuple):
    name: str
    category: str
    start: float
    end: float
    thread: Any
    launched: float  # by the host; a kernel starts later


def elapsed(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: Iterable[Span]) -> float | None:
    """The fraction of time in which a pipeline's ranks are between chunks, from the first chunk of a step to the last;
    None without chunks. Waits within a chunk do not count. A step may repeat its chunks, one pass of the schedule after
    another, so the parts of a chunk are those that follow each other on its rank."""
    chunks = sorted((s for s in spans if s.chunk is not None), key=lambda s: (s.step, s.rank, s.start))
    steps = groupby(chunks, key=lambda s: s.step)
    whole = sum(elapsed(list(step)) for _, step in steps) * len({s.rank for s in chunks})
    parts = groupby(chunks, key=lambda s: (s.step, s.rank, s.kind, s.stage, s.chunk))
    busy = sum(elapsed(list(chunk)) for _, chunk in parts)
    return 1 - busy / whole if whole else None


def read_spans(traces: dict[int, Path]) -> list[Span]:
    """The spans of all ranks on one clock, sorted by rank and time. Raises OSError, or ValueError for a file that is
    not a trace."""
    events = {rank: _events(path) for rank, path in sorted(traces.items())}
    steps = {rank: _in_order(e for e in seen if e.name.startswith("ProfilerStep#")) for rank, seen in events.items()}
    begin = min((each[0].start for each in steps.values() if each), default=0.0)
    return [
        span._replace(start=span.start - begin, end=span.end - begin)
        for rank, seen in events.items()
        if steps[rank]
        for span in _spans(rank, seen, steps[rank])
    ]


def _events(path: Path) -> list[_Event]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            return _read(json.load(file))
    except (KeyError, TypeError, AttributeError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} is not a trace of torch's profiler: {error!r}") from None


def _read(trace: Any) -> list[_Event]:
    base = int(trace.get("baseTimeNanoseconds", 0)) / 1e9
    timed = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    launches = {_correlation(event): event["ts"] for event in timed if event.get("cat") in LAUNCHES}
    launches.pop(None, None)
    return [
        _Event(
            str(event["name"]),
            str(event.get("cat", "")),
            base + event["ts"] / 1e6,
            base + (event["ts"] + event["dur"]) / 1e6,
            event.get("tid"),
            base + launches.get(_correlation(event), event["ts"]) / 1e6,
        )
        for event in timed
        if event.get("cat") != ON_DEVICE
    ]


def _correlation(event: dict[str, Any]) -> Any:
    return (event.get("args") or {}).get("correlation")


def _in_order(events: Iterable[_Event]) -> list[_Event]:
    return sorted(events, key=lambda event: event.start)


def _spans(rank: int, events: list[_Event], steps: list[_Event]) -> list[Span]:
    main, bounds = steps[0].thread, [step.start for step in steps]
    begin, end = steps[0].start, steps[-1].end
    inside = [e for e in events if begin <= e.launched < end]  # messages and kernels may end after the last step
    on_main = [e for e in inside if e.thread == main]
    phases = _phases(on_main, steps)
    sent = _collectives(inside, on_main)
    kernels = [e for e in inside if e.category == "kernel" and not _is_nccl(e)]
    if not kernels:
        sent = [(kind, label, _ended_with_backward(e, phases, on_main)) for kind, label, e in sent]

    def step_at(time: float) -> int:
        return bisect_right(bounds, time) - 1

    sent_spans = [Span(rank, kind, e.start, e.end, label, step=step_at(e.launched)) for kind, label, e in sent]
    if kernels:
        phases = [phase._replace(step=step_at(phase.start)) for phase in phases]
        spans = _on_device(rank, phases, kernels, sent_spans)
    else:
        spans = _on_host(rank, phases, on_main, sent)
        spans = [span._replace(step=step_at(span.start)) for span in spans]
    return sorted([*spans, *sent_spans], key=lambda span: span.start)


def _phases(events: list[_Event], steps: list[_Event]) -> list[Span]:
    """The phases of the main thread. Forward is the time from a batch, or the previous backward, to backward."""
    marks = []
    for e in events:
        if match := re.fullmatch(r"labkit:(forward|backward|weights)(?: (\d+) (\d+))?", e.name):
            stage, chunk = (int(match[i]) if match[i] else None for i in (2, 3))
            marks.append(Span(0, match[1], e.start, e.end, stage=stage, chunk=chunk))
        elif e.name.startswith("Optimizer.step#"):
            marks.append(Span(0, "optimizer", e.start, e.end))
        elif e.name.startswith("enumerate(DataLoader)"):
            marks.append(Span(0, "input", e.start, e.end))
    outermost: list[Span] = []
    for mark in sorted(marks, key=lambda m: (m.start, -m.end)):
        if not outermost or mark.start >= outermost[-1].end:
            outermost.append(mark)
    if any(mark.chunk is not None for mark in outermost):
        return outermost
    edges = [Span(0, "step", step.start, step.start) for step in steps]
    phases = list(outermost)
    for before, after in pairwise(sorted([*edges, *outermost], key=lambda m: (m.start, m.end))):
        if after.kind == "backward" and after.start > before.end:
            phases.append(Span(0, "forward", before.end, after.start))
    return sorted(phases, key=lambda span: span.start)


def _collectives(events: list[_Event], on_main: list[_Event]) -> list[tuple[str, str, _Event]]:
    """`(kind, label, event)`. gloo implements reduce-scatter as an all-reduce, so the name of the call counts."""
    nccl = [e for e in events if e.category == "kernel" and _is_nccl(e)]
    if nccl:
        return [(kind, "", e) for e in nccl if (kind := _kind(e.name))]
    done = _in_order(e for e in events if e.name.startswith("gloo:"))
    called = _in_order(e for e in events if e.category == "cpu_op" and e.name.startswith("c10d::"))
    blocks = [e for e in on_main if re.match(r"FSDP::(all_gather|post_backward_reduce) \(", e.name)]
    collectives = []
    for number, e in enumerate(done):
        call = called[number] if len(called) == len(done) else e
        if kind := _kind(call.name):
            inside = [b for b in blocks if b.start <= call.start <= b.end]
            collectives.append((kind, inside[-1].name.partition("(")[2].rstrip(")") if inside else "", e))
    return collectives


def _ended_with_backward(event: _Event, phases: list[Span], on_main: list[_Event]) -> _Event:
    """gloo's threads may record the end of a collective late: one that started in backward, and that nothing waits for
    afterwards, was complete when backward ended."""
    of = next((p for p in phases if p.kind == "backward" and p.chunk is None and p.start <= event.start < p.end), None)
    if (
        of is None
        or event.end <= of.end
        or any(_is_wait(e) and of.end <= e.end and e.start < event.end for e in on_main)
    ):
        return event
    return event._replace(end=of.end)


def _is_wait(event: _Event) -> bool:
    return event.name == "labkit:wait" or event.name.endswith("::wait_tensor")


def _kind(name: str) -> str | None:
    plain = re.sub(r"[^a-z]", "", name.lower().replace("gloo:", "").replace("c10d::", ""))
    return next((kind for spelled, kind in KINDS.items() if spelled in plain), None)


def _is_nccl(event: _Event) -> bool:
    return event.name.startswith("nccl")


def _on_host(rank: int, phases: list[Span], on_main: list[_Event], sent: list[tuple[str, str, _Event]]) -> list[Span]:
    """The phases without the main thread's waits, which are marked, or have no operator during communication."""
    busy = union((e.start, e.end) for e in on_main if e.category == "cpu_op" and not _talks(e))
    marked = union((e.start, e.end) for e in on_main if _is_wait(e))
    in_flight = union((e.start, e.end) for _, _, e in sent)
    spans = []
    for phase in phases:
        whole = [(phase.start, phase.end)]
        idle = [gap for gap in subtracted(whole, busy) if gap[1] - gap[0] >= SHORTEST_WAIT]
        unmarked = intersection(idle, in_flight) if phase.chunk is None else []  # a pipeline stage sends asynchronously
        waits = union([*intersection(whole, marked), *unmarked])
        spans += [
            phase._replace(rank=rank, start=start, end=end) for start, end in subtracted(whole, waits) if end > start
        ]
        spans += [Span(rank, WAITING, start, end, phase.kind) for start, end in waits if end - start >= SHORTEST_WAIT]
    return spans


def _talks(event: _Event) -> bool:
    return event.name.startswith(("c10d::", "_c10d_functional::wait_tensor"))


def _on_device(rank: int, phases: list[Span], kernels: list[_Event], sent: list[Span]) -> list[Span]:
    """Kernels, each in the phase and step in which the host launched it, which may be ahead of the GPU; the GPU waits
    when only NCCL's kernels run."""
    starts = [phase.start for phase in phases]
    by_phase: dict[Span, list[Interval]] = {}
    for kernel in kernels:
        at = bisect_right(starts, kernel.launched) - 1
        if at >= 0:
            by_phase.setdefault(phases[at], []).append((kernel.start, kernel.end))
    spans = [
        phase._replace(rank=rank, start=start, end=end)
        for phase, intervals in by_phase.items()
        for start, end in union(intervals, apart=SHORTEST_WAIT)
    ]
    computing = union((span.start, span.end) for span in spans)
    for step in sorted({span.step for span in sent}):
        waits = subtracted(union((span.start, span.end) for span in sent if span.step == step), computing)
        spans += [Span(rank, WAITING, *wait, step=step) for wait in waits if wait[1] - wait[0] >= SHORTEST_WAIT]
    return spans


Interval = tuple[float, float]


def union(intervals: Iterable[Interval], apart: float = 0.0) -> list[Interval]:
    """The union, sorted; intervals at most `apart` seconds from each other are merged."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + apart:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time in both."""
    common, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        low, high = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if high > low:
            common.append((low, high))
        i, j = (i + 1, j) if some[i][1] < others[j][1] else (i, j + 1)
    return common


def subtracted(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time in `some` and not in `others`."""
    rest = []
    for start, end in some:
        at = start
        for low, high in intersection([(start, end)], others):
            if low > at:
                rest.append((at, low))
            at = high
        if end > at:
            rest.append((at, end))
    return rest


def total(intervals: Iterable[Interval]) -> float:
    """The total length in seconds."""
    return sum(end - start for start, end in intervals)
