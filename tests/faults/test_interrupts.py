"""What a rank may do about Ctrl-C and TERM before it is killed: as much as under bare torchrun, and no more waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import SCRIPTS
from faults.scene import SHARED_MACHINE, assert_clean, last_step, the_run, wait_for_step, wait_until

import labkit
from labkit.launcher.rank_processes import disposition
from labkit.launcher.stopping import stop

SIGNALLED = SCRIPTS / "signalled.py"
SECONDS = 8.0  # longer than what a rank gets that does nothing
AT_ONCE = 3.0
LIBC = "import ctypes; ctypes.CDLL(None).signal(15, {})"
HANDLERS = {
    "pass": "default",
    "signal.signal(15, lambda *_: None)": "handled",
    "faulthandler.register(15)": "handled",  # in C
    "signal.signal(15, signal.SIG_IGN)": "ignored",
    LIBC.format("ctypes.c_void_p(1)"): "ignored",  # Python does not know
    "signal.signal(15, print); signal.signal(15, signal.SIG_DFL)": "default",
}


@pytest.fixture
def moments(tmp_path: Path) -> Path:
    """Where the ranks write what they do, and when."""
    folder = tmp_path / "moments"
    folder.mkdir()
    return folder


def launch(moments: Path, *roles: str, seconds: float = SECONDS) -> labkit.Run:
    args = [moments, *roles, "--seconds", seconds]
    run = labkit.launch(SIGNALLED, nproc_per_node=2, args=args, wait=False)
    wait_until_both_train(moments)
    return run


def wait_until_both_train(moments: Path) -> None:
    wait_until(lambda: len([*moments.glob("trains-*")]) == 2)
    time.sleep(1)  # a rank that gets stuck is stuck by then


@contextmanager
def in_a_terminal(moments: Path, *roles: str, seconds: float = SECONDS) -> Iterator[subprocess.Popen[str]]:
    """`labkit launch` in the foreground, which Ctrl-C reaches."""
    command = ["labkit", "launch", SIGNALLED, "--nproc-per-node", "2", "--", moments, *roles, "--seconds", str(seconds)]
    process = subprocess.Popen(map(str, command), stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until_both_train(moments)
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupted(process: subprocess.Popen[str]) -> tuple[str, float]:
    """What it prints after a Ctrl-C, and how many seconds it takes to exit."""
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    return said, time.monotonic() - began


# --- Ctrl-C


def test_ctrl_c_is_a_keyboard_interrupt_in_every_rank_which_may_save(moments) -> None:
    with in_a_terminal(moments, "saves", "saves") as process:
        said, seconds = interrupted(process)

    assert "stopping: waiting for ranks 0 and 1, which may save after the interrupt, up to 30 s" in said
    assert sorted(path.name for path in moments.glob("saved-*")) == ["saved-0", "saved-1"]
    assert seconds < SECONDS + AT_ONCE * SHARED_MACHINE
    assert assert_clean(the_run())["cause"]["sentence"] == "stopped on request"
    assert labkit.attach().status().killed == 0


def test_a_rank_that_waits_for_one_that_saves_does_not_cut_it_off(moments) -> None:
    """Nor does a rank that saves with another process, and hardly uses the processor itself."""
    with in_a_terminal(moments, "uploads", "train") as process:
        said, _ = interrupted(process)

    assert (moments / "saved-0").exists()
    assert "which may save after the interrupt" in said


def test_a_rank_that_hears_of_the_interrupt_when_another_has_saved_may_save_too(moments) -> None:
    with in_a_terminal(moments, "pauses", "saves") as process:
        interrupted(process)

    heard = [float((moments / f"interrupted-{rank}").read_text()) for rank in (0, 1)]
    assert heard[1] - heard[0] > SECONDS - 1
    assert (moments / "saved-1").exists()


def test_ranks_that_wait_in_c_code_are_terminated_after_5_s_and_not_30(moments) -> None:
    with in_a_terminal(moments, "stuck", "train") as process:
        _, seconds = interrupted(process)

    assert 5 <= seconds < 5 + AT_ONCE * SHARED_MACHINE
    assert not [*moments.glob("interrupted-*")]  # they have never heard of it
    assert_clean(the_run())


def test_ranks_that_ignore_an_interrupt_are_terminated_at_once(moments) -> None:
    with in_a_terminal(moments, "ignores", "ignores") as process:
        _, seconds = interrupted(process)

    assert seconds < AT_ONCE * SHARED_MACHINE
    assert_clean(the_run())


def test_a_second_ctrl_c_kills_a_rank_that_saves(moments) -> None:
    with in_a_terminal(moments, "saves", "saves", seconds=30) as process:
        process.send_signal(signal.SIGINT)
        wait_until(lambda: len([*moments.glob("interrupted-*")]) == 2)
        time.sleep(1)
        _, seconds = interrupted(process)

    assert seconds < AT_ONCE * SHARED_MACHINE
    assert not [*moments.glob("saved-*")]
    assert_clean(the_run())


def test_a_stop_goes_on_to_term_where_an_interrupt_waits(moments) -> None:
    run = launch(moments, "saves", "saves", seconds=30)
    asked = subprocess.Popen([sys.executable, "-c", f"import labkit; labkit.attach({str(run.path)!r}).wait()"])
    time.sleep(3)  # until it waits
    asked.send_signal(signal.SIGINT)
    wait_until(lambda: len([*moments.glob("interrupted-*")]) == 2)

    began = time.monotonic()
    state = run.stop()

    assert time.monotonic() - began < AT_ONCE * SHARED_MACHINE
    assert (state.state, state.killed) == ("stopped", 0)
    assert asked.wait(30) != 0


def test_an_interrupt_lets_labkits_own_scripts_save_after_the_same_step_also_with_workers() -> None:
    options = {"steps": 100_000, "save_every": 100_000, "workers": 2}
    run = labkit.launch("ddp", nproc_per_node=2, wait=False, **options)
    wait_for_step(run, 5)

    state = stop(run.folder, interrupts=True)

    assert (state.state, state.killed) == ("stopped", 0)
    steps = {last_step(run.folder, rank) for rank in (0, 1)}
    assert [state.checkpoint] == [f"step-{step}" for step in steps]
    assert f"stopped by SIGINT after step {steps.pop()} of" in run.logs(rank=0)


# --- TERM


def test_a_rank_that_handles_term_has_the_time_for_it_and_that_is_said(moments, capfd) -> None:
    """Its handler begins by putting itself away, and waits without using the processor."""
    run = launch(moments, "handles", "train")

    state = run.stop()

    assert (moments / "handled-0").exists()
    assert (state.state, state.killed) == ("stopped", 0)
    assert "stopping: waiting for rank 0, which handles SIGTERM, up to 30 s" in capfd.readouterr().out
    assert state.notice is None
    assert_clean(run)


def test_the_grace_that_the_caller_gives_counts_for_a_handler_too(moments) -> None:
    run = launch(moments, "handles", "train")

    began = time.monotonic()
    state = run.stop(grace=1)

    assert time.monotonic() - began < 1 + AT_ONCE * SHARED_MACHINE
    assert (moments / "handling-0").exists()
    assert not (moments / "handled-0").exists()
    assert state.killed >= 1


def test_a_time_limit_of_the_users_own_for_torchrun_is_kept(moments, capfd) -> None:
    """As bare torchrun keeps it."""
    args = [moments, "handles", "train", "--seconds", 30]
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}
    run = labkit.launch(SIGNALLED, nproc_per_node=2, args=args, env=env, wait=False)
    wait_until_both_train(moments)

    began = time.monotonic()
    run.stop()

    assert time.monotonic() - began < 3 + AT_ONCE * SHARED_MACHINE
    assert "which handles SIGTERM, up to 3 s" in capfd.readouterr().out


@pytest.mark.parametrize(("code", "what"), HANDLERS.items())
def test_what_a_process_does_with_a_signal_is_seen_from_outside(code, what) -> None:
    """In whatever language the handler is written."""
    text = f"import faulthandler, signal, sys\n{code}\nprint(1, flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"1"
        assert disposition(process.pid, signal.SIGTERM) == what
        process.stdin.close()
    assert disposition(process.pid, signal.SIGTERM) is None


def test_the_first_of_several_requests_to_stop_does_not_weaken_a_later_one(runs_dir, moments) -> None:
    run = launch(moments, "handles", "train", seconds=30)
    first = subprocess.Popen(["labkit", "stop", run.id], env=os.environ)
    wait_until((moments / "handling-0").exists)

    began = time.monotonic()
    state = run.stop(grace=0)

    assert time.monotonic() - began < AT_ONCE * SHARED_MACHINE
    assert state.killed >= 1
    assert first.wait(30) == 0
