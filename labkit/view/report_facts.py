"""States what the report of a run shows as plain values, for programs: `labkit report --json`."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from labkit import words
from labkit.dataclass_json import to_json
from labkit.files import Json, finite, read_object
from labkit.record import RankHistory, RunFolder, RunReader, Step
from labkit.view.live.disturbances import disturbances
from labkit.view.run_facts import facts_of

OF_ATTEMPT = ("exit_code", "cause", "checkpoint")


def report_data(run: Any) -> dict[str, Json]:
    """The run, and what its report shows beside that; docs/reference/json.md has each field."""
    folder, state = run.folder, run.status()
    reader, manifest = RunReader(folder, each_rank=True).read_all(), folder.glimpsed_manifest()
    ranks = [_rank(history) for history in reader.ranks.values()]
    cause = state.cause
    data = {
        "schema": "labkit.report/1",
        "run": facts_of(run),
        "why": cause and {"advice": cause.advice, "traceback": cause.traceback, "where": cause.where},
        "findings": run.findings().to_dict()["findings"],
        "earlier_attempts": [{name: each.get(name) for name in OF_ATTEMPT} for each in state.earlier],
        "phases": {phase: _mean([each["phases"][phase] for each in ranks]) for phase in Step.PHASES},
        "memory": _memory(folder, reader),
        "per_rank": ranks,
        "disturbances": [each.sentence for each in disturbances(reader, state)],
        "command": run.command,
        "devices": manifest.devices,
        "versions": manifest.versions,
        "git": manifest.git,
    }
    return {name: to_json(value) for name, value in data.items()}


def _rank(history: RankHistory) -> dict[str, Any]:
    steps, seconds = history.totals["steps"], history.totals["seconds"]
    return {
        "rank": history.rank,
        "host": history.host or None,
        "device": None if history.device == "?" else history.device,
        "step": history.step,
        "loss": finite(history.latest.get("loss")),
        "step_seconds": seconds / steps if steps else None,
        "throughput": history.recent_throughput,
        "phases": {phase: words.share(history, phase) for phase in Step.PHASES},
        "memory_peak": int(history.memory_peak) or None,
        "memory_limit": history.memory_limit,
        "held": {name: history.held.get(name) for name in ("parameters", "gradients", "optimizer")},
        "outcome": (history.end and history.end.outcome) or None,
    }


def _mean(shares: list[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def _memory(folder: RunFolder, reader: RunReader) -> dict[str, Any]:
    """The peak of the rank with the most, beside the peak that the plan predicted of the tensors, and the one that was
    traced, which is comparable with it."""
    histories = [*reader.ranks.values()]
    plan = read_object(folder.plan)
    peak, planned = max((h.memory_peak for h in histories), default=0.0), plan.get("peak")
    return {
        "kind": histories[0].memory_name if histories else None,
        "peak": int(peak) or None,
        "limit": min((h.memory_limit for h in histories if h.memory_limit), default=None),
        "planned": planned.get("bytes") if isinstance(planned, dict) else None,
        "planned_for": plan.get("device"),
        "traced": max((h.traced.bytes for h in histories if h.traced), default=None),
    }
