"""A rank that becomes another program by exec: labkit cannot see into it, says so, and lets it work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from faults.scene import assert_clean, wait_until

import labkit
from labkit.files import read_json
from labkit.host import Identity
from labkit.launcher import rank_processes
from labkit.record import RunFolder

SCRIPT = """
import os, sys, time
import torch
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range({steps}):
    weight.square().sum().backward()
    optimizer.step()
    time.sleep(0.02)
time.sleep({pause})
if os.environ["RANK"] == "1":
    os.execvp({command}[0], {command})
time.sleep({seconds})
"""
WORK = (
    "import time\nuntil = time.time() + {}\nwhile time.time() < until:\n    sum(range(100_000))\n    time.sleep(0.05)"
)
GUEST = """
import os, sys, threading
heartbeat = open(sys.argv[1])
ends = threading.Event()
guest = threading.Thread(target=ends.wait)
guest.start()
print(guest.native_id, flush=True)
sys.stdin.readline()
ends.set()
guest.join()
print("done", flush=True)
sys.stdin.readline()
os.execvp("bash", ["bash", "-c", "echo done; sleep 600; true"])
"""
WAITS = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(100):
    weight.square().sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    time.sleep(0.05)
    if dist.get_rank() == 1 and step == 5:
        time.sleep(1.5)
        os.execvp("sleep", ["sleep", "5"])
"""
WATCHDOG = 10


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "20260101T000000Z-train-0000")


def launch(tmp_path: Path, command: list[str], seconds: float, *, steps=10, pause=2.0, ranks=2) -> labkit.Run:
    (script := tmp_path / "train.py").write_text(
        SCRIPT.format(steps=steps, pause=pause, command=command, seconds=seconds)
    )
    return labkit.launch(script, nproc_per_node=ranks, watchdog=WATCHDOG, wait=False)


def beat_of(run: labkit.Run, rank: int) -> dict[str, Any]:
    """Its newest heartbeat."""
    return read_json(run.folder.heartbeat(rank)) or {}


@pytest.mark.parametrize(("steps", "pause"), [(10, 2.0), (0, 0.0)], ids=["a moment later", "at once"])
def test_a_rank_that_has_become_a_program_that_works_is_neither_stuck_nor_ended(steps, pause, tmp_path) -> None:
    """Its children do the work."""
    (work := tmp_path / "work.py").write_text(WORK.format(2 * WATCHDOG))
    (shell := tmp_path / "run.sh").write_text(f"{sys.executable} {work}\ntrue\n")
    run = launch(tmp_path, ["bash", str(shell)], 2 * WATCHDOG, steps=steps, pause=pause)
    beat = wait_until(lambda: beat_of(run, 1).get("program") and beat_of(run, 1), 60)
    said = f"rank 1 has become `bash run.sh` (pid {beat['pid']}), which labkit cannot see into"

    sentence = run.stacks().sentence
    notices = []
    wait_until(lambda: notices.append(run.status()) or notices[-1].is_final)

    assert said in sentence
    assert run.status().state == "succeeded"
    assert not [state for state in notices if state.stuck_since is not None]
    assert not [state for state in notices if "rank 1 has made" in (state.notice or "")]
    assert_clean(run, state="succeeded")


def test_one_that_does_nothing_is_ended_by_the_watchdog_which_says_what_it_was(tmp_path) -> None:
    run = launch(tmp_path, ["sleep", "600"], 600)

    wait_until(lambda: run.status().is_final)

    cause = assert_clean(run, state="failed")["cause"]
    assert f"stopped by the watchdog after {WATCHDOG} s without progress" in cause["sentence"]
    assert "rank 1 has become `sleep ...` (pid " in cause["sentence"]


def test_a_rank_that_waited_for_one_is_explained_by_what_it_had_become(tmp_path) -> None:
    """Its sockets stay open in the program, until that ends."""
    (script := tmp_path / "train.py").write_text(WAITS)

    sentence = (
        r"rank 1 had become `sleep ...`, which ended without an error, last seen at step \d; rank 0 waited for it"
    )
    with pytest.raises(labkit.RankFailedError, match=sentence):
        labkit.launch(script, nproc_per_node=2, wait=True)


def test_a_rank_whose_guest_has_ended_is_not_another_program_before_it_execs(folder, monkeypatch) -> None:
    """Its process may take long to exit."""
    monkeypatch.setattr(rank_processes, "POLL_SECONDS", 0.0)
    folder.rank(0).mkdir(parents=True)
    folder.heartbeat(0).touch()
    command = [sys.executable, "-c", GUEST, folder.heartbeat(0)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | {"RANK": "0"}, text=True, **streams) as rank:
        thread = int(rank.stdout.readline())
        folder.heartbeat(0).write_text(json.dumps({"pid": rank.pid, "thread": thread, "step": 3}))
        looking = rank_processes.Programs(folder, Identity.of(os.getpid()))
        looking.update()
        for _ in ("the guest ends", "exec"):
            assert "program" not in json.loads(folder.heartbeat(0).read_text())
            print(file=rank.stdin, flush=True)
            assert rank.stdout.readline() == "done\n"
            time.sleep(0.2)
            looking.update()
        beat = json.loads(folder.heartbeat(0).read_text())
        rank.kill()

    assert (beat["program"], beat["step"], beat["pid"]) == ("bash -c ...", 3, rank.pid)
