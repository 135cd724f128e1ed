"""The round trip with Kaggle's own client against a stand-in for its service: never against Kaggle itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from integration.kaggle_stand_in import TOKEN, StandIn
from kagglesdk import kaggle_env

import labkit
from labkit.cli import main
from labkit.files import write_json
from labkit.install import pip_install
from labkit.kaggle import following
from labkit.record import RunFolder, State
from labkit.view.live.terminal import read_progress_line

pytest_plugins = ["integration.kaggle_stand_in"]  # its fixture `service`
KERNEL = "me/labkit-small"


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "small.ipynb"

    def write(*sources: str) -> Path:
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write


def test_a_notebook_goes_to_a_stand_in_for_kaggle_is_followed_and_its_run_comes_back(
    service, notebook, runs_dir, capsys
):
    """One push after an older version, of which Kaggle still tells at first; the log's connection is cut once."""
    service.late, service.cut_after = ["COMPLETE", "QUEUED"], 4
    train = "import labkit\nrun = labkit.launch('single', nproc_per_node=1, steps=steps, global_batch_size=4)"

    code = main(["kaggle", "push", str(notebook("steps = 1", train)), "-p", "steps", "10"])

    out = capsys.readouterr().out
    assert code == 0, out
    assert re.search(rf"{KERNEL}, 0\.\d\d of 1 MB, runs at https://www.kaggle.com/code/{KERNEL}", out)
    assert "of the version before" not in out
    assert f"labkit {labkit.__version__}, push" not in out.partition("runs at")[0]
    lines = [line for line in out.splitlines() if read_progress_line(line)]
    assert lines and len(lines) == len(set(lines))  # nothing is told twice after the cut
    text, facts = read_progress_line(lines[-1])
    assert text.startswith("step 10 of 10 (100%) · loss")
    assert (facts["state"], facts["step"], facts["total_steps"]) == ("succeeded", 10, 10)
    assert "Kaggle sessions are limited: this run saves and stops after 99" in out
    (run,) = labkit.runs()
    assert run.path.parent == runs_dir
    assert str(run.path) in out
    assert run.status().state == facts["state"]
    assert run.metrics()["step"].max() == 10
    for verb in ("compare", "report"):
        assert main([verb, run.id]) == 0
    assert not list(runs_dir.glob(".pull-*"))

    assert (service.saved["slug"], service.saved["machineShape"]) == (KERNEL, "NvidiaTeslaT4")
    assert (service.saved["enableGpu"], service.saved.get("enableInternet", False)) == (True, False)
    assert service.saved["isPrivate"] is True
    assert "steps = 10" in json.loads(service.saved["text"])["cells"][2]["source"]


def put(service: StandIn, run: str, state: State) -> RunFolder:
    folder = RunFolder(service.working / "runs" / run)
    (folder.path / "checkpoints" / "step-4").mkdir(parents=True)
    (folder.path / "checkpoints" / "step-4" / "weights").write_text("gigabytes")
    (folder.rank(0)).mkdir(parents=True)
    write_json(folder.manifest, {"format": 1, "name": "ddp", "world_size": 1})
    write_json(folder.agent, {"supervisor": {"pid": 7, "started": 1.0, "boot": "another", "host": "kaggle"}})
    state.write(folder)
    records = [{"k": "meta", "t": 5.0, "time": 1000.0}]
    records += [{"k": "step", "t": 5.0 + i, "step": i, "n": 1, "seconds": [1.0] * 3} for i in range(1, 31)]
    folder.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_run_cut_off_by_its_session_is_lost_and_has_no_checkpoints(service, runs_dir, capsys):
    put(service, "20260101T000000Z-ddp-0001", State("running", 1000.0))
    service.status, service.message = "ERROR", "Your notebook tried to run longer than allowed"

    assert main(["kaggle", "pull", KERNEL]) == 1

    assert f"{KERNEL}: ERROR. Your notebook tried to run longer than allowed" in capsys.readouterr().out
    (run,) = labkit.runs()
    assert (run.status().state, round(run.status().seconds)) == ("lost", 30)
    assert run.status().cause["sentence"] == "Kaggle's session ended before the run did"
    assert not (run.path / "checkpoints").exists()


def test_what_was_pulled_before_is_left_as_it_is(service, runs_dir, capsys):
    for number in range(1, 9):  # more files than are listed at once
        put(service, f"2026010{number}T000000Z-ddp-0001", State("succeeded", 0.0, ended=9.0))
    mine = runs_dir / "20260102T000000Z-ddp-0001"
    mine.mkdir(parents=True)

    assert main(["kaggle", "pull", KERNEL]) == 0

    assert f"{mine.name} already exists and was not changed" in capsys.readouterr().out
    assert not list(mine.iterdir())
    assert len(labkit.runs()) == 7
    assert sum(name == "ListKernelSessionOutput" for name, _ in service.calls) > 1


def test_a_failed_notebook_is_reported_with_its_cause(service, notebook, capsys):
    service.late = ["COMPLETE"]  # the session before: the log may show all of this one before the status does
    assert main(["kaggle", "push", str(notebook("x = 1", "raise ValueError('of the notebook')"))]) == 1

    out = capsys.readouterr().out
    assert "ValueError: of the notebook" in out
    assert "its output has no runs" in out
    assert f"{KERNEL}: ERROR. the notebook failed" in out


def test_a_push_that_never_starts_is_reported(service, notebook, monkeypatch, capsys):
    monkeypatch.setattr(following, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(StandIn, "_run", lambda self: None)

    assert main(["kaggle", "push", str(notebook("x = 1"))]) == 2

    told = capsys.readouterr().err
    assert f"labkit: {KERNEL}: COMPLETE, but its log has no output from this push" in told
    assert f"follow it with: labkit kaggle pull {KERNEL}" in told


def test_an_interrupt_leaves_the_kernel_going_and_says_how_to_come_back(service, notebook):
    service.status, service.log = "RUNNING", ['labkit: step 3 of 9 (33%) {"run": "r"}\n']
    at = f"import kagglesdk.kaggle_env as e; e._env_to_endpoint[e.KaggleEnv.PROD] = {service.url!r}; "
    program = at + f"import sys, labkit.cli; sys.exit(labkit.cli.main(['kaggle', 'pull', {KERNEL!r}]))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert "step 3 of 9" in process.stdout.readline()

    process.send_signal(signal.SIGINT)

    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"{KERNEL} continues; follow it with: labkit kaggle pull {KERNEL}" in out
    assert service.status == "RUNNING"


def test_without_following_it_prints_how_to_come_back(service, notebook, monkeypatch, capsys):
    monkeypatch.setattr(StandIn, "_run", lambda self: None)

    assert main(["kaggle", "push", "--no-follow", "--input", "me/labkit-small", str(notebook("x = 1"))]) == 0

    assert f"follow it with: labkit kaggle pull {KERNEL}" in capsys.readouterr().out
    assert service.saved["kernelDataSources"] == [KERNEL]


def test_without_a_login_one_sentence_says_how(service, notebook, monkeypatch, capsys):
    monkeypatch.setenv("KAGGLE_API_TOKEN", "of-somebody-else")

    assert main(["kaggle", "push", str(notebook("x = 1"))]) == 2

    said = capsys.readouterr()
    assert said.err.startswith("labkit: you are not logged in to Kaggle: run `kaggle auth login`")
    assert not said.out


def test_without_the_client_one_sentence_says_what_to_install(notebook, monkeypatch, capsys):
    for module in ["kaggle", *(name for name in sys.modules if name.startswith("kaggle."))]:
        monkeypatch.setitem(sys.modules, module, None)

    assert main(["kaggle", "push", str(notebook("x = 1"))]) == 2

    assert capsys.readouterr().err == f"labkit: Kaggle's client is missing; install it: {pip_install('kaggle')}\n"


def test_a_service_that_does_not_answer_is_reported(tmp_path, notebook, monkeypatch, capsys):
    monkeypatch.setenv("KAGGLE_API_TOKEN", TOKEN)
    monkeypatch.setitem(kaggle_env._env_to_endpoint, kaggle_env.KaggleEnv.PROD, "http://127.0.0.1:1")

    assert main(["kaggle", "push", str(notebook("x = 1"))]) == 2

    assert capsys.readouterr().err.startswith("labkit: Kaggle: logging in failed: HTTPConnectionPool")
