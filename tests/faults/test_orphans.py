"""No process of a run outlives it, whatever it did to its environment, its parents or its session; and what is not the
run's is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from faults.scene import assert_clean, read, wait_until

import labkit

# What a rank starts: deaf to TERM, it writes down its pid and sleeps.
HELPER = """
import ctypes, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] == "rewritten":  # as setproctitle does
    start, end = map(int, open("/proc/self/stat").read().rsplit(")", 1)[1].split()[47:49])
    ctypes.memset(start, 0, end - start)
partial = sys.argv[1] + ".partial"
with open(partial, "w") as file:
    file.write(str(os.getpid()))
os.rename(partial, sys.argv[1])
time.sleep(600)
"""
SCRIPT = """
import os, subprocess, sys, time
kind, pid_file, seconds, helper = sys.argv[1:]
command = [sys.executable, "-S", "-c", helper, pid_file, kind]
if kind == "rewritten":
    subprocess.Popen(command)
else:  # a daemon: no environment, a session of its own, a parent that is gone
    if os.fork() == 0:
        subprocess.Popen(command, env={}, start_new_session=True)
        os._exit(0)
while not os.path.exists(pid_file):
    time.sleep(0.05)
time.sleep(float(seconds))
"""
KINDS = pytest.mark.parametrize("kind", ["rewritten", "daemon"])


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    """Where a process that the test's run has started writes its pid; it is ended after the test in any case."""
    path = tmp_path / "pid"
    yield path
    if path.exists() and psutil.pid_exists(pid := int(path.read_text())):
        psutil.Process(pid).kill()


def launch(tmp_path: Path, kind: str, pid_file: Path, seconds: float) -> labkit.Run:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = [kind, str(pid_file), str(seconds), HELPER]
    return labkit.launch(script, nproc_per_node=1, args=arguments, wait=False)


def helper_of(pid_file: Path) -> psutil.Process:
    wait_until(pid_file.exists)
    helper = psutil.Process(int(pid_file.read_text()))
    assert "LABKIT_RUN" not in helper.environ()
    return helper


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def recorded(run: labkit.Run) -> list[int]:
    return [process["pid"] for process in read(run.folder.processes)["processes"]]


def supervisor_of(run: labkit.Run) -> psutil.Process:
    return psutil.Process(read(run.folder.agent)["supervisor"]["pid"])


def sampler_of(supervisor: psutil.Process) -> psutil.Process | None:
    return next((child for child in supervisor.children() if "labkit.launcher.sampler" in child.cmdline()), None)


@KINDS
def test_a_helper_without_the_marker_is_ended_with_its_run(kind, tmp_path, pid_file) -> None:
    run = launch(tmp_path, kind, pid_file, seconds=0)
    helper = helper_of(pid_file)

    state = run.wait()

    assert (state.state, state.exit_code) == ("succeeded", 0)
    assert not is_alive(helper)
    assert state.killed == 1
    assert_clean(run, state="succeeded")


@KINDS
def test_stop_ends_a_helper_without_the_marker(kind, tmp_path, pid_file, capfd) -> None:
    run = launch(tmp_path, kind, pid_file, seconds=600)
    helper = helper_of(pid_file)

    run.stop(grace=1)

    assert not is_alive(helper)
    assert "; 0 processes left" in capfd.readouterr().out
    assert_clean(run)


def test_stop_ends_a_daemon_whose_supervisor_was_killed(tmp_path, pid_file, capfd) -> None:
    """Nobody has inherited it then; it is known from before, and the run stays lost."""
    run = launch(tmp_path, "daemon", pid_file, seconds=600)
    helper, supervisor = helper_of(pid_file), supervisor_of(run)
    wait_until(lambda: run.folder.processes.exists() and helper.pid in recorded(run))
    supervisor.kill()
    wait_until(lambda: run.status().is_final)
    assert is_alive(helper)

    state = run.stop()

    assert not is_alive(helper)
    assert "0 processes left" in capfd.readouterr().out
    assert state.state == labkit.attach(run.path).status().state == "lost"
    assert_clean(run, state="lost")


def test_stop_ends_a_stopped_supervisor_and_sampler_too(tmp_path, pid_file) -> None:
    run = launch(tmp_path, "daemon", pid_file, seconds=600)
    wait_until(run.folder.agent.exists)
    supervisor = supervisor_of(run)
    sampler = wait_until(lambda: sampler_of(supervisor))
    sampler.suspend()
    helper = helper_of(pid_file)
    assert not run.folder.processes.exists() or helper.pid not in recorded(run)
    supervisor.suspend()

    state = run.stop(grace=1)

    assert state.state == "stopped"
    assert not [process for process in (helper, supervisor, sampler) if is_alive(process)]
    assert_clean(run)


def test_another_run_that_a_rank_has_launched_continues(tmp_path, pid_file) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text(f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import labkit, os, sys, time\n"
        "labkit.launch(sys.argv[1], nproc_per_node=1, wait=False, detach=True, runs_dir=sys.argv[2])\n"
        "while not os.path.exists(sys.argv[3]):\n    time.sleep(0.1)\n"
    )
    others = tmp_path / "others"
    run = labkit.launch(outer, nproc_per_node=1, args=[str(inner), str(others), str(pid_file)], wait=False)

    assert run.wait(timeout=90).state == "succeeded"

    other = labkit.attach(next(others.iterdir()))
    try:
        assert run.status().killed == 0
        assert other.status().state == "running"
        assert is_alive(psutil.Process(int(pid_file.read_text())))
    finally:
        other.stop()
    assert_clean(other)
