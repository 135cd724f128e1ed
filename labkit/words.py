"""Formats numbers and states for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from labkit.files import Json, finite, read_object
from labkit.record import Cause, RankHistory, RunReader, State
from labkit.text import gib as gib
from labkit.text import plain

EXPANDABLE = "{'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}"  # reduces fragmentation

LONGEST_VALUE, DRAWN_DIGITS = 24, 10
SHOWN_VALUES = 12
SHOWN_RANKS = 8
LONGEST_TEXT = 80
LONGEST_NAME = 40
EVEN = 0.05  # of a step
MOSTLY = 0.5


def quantity(value: float | None, digits: int = 3) -> str:
    """12,345 · 0.0123 · n/a"""
    if value is None:
        return "n/a"
    if not math.isfinite(value):
        return str(value)
    if 999.5 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    """1.2 ms · 3.4 s · 5 min 6 s · 1 h 2 min"""
    if value is None:
        return "n/a"
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 59.95:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def status(state: State, loss: float | None = None) -> str:
    """`running` · `paused` · `held` · `stuck 12 s` · `succeeded, but wrong` · `running, but the loss is NaN` · `failed:
    out of device memory`; `loss` is the newest."""
    if (stuck := state.stuck_seconds) is not None:
        return f"stuck {seconds(round(stuck))}"
    if state.is_paused:
        return state.paused
    if doubt := _doubt(state, loss):
        return f"{state.state}, but {doubt}"
    memory = state.cause and state.cause.out_of_memory
    return f"{state.state}: out of {memory} memory" if memory in ("device", "host") else state.state


def is_doubtful(state: State, loss: float | None) -> bool:
    """Whether a run needs attention although it goes on, or has ended well; `loss` is its newest."""
    return state.stuck_seconds is not None or bool(_doubt(state, loss))


def _doubt(state: State, loss: float | None) -> str:
    if state.cause:
        return ""
    if state.wrong:
        return "wrong"
    if loss is None or math.isfinite(loss):
        return ""
    return f"the loss is {'NaN' if math.isnan(loss) else 'infinite'}"


def ranks(launched: int, last: int | None) -> str:
    """`4`, or `4 → 3` for a run that was restarted on fewer ranks."""
    return f"{launched} → {last}" if last else str(launched)


def throughput(reader: RunReader, state: State) -> float | None:
    """Samples per second over all ranks: of each rank's last steps, and once the run has ended the mean over its
    steps; None before the first record."""
    if state.is_final and not reader.folds:
        return mean_throughput(reader)
    return together(reader, reader.throughputs())


def mean_throughput(reader: RunReader) -> float | None:
    """Samples per second over all ranks and all steps whose samples are known; None if these took less than half of the
    time."""
    counted, whole = (
        max((history.totals[name] for history in reader.ranks.values()), default=0.0)
        for name in ("counted_seconds", "seconds")
    )
    samples = together(reader, reader.samples())
    return samples / counted if samples and counted and counted >= MOSTLY * whole else None


def together(reader: RunReader, samples: list[float]) -> float | None:
    """The ranks' samples, or samples per second, summed; None when no rank has any. Ranks that split one replica
    (tensor, pipeline parallel) process the same samples, which count once if the script reports `data_ranks`.
    """
    if not samples:
        return None
    replicas = next((h.values.get("data_ranks") for h in reader.reporting), None)
    if isinstance(replicas, int) and 0 < replicas <= len(reader.rank_numbers):
        return sum(samples) / len(samples) * replicas
    return sum(samples)


def slowest_step(reader: RunReader) -> int:
    """The lowest step among the ranks that have written a readable record."""
    return min((h.step for h in reader.current.values() if h.header or h.step), default=0)


def total_steps(reader: RunReader) -> int:
    """The number of steps that the script announced; 0 if it announced none."""
    first = next(iter(reader.reporting), None)
    total = first.values.get("total_steps") if first else None
    return total if isinstance(total, int) and total > 0 else 0


def fraction(reader: RunReader) -> float | None:
    """Completed fraction of the run, 0 to 1; None if the number of steps is unknown."""
    total = total_steps(reader)
    return min(1.0, slowest_step(reader) / total) if total else None


def progress(reader: RunReader, state: State) -> str:
    """`step 120 of 500 (24%), about 41 s left`, or what the run is doing before its first step."""
    first = next(iter(reader.reporting), None)
    if first is None:
        if state.is_final:
            return "no rank started"
        return "no rank has started yet" if state.notice else "starting the ranks"
    step = slowest_step(reader)
    total = total_steps(reader)
    beat = {} if state.is_final else read_object(reader.attempt.heartbeat(first.rank))
    doing = beat.get("doing")
    if beat.get("serves"):
        return "waiting for cells"
    if not step:
        passes = finite(beat.get("passes")) or (first.end.passes if first.end and not beat else None) or 0.0
        why = f": {passes:,.0f} backward passes, but no torch.optim optimizer has stepped" if passes > 1 else ""
        so_far = f" ({passes:,.0f} backward passes so far)" if passes > 1 else ""
        before = f"in the first step{so_far}" if doing == "first step" else f"preparing: {starting(reader)}"
        if state.state == "succeeded" and why:
            return f"{passes:,.0f} backward passes, no step of a torch.optim optimizer"
        if state.is_final and (most := max(history.step for history in reader.current.values())):
            silent = next(history.rank for history in reader.current.values() if not history.step)
            return f"step {most:,}, of which rank {silent} recorded none"  # it was killed before it wrote
        return f"no step completed{why}" if state.is_final else before
    text = f"step {step:,} of {total:,} ({step / total:.0%})" if total else f"step {step:,}"
    elapsed = first.totals["seconds"]
    if not state.is_final and reader.folder.checkpoint_being_saved():
        return f"{text}, saving a checkpoint"
    if doing == "evaluating" or (total and step >= total and not state.is_final):
        return f"{text}, evaluating"
    if state.is_final or state.stuck_seconds is not None or not total or not first.totals["steps"]:
        return text
    left = (total - step) * elapsed / first.totals["steps"]
    return f"{text}, about {seconds(round(left) or 1)} left"


def starting(reader: RunReader) -> str:
    """What the ranks are doing before their first step: `importing torch`, or by rank where they differ."""
    beats = {rank: read_object(reader.attempt.heartbeat(rank)) for rank in list(reader.current)[:SHOWN_RANKS]}
    each = {rank: plain(_starting(beat))[:LONGEST_TEXT] for rank, beat in beats.items()}
    if len(set(each.values())) == 1:
        return next(iter(each.values()))
    return ", ".join(f"rank {rank} {text}" for rank, text in each.items()) or "no step yet"


def _starting(beat: dict[str, Any]) -> str:
    return f"running {program}" if (program := beat.get("program")) else str(beat.get("starting") or "no step yet")


def skew(reader: RunReader) -> str:
    """`last steps: rank 1 slowest, by 34 ms`: the mean step time of the slowest rank over its newest records minus that
    of the fastest. No rank is named for less than EVEN of a step, which is noise."""
    steps = {rank: took for rank, h in reader.current.items() if (took := h.recent_step_seconds)}
    if len(steps) < 2:
        return ""
    slowest = max(steps, key=lambda rank: steps[rank])
    behind = steps[slowest] - min(steps.values())
    if behind <= EVEN * steps[slowest]:
        return "last steps: equal on all ranks"
    return f"last steps: rank {slowest} slowest, by {seconds(behind)}"


def headline(reader: RunReader, state: State) -> str:
    """One line about a run: progress, loss, speed and memory."""
    parts = [progress(reader, state)]
    loss = mean_latest(reader, "loss")
    if loss is not None:
        parts.append(f"loss {quantity(loss, 4)}")
    elif reason := loss_of(reader):
        parts.append(f"loss {reason}")
    if state.stuck_seconds is None and (rate := throughput(reader, state)) is not None:
        parts.append(f"{quantity(rate)} samples/s{' on average' if state.is_final and not reader.folds else ''}")
    peaks = [h for h in reader.ranks.values() if h.memory_peak]
    if peaks:
        parts.append(f"peak {peaks[0].memory_name} {gib(max(h.memory_peak for h in peaks))}")
    return " · ".join(parts)


def loss_of(reader: RunReader) -> str:
    """How the loss was obtained or why there is none, by the first rank with a loss; empty if the script reports it."""
    histories = sorted(reader.reporting, key=lambda history: "loss" not in history.latest)
    return histories[0].loss_of if histories else ""


def mean_latest(reader: RunReader, name: str) -> float | None:
    if reader.folds:
        is_lost = name == "loss" and any(history.has_lost_loss for history in reader.current.values())
        return math.nan if is_lost else reader.folds.latest.get(name)
    values = [h.latest[name] for h in reader.current.values() if name in h.latest]
    return sum(values) / len(values) if values else None


def share(history: RankHistory, phase: str) -> float | None:
    """The fraction of a rank's step time spent in a phase, 0 to 1; None if unknown."""
    seconds = history.totals["seconds"]
    known = seconds and (phase != "communication" or history.communicates)
    return history.totals[phase] / seconds if known else None


def percent(value: float | None) -> str:
    """12.3% · n/a"""
    return "n/a" if value is None else f"{value:.1%}"


def reported(reader: RunReader) -> list[tuple[str, str]]:
    """(name, newest value) for each metric that the script reported, `test_` first: the mean over ranks, with the
    minimum and maximum if ranks at the same step differ. At most 12; `run.metrics()` has all of them."""
    values: dict[str, list[float]] = {}
    for history in reader.reporting:
        for name, figure in history.figures.items():
            values.setdefault(name, []).append(figure)
    names = sorted(values, key=lambda name: not name.startswith("test_"))
    in_step = len({str(history.values.get("step")) for history in reader.reporting}) == 1
    shown = [
        (" ".join(name[:LONGEST_NAME].split()), _over_ranks(values[name], in_step)) for name in names[:SHOWN_VALUES]
    ]
    return [*shown, ("others", str(len(names) - SHOWN_VALUES))] if len(names) > SHOWN_VALUES else shown


def _over_ranks(values: list[float], with_extremes: bool) -> str:
    """`0.731` · `0.52 (0.49 to 0.56)`"""
    mean, low, high = (quantity(value, 4) for value in (sum(values) / len(values), min(values), max(values)))
    return f"{mean} ({low} to {high})" if with_extremes and low != high else mean


def final_values(reader: RunReader) -> dict[str, Any]:
    """What the script reported about the whole run, from the lowest rank that reported."""
    first = next(iter(reader.reporting), None)
    return dict(first.values) if first else {}


def parameter_text(value: Any) -> str:
    """At most 24 characters of a script's parameter, and five digits of a number that was drawn at random."""
    text = plain(str(value))
    if len(text) > DRAWN_DIGITS and not text.lstrip("-").isdecimal():
        with suppress(ValueError):
            return f"{float(text):.5g}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:8]}…{text[9 - LONGEST_VALUE :]}"


def band(value: float | None, low: float | None, high: float | None) -> str:
    """`0.31 s (0.25 to 0.40 s)`; n/a if the speed is unknown."""
    if value is None:
        return "n/a"
    if low is None or high is None or low == high:
        return seconds(value)
    return f"{seconds(value)} ({seconds(low)} to {seconds(high)})"


def attempt_ended(number: int, ended: Mapping[str, Json]) -> str:
    """`attempt 1 failed: rank 1 was killed (SIGKILL)…; restarted from step-40`"""
    cause = Cause.decode(ended.get("cause")) or Cause()
    checkpoint = ended.get("checkpoint")
    how = "" if cause.goes_on else " failed"  # near the time limit
    ranks = ended.get("restarted_ranks")
    fewer = f" on {ranks} rank{'s' * (ranks > 1)}" if isinstance(ranks, int) else ""
    return f"attempt {number}{how}: {cause.sentence}; restarted{f' from {checkpoint}' if checkpoint else ''}{fewer}"
