"""A run's metrics in the files and services that people have, read back by their own readers."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

import labkit
from labkit import LabError, cli
from labkit.record import RunFolder, State, write_state


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    folder = RunFolder(tmp_path / "20260101T000000Z-ddp-0a1b")
    folder.ranks.mkdir(parents=True)
    manifest = {"format": 1, "name": "ddp", "world_size": 2, "parameters": {"lr": "0.1"}}
    folder.manifest.write_text(json.dumps(manifest | {"created": "2026-01-01T00:00:00+00:00"}))
    write_state(folder, State("succeeded", 0.0, ended=3.0))
    for rank in range(2):
        folder.rank(rank).mkdir()
        records = [{"k": "meta", "t": 0.0, "time": 1.0}]
        records += [
            {"k": "step", "t": float(s), "step": s, "n": 1, "seconds": [1, 1, 1], "rss": (rank + 1) * 1000 * s}
            for s in (1, 2, 3)
        ]
        losses = [1.0 + rank, "nan", "inf"]
        records += [{"k": "report", "t": float(s), "step": s, "loss": loss} for s, loss in enumerate(losses, 1)]
        records += [{"k": "report", "t": 3.0, "step": 3, "test_accuracy": 0.5}]
        folder.metrics(rank).write_text("".join(json.dumps(record) + "\n" for record in records))
    return labkit.attach(folder.path)


def test_a_table_holds_every_rank_and_step(run, tmp_path):
    frame = pd.read_csv(run.export("csv"))

    assert (run.path / "metrics.csv").exists()
    assert frame[["rank", "step"]].values.tolist() == [[rank, step] for rank in (0, 1) for step in (1, 2, 3)]
    assert math.isinf(frame["loss"].iloc[-1])
    pytest.importorskip("pyarrow")
    pd.testing.assert_frame_equal(
        pd.read_parquet(run.export("parquet", tmp_path / "mine.parquet")), run.metrics(), check_dtype=False
    )


def test_tensorboard_reads_the_mean_over_ranks_and_each_rank(run, capsys):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator

    run.export("tensorboard")
    assert cli.main(["export", run.id, "tensorboard"]) == 0  # again: no point is there twice
    events = accumulator(capsys.readouterr().out.strip()).Reload()

    losses = events.Scalars("loss")
    assert [event.step for event in losses] == [1, 2, 3]
    assert losses[0].value == 1.5 and math.isnan(losses[1].value) and math.isinf(losses[2].value)
    assert [event.value for event in events.Scalars("rss")] == [2000, 4000, 6000]
    assert [event.value for event in events.Scalars("ranks/1/loss")][0] == 2.0
    assert [(event.step, event.value) for event in events.Scalars("test_accuracy")] == [(3, 0.5)]
    assert losses[0].wall_time == pytest.approx(1767225601, abs=2)
    assert "lr/text_summary" in events.Tags()["tensors"]


def test_trackio_has_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert run.export("trackio", project="mine") == f"mine/{run.id}"

    assert [log["loss"] for log in SQLiteStorage.get_logs("mine", run.id)][0] == 1.5


def test_wandb_writes_offline(run):
    pytest.importorskip("wandb")

    assert run.export("wandb", project="mine") == f"mine/{run.id}"

    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("tensorbord", {}, "csv, parquet, tensorboard, trackio, wandb; got 'tensorbord'; did you mean 'tensorboard'?"),
        ("wandb", {"path": "here"}, "wandb chooses its own place; leave path out, or name a project"),
        ("csv", {"path": "/proc/nowhere/metrics.csv"}, "could not be exported: "),
    ],
)
def test_what_cannot_be_exported_is_refused_in_a_sentence(run, to, options, message):
    with pytest.raises(LabError, match=message.replace("?", r"\?")):
        run.export(to, **options)


def test_a_run_without_records_has_nothing_to_export(run):
    for rank in range(2):
        run.folder.metrics(rank).unlink()

    with pytest.raises(LabError, match="has recorded nothing to export yet"):
        run.export("csv")
