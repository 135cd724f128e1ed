"""Where findings show, of a run that is made up."""

import json
import time

import pytest

import labkit
from labkit import cli, words
from labkit.charts import Palette
from labkit.record import Cause, RunFolder, RunReader, State
from labkit.run import Run
from labkit.view import run_text
from labkit.view.live.page import run_html
from labkit.witness import Finding, Findings

SLIP = Finding(
    "slip",
    "rank 1 left out a <collective>",
    "its loss has no graph",
    "Let it take part.",
    since=12,
    until=12,
    ranks=(1,),
)
NOTE = Finding("skip", "rank 0 skipped a batch", certain=False, since=3, until=7)


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path, "train")
    folder.manifest.write_text('{"format": 1, "world_size": 2, "name": "train"}')
    now = time.time()
    State("succeeded", now - 3, now, exit_code=0, notice=SLIP.sentence, wrong=True).write(folder)
    Findings([SLIP, NOTE]).write(folder)
    return folder


def test_findings_are_read_as_they_were_written(folder):
    assert Run(folder).findings() == (SLIP, NOTE)
    assert Run(folder).findings().certain == (SLIP,)


@pytest.mark.parametrize("text", ['{"findings": 3}', '{"findings": [{"kind": 1}, "x", null]}', "", "[1]"])
def test_a_damaged_file_holds_no_findings(text, folder):
    folder.findings.write_text(text)

    assert Run(folder).findings() == ()
    assert repr(Run(folder).findings()).startswith("it is not known whether anything is wrong")


@pytest.mark.parametrize(
    ("since", "until", "start"),
    [(12, 12, "since step 12: "), (3, 7, "since a step between 3 and 7: "), (0, 5, "by step 5: "), (0, 0, "rank")],
)
def test_a_sentence_says_when(since, until, start):
    assert Finding("slip", "rank 1 slept", since=since, until=until).sentence.startswith(start)


def test_findings_in_a_notebook_are_escaped_and_have_their_advice(folder):
    html = Run(folder).findings()._repr_html_()

    assert "&lt;collective&gt;" in html
    assert "Let it take part." in html
    assert "note: since a step between 3 and 7" in html
    assert "nothing was found" in Findings()._repr_html_()


def test_the_first_lines_of_a_run_say_that_it_is_wrong(folder):
    state = State.read(folder)
    first, second, *_ = run_text(folder, RunReader(folder).read_all(), state).splitlines()

    assert words.status(state) == "succeeded, but wrong"
    assert "succeeded, but wrong after 3" in first
    assert second.startswith("since step 12: rank 1 left out")
    assert repr(state).startswith("succeeded after 3.0 s, but since step 12")


def test_the_list_of_runs_has_a_sign(folder):
    assert "succeeded, but wrong" in repr(labkit.runs(runs_dir=folder.path.parent))


def test_a_strict_wait_fails_for_what_is_certain(folder, capsys):
    assert Run(folder).wait().state == "succeeded"
    with pytest.raises(labkit.FindingError, match="succeeded, but wrong\n\nsince step 12"):
        Run(folder).wait(strict=True)
    Findings([NOTE]).write(folder)
    assert Run(folder).wait(strict=True).state == "succeeded"
    assert "it is not known" not in capsys.readouterr().out
    folder.findings.unlink()
    assert Run(folder).wait(strict=True).state == "succeeded"
    assert "it is not known whether anything is wrong" in capsys.readouterr().out


def test_a_run_without_findings_says_what_else_went_wrong(folder, write_metrics, capsys):
    Findings().write(folder)
    losses = [1.0, 1.0, 1.0, "nan", "nan", "nan"]
    steps = (
        {"k": "step", "t": i, "step": i, "n": 1, "seconds": [0.1] * 3, "loss": loss} for i, loss in enumerate(losses, 1)
    )
    folder.ranks.mkdir(exist_ok=True)
    write_metrics(0, {"k": "meta", "t": 0.0}, *steps)
    State("succeeded", 1.0, 2.0, exit_code=0).write(folder)

    lost = "the loss is NaN or infinite on rank 0 since step 4: lower the learning rate or check the data"
    assert repr(Run(folder).findings()) == f"{lost}\nbeside that, nothing was found to be wrong"
    assert lost in Run(folder).findings().certain._repr_html_()

    State("failed", 1.0, 2.0, exit_code=1, cause=Cause("rank", "rank 1 failed: ValueError")).write(folder)

    assert cli.main(["findings", str(folder.path)]) == 0
    failed = "it failed: rank 1 failed: ValueError"
    assert capsys.readouterr().out == f"{failed}\n{lost}\nbeside that, nothing was found to be wrong\n"
    folder.findings.unlink()
    assert repr(Run(folder).findings()).startswith(f"{failed}\n{lost}\nit is not known whether anything else is wrong")


def test_the_verdict_of_a_paused_run_begins_with_that(folder):
    notice = "paused; resume it with run.resume() or `labkit resume`"
    State("running", time.time(), notice=notice).write(folder)

    assert Run(folder).verdict() == [notice]


def test_findings_are_told_in_a_terminal(folder, capsys):
    from labkit.cli import main

    assert main(["findings", str(folder.path)]) == 1
    assert "rank 1 left out" in capsys.readouterr().out
    Findings().write(folder)
    assert main(["findings", str(folder.path)]) == 0
    assert capsys.readouterr().out == "nothing was found to be wrong\n"
    folder.findings.unlink()
    assert main(["findings", str(folder.path)]) == 0
    assert "no optimizer step was witnessed yet, or the witness was off" in capsys.readouterr().out
    assert not Run(folder).findings().certain.witnessed


def test_what_is_wrong_can_be_selected_and_is_not_the_best(folder, tmp_path):
    other = RunFolder.create(tmp_path, "train")
    other.manifest.write_text(folder.manifest.read_text())
    State("succeeded", 1.0, 2.0, exit_code=0).write(other)
    for each, loss in ((folder, 0.1), (other, 0.2)):
        each.rank(0).mkdir(parents=True)
        each.metrics(0).write_text(f'{{"k": "report", "t": 1.0, "step": 1, "loss": {loss}}}\n')
    labkit.runs(runs_dir=tmp_path)

    assert [run.id for run in labkit.runs(state="wrong", runs_dir=tmp_path)] == [folder.id]
    assert len(labkit.runs(state="succeeded", runs_dir=tmp_path)) == 2
    comparison = labkit.compare([folder.path, other.path])
    assert "★" not in str(comparison)
    assert "succeeded, but wrong" in str(comparison)


def test_a_run_whose_loss_is_nan_is_not_the_best_and_not_a_plain_success(folder, tmp_path):
    (tmp_path / "runs").mkdir()
    runs = [RunFolder.create(tmp_path / "runs", name) for name in ("diverged", "trained")]
    for each, loss, accuracy in zip(runs, ("nan", 0.2), (0.9, 0.8), strict=True):
        each.manifest.write_text(folder.manifest.read_text())
        State("succeeded", 1.0, 2.0, exit_code=0).write(each)
        each.rank(0).mkdir(parents=True)
        records = [{"k": "report", "t": 1.0, "step": 1, "loss": 1.0, "val_accuracy": accuracy}]
        records.append({"k": "report", "t": 2.0, "step": 2, "loss": loss, "val_accuracy": 0.1})
        each.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))

    state = "succeeded, but the loss is NaN"
    assert str(labkit.runs(runs_dir=tmp_path / "runs")).count(state) == 1
    rows = labkit.compare([each.path for each in runs])._rows()
    assert [row["result"] for row in rows] == [state, "succeeded"]
    assert [row["best val_accuracy"] for row in rows] == ["0.9", "0.8"]
    page = run_html(runs[0], RunReader(runs[0]).read_all(), State.read(runs[0]))
    assert f"▲&nbsp;{state}" in page and Palette.GREEN not in page


def test_a_run_that_failed_says_what_else_was_wrong_with_it(folder):
    State("failed", 1.0, 2.0, exit_code=1, cause=Cause("exception", "rank 0 failed"), wrong=True).write(folder)
    with pytest.raises(
        labkit.RankFailedError, match="the training was also found to be wrong:\nsince step 12: rank 1 left out"
    ):
        Run(folder).wait()
    State("failed", 1.0, 2.0, exit_code=1, cause=Cause("slip", SLIP.sentence), wrong=True).write(folder)
    with pytest.raises(labkit.RankFailedError) as failure:
        Run(folder).wait()
    assert "also" not in str(failure.value)


def test_what_no_witness_sees_cannot_be_strict(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    assert cli.main(["launch", "--strict", "--no-witness", str(script)]) == 2
    assert "--strict asks the witness, which --no-witness or LABKIT_WITNESS=0 turns off" in capsys.readouterr().err
    assert cli.main(["launch", "--strict", "--detach", str(script)]) == 2
    assert "--strict waits for the end, which --detach does not" in capsys.readouterr().err
    monkeypatch.setenv("LABKIT_WITNESS", "0")
    assert cli.main(["launch", "--strict", str(script)]) == 2
    assert "LABKIT_WITNESS=0 turns off" in capsys.readouterr().err
