"""What a rank recorded is decoded once, and one rule says which of its losses count."""

import math
import re
from pathlib import Path

import pytest

import labkit
from labkit import words
from labkit.files import write_json
from labkit.record import Glance, RunReader
from labkit.record.fold import NodeFold, NodeFolds
from labkit.record.losses import Losses
from labkit.record.records import End, Header, Memory, Model, Report, Step, decode
from labkit.record.table import rows

SEVERAL = "n/a: several optimizers, each with its own loss"
META = {"k": "meta", "t": 100.0, "rank": 0, "device": "cpu"}


def step(number, **more):
    return {"k": "step", "t": 100.0 + number, "step": number, "n": 1, "seconds": [1, 1, 1]} | more


def report(number, **values):
    return {"k": "report", "t": 100.5 + number, "step": number, **values}


MIXED_FROM_3 = [step(1, loss=2.0), step(2, loss=1.9), step(3, loss=55.0)]
SILENT = {"loss": None, "loss_of": SEVERAL}
# The records, the losses that count, and the newest one.
CASES = {
    "several optimizers all along": ([*MIXED_FROM_3, step(4, **SILENT, void_after=0)], [], None),
    "several from the third step on": ([*MIXED_FROM_3, step(4, **SILENT, void_after=2)], [2.0, 1.9], None),
    "found twice": (
        [*MIXED_FROM_3, step(4, **SILENT, void_after=2), step(5, loss=60.0), step(6, **SILENT, void_after=2)],
        [2.0, 1.9],
        None,
    ),
    "first in part, then as a whole": (
        [*MIXED_FROM_3, step(4, **SILENT, void_after=2), step(5, **SILENT, void_after=0)],
        [],
        None,
    ),
    "a second training": (
        [step(1, loss=2.0), step(2, loss=1.9, training=2), step(3, training=2, **SILENT, void_after=1)],
        [2.0],
        None,
    ),
    "the script's own": ([step(1, loss=9.0), report(1, loss=3.0), step(2, loss=8.0)], [3.0], 3.0),
    "unknown now": ([step(1, loss=2.0), step(2, loss=None, loss_of="n/a: …")], [2.0], None),
    "none was kept": ([step(1, loss=2.0), step(2)], [2.0], 2.0),
}


@pytest.mark.parametrize(("records", "losses", "newest"), CASES.values(), ids=CASES)
def test_every_reader_shows_the_losses_that_count(folder, write_metrics, records, losses, newest):
    write_metrics(0, META, *records)
    reader, seen = RunReader(folder).read_all(), Glance.read(folder)
    history = reader.ranks[0]

    assert [last for *_, last in history.series["loss"].points()] == losses
    assert [row["loss"] for row in rows(folder) if row.get("loss") is not None] == losses
    assert seen.losses == losses
    assert history.latest.get("loss") == seen.loss == Glance.read(folder, only="loss").loss == newest


@pytest.mark.parametrize(("records", "losses", "newest"), CASES.values(), ids=CASES)
def test_records_that_come_one_by_one_end_in_the_same_losses(folder, write_metrics, records, losses, newest):
    write_metrics(0, META)
    reader = RunReader(folder)
    for record in records:
        write_metrics(0, record)
        reader.poll()

    assert [last for *_, last in reader.ranks[0].series["loss"].points()] == losses


@pytest.mark.parametrize(("records", "losses", "newest"), CASES.values(), ids=CASES)
def test_a_nodes_fold_forgets_the_losses_that_do_not_count(folder, write_metrics, records, losses, newest):
    write_metrics(0, META)
    home = folder.node(0)
    home.path.mkdir(parents=True)
    fold = NodeFold(folder, folder, home, range(1))
    fold.update()
    folds = NodeFolds([folder], [range(1)])
    for record in records:
        write_metrics(0, record)
        fold.update()
        folds.poll()

    shown = sorted({round(last, 6) for *_, last in folds.series["loss"].points()}, reverse=True)
    assert shown == losses
    assert folds.latest.get("loss") == newest


def test_runs_and_metrics_show_no_loss_of_several_optimizers(folder, write_metrics):
    write_metrics(0, META, *MIXED_FROM_3, step(4, **SILENT, void_after=0))
    script = {"path": None}
    write_json(folder.manifest, {"format": 1, "id": folder.id, "name": "gan", "world_size": 1, "script": script})
    write_json(folder.state, {"state": "succeeded", "started": 1.0, "ended": 2.0, "exit_code": 0})

    assert labkit.attach(folder.path).metrics()["loss"].isna().all()
    assert "55" not in repr(labkit.runs(runs_dir=folder.path.parent))
    assert words.headline(RunReader(folder).read_all(), labkit.attach(folder.path).status()).endswith(f"loss {SEVERAL}")


def test_losses_of_a_resumed_run_are_void_after_a_step_of_the_run(folder, write_metrics):
    write_metrics(0, META, report(0, start_step=10), *MIXED_FROM_3, step(4, **SILENT, void_after=2))

    assert [row["step"] for row in rows(folder) if row.get("loss") is not None] == [11, 12]
    assert [last for *_, last in RunReader(folder).read_all().ranks[0].series["loss"].points()] == [2.0, 1.9]


def test_a_loss_that_is_lost_and_void_is_no_longer_lost(folder, write_metrics):
    write_metrics(0, META, step(1, loss=2.0), step(2, loss="nan"))
    reader = RunReader(folder).read_all()
    assert reader.ranks[0].lost_at == 2

    write_metrics(0, step(3, **SILENT, void_after=1))
    reader.poll()
    assert (reader.ranks[0].lost_at, reader.ranks[0].finite_at) == (None, 1)


def test_each_kind_of_record_is_decoded_to_its_type():
    assert decode(META | {"host": "h", "world_size": 2, "time": 5}) == Header(100.0, 5.0, "h", 2, "cpu")
    assert decode({"k": "model", "t": 1, "device": "cuda:0", "limit": 9, "parameters": 4, "missed": "x"}) == Model(
        1.0, "cuda:0", "", 9.0, {"parameters": 4.0}
    )
    assert decode({"k": "end", "t": 1, "outcome": "raised", "dropped": 2}) == End(1.0, "raised", 2)
    assert decode({"k": "untraced", "t": 1, "why": "no step"}) == Memory(1.0, why="no step")
    assert decode({"k": "report", "t": 1, "step": 3.0, "f1": "nan", "many": [1]}) == Report(
        1.0, 3, {"step": 3.0, "f1": "nan"}
    )
    assert decode({"k": "of the future", "t": 1}) is None

    made = decode({"k": "step", "t": 1, "step": 7, "n": 2, "seconds": [2, 0.5, 1.5], "backward": None, "loss": "inf"})
    assert isinstance(made, Step)
    assert (made.step, made.steps, made.seconds, made.slowest) == (7, 2.0, 2.0, 1.5)
    assert (made.phases, made.samples, made.rss, made.void_after) == ({"backward": None}, None, None, None)
    assert (made.has_loss, made.loss, made.loss_of, made.training) == (True, math.inf, "as passed to backward()", 1)


def test_a_record_of_another_kind_says_nothing_about_losses():
    losses = Losses()

    assert losses.take(End(1.0, "finished")) == (None, None)
    assert (losses.newest, losses.what) == (None, "")


def test_only_the_package_of_records_opens_a_ranks_file():
    root = Path(labkit.__file__).parent
    named = re.compile(r"([\w.]*)\((?:\w+, )?[\w.]+\.metrics\(\w[^)]*\)(\.\w+)?")
    found = {
        (str(path.relative_to(root)), user or method)
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in ("record", "worker")
        for user, method in named.findall(path.read_text())
    }

    assert ("launcher/stalls.py", "Records") in found
    assert {user for _, user in found} <= {"Records", "End.read", "Step.last", "RankHistory", ".stat"}
