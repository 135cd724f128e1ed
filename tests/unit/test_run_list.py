"""Lists of runs: what they show of many, filters, tags, and what may be deleted."""

from __future__ import annotations

import json
import time

import pytest

import labkit
from labkit import LabError, cli
from labkit.launcher.locks.checkpoints import lock_checkpoints
from labkit.record import RunFolder, State, write_state
from labkit.record.measured.glance import WHOLE_BYTES, glance


def ended(root, number, *, name="ddp", state="succeeded", parameters=None, losses=(3.0, 2.0, 1.0), reports=()):
    folder = RunFolder(root / f"20260101T{number:06}Z-{name}-{number:04x}")
    folder.rank(0).mkdir(parents=True)
    manifest = {"format": 1, "name": name, "world_size": 2, "parameters": parameters or {}}
    folder.manifest.write_text(json.dumps(manifest))
    write_state(folder, State(state, 1000.0, ended=1060.0))
    records = [{"k": "step", "t": float(i), "step": i, "loss": loss} for i, loss in enumerate(losses, 1)]
    records += [{"k": "report", "t": float(i), "step": i} | report for i, report in enumerate(reports, 1)]
    folder.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    return tmp_path


def test_the_table_has_what_differs_and_the_best_of_each_evaluated_metric(root):
    accuracies = [{"test_accuracy": value} for value in (0.5, 0.75, 0.625)]
    ended(root, 1, parameters={"lr": "0.001", "steps": "100"}, reports=accuracies)
    ended(root, 2, parameters={"lr": "0.01", "steps": "100"}, losses=(3.0, 0.25), reports=[{"val/loss": 0.5}])

    text = repr(labkit.runs())
    newest, older = text.splitlines()[1:]

    assert text.splitlines()[0].split()[:8] == ["run", "state", "loss", "loss", "so", "far", "best", "val/loss"]
    assert text.splitlines()[0].split()[-3:] == ["lr", "ranks", "time"]
    assert "steps" not in text
    assert "0.01" in newest and "0.25" in newest and "0.5" in newest
    assert "0.001" in older and "0.75" in older and "█" in older
    assert "<svg" not in labkit.runs()._repr_html_() and "data:image/svg+xml" in labkit.runs()._repr_html_()


def test_filters_select_by_script_state_and_tag(root):
    ended(root, 1)
    ended(root, 2, name="fsdp", state="failed")
    run = labkit.attach(ended(root, 3, state="failed").id)
    run.tag("baseline", "baseline", note="lr too high")

    assert [r.id for r in labkit.runs(script="fsdp")] == [r.id for r in labkit.runs(script="fsdp", state="failed")]
    assert [r.id for r in labkit.runs(script="ddp", state="failed")] == [run.id]
    assert [r.id for r in labkit.runs(tag="baseline")] == [run.id]
    assert "baseline" in repr(labkit.runs()) and "lr too high" in repr(labkit.runs())
    with pytest.raises(LabError, match="there is no state 'crashed'; a run is starting, running, succeeded"):
        labkit.runs(state="crashed")


def test_a_slice_is_a_table_too(root):
    for number in range(60):
        ended(root, number)

    assert "and 10 older runs: runs()[50:]" in repr(labkit.runs())
    assert len(labkit.runs()[50:]._repr_html_().split("<tr>")) == 12


def test_only_runs_that_have_ended_are_deleted(root, capsys):
    old, new = ended(root, 1), ended(root, 2)
    active = ended(root, 3)
    write_state(active, State("running", time.time()))

    with pytest.raises(LabError, match="is active; stop it before you delete it"):
        labkit.attach(active.id).rm()
    assert cli.main(["prune", "--keep", "1"]) == 0
    assert f"{old.id}\n--yes deletes these 1 runs" in capsys.readouterr().out
    assert cli.main(["prune", "--keep", "1", "--yes"]) == 0
    assert sorted(path.name for path in root.iterdir()) == [new.id, active.id]
    assert cli.main(["rm", new.id]) == 0
    assert [path.name for path in root.iterdir()] == [active.id]


def test_a_folder_into_which_another_run_saves_is_not_deleted(root):
    old, other = ended(root, 1), ended(root, 2)
    lock = lock_checkpoints(old.checkpoints, other)

    assert lock is not None
    with pytest.raises(LabError, match=f"{other.id} is active and saves its checkpoints in the folder of"):
        labkit.attach(old.id).rm()


def test_a_long_run_is_sampled(root):
    losses = [1000 / step for step in range(1, 40_000)]
    folder = ended(root, 1, losses=losses, reports=[{"test_loss": 2.0, "best_loss": 0.5}])

    assert folder.metrics(0).stat().st_size > 4 * WHOLE_BYTES
    seen = glance(folder)

    assert seen.losses[0] == 1000.0 and seen.losses[-1] == losses[-1]
    assert 100 < len(seen.losses) < 10_000
    assert seen.losses == sorted(seen.losses, reverse=True)
    assert seen.best == {"test_loss": 0.5}


@pytest.mark.parametrize("text", ["", "not json\n", '{"k": "step", "t": 1', '[1]\n{"k": "report", "loss": "x"}\n'])
def test_damaged_records_leave_a_row(root, text):
    ended(root, 1).metrics(0).write_text(text)

    assert "succeeded" in repr(labkit.runs())
