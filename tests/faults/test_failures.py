"""What a run says when a rank fails, and what is left of it: nothing but the truth."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest
from conftest import SCRIPTS, marked_processes

import labkit
from labkit import RankFailedError, Script
from labkit.launcher.causes import signals
from labkit.launcher.stop import processes_of
from labkit.record import Identity, RunFolder

FAULTY = SCRIPTS / "faulty.py"


def launch(**options):
    return labkit.launch(FAULTY, nproc_per_node=2, wait=False, **options)


TOGETHER = """def main():
    here = Path(os.environ["LABKIT_RUN_DIR"])  # torchrun ends the others as soon as one has failed
    (here / f"here-{os.environ['RANK']}").touch()
    while len(list(here.glob("here-*"))) < 2:
        time.sleep(0.001)
"""


def test_the_same_failure_of_all_ranks_is_reported_once():
    script = Script.parse(str(Script.load("ddp")).replace("def main():\n", TOGETHER), name="together")
    run = labkit.launch(script, nproc_per_node=2, args=["--precision", "fp9"], wait=False)
    with pytest.raises(RankFailedError, match=r"ranks 0, 1 exited with 2: .*invalid choice: 'fp9'"):
        run.wait(60)


def test_an_error_in_a_cell_is_traced_back_to_the_cell():
    lines = "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n"
    lines += "        super().__init__()\n        self.net = nn.Embedding(256, 256)\n\n"
    lines += "    def forward(self, x):\n        1 / 0\n"
    run = labkit.launch(Script.load("single").with_cells(model=lines), nproc_per_node=1, steps=2, wait=False)
    with pytest.raises(
        RankFailedError, match=r"ZeroDivisionError.*cell `model` from text passed to with_cells, line 11"
    ):
        run.wait(60)


def test_an_error_in_a_dataloader_worker_keeps_its_own_words_and_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from torch.utils.data import DataLoader\n\n\nclass Broken:\n    def __len__(self):\n        return 8\n\n"
        "    def __getitem__(self, i):\n        raise ValueError('item 3 is empty')\n\n\n"
        "for _ in DataLoader(Broken(), num_workers=1):\n    pass\n"
    )
    run = labkit.launch(script, nproc_per_node=1, wait=False)
    with pytest.raises(RankFailedError) as raised:
        run.wait(60)
    first = str(raised.value).splitlines()[0]
    assert first == "rank 0 failed: ValueError: item 3 is empty (in a DataLoader worker) (train.py line 9)"


def test_what_was_recorded_at_the_launch_is_what_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('version 1')\n")
    run = labkit.launch(script, nproc_per_node=1, wait=False)
    script.write_text("print('version 2')\n")
    run.wait(60)
    assert run.logs(rank=0).strip() == "version 1"


def test_a_second_interrupt_does_not_wait_for_ranks_that_are_deaf():
    run = launch(fault="deaf", steps=10_000)
    wait_for_step(run, 3)
    run.folder.stop_request.write_text(json.dumps({"time": 0, "pid": 0, "grace": 60}))
    time.sleep(0.5)
    started = time.monotonic()
    run.stop(grace=0)
    assert time.monotonic() - started < 5
    assert not processes_of(run.folder)


def test_a_killed_supervisor_takes_deaf_ranks_with_it():
    run = launch(fault="deaf", steps=10_000)
    wait_for_step(run, 3)
    os.kill(agent_of(run)["supervisor"]["pid"], signal.SIGKILL)
    wait_for_end(run)
    assert run.status().state == "lost"


def test_a_run_of_another_machine_is_not_stopped_from_here():
    run = launch(steps=10_000)
    wait_for_step(run, 3)
    here = run.folder.agent.read_text()
    elsewhere = json.loads(here)
    elsewhere["supervisor"] |= {"boot": "another boot", "host": "another-host"}
    run.folder.agent.write_text(json.dumps(elsewhere))
    with pytest.raises(labkit.RunFolderError, match="another machine"):
        run.stop()
    assert run.status().state == "running"
    run.folder.agent.write_text(here)
    run.stop()


@pytest.mark.parametrize(
    "fault", ["grandchild", *(pytest.param(fault, marks=pytest.mark.soak) for fault in ("none", "deaf"))]
)
def test_stop_leaves_no_process(fault):
    run = launch(fault=fault, steps=10_000, at=2)
    wait_for_step(run, 3)
    started = time.monotonic()
    state = run.stop()
    assert time.monotonic() - started < 9
    assert state.state == "stopped"
    assert state.cause["sentence"] == "stopped on request"
    assert not processes_of(run.folder)
    assert run.stop().state == "stopped"
    assert state.killed > 0 or fault == "none"


def test_stop_works_while_torchrun_is_still_starting():
    run = launch(steps=10_000)
    assert run.stop().state == "stopped"
    assert not processes_of(run.folder)


def test_stop_after_the_end_changes_nothing():
    run = launch(steps=2)
    run.wait(60)
    before = run.folder.state.read_bytes()
    assert run.stop().state == "succeeded"
    assert run.folder.state.read_bytes() == before


def wait_for_step(run, step: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while run.metrics().empty or run.metrics()["step"].max() < step:
        assert time.monotonic() < deadline, f"no step {step} within {seconds} s: {run.status()}"
        assert not run.status().is_final, run.status()
        time.sleep(0.1)


def agent_of(run) -> dict:
    return json.loads(run.folder.agent.read_text())


def wait_for_end(run, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while (marked := processes_of(run.folder)) or not run.status().is_final:
        assert time.monotonic() < deadline, f"{marked}, {run.status()}"
        time.sleep(0.1)


def test_a_killed_agent_takes_its_ranks_with_it_and_the_state_says_so():
    run = launch(steps=10_000)
    wait_for_step(run, 3)
    os.kill(agent_of(run)["agent"]["pid"], signal.SIGKILL)
    wait_for_end(run)
    assert run.status().state == "failed"
    assert "torchrun was killed (SIGKILL)" in run.status().cause["sentence"]


def test_a_killed_supervisor_takes_the_run_with_it_and_the_run_reads_as_lost():
    run = launch(steps=10_000)
    wait_for_step(run, 3)
    os.kill(agent_of(run)["supervisor"]["pid"], signal.SIGKILL)
    wait_for_end(run)
    assert run.status().state == "lost"
    with pytest.raises(RankFailedError, match="gone"):
        run.wait()
    assert run.stop().state == "lost"


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (3, 3, "by another process, not by labkit"),
        (3, 4, "by the system because memory ran out"),
        (None, 4, "probably by the system because memory ran out"),
    ],
)
def test_who_sent_a_kill_is_derived_from_the_systems_count(tmp_path, monkeypatch, before, now, says):
    folder = RunFolder(tmp_path)
    folder.agent.write_text(json.dumps({"oom_kills": before}))
    monkeypatch.setattr(signals, "oom_kills", lambda: now)
    assert says in signals._killer(folder)[0]


def test_a_rank_killed_from_outside_is_named():
    run = launch(steps=10_000)
    wait_for_step(run, 3)
    ranks = {p.environ().get("RANK"): p.pid for p in processes_of(run.folder) if "RANK" in p.environ()}
    os.kill(ranks["0"], signal.SIGKILL)
    wait_for_end(run)
    assert run.status().cause["sentence"].startswith("rank 0 was killed (SIGKILL)")


def test_no_signal_goes_to_a_process_that_took_over_a_pid():
    run = launch(steps=10_000)
    wait_for_step(run, 3)
    run.stop()
    record = agent_of(run)
    own = Identity.of(os.getpid()).as_dict()
    record["agent"] = record["supervisor"] = {**own, "started": own["started"] - 1}
    run.folder.agent.write_text(json.dumps(record))
    run.folder.state.write_text(json.dumps({"state": "running", "started": time.time()}))
    assert run.status().state == "lost"
    run.stop()
    assert psutil.Process(os.getpid()).is_running()


def test_a_programs_run_dies_with_the_program(tmp_path, runs_dir):
    """A plain program is headless: its run is tied to it, also when it is killed without a chance to clean up."""
    program = tmp_path / "program.py"
    program.write_text(f"import labkit\nlabkit.launch({str(FAULTY)!r}, nproc_per_node=2, steps=10_000)\n")
    process = psutil.Popen(["python", str(program)])
    deadline = time.monotonic() + 60
    while not labkit.runs() or labkit.runs()[0].metrics().empty:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    run = labkit.runs()[0]
    process.kill()
    process.wait()
    wait_for_end(run)
    assert not marked_processes(runs_dir)
    assert run.status().state == "stopped"
    assert run.status().cause["sentence"] == "the process that started this run has exited"


def test_a_detached_run_outlives_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import labkit\nlabkit.launch({str(FAULTY)!r}, nproc_per_node=2, detach=True, wait=False)\n")
    assert psutil.Popen(["python", str(program)]).wait(60) == 0
    run = labkit.attach("latest")
    assert run.wait(60).state == "succeeded"
