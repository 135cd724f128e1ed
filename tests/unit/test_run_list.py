"""Lists of runs: what they show of many, filters, tags, and what may be deleted."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

import labkit
from labkit import LabError, cli
from labkit.charts import Palette
from labkit.launcher.locks import lock_checkpoints
from labkit.record import Cause, RunFolder, State
from labkit.record.table import WHOLE_BYTES, Glance
from labkit.view.live.page import state_pill


def ended(root, number, *, name="ddp", state="succeeded", parameters=None, losses=(3.0, 2.0, 1.0), reports=()):
    folder = RunFolder(root / f"20260101T{number:06}Z-{name}-{number:04x}")
    folder.rank(0).mkdir(parents=True)
    manifest = {"format": 1, "name": name, "world_size": 2, "parameters": parameters or {}}
    folder.manifest.write_text(json.dumps(manifest))
    State(state, 1000.0, ended=1060.0).write(folder)
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
    assert text.splitlines()[0].split()[-3:] == ["lr", "ranks", "duration"]
    assert "steps" not in text
    assert "0.01" in newest and "0.25" in newest and "0.5" in newest
    assert "0.001" in older and "0.75" in older and "█" in older
    assert "<svg" not in labkit.runs()._repr_html_() and "data:image/svg+xml" in labkit.runs()._repr_html_()


def test_columns_that_do_not_fit_are_named_and_values_that_are_cut_have_a_title(root):
    folder = "/kaggle/input/imagenet-object-localization-challenge/"
    for number in range(2):
        ended(root, number, parameters={"data": f"{folder}{number}"} | {f"option_{n:0>30}": number for n in range(9)})

    html, text = labkit.runs()._repr_html_(), repr(labkit.runs())

    assert f'<span title="{folder}0">/<wbr>kaggle/<wbr>…ion-challenge/<wbr>0</span>' in html
    assert re.findall("columns left out: .*", text) == [
        f"columns left out: option_{8:0>30}, ranks; labkit.compare shows them"
    ]
    assert 2 < html.count("<th") < len(text.splitlines()[0].split())
    assert f"option_{8:0>30}, ranks; labkit.compare shows them" in html


def test_a_comparison_never_calls_values_the_same_that_differ_where_they_are_cut(root):
    for number in range(2):
        ended(root, number, parameters={"data": f"/kaggle/input/{number}/imagenet-object-localization-challenge"})

    assert "the same in all runs" in str(labkit.compare(labkit.runs()))
    assert "challenge" not in str(labkit.compare(labkit.runs())).partition("the same in all runs")[2]


def test_a_run_that_failed_has_a_mark_a_colour_and_the_way_to_its_report_and_folder(root):
    ended(root, 1)
    failed = ended(root, 2, state="failed")
    State("failed", 1000.0, ended=1060.0, cause=Cause("error", "rank 1 failed: <b> in `step`")).write(failed)
    place = os.path.relpath(failed.path)
    page = labkit.runs()._repr_html_()

    assert f"border:1px solid {Palette.RED};" in page and "✖&nbsp;failed" in page
    why = "rank 1 failed: &lt;b&gt; in <code>step</code>"
    assert f"{why} · <code>labkit.attach(&#x27;{failed.id.partition('-')[2]}&#x27;).report()" in page
    assert f"<code>{place}</code>" in page
    assert page.count("<code>") == 3  # nothing of those that succeeded

    labkit.attach(failed.id).report()
    page = labkit.runs()._repr_html_()
    assert f'<a href="{place}/report.html" target="_blank">report</a> · <code>{place}</code>' in page
    assert "writes a report" not in page


def test_a_paused_run_has_a_mark_and_a_colour_of_its_own():
    paused = state_pill(State("running", 1000.0, notice="paused; resume it with run.resume()"), 0.5)

    assert "‖&nbsp;paused" in paused and Palette.AMBER in paused
    assert "●&nbsp;running" in state_pill(State("running", 1000.0), 0.5)


FACTS = [
    "schema",
    "run",
    "state",
    "seconds",
    "step",
    "total_steps",
    "loss",
    "throughput",
    "memory_peak",
    "exit_code",
    "cause",
    "notice",
    "wrong",
    "findings",
    "verdict",
    "metrics",
    "started",
    "ended",
    "ranks",
    "attempt",
    "parameters",
    "script",
    "script_path",
    "folder",
    "tags",
    "note",
    "labkit",
]


def listed_as_json(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(["runs", "--json", *words]) == code
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_folder_of_runs_that_is_not_there_is_named_beside_the_empty_list(tmp_path, capsys):
    assert cli.main(["--runs-dir", str(tmp_path / "none"), "runs", "--json"]) == 0
    assert capsys.readouterr() == ("[]\n", f"labkit: there is no folder {tmp_path / 'none'}\n")


def test_a_program_reads_runs_as_json_with_null_for_what_is_unknown(root, capsys):
    ended(root, 1, losses=(3.0, "nan"), parameters={"lr": "0.001"})
    failed = ended(root, 2, state="failed", losses=(), name="a\x1b[31mb")
    cause = Cause("error", "rank 1 failed: ValueError: boom", ranks=(1,))
    State("failed", 1000.0, ended=1060.0, exit_code=1, cause=cause).write(failed)
    reports = [{"val_accuracy": each, "score": 1.0} for each in (0.5, 0.75, 0.625)]
    labkit.Run(ended(root, 3, reports=reports)).tag("kept", note="a note")

    newest, middle, oldest = listed_as_json(capsys)

    assert [*newest] == [*middle] == [*oldest] == FACTS
    assert newest["metrics"] == {
        "val_accuracy": {"last": 0.625, "best": 0.75, "better": "higher"},
        "score": {"last": 1.0, "best": None, "better": None},
    }
    assert (newest["loss"], newest["step"], newest["exit_code"], newest["cause"]) == (1.0, 3, None, None)
    assert (newest["tags"], newest["note"], oldest["tags"], oldest["note"]) == (["kept"], "a note", [], None)
    assert (newest["started"], newest["ended"], newest["seconds"]) == (
        "1970-01-01T00:16:40Z",
        "1970-01-01T00:17:40Z",
        60.0,
    )
    assert newest["findings"] is None  # these ranks had no witness
    assert newest["throughput"] is newest["memory_peak"] is None
    assert middle["cause"] == {"kind": "error", "sentence": "rank 1 failed: ValueError: boom", "rank": 1}
    assert (middle["state"], middle["exit_code"], middle["loss"], middle["script"]) == ("failed", 1, None, "ab")
    assert oldest["loss"] is None  # it is NaN
    assert oldest["parameters"] == {"lr": "0.001"}
    assert oldest["script_path"] == f"{oldest['folder']}/script.py"
    assert labkit.runs()[:1].facts() == [newest]


def test_runs_lists_those_that_are_named_or_the_last(root, capsys):
    for number in range(1, 4):
        ended(root, number, state="failed" if number == 2 else "succeeded", losses=(float(number),))

    def numbers(*words):
        return [int(facts["run"][-4:], 16) for facts in listed_as_json(capsys, *words)]

    assert numbers("--last", "2") == [3, 2]
    assert numbers("--sort", "loss", "--last", "1") == [1]
    assert numbers("--state", "failed") == [2]
    assert numbers("0001", "latest") == [1, 3]
    assert numbers("0003", "0001", "--sort", "loss") == [1, 3]
    assert numbers("--state", "lost") == []
    assert cli.main(["runs", "0002"]) == 0
    assert [line[-4:] for line in re.findall(r"^\S+-ddp-\w+", capsys.readouterr().out, re.M)] == ["0002"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nothing"], "no run"),
        (["--last", "0"], "--last must be 1 or more, got 0"),
        (["0001", "--tag", "a"], "--tag selects among all runs; give it, or ids, but not both"),
    ],
)
def test_what_runs_cannot_list_is_refused(root, words, why, capsys):
    ended(root, 1)
    assert cli.main(["runs", "--json", *words]) == 2
    said = capsys.readouterr()
    assert why in said.err and said.out == ""


def test_filters_select_by_script_state_and_tag(root):
    ended(root, 1)
    ended(root, 2, name="fsdp", state="failed")
    run = labkit.attach(ended(root, 3, state="failed").id)
    run.tag("baseline", "baseline", note="lr too high")

    assert [r.id for r in labkit.runs(script="fsdp")] == [r.id for r in labkit.runs(script="fsdp", state="failed")]
    assert [r.id for r in labkit.runs(script="ddp", state="failed")] == [run.id]
    assert [r.id for r in labkit.runs(tag="baseline")] == [run.id]
    assert "baseline" in repr(labkit.runs()) and "lr too high" in repr(labkit.runs())
    with pytest.raises(LabError, match="there is no state 'crashed'; the states are starting, running, succeeded"):
        labkit.runs(state="crashed")


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("started", "3210"),
        ("loss", "0123"),
        ("duration", "1320"),
        ("lr", "2013"),
        ("val_accuracy", "1032"),
        ("accuracy", "0321"),
    ],
)
def test_the_best_run_is_first_and_one_without_the_value_last(root, capsys, sort, order):
    runs = [
        ended(root, 0, parameters={"lr": "0.01"}, losses=[1.0], reports=[{"accuracy": 0.5, "val_accuracy": 0.5}]),
        ended(root, 1, parameters={"lr": "0.1"}, losses=[2.0], reports=[{"val_accuracy": 0.75}, {"val_accuracy": 0.5}]),
        ended(root, 2, parameters={"lr": "1e-3"}, losses=[9.0, 3.0]),
        ended(root, 3, parameters={"lr": "auto"}, losses=["nan"], reports=[{"accuracy": 0.25}]),
    ]
    for run, (started, seconds) in zip(runs, [(1, 9), (2, 1), (3, 3), (4, 2)], strict=True):
        State("succeeded", started, ended=started + seconds).write(run)
    expected = [runs[int(number)].id for number in order]

    assert [run.id for run in labkit.runs(sort=sort)] == expected
    assert [summary["run"] for summary in labkit.compare(labkit.runs(), sort=sort).summaries] == expected
    assert cli.main(["runs", "--sort", sort]) == cli.main(["compare", "--last", "4", "--sort", sort]) == 0
    listed, compared = capsys.readouterr().out.split("    run  ", 1)
    assert sorted(expected, key=listed.index) == expected
    assert min(expected, key=lambda id: compared.index(id.partition("-")[2])) == expected[0]


def test_runs_sorted_by_a_metric_of_which_nothing_says_what_is_better_begin_with_the_lowest_and_say_so(root, capsys):
    for number, value in enumerate((0.5, 0.25, 0.75), 1):
        ended(root, number, reports=[{"val_quality": 0.9}, {"val_quality": value}])
    order = "sorted by val_quality, lowest first: run.metric('val_quality', better=…) says which values are better"

    for listed in (labkit.runs(sort="val_quality"), labkit.runs(sort="val_quality")[:2]):
        assert order in repr(listed)
        assert [Glance.read(run.folder).newest["val_quality"] for run in listed] == [0.25, 0.5, 0.75][: len(listed)]
    with pytest.raises(LabError, match="the best runs are unknown .*so keep=1 might delete them"):
        labkit.runs(sort="val_quality").rm(keep=1)
    assert cli.main(["prune", "--sort", "val_quality", "--keep", "1"]) == 2
    assert "the best runs are unknown" in capsys.readouterr().err
    compared = labkit.compare(labkit.runs(), sort="val_quality")
    assert order in str(compared) and "★" not in str(compared) and "best" not in str(compared).partition("sorted")[0]

    labkit.attach("0002").metric("val_quality", better="higher")  # no other run says otherwise

    assert order not in repr(labkit.runs(sort="val_quality"))
    assert "best val_quality" in repr(labkit.runs())
    assert "★ 0.9" not in str(labkit.compare(labkit.runs()))  # all are equal
    assert len(labkit.runs(sort="val_quality").rm(keep=1)) == 2


def test_a_name_that_no_run_has_is_refused_with_those_there_are(root):
    assert labkit.runs(sort="val_loss") == []
    ended(root, 1, parameters={"lr": "0.1"}, reports=[{"val_loss": 0.5, "train_loss": 0.5}])

    says = r"cannot sort by 'vall_loss'; did you mean 'val_loss'\? There are: started, duration, ranks, lr, .*val_loss"
    with pytest.raises(LabError, match=says):
        labkit.runs(sort="vall_loss")
    with pytest.raises(LabError, match=says):
        labkit.compare(labkit.runs(), sort="vall_loss")
    assert "train_loss" in repr(labkit.runs(sort="train_loss"))
    assert "train_loss" not in repr(labkit.runs())


def test_only_a_best_run_is_marked(root):
    for number, (loss, accuracy) in enumerate([(1.00001, 0.5), (1.00002, 0.75), (1.0, 0.75)]):
        ended(root, number, losses=[loss], reports=[{"val_accuracy": accuracy}])
    rows = labkit.compare(labkit.runs())._rows()

    assert [row["loss"] for row in rows] == ["1", "1", "1"]
    assert [row["best val_accuracy"] for row in rows] == ["★ 0.75", "★ 0.75", "0.5"]


def test_a_slice_is_a_table_too(root):
    for number in range(60):
        ended(root, number, losses=[number])

    assert "and 10 more: runs()[50:]" in repr(labkit.runs())
    assert "and 10 more: runs(sort='loss')[50:]" in repr(labkit.runs(sort="loss"))
    assert len(labkit.runs()[50:]._repr_html_().split("<tr")) == 12


def test_pause_and_resume_without_an_id_say_which_runs_there_are(root, capsys):
    ended(root, 1)
    assert cli.main(["pause"]) == cli.main(["resume"]) == 2
    assert capsys.readouterr().err.count("no run is active") == 2

    active = ended(root, 0)
    State("running", time.time()).write(active)
    assert cli.main(["resume"]) == 2
    assert f"no run is paused; active: {active.id}" in capsys.readouterr().err


def test_only_runs_that_have_ended_are_deleted(root, capsys):
    old, new = ended(root, 1), ended(root, 2)
    active = ended(root, 3)
    State("running", time.time()).write(active)

    with pytest.raises(LabError, match="is active; stop it before you delete it"):
        labkit.attach(active.id).rm()
    assert cli.main(["prune", "--keep", "1"]) == 0
    assert f"{old.id}\nadd --yes to delete 1 run" in capsys.readouterr().out
    assert cli.main(["prune", "--keep", "1", "--yes"]) == 0
    assert sorted(path.name for path in root.iterdir()) == [new.id, active.id]
    assert cli.main(["rm", new.id]) == 0
    assert [path.name for path in root.iterdir()] == [active.id]


@pytest.mark.parametrize("which", ["", " ", "ddp", "2026", "latest", ".", "/", "runs"])
def test_rm_deletes_nothing_that_is_not_named_exactly(root, which, capsys):
    run = ended(root, 1)

    assert cli.main(["rm", which]) == 2

    assert run.manifest.exists()
    message = capsys.readouterr().err
    assert message.startswith("labkit: ")
    assert "rm takes an id, its end, such as " in message or "run is identified" in message or "no run" in message


@pytest.mark.parametrize("which", [lambda run: run.id, lambda run: run.id[-8:], lambda run: str(run.path)])
def test_rm_deletes_the_run_of_an_id_its_end_or_a_path(root, which):
    run, other = ended(root, 1), ended(root, 2)

    assert cli.main(["rm", which(run)]) == 0

    assert [path.name for path in root.iterdir()] == [other.id]


def test_a_folder_into_which_another_run_saves_is_not_deleted(root):
    old, other = ended(root, 1), ended(root, 2)
    lock = lock_checkpoints(old.checkpoints, other)

    assert lock is not None
    with pytest.raises(LabError, match=f"{other.id} is active and saves its checkpoints in the folder of"):
        labkit.attach(old.id).rm()


@pytest.mark.parametrize("name", ["loss", "accuracy", "val_accuracy", "val/loss", "missing"])
def test_a_glance_at_one_metric_is_that_of_a_glance_at_all(root, name):
    reports = [{"accuracy": 0.25, "val_accuracy": 0.5}, {"val/loss": 0.5}, {"val_accuracy": 0.25}, {"val/loss": 0.75}]
    for losses, reported in (((3.0, 2.0), reports), ((3.0, None), [*reports, {"loss": 9.0}, {"loss": None}])):
        folder = ended(root, len(reported), losses=losses, reports=reported)
        ended_elsewhere = [{"k": "step", "t": 1.0, "step": 1, "loss": 8.0}, {"k": "report", "t": 1.0, "accuracy": 0.75}]
        folder.rank(1).mkdir()
        folder.metrics(1).write_text("".join(json.dumps(record) + "\n" for record in ended_elsewhere))

        for better in ("lower", "higher", None):
            assert Glance.read(folder, only=name).value(name, better) == Glance.read(folder).value(name, better)


def test_a_long_run_is_sampled(root):
    losses = [1000 / step for step in range(1, 40_000)]
    folder = ended(root, 1, losses=losses, reports=[{"test_loss": 2.0, "best_loss": 0.5}])

    assert folder.metrics(0).stat().st_size > 4 * WHOLE_BYTES
    seen = Glance.read(folder)

    assert seen.losses[0] == 1000.0 and seen.losses[-1] == losses[-1]
    assert 100 < len(seen.losses) < 10_000
    assert seen.losses == sorted(seen.losses, reverse=True)
    assert seen.value("test_loss", "lower") == 0.5


@pytest.mark.parametrize("text", ["", "not json\n", '{"k": "step", "t": 1', '[1]\n{"k": "report", "loss": "x"}\n'])
def test_damaged_records_leave_a_row(root, text):
    ended(root, 1).metrics(0).write_text(text)

    assert "succeeded" in repr(labkit.runs())


def test_a_run_is_deleted_while_its_supervisor_removes_its_last_file(root, monkeypatch):
    old = ended(root, 1)
    (old.path / "reserve").touch()
    listed = os.unlink

    def unlink(name, *args, **kwargs):
        listed(name, *args, **kwargs)
        if Path(name).name == "reserve":
            listed(name, *args, **kwargs)  # somebody else has removed it since the folder was listed

    monkeypatch.setattr(os, "unlink", unlink)
    labkit.attach(old.id).rm()
    assert not old.path.exists()


def test_what_a_verb_says_beside_its_json_goes_to_stderr(root, capsys):
    ended(root, 1)
    killed = root / "20260101T000002Z-ddp-0002"
    killed.mkdir()
    os.utime(killed, (1000.0, 1000.0))

    (run,) = listed_as_json(capsys, "--clean")
    assert run["run"][-4:] == "0001" and not killed.exists()
    killed.mkdir()
    os.utime(killed, (1000.0, 1000.0))
    cli.main(["runs", "--json", "--clean"])
    assert capsys.readouterr().err == f"deleted {killed}\n"
