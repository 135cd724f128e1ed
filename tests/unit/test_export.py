"""`run.export`: what other tools read back, by their own readers, is what the ranks recorded."""

import json
import math
import struct
import sys
import time
from contextlib import ExitStack

import pandas as pd
import pytest

import labkit
from labkit import LabError, Run
from labkit.cli import main
from labkit.export import live
from labkit.export.points import points
from labkit.record import State

LAUNCHED = 1_700_000_000.0


@pytest.fixture
def run(folder, write_metrics):
    """Two ranks of different speed, whose loss is lost at the end; rank 0 reports a validation and a note."""
    folder.manifest.write_text(
        json.dumps({"format": 1, "name": "demo", "world_size": 2, "parameters": {"lr": 0.1, "optimizer": "adam"}})
    )
    losses = {0: [2.0, 1.0, "nan"], 1: [4.0, 2.0, "inf"]}
    for rank in (0, 1):
        write_metrics(rank, {"k": "meta", "t": 50.0 + rank, "time": LAUNCHED + rank, "rank": rank})
        for i, loss in enumerate(losses[rank]):
            write_metrics(
                rank,
                {
                    "k": "step",
                    "t": 60.0 + rank + i,
                    "step": 4 * (i + 1),
                    "n": 4,
                    "seconds": [2.0, 0.25, 1.0 + rank],
                    "samples": 64,
                    "forward": 1.0,
                    "rss": 1000 * (rank + 1),
                    "loss": loss,
                },
            )
    write_metrics(0, {"k": "report", "t": 61.25, "step": 8, "test_accuracy": 0.75, "note": "grün, \x1b[31mred\x1b[0m"})
    return Run(folder)


@pytest.fixture
def empty(folder):
    folder.manifest.write_text(json.dumps({"format": 1, "name": "demo", "world_size": 2}))
    return Run(folder)


def step_record(t, step, **more):
    return {"k": "step", "t": t, "step": step, "n": 1, "seconds": [1.0, 1.0, 1.0], "samples": 8, **more}


def scalars_of(path):
    """What TensorBoard itself reads: (wall time, step, value) by tag, and the accumulator."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(path), size_guidance={reader.SCALARS: 0}).Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.wall_time, e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}, accumulator


def wandb_history(file):
    """The rows of a wandb file: records in LevelDB's log format, in blocks of 32 KiB after a header of 7 bytes."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, whole, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # too short for a record's header
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record, whole = protocol.Record.FromString(whole), b""
            if record.WhichOneof("record_type") == "history":
                rows.append({".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    return rows


def values_of(events):
    return [value for _, _, value in events]


def test_a_csv_file_holds_the_metrics_and_nothing_is_lost(run):
    path = run.export("csv")

    read, metrics = pd.read_csv(path), run.metrics()
    assert path == run.path / "metrics.csv"
    assert list(read) == list(metrics)
    assert str(list(read["loss"])) == "[2.0, 1.0, nan, 4.0, 2.0, inf]"
    assert list(read["throughput"]) == list(metrics["throughput"])
    assert read["note"][1] == "grün, red"


def test_nan_in_a_csv_file_differs_from_what_was_not_recorded(run):
    lines = run.export("csv").read_text(encoding="utf-8").splitlines()
    names, last_of_rank_0 = lines[0].split(","), lines[3].split(",")

    assert last_of_rank_0[names.index("loss")] == "nan"
    assert last_of_rank_0[names.index("test_accuracy")] == ""


def test_a_parquet_file_holds_the_metrics_and_tells_nan_from_null(run):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = run.export("parquet")

    read = parquet.read_table(path).to_pydict()
    assert path == run.path / "metrics.parquet"
    assert list(read) == list(run.metrics())
    assert str(read["loss"]) == "[2.0, 1.0, nan, 4.0, 2.0, inf]"
    assert read["test_accuracy"] == [None, 0.75, None, None, None, None]
    assert list(pd.read_parquet(path)["throughput"]) == [32.0] * 6


def test_a_parquet_column_of_text_and_numbers_is_text(run, write_metrics):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_metrics(0, {"k": "report", "t": 63, "step": 12, "note": 5.0})

    assert parquet.read_table(run.export("parquet")).to_pydict()["note"][:3] == [None, "grün, red", "5.0"]


def test_a_file_is_written_again_in_place_of_a_link_and_not_through_it(run, tmp_path):
    target = tmp_path / "mine.txt"
    target.write_text("mine")
    (run.path / "metrics.csv").symlink_to(target)

    run.export("csv")
    path = run.export("csv")

    assert target.read_text() == "mine"
    assert not path.is_symlink()
    assert [p.name for p in run.path.iterdir() if "metrics" in p.name] == ["metrics.csv"]


def test_tensorboard_reads_the_ranks_together(run):
    pytest.importorskip("tensorboard")
    path = run.export("tensorboard")

    read, _ = scalars_of(path)
    assert path == run.path.parent / "tensorboard" / run.id
    assert [step for _, step, _ in read["loss"]] == [4, 8, 12]
    assert str(values_of(read["loss"])) == "[3.0, 1.5, nan]"
    assert values_of(read["throughput"]) == [64.0] * 3
    assert values_of(read["step_seconds"]) == [0.5] * 3
    assert values_of(read["step_seconds_max"]) == [2.0] * 3
    assert values_of(read["memory/rss"]) == [2000.0] * 3
    assert values_of(read["phases/forward"]) == [0.25] * 3
    assert read["test_accuracy"] == [(LAUNCHED + 11.25, 8, 0.75)]


def test_tensorboard_reads_every_rank_of_a_small_world_at_its_own_time(run):
    pytest.importorskip("tensorboard")
    read, _ = scalars_of(run.export("tensorboard"))

    assert values_of(read["ranks/1/loss"]) == [4.0, 2.0, math.inf]
    assert values_of(read["ranks/0/memory/rss"]) == [1000.0] * 3
    assert [time for time, _, _ in read["loss"]] == [LAUNCHED + 10, LAUNCHED + 11.25, LAUNCHED + 12]


def test_tensorboard_reads_the_parameters_as_text(run):
    pytest.importorskip("tensorboard")
    _, accumulator = scalars_of(run.export("tensorboard"))
    (event,) = accumulator.Tensors("parameters")

    assert json.loads(event.tensor_proto.string_val[0]) == {"lr": 0.1, "optimizer": "adam"}
    assert accumulator.SummaryMetadata("parameters").plugin_data.plugin_name == "text"


def test_a_run_that_is_written_twice_has_each_point_once_and_other_files_stay(run):
    pytest.importorskip("tensorboard")
    path = run.export("tensorboard")
    (path / "events.out.tfevents.1.host.mine").write_bytes(b"")

    assert run.export("tensorboard") == path
    read, _ = scalars_of(path)
    assert [step for _, step, _ in read["loss"]] == [4, 8, 12]
    assert len(list(path.iterdir())) == 2


def test_the_ranks_of_a_large_world_are_not_drawn_one_by_one(folder, write_metrics):
    for rank in range(9):
        write_metrics(rank, {"k": "meta", "t": 0.0}, step_record(1.0, 1, loss=float(rank)))

    (point,) = points(folder)
    assert point.values["loss"] == 4.0
    assert not [name for name in point.values if name.startswith("ranks/")]


def test_a_rank_that_recorded_another_step_counts_with_its_newest_value(folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0}, step_record(1.0, 1, loss=1.0), step_record(2.0, 10, loss=2.0))
    write_metrics(1, {"k": "meta", "t": 0.0}, step_record(1.0, 1, loss=3.0), step_record(2.0, 9, loss=4.0))
    write_metrics(1, step_record(2.5, 11, loss=9.0))

    drawn = {point.step: point.values for point in points(folder)}
    assert {step: values["loss"] for step, values in drawn.items() if "loss" in values} == {1: 2.0, 10: 3.0}
    assert drawn[10]["throughput"] == 16.0
    assert drawn[11] == {name: value for name, value in drawn[11].items() if name.startswith("ranks/1/")}


def test_ranks_that_share_a_replica_count_their_samples_once(folder, write_metrics):
    for rank in (0, 1):
        write_metrics(rank, {"k": "meta", "t": 0.0}, {"k": "report", "t": 0.5, "data_ranks": 1}, step_record(1.0, 1))

    assert points(folder)[0].values["throughput"] == 8.0


def test_steps_that_a_restart_repeated_are_drawn_once(folder, write_metrics):
    write_metrics(
        0, {"k": "meta", "t": 500.0, "time": 1000.0}, *(step_record(501.0 + i, i, loss=9.0) for i in (1, 2, 3))
    )
    second = folder.attempt(2)
    second.rank(0).mkdir(parents=True)
    records = {"k": "meta", "t": 20.0, "time": 1010.0}, {"k": "report", "t": 20.5, "start_step": 2}
    records += (step_record(21.0, 1, loss=7.0),)
    second.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))

    assert [(p.step, p.time, p.values["loss"]) for p in points(folder)] == [(1, 1002, 9), (2, 1003, 9), (3, 1011, 7)]


def test_wandb_has_the_run_offline_with_every_value_at_its_time(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")

    path = run.export("wandb")

    (file,) = path.glob("*.wandb")
    deadline = time.monotonic() + 10.0  # wandb's own process may still be writing when finish() returns
    while len(history := wandb_history(file)) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert path.parent == run.path.parent / "wandb"
    assert [row["_step"] for row in history] == [4, 8, 12]
    assert [row["_timestamp"] for row in history] == [LAUNCHED + 10, LAUNCHED + 11.25, LAUNCHED + 12]
    assert [float(row["loss"]) for row in history[:2]] == [3.0, 1.5]
    assert math.isnan(float(history[2]["loss"]))
    assert float(history[2]["ranks/1/loss"]) == math.inf
    assert history[1]["test_accuracy"] == 0.75


def test_trackio_has_each_value_once_when_the_run_is_written_twice(run, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio")
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage

    run.export("trackio", project="exported")
    database = run.export("trackio", project="exported")

    history = storage.get_logs("exported", run.id)
    assert database.exists()
    assert storage.get_runs("exported") == [run.id]
    assert [row["step"] for row in history] == [4, 8, 12]
    assert str([row["loss"] for row in history]) == "[3.0, 1.5, nan]"
    assert history[2]["ranks/1/loss"] == math.inf
    assert storage.get_run_config("exported", run.id)["optimizer"] == "adam"


def test_trackio_keeps_runs_in_its_own_folder(run):
    with pytest.raises(LabError, match="trackio keeps all runs in one folder, got path='here'; set TRACKIO_DIR"):
        run.export("trackio", "here")


@pytest.mark.parametrize(("to", "near"), [("tensorbord", "tensorboard"), ("CSV", "csv"), ("W&B", "wandb")])
def test_an_unknown_format_is_answered_with_the_nearest_one(run, to, near):
    with pytest.raises(LabError, match=f"{to!r} is not an export format; did you mean {near!r}. There are: csv,"):
        run.export(to)


@pytest.mark.parametrize("to", ["csv", "parquet", "tensorboard", "trackio", "wandb"])
def test_a_run_without_records_is_refused(empty, to):
    pytest.importorskip({"csv": "csv", "parquet": "pyarrow"}.get(to, to))

    with pytest.raises(LabError, match="has no records to export, expected at least one step or reported number"):
        empty.export(to)


@pytest.mark.parametrize("to", ["csv", "parquet", "tensorboard", "wandb"])
def test_a_place_that_cannot_be_written_is_named(run, tmp_path, to):
    pytest.importorskip({"csv": "csv", "parquet": "pyarrow"}.get(to, to))
    (tmp_path / "file").touch()

    with pytest.raises(LabError, match="file/there cannot be written: Not a directory; pass a path"):
        run.export(to, tmp_path / "file" / "there")


def test_a_folder_is_not_replaced_by_a_file(run):
    with pytest.raises(LabError, match="cannot be written: Is a directory"):
        run.export("csv", run.path)


@pytest.mark.parametrize(
    ("to", "package"), [("parquet", "pyarrow"), ("tensorboard",) * 2, ("trackio",) * 2, ("wandb",) * 2]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(run, monkeypatch, to, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(LabError, match=rf"needs the package {package}, .* -m pip install '?{package}[>=.\d]*'?$"):
        run.export(to)


def test_the_terminal_prints_where_the_export_is(run, capsys, tmp_path):
    assert main(["export", str(run.path), "csv", str(tmp_path / "run.csv")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.csv'}\n"
    assert main(["export", str(run.path), "cvs"]) == 2
    assert "did you mean 'csv'" in capsys.readouterr().err


def test_a_live_export_adds_what_is_settled_and_forgets_what_a_restart_repeats(run, write_metrics, monkeypatch):
    pytest.importorskip("tensorboard")
    where = run.path.parent / "tensorboard" / run.id
    with ExitStack() as opened:
        export = live._Export(run.folder, "tensorboard", opened)
        export.update(final=False)
        assert [step for _, step, _ in scalars_of(where)[0]["loss"]] == [4, 8]  # values may still come for step 12
        for rank in (0, 1):
            write_metrics(rank, step_record(66.0, 16, loss=0.5))
        export.update(final=False)
        assert [step for _, step, _ in scalars_of(where)[0]["throughput"]] == [4, 8, 12]
        again = run.folder.attempt(2)
        for rank in (0, 1):
            again.metrics(rank).parent.mkdir(parents=True)
            records = [{"k": "meta", "t": 90.0, "time": LAUNCHED + 60, "rank": rank}]
            records += [step_record(91.0 + step, step, loss=0.25) for step in (9, 10, 11)]
            again.metrics(rank).write_text("".join(json.dumps(record) + "\n" for record in records))
        export.update(final=True)
    tensorboard = scalars_of(where)[0]

    assert not export.failure
    assert [(step, value) for _, step, value in tensorboard["loss"]] == [
        (4, 3.0),
        (8, 1.5),
        (9, 0.25),
        (10, 0.25),
        (11, 0.25),
    ]
    assert {(p.step, n) for p in points(run.folder) for n in p.values} == {
        (step, name) for name, curve in tensorboard.items() for _, step, _ in curve
    }


def test_a_live_export_that_fails_says_so_in_the_view(run, monkeypatch):
    monkeypatch.setitem(live.FILES, "csv", lambda folder, path: 1 / 0)
    monkeypatch.setattr(live.os, "nice", lambda _: None)
    monkeypatch.setattr(live.sys, "argv", ["live", str(run.path), "csv"])
    State("succeeded", 1.0, ended=2.0).write(run.folder)
    live.main()

    assert "not exported to csv: ZeroDivisionError" in repr(run)


def test_a_launch_refuses_an_export_it_could_not_write(monkeypatch):
    with pytest.raises(LabError, match="'tensorbord' is not an export format.*did you mean 'tensorboard'"):
        labkit.launch("ddp", export="tensorbord")
    monkeypatch.setattr("labkit.export.formats.find_spec", lambda name: None)
    with pytest.raises(LabError, match="needs the package wandb.*pip install 'wandb>="):
        labkit.sweep("ddp", lr=[1e-3, 1e-4], export=["csv", "wandb"])
