"""No process of a run outlives it, whatever it did to its environment, its parents or its session; and what is not the
run's is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from faults.scene import ENDLESS, FAULTY, assert_clean, assert_over, marked, read, wait_for_step, wait_until, written

import labkit

# What a rank starts, one of each kind: deaf to TERM, it writes down its pid and sleeps.
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
seconds, helper, *kinds = sys.argv[1:]
for kind in kinds:
    command = [sys.executable, "-S", "-c", helper, kind, os.path.basename(kind)]
    if os.path.basename(kind) == "rewritten":
        subprocess.Popen(command)
    else:  # a daemon: no environment, a session of its own, a parent that is gone
        if os.fork() == 0:
            subprocess.Popen(command, env={}, start_new_session=True)
            os._exit(0)
    while not os.path.exists(kind):
        time.sleep(0.05)
time.sleep(float(seconds))
"""


@pytest.fixture
def pids(tmp_path: Path) -> Iterator[Path]:
    """Where processes that the test's run has started write their pids; they are ended after the test in any case."""
    folder = tmp_path / "pids"
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        if file.suffix != ".partial" and psutil.pid_exists(pid := int(file.read_text())):
            psutil.Process(pid).kill()


def launch(tmp_path: Path, pids: Path, seconds: float, kinds: tuple[str, ...] = ("rewritten", "daemon")) -> labkit.Run:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    arguments = [str(seconds), HELPER, *(str(pids / kind) for kind in kinds)]
    return labkit.launch(script, nproc_per_node=1, args=arguments, wait=False)


def helper_of(pids: Path, kind: str = "daemon") -> psutil.Process:
    wait_until((pids / kind).exists)
    helper = psutil.Process(int((pids / kind).read_text()))
    assert "LABKIT_RUN" not in helper.environ()
    return helper


def helpers_of(pids: Path) -> list[psutil.Process]:
    return [helper_of(pids, kind) for kind in ("rewritten", "daemon")]


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def recorded(run: labkit.Run) -> list[int]:
    return [process["pid"] for process in read(run.folder.processes)["processes"]]


def supervisor_of(run: labkit.Run) -> psutil.Process:
    return psutil.Process(read(run.folder.agent)["supervisor"]["pid"])


def sampler_of(supervisor: psutil.Process) -> psutil.Process | None:
    return next((child for child in supervisor.children() if "labkit.launcher.sampler" in child.cmdline()), None)


def test_helpers_without_the_marker_are_found_after_their_run_too(tmp_path, pids, capfd) -> None:
    """They outlive a run that has succeeded, for a minute (test_left_running.py)."""
    run = launch(tmp_path, pids, seconds=3)
    helpers = helpers_of(pids)
    assert run.wait().state == "succeeded"
    assert all(map(is_alive, helpers))

    state = run.stop(grace=1)

    assert (state.state, state.exit_code, state.killed) == ("succeeded", 0, 2)
    assert not [helper for helper in helpers if is_alive(helper)]
    assert "; 0 processes left" in capfd.readouterr().out
    assert_clean(run, state="succeeded")


def test_stop_ends_helpers_without_the_marker(tmp_path, pids, capfd) -> None:
    run = launch(tmp_path, pids, seconds=600)
    helpers = helpers_of(pids)

    run.stop(grace=1)

    assert not [helper for helper in helpers if is_alive(helper)]
    assert "; 0 processes left" in capfd.readouterr().out
    assert_clean(run)


def test_deaf_ranks_end_with_a_killed_supervisor_and_the_run_reads_as_lost() -> None:
    run = labkit.launch(FAULTY, nproc_per_node=2, fault="deaf", steps=ENDLESS, wait=False)
    before = written(wait_for_step(run))

    supervisor_of(run).kill()

    assert_clean(run, before, state="lost")
    with pytest.raises(labkit.RankFailedError, match="gone"):
        run.wait()
    assert run.stop().state == "lost"


def test_what_ranks_have_started_ends_with_a_killed_torchrun() -> None:
    """DataLoader workers, and a grandchild in a session of its own; a stop after that changes nothing."""
    run = labkit.launch(FAULTY, nproc_per_node=2, fault="grandchild", at=2, steps=ENDLESS, workers=2, wait=False)
    folder = wait_for_step(run)
    before = written(folder)
    assert len(marked(folder)) >= 1 + 2 + 2 * 2 + 1

    psutil.Process(read(folder.agent)["agent"]["pid"]).kill()

    told = assert_clean(run, before, state="failed")
    assert told["cause"]["sentence"] == "torchrun was killed (SIGKILL), and its ranks with it"
    assert_over(run)
    assert run.stop().state == "failed"
    assert read(folder.state) == told


def test_stop_ends_a_daemon_whose_supervisor_was_killed(tmp_path, pids, capfd) -> None:
    """Nobody has inherited it then; it is known from before, and the run stays lost."""
    run = launch(tmp_path, pids, seconds=600, kinds=("daemon",))
    helper, supervisor = helper_of(pids), supervisor_of(run)
    wait_until(lambda: run.folder.processes.exists() and helper.pid in recorded(run))
    supervisor.kill()
    wait_until(lambda: run.status().is_final)
    assert is_alive(helper)

    state = run.stop()

    assert not is_alive(helper)
    assert "0 processes left" in capfd.readouterr().out
    assert state.state == labkit.attach(run.path).status().state == "lost"
    assert_clean(run, state="lost")


def test_stop_ends_a_stopped_supervisor_and_sampler_too(tmp_path, pids) -> None:
    run = launch(tmp_path, pids, seconds=600, kinds=("daemon",))
    wait_until(run.folder.agent.exists)
    supervisor = supervisor_of(run)
    sampler = wait_until(lambda: sampler_of(supervisor))
    sampler.suspend()
    helper = helper_of(pids)
    assert not run.folder.processes.exists() or helper.pid not in recorded(run)
    supervisor.suspend()

    state = run.stop(grace=1)

    assert state.state == "stopped"
    assert not [process for process in (helper, supervisor, sampler) if is_alive(process)]
    assert_clean(run)


def test_another_run_that_a_rank_has_launched_continues(tmp_path, pids) -> None:
    pid_file = pids / "inner"
    inner = tmp_path / "inner.py"
    inner.write_text(f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    outer = tmp_path / "outer.py"
    outer.write_text(
        "import labkit, os, sys, time\n"
        "labkit.launch(sys.argv[1], nproc_per_node=1, detach=True, runs_dir=sys.argv[2])\n"
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
