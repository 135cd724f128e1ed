"""States runs as plain values, for programs: progress lines, `labkit runs --json`, and what a comparison shows."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import mean
from typing import Any

from labkit import words
from labkit.dataclass_json import to_json
from labkit.files import Json
from labkit.metric_names import is_evaluated
from labkit.record import Glance, RunReader, State


def facts_of(run: Any) -> dict[str, Json]:
    """What `Run.to_dict` describes."""
    state, reader, findings = run.status(), RunReader(run.folder, each_rank=True).read_all(), run.findings()
    manifest, directions, seen = run.folder.glimpsed_manifest(), run.folder.directions(), glance_at(reader)
    cause = state.cause
    metrics: dict[str, Json] = {}
    for name, value in seen.newest.items():
        better = directions.better(name)
        best = seen.value(name, better) if better and name in seen.extremes else None
        metrics[name] = {"last": value, "best": best, "better": better}
    facts = {"schema": "labkit.run/1", **progress_facts(reader, state)} | {
        "exit_code": state.exit_code,
        "cause": cause and {"kind": cause.kind, "sentence": cause.sentence, "rank": cause.rank},
        "notice": state.notice,
        "wrong": state.wrong,
        "findings": [{"kind": each.kind, "sentence": each.sentence, "certain": each.certain} for each in findings]
        if findings or findings.witnessed
        else None,
        "verdict": run.verdict(),
        "metrics": metrics,
        "started": _moment(state.started),
        "ended": _moment(state.ended),
        "ranks": manifest.world_size,
        "attempt": state.attempt,
        "parameters": manifest.parameters,
        "script": manifest.name,
        "script_path": str(run.folder.script),
        "folder": str(run.path),
        "tags": run.tags,
        "note": run.note or None,
        "labkit": manifest.versions.get("labkit"),
    }
    return {name: to_json(value) for name, value in facts.items()}


def progress_facts(reader: RunReader, state: State) -> dict[str, Json]:
    """What a line of progress states; None is unknown, and a loss may be NaN. `throughput` is in samples/s over all
    ranks, for a run that has ended the mean; `memory_peak` is in bytes, the highest of all ranks."""
    return {
        "run": reader.folder.id,
        "state": state.state,
        "seconds": round(state.seconds, 1),
        "step": words.slowest_step(reader),
        "total_steps": words.total_steps(reader) or None,
        "loss": words.mean_latest(reader, "loss"),
        "throughput": words.throughput(reader, state),
        "memory_peak": int(max((h.memory_peak for h in reader.ranks.values()), default=0)) or None,
    }


def glance_at(reader: RunReader) -> Glance:
    """What the run reported: newest values are the mean over ranks, extremes those of the lowest rank that has them.
    What was measured on the test set counts at the end of the run."""
    seen, newest = Glance(words.mean_latest(reader, "loss")), dict[str, list[float]]()
    for history in reader.reporting:
        for name, figure in history.figures.items():
            if name.startswith("best_"):
                continue
            newest.setdefault(name, []).append(figure)
            if is_evaluated(name) and not is_tested(name) and name in history.extremes:
                seen.extremes.setdefault(name, history.extremes[name])
    seen.newest = {name: mean(figures) for name, figures in newest.items()}
    return seen


def is_tested(name: str) -> bool:
    """Whether a reported value is a measurement on the test set."""
    return name.startswith("test_") and name != "test_samples"


def _moment(seconds: float | None) -> str | None:
    """Seconds since the epoch as 2026-11-28T18:53:31Z; None for what is not a time."""
    try:
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return None
