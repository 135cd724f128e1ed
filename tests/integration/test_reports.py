"""What scripts report, each in its way: real torchrun, real gloo ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec

import pandas as pd
import pytest
from conftest import SCRIPTS

import labkit
from labkit.record import RunReader
from labkit.view.live.run_charts import Look, run_charts
from labkit.view.live.terminal import read_progress_line


def test_what_a_plain_script_logs_is_in_its_metrics_its_view_and_its_report(capsys):
    export = ["csv", "tensorboard"] if find_spec("tensorboard") else "csv"
    run = labkit.launch(SCRIPTS / "with_logging.py", nproc_per_node=2, args=["30"], export=export)
    shown = capsys.readouterr().out
    metrics = run.metrics()
    logged = metrics.dropna(subset=["f1"])
    last = metrics[metrics["step"] == 30].set_index("rank")
    printed = re.findall(r"^step (\d+) f1 (\d\.\d{3})$", run.logs(rank=0), re.M)

    assert logged.groupby("rank")["step"].apply(list).to_dict() == {rank: [*range(1, 31)] for rank in (0, 1)}
    assert [(f"{step:.0f}", f"{f1:.3f}") for step, f1 in logged.query("rank == 0")[["step", "f1"]].values] == printed
    assert "f1" not in run.logs(rank=1)
    assert (logged.query("rank == 0")["f1"].values != logged.query("rank == 1")["f1"].values).any()
    assert (logged.query("rank == 0")["grad_norm"].values == logged.query("rank == 1")["grad_norm"].values).all()
    assert metrics.dropna(subset=["classes"])["step"].tolist() == [1, 1]
    assert (last["validation_f1"] == last["f1"]).all()
    assert metrics.groupby("rank")["steps"].sum().eq(30).all()  # the probe's records are there as ever
    assert re.search(r"f1 0\.\d+ .*grad_norm \d.*validation_f1 0\.\d+", repr(run))
    assert "validation_f1" in run.report().read_text()
    assert run.folder.metrics(0).read_text().splitlines()[-1].endswith('"outcome": "finished", "dropped": 0}')
    assert not re.search(r"^step \d", shown, re.M)  # a rank's lines are in its log

    deadline = time.monotonic() + 60
    while not (run.path / "metrics.csv").exists() or not run.folder.exports.exists():
        assert time.monotonic() < deadline, run.folder.export_log.read_text()
        time.sleep(0.2)
    while len(pd.read_csv(run.path / "metrics.csv")) < len(metrics):  # the last pass, soon after the end
        assert time.monotonic() < deadline, run.folder.export_log.read_text()
        time.sleep(0.2)
    assert "error" not in run.folder.exports.read_text()


def test_what_a_script_only_prints_is_offered_and_charted_on_request(tmp_path):
    script = tmp_path / "prints.py"
    script.write_text(
        "import time, torch\n"
        "model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(1, 41):\n"
        "    loss = model(torch.ones(8, 4)).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()\n"
        "    time.sleep(0.1)\n"
        "    if step % 10 == 0: print(f'step {step} loss {loss:.3f} val_acc: {step / 100}')\n"
    )
    run = labkit.launch(script, nproc_per_node=1, runs_dir=tmp_path, wait=True)
    end = run.id.partition("-")[2]
    offer = f'val_acc is in the log; chart it by `labkit.attach("{end}").metric("val_acc", from_log=True)`'
    assert run.verdict()[-1] == offer
    assert repr(run).splitlines()[-1] == offer

    run.metric("val_acc", from_log=True)

    for view in (run, labkit.attach(run.path)):
        assert offer not in repr(view)
        table = view.metrics().dropna(subset=["val_acc"])
        assert {*zip(table["step"], table["val_acc"], strict=True)} == {(10 * i, i / 10) for i in range(1, 5)}
    reader = RunReader(run.folder).read_all()
    assert "acc" in [chart.title for chart in run_charts(reader, Look())]
    steps = {round(last): x for x, *_, last in reader.ranks[0].series["step"].points()}
    seen = [x for x, *_ in reader.ranks[0].scalars["val_acc"].points()]
    assert all(x >= steps[10 * (i + 1)] - 0.2 for i, x in enumerate(seen))


def test_a_rank_that_prints_its_steps_adds_none_to_the_lines_of_progress(monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_UI", "text")
    run = labkit.launch(SCRIPTS / "with_logging.py", nproc_per_node=2, args=["3000"], wait=False)
    monkeypatch.setattr("labkit.run.PROGRESS_SECONDS", 0.5)
    run.wait()
    said = [line for line in capsys.readouterr().out.splitlines() if read_progress_line(line)]
    steps = [read_progress_line(line)[1]["step"] for line in said]

    assert steps == sorted(steps)
    assert len([line for line in run.logs(rank=0).splitlines() if line.startswith("step ")]) == 3000
    lines = run.folder.metrics(0).read_text().count('"report"')
    assert lines <= 200 + 10 * (run.status().seconds + 1)
    assert run.metrics().query("rank == 1 and step == 3000")["f1"].notna().all()


@pytest.mark.parametrize(
    "configure",
    ["logging.basicConfig(force=True)", "logging.config.dictConfig({'version': 1, 'disable_existing_loggers': True})"],
)
def test_a_script_without_steps_is_recorded_however_it_configures_logging(tmp_path, configure):
    logs = "logging.getLogger('metrics').info({'accuracy': torch.tensor(0.5)})"
    (tmp_path / "evaluate.py").write_text(f"import logging.config, torch\n{configure}\n{logs}\n")
    run = labkit.launch(tmp_path / "evaluate.py", nproc_per_node=1)

    assert run.metrics()[["rank", "step", "accuracy"]].values.tolist() == [[0, 0, 0.5]]
    assert "accuracy 0.5" in repr(run)


def test_the_last_value_before_a_pause_is_written_though_the_rank_ends_without_a_word(tmp_path):
    logs = "[logging.getLogger('metrics').info({'step': i, 'f1': i / 2}) for i in range(2000)]"
    (tmp_path / "pause.py").write_text(f"import logging, os, time, torch\n{logs}\ntime.sleep(2.5)\nos._exit(0)\n")
    run = labkit.launch(tmp_path / "pause.py", nproc_per_node=1)
    metrics = run.metrics()

    assert metrics.iloc[-1][["step", "f1"]].tolist() == [1999, 999.5]
    assert 200 < len(metrics) < 230


QUALITIES = """
import logging, time, torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

model = torch.nn.Linear(2, 1)
plateau = ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1), mode="max")
for step, val_x in enumerate((3.0, 9.0, 4.0, 6.0, 5.0), 1):
    logging.getLogger("metrics").info({"step": step, "val_x": val_x, "val_y": val_x})
    plateau.step(val_x)
    time.sleep(0.2)
time.sleep(300)
"""


def test_a_running_view_circles_what_the_script_and_later_the_owner_in_another_process_call_better(tmp_path):
    (tmp_path / "qualities.py").write_text(QUALITIES)
    run = labkit.launch(tmp_path / "qualities.py", nproc_per_node=2, wait=False)
    reader = RunReader(run.folder)

    def circled():
        reader.poll()
        charts = {chart.title: chart for chart in run_charts(reader, Look()) if chart.evaluated}
        return {title: (point := chart.best_point()) and point[1] for title, chart in charts.items()}

    deadline = time.monotonic() + 120
    while circled() != {"x": 9.0, "y": None}:
        assert time.monotonic() < deadline, (circled(), repr(run))
        time.sleep(0.2)
    say = f"import labkit; labkit.attach({str(run.path)!r}).metric('val_y', better='lower')"
    subprocess.run([sys.executable, "-c", say], check=True, env=os.environ | {"LABKIT_UI": "text"})

    assert circled() == {"x": 9.0, "y": 3.0}
    assert not run.status().is_final
    run.stop(grace=0)
    assert re.search(r"best val_x +best val_y", repr(labkit.runs()))
