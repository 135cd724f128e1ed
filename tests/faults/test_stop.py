"""Stop: at any moment, by anybody, however deaf or frozen its processes are; and never anybody else's process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from faults.scene import (
    ENDLESS,
    FAULTY,
    SHARED_MACHINE,
    assert_clean,
    marked,
    ranks_of,
    read,
    wait_for_step,
    wait_until,
    written,
)

import labkit
from labkit.host import Identity
from labkit.launcher import stopping
from labkit.launcher.rank_processes import is_alive
from labkit.launcher.starting import _supervisors
from labkit.record import RunFolder
from labkit.record.nodes import Node

BOUND = 8.0  # seconds, of every stop
NOT_OURS = "the run's supervisor is gone (killed, or the machine was rebooted) and left no result"


def launch(**options) -> labkit.Run:
    return labkit.launch(FAULTY, nproc_per_node=2, wait=False, **({"steps": ENDLESS} | options))


def timed(act: Callable[[], labkit.record.State]) -> tuple[labkit.record.State, float]:
    began = time.monotonic()
    return act(), time.monotonic() - began


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen]:
    """A process that has nothing to do with any run here; it even carries the marker of another one."""
    process = subprocess.Popen(["sleep", "600"], env=os.environ | {"LABKIT_RUN": "20260101T000000Z-another-0000"})
    yield process
    alive = process.poll() is None
    process.kill()
    process.wait()
    assert alive, "labkit ended a process that is not its own"


# --- a run that goes on


@pytest.mark.parametrize(
    ("fault", "grace", "killed"),
    [
        ("deaf", None, 2),
        ("grandchild", None, 1),
        *(pytest.param(fault, 0, 1, marks=pytest.mark.soak) for fault in ("none", "deaf", "grandchild")),
    ],
)
def test_stop_ends_every_process_and_says_how_many_it_had_to_kill(fault, grace, killed, capfd) -> None:
    """Also DataLoader workers, and a grandchild in a session of its own."""
    run = launch(fault=fault, at=2, workers=0 if fault == "deaf" else 2)
    folder = wait_for_step(run, 4)
    assert len(marked(folder)) >= {"deaf": 3, "none": 3 + 2 * 2, "grandchild": 3 + 2 * 2 + 1}[fault]
    before = written(folder)

    state, seconds = timed(lambda: run.stop() if grace is None else run.stop(grace=grace))

    assert not marked(folder)
    assert seconds < (BOUND if grace is None else 3) * SHARED_MACHINE
    assert state.cause == {"kind": "stopped", "sentence": "stopped on request"}
    assert state.killed >= killed
    assert f"stopped; {state.killed} had to be killed; 0 processes left" in capfd.readouterr().out
    assert_clean(run, before)


def test_a_second_stop_without_grace_does_not_wait_for_ranks_that_are_deaf() -> None:
    run = launch(fault="deaf")
    before = written(wait_for_step(run))
    run.folder.stop_request.write_text(json.dumps({"time": 0, "pid": 0, "grace": 60}))
    time.sleep(0.5)
    assert not run.status().is_final

    state, seconds = timed(lambda: run.stop(grace=0))

    assert seconds < 3 * SHARED_MACHINE
    assert state.killed >= 1
    assert_clean(run, before)


@pytest.mark.parametrize(  # one rank: test_stuck.py
    "frozen", ["all", *(pytest.param(who, marks=pytest.mark.soak) for who in ("one rank", "both ranks", "torchrun"))]
)
def test_stop_of_processes_that_are_stopped_by_a_signal(frozen) -> None:
    run = launch()
    folder = wait_for_step(run)
    before, ranks = written(folder), ranks_of(folder)
    agent = psutil.Process(read(folder.agent)["agent"]["pid"])
    who = {"one rank": [ranks[1]], "both ranks": [*ranks.values()], "torchrun": [agent], "all": marked(folder)}[frozen]
    for process in who:
        process.suspend()
    wait_until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in who))

    state, seconds = timed(run.stop)

    assert seconds < BOUND * SHARED_MACHINE
    assert state.cause["sentence"] == "stopped on request"
    assert state.killed >= 1
    assert state.exit_code == -signal.SIGKILL or frozen not in ("all", "torchrun")
    assert_clean(run, before)


MAIN_THREAD_ENDS = """
import ctypes, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone
"""
STARTS_IT = """
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, pathlib.Path(__file__).with_name("child.py")])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_stop_of_a_process_whose_main_thread_has_ended_and_whose_others_have_not(tmp_path: Path) -> None:
    """The system shows it as a zombie, as it does a process while another thread of it frees a GPU's memory."""
    (tmp_path / "child.py").write_text(MAIN_THREAD_ENDS)
    (tmp_path / "train.py").write_text(STARTS_IT)
    run = labkit.launch(tmp_path / "train.py", nproc_per_node=1, wait=False)
    wait_until(lambda: run.logs(rank=0, stream="stdout").strip())
    child = psutil.Process(int(run.logs(rank=0, stream="stdout")))
    wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    threads = Path(f"/proc/{child.pid}/task")
    assert len([*threads.glob("*")]) == 2

    state = run.stop(grace=0)

    assert state.state == "stopped"
    assert len([*threads.glob("*")]) <= 1  # a zombie, if nobody reaps it
    assert_clean(run.folder)


def test_a_stop_waits_for_what_a_simulated_driver_keeps_after_a_kill_and_says_so(monkeypatch, capfd) -> None:
    """Simulated: a process counts as alive until 3 s after it was killed, without its environment."""
    run = launch()
    wait_for_step(run.folder, 1)
    ended: dict[int, float] = {}

    def exits_slowly(process: psutil.Process) -> bool:
        return is_alive(process) or time.monotonic() < ended.setdefault(process.pid, time.monotonic()) + 3

    os.kill(read(run.folder.agent)["supervisor"]["pid"], signal.SIGKILL)
    monkeypatch.setattr(stopping, "is_alive", exits_slowly)
    state, seconds = timed(lambda: stopping.stop(run.folder, grace=0, say=print))

    assert state.killed > 0
    assert 3 < seconds < BOUND
    said = capfd.readouterr().out
    assert "of its processes that were killed: the system frees their memory" in said  # again if fewer are left
    assert_clean(run.folder)


PYNVML = """
import os, pathlib
FOLDER = pathlib.Path({folder!r})
class NVMLError(Exception): pass
class Process:
    usedGpuMemory = 3 << 30
    def __init__(self, pid): self.pid = pid
NVML_TEMPERATURE_GPU = 0
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetComputeRunningProcesses(handle):
    names = [path.name for path in FOLDER.glob("[0-9]*")]
    stuck = (FOLDER / "stuck").exists()
    return [Process(int(name)) for name in names if stuck or has_memory(name)]
def has_memory(name):
    try: return pathlib.Path("/proc", name, "cmdline").read_bytes() != b""  # empty of a zombie
    except OSError: return False
def __getattr__(name):
    def fails(*_): raise NVMLError
    return fails
"""
ON_GPU = """
import os, pathlib, sys, time
import torch
(pathlib.Path(sys.argv[1]) / str(os.getpid())).touch()
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ("the rank", "0 processes left, and their GPU memory is free"),
        ("stuck", r"0 processes left, but after 1 s NVML still lists pid \d+ with 3.00 GiB on GPU 0"),
        ("nobody", "0 processes left"),  # as in a container: it cannot tell
    ],
)
def test_a_stop_says_of_simulated_gpus_what_nvml_does(lists, said, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML.format(folder=str(tmp_path)))
    (tmp_path / "train.py").write_text(ON_GPU)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(stopping, "FREEING_SECONDS", 1.0)
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "elsewhere" if lists == "nobody" else tmp_path
    run = labkit.launch(tmp_path / "train.py", args=[str(folder)], nproc_per_node=1, wait=False)
    wait_until(lambda: run.folder.processes.exists() and (lists == "nobody" or read(run.folder.processes)["on_gpus"]))
    if lists == "stuck":
        (tmp_path / "stuck").touch()

    run.stop(grace=0)

    assert re.search(f"{said}$", capfd.readouterr().out.strip())
    assert_clean(run.folder)


@pytest.mark.soak
def test_stop_while_the_supervisor_is_stopped_by_a_signal() -> None:
    """Nobody but the caller can do it then, and the supervisor is ended too."""
    run = launch()
    folder = wait_for_step(run)
    before = written(folder)
    supervisor = psutil.Process(read(folder.agent)["supervisor"]["pid"])
    supervisor.suspend()
    state, seconds = timed(run.stop)
    assert seconds < 2 * BOUND * SHARED_MACHINE
    assert state.state == "stopped"
    assert not marked(folder)
    assert assert_clean(run, before)["cause"]["kind"] == "stopped"


def test_a_supervisor_that_wakes_up_writes_nothing_over_a_final_state() -> None:
    run = launch()
    folder = wait_for_step(run)
    supervisor = psutil.Process(read(folder.agent)["supervisor"]["pid"])
    supervisor.suspend()
    cause = {"kind": "stopped", "sentence": "stopped by somebody who is in a hurry"}
    final = read(folder.state) | {"state": "stopped", "ended": time.time(), "cause": cause}
    folder.state.write_text(json.dumps(final))
    folder.stop_request.write_text(json.dumps({"grace": 0}))

    supervisor.resume()

    assert assert_clean(run) == final


def test_two_stops_at_once_agree_and_a_rank_that_dies_meanwhile_is_not_called_a_failure() -> None:
    run = launch(fault="deaf")
    folder = wait_for_step(run)
    before, ranks = written(folder), ranks_of(folder)
    began = time.monotonic()
    stops = [subprocess.Popen(["labkit", "stop", run.id], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    wait_until(folder.stop_request.exists, 30)
    time.sleep(0.5)
    ranks[1].kill()
    said = [process.communicate(timeout=60)[0] for process in stops]

    assert time.monotonic() - began < BOUND * SHARED_MACHINE
    assert [process.returncode for process in stops] == [0, 0]
    last = [text.splitlines()[-1] for text in said]  # before it, what is waited for
    assert all(line.startswith(run.id) and line.endswith("0 processes left") for line in last), said
    told = assert_clean(run, before)
    assert told["cause"]["sentence"] == "stopped on request"
    state, seconds = timed(run.stop)
    assert seconds < 2
    assert (state.state, state.ended) == ("stopped", told["ended"])


# --- one that has hardly begun


def test_stop_before_the_supervisor_has_started() -> None:
    run = launch(env={"LABKIT_WARM": "0"})
    assert Node(run.folder).supervisor_is_starting()

    state, seconds = timed(run.stop)

    assert seconds < BOUND * SHARED_MACHINE
    assert state.cause["sentence"] == "stopped on request"
    assert_clean(run)


@pytest.mark.soak
def test_a_supervisor_that_is_suspended_before_it_has_started_is_killed() -> None:
    run = launch(env={"LABKIT_WARM": "0"})
    psutil.Process(_supervisors[-1].pid).suspend()
    assert Node(run.folder).supervisor_is_starting()

    state, seconds = timed(run.stop)

    assert seconds < 2 * BOUND * SHARED_MACHINE
    assert state.cause["sentence"] == "stopped on request, before its supervisor had started"
    assert_clean(run)


def torchrun_was_started(folder: RunFolder) -> bool:
    return folder.agent.exists() and "agent" in read(folder.agent)


def a_rank_was_started(folder: RunFolder) -> bool:
    return torchrun_was_started(folder) and bool(ranks_of(folder))


def a_rank_has_begun_its_log(folder: RunFolder) -> bool:
    return bool(folder.started_ranks())


MOMENTS = [
    *(pytest.param(moment, marks=pytest.mark.soak) for moment in (torchrun_was_started, a_rank_has_begun_its_log))
]
EARLY = pytest.mark.parametrize("moment", [a_rank_was_started, *MOMENTS])


@EARLY
def test_stop_while_torchrun_is_still_starting(moment) -> None:
    run = launch()
    wait_until(lambda: moment(run.folder))

    state, seconds = timed(run.stop)

    assert seconds < BOUND * SHARED_MACHINE
    assert state.cause["sentence"] == "stopped on request"
    assert_clean(run)


@EARLY
def test_a_supervisor_killed_while_torchrun_is_still_starting_leaves_nothing(moment) -> None:
    run = launch()
    wait_until(lambda: moment(run.folder))
    psutil.Process(read(run.folder.agent)["supervisor"]["pid"]).kill()
    assert_clean(run, state="lost")
    assert run.stop().state == "lost"
    assert_clean(run, state="lost")


# --- one that is over


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has succeeded."""
    run = launch(steps=6, runs_dir=tmp_path_factory.mktemp("ended"))
    wait_until(lambda: run.status().is_final)
    assert_clean(run, state="succeeded")
    return run.path


@pytest.fixture
def over(ended: Path, runs_dir: Path) -> RunFolder:
    """The same, as if it had been launched in the test's own folder."""
    over = RunFolder(shutil.copytree(ended, runs_dir / ended.name))
    over.manifest.write_text(json.dumps(read(over.manifest) | {"folder": str(over.path)}))
    return over


def test_stop_after_the_end_changes_no_file(over, capfd) -> None:
    before = {path: path.read_bytes() for path in over.path.rglob("*") if path.is_file()}

    state, seconds = timed(labkit.attach(over.path).stop)

    assert state.state == "succeeded"
    assert seconds < 2
    assert "had already ended, succeeded; 0 processes left" in capfd.readouterr().out
    assert {path: path.read_bytes() for path in over.path.rglob("*") if path.is_file()} == before


# --- records that are not true any more


def forge(folder: RunFolder, pid: int, **changes) -> labkit.Run:
    """A run that is over, as if it still went on and its supervisor and torchrun were the process `pid`."""
    someone = Identity.of(pid).as_dict() | changes
    folder.agent.write_text(json.dumps({"supervisor": someone, "agent": someone, "oom_kills": None}))
    folder.state.write_text(json.dumps({"state": "running", "started": time.time() - 60}))
    return labkit.attach(folder.path)


@pytest.mark.parametrize("what", ["start", "boot", "nothing"])
def test_no_signal_goes_to_a_stranger_who_has_the_pid(what, over, innocent, capfd) -> None:
    """The pid was recycled; the machine was restarted since; and even: the record is right, but it is not our run."""
    started = Identity.of(innocent.pid).started
    changes = {"start": {"started": started - 1}, "boot": {"boot": "another boot of this machine"}, "nothing": {}}[what]
    run = forge(over, innocent.pid, **changes)
    if what != "nothing":
        assert run.status().state == "lost"
        assert run.status().cause["sentence"] == NOT_OURS

    state, seconds = timed(run.stop)

    assert innocent.poll() is None
    assert seconds < (2 * BOUND if what == "nothing" else 2) * SHARED_MACHINE
    assert state.state == ("stopped" if what == "nothing" else "lost")
    assert "0 processes left" in capfd.readouterr().out


def test_a_run_of_another_machine_is_not_stopped_from_here(over, innocent) -> None:
    run = forge(over, innocent.pid, boot="another boot", host="another-host")

    with pytest.raises(labkit.RunFolderError, match="another machine"):
        run.stop()

    assert innocent.poll() is None
    assert run.status().state == "running"


def test_a_damaged_agent_json_is_no_reason_to_leave_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    # else the run counts as lost on a slow machine
    monkeypatch.setattr("labkit.record.state.STARTING_SECONDS", 600)
    run = launch()
    before = written(wait_for_step(run))
    whole = run.folder.agent.read_bytes()
    run.folder.agent.write_bytes(whole[:20])

    _, seconds = timed(run.stop)

    assert seconds < 2 * BOUND * SHARED_MACHINE
    run.folder.agent.write_bytes(whole)
    assert_clean(run, before)
