"""A run that does not move says so by itself and says where every rank is; one that is merely slow does not."""

from __future__ import annotations

import re
import time

import pytest
from faults.matrix import FAULTY, HANGS, LEAVING
from faults.scene import assert_over, read, wait_for_step, wait_until

import labkit
from labkit.files import read_object
from labkit.witness.slips import ADVICE

WAITS = r"; rank 0 is at step 4, waiting in `all_reduce` \(faulty.py line \d+\)$"
STUCK = {
    "hang": r"rank 1 has not entered `all_reduce` #5. Rank 1 is at step 4 in faulty.py line \d+: `time.sleep\(600\)`",
    "spin": r"rank 1 has not entered `all_reduce` #5. Rank 1 is at step 4 in faulty.py line \d+: `(while True:|pass)`",
    "gil": r"rank 1 has not entered `all_reduce` #5. Rank 1 is at step [34], in `match` .*, and holds the GIL",
    "sigstop": r"rank 1 is stopped by a signal \(SIGSTOP, or a debugger\) at step [34]",
}
SHOWN_SECONDS = 10
STOPPED_SECONDS = 8


@pytest.mark.parametrize(
    "fault", ["hang", "sigstop", *(pytest.param(fault, marks=pytest.mark.soak) for fault in ("gil", "spin"))]
)
def test_a_stuck_rank_is_found_where_it_is(fault: str) -> None:
    run = labkit.launch(FAULTY, args=["--fault", fault], wait=False)
    wait_for_step(run.folder, 3)
    time.sleep(2)

    began = time.monotonic()
    stacks = run.stacks()
    assert time.monotonic() - began < SHOWN_SECONDS
    assert re.search(STUCK[fault] + WAITS, stacks.sentence), stacks.sentence

    while (notice := run.status().notice) is None and time.monotonic() - began < 2 * SHOWN_SECONDS:
        time.sleep(0.2)
    assert notice
    assert re.search("(no rank has made|rank 1 has made no) progress since .*" + STUCK[fault] + WAITS, notice), notice
    assert notice in repr(run)
    assert "File" in run.folder.stacks(0).read_text()
    assert notice.startswith("rank 1") or run.status().stuck_seconds > SHOWN_SECONDS / 4
    assert not run.status().is_final

    began = time.monotonic()
    state = run.stop()
    assert state.state == "stopped"
    assert re.search("^stopped on request; until then .*progress since .*" + STUCK[fault] + WAITS, state.cause.sentence)
    assert time.monotonic() - began < STOPPED_SECONDS
    assert_over(run.folder)


WAITS_FOR_EVER = """import time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.broadcast(torch.ones(3), src=0)
    dist.barrier()
else:
    dist.all_reduce(torch.ones(4))
"""
LEFT_OUT = (
    r"^stopped on request; until then no rank had made progress since \d\d:\d\d:\d\d: rank 0 called `broadcast` "
    r"\(train.py line 6\) while rank 1 called `all_reduce` \(train.py line 9\)\. `labkit check` says of line 6: .*\. "
    r"Rank 0 is at step 0, waiting in `b\w+` \(train.py line \d\); rank 1 is at step 0, waiting in `all_reduce`"
)


def test_a_stop_before_the_notice_tells_what_the_run_waited_for(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS_FOR_EVER)
    run = labkit.launch(script, nproc_per_node=2, wait=False)
    beats = [run.folder.heartbeat(rank) for rank in (0, 1)]
    wait_until(lambda: all(read_object(beat).get("waits") for beat in beats), 20)
    time.sleep(7)  # a first step may take 30 s
    assert run.status().notice is None

    cause = run.stop().cause

    assert re.search(LEFT_OUT, cause.sentence), cause.sentence
    assert (cause.ranks, cause.where.line, cause.advice) == ((0, 1), 6, (ADVICE,))
    assert_over(run.folder)


@pytest.mark.soak  # of one rank: below
def test_ranks_that_wait_for_each_other() -> None:
    run = labkit.launch(FAULTY, args=["--fault", "deadlock"], wait=False)
    wait_for_step(run.folder, 3)
    time.sleep(2)

    line = r"rank [01] is at step 4 in faulty.py line \d+: `time.sleep\(600\)`"
    assert re.search(f"^{line}; {line}$", run.stacks().sentence)
    run.stop()


def test_an_inquiry_interrupts_no_system_call_of_a_rank_that_holds_the_gil(tmp_path) -> None:
    """C's `sleep` returns the seconds that were left when a signal woke it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import ctypes\nprint('asleep', flush=True)\nprint('left:', ctypes.PyDLL(None).sleep(12), flush=True)\n"
    )
    run = labkit.launch(script, nproc_per_node=1, wait=False)
    wait_until(lambda: run.folder.log(0).exists() and "asleep" in run.logs(rank=0))
    wait_until(lambda: time.monotonic() - read(run.folder.heartbeat(0))["t"] > 1.5)  # it beats no more: the GIL is held

    stacks = run.stacks()

    assert re.search(r"in train.py line 3: `print.*`, and holds the GIL$", stacks.sentence), stacks.sentence
    assert "left:" not in run.logs(rank=0), "it was asked too late to prove anything"
    assert run.wait().state == "succeeded"
    assert "left: 0" in run.logs(rank=0)


def test_a_rank_that_sleeps_before_the_first_collective_answers_and_does_not_hold_the_gil(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nimport torch.distributed as dist\n\ndist.init_process_group('gloo')\n"
        "print('asleep', flush=True)\ntime.sleep(600)\n"
    )
    run = labkit.launch(script, nproc_per_node=1, wait=False)
    wait_until(lambda: run.folder.log(0).exists() and "asleep" in run.logs(rank=0))

    assert run.stacks().sentence == "rank 0 is at step 0 in train.py line 6: `time.sleep(600)`"
    run.stop()


@pytest.mark.parametrize(
    ("hang", "sentence"),
    [
        pytest.param("queued", "rank 1 has not entered `all_reduce` #4. Rank 1 is at", marks=pytest.mark.soak),
        ("sizes", "as collective #4 rank 0 called all_reduce(Float [4]), rank 1 called all_reduce(Float [3])"),
        ("order", "rank 0 waits in `all_reduce` #4 for rank 1; rank 1 waits in `all_reduce` #4 of group `second` for"),
        pytest.param(
            "second", "rank 1 has not entered `barrier` #4 of group `second`. Rank 1 is at", marks=pytest.mark.soak
        ),
    ],
)
def test_ranks_are_compared_call_by_call_and_group_by_group(hang: str, sentence: str) -> None:
    run = labkit.launch(HANGS, nproc_per_node=2, args=[hang], wait=False)
    wait_until(lambda: all(run.folder.heartbeat(rank).exists() for rank in (0, 1)))

    wait_until(lambda: sentence in run.stacks().sentence, seconds=60)
    run.stop(grace=0)


@pytest.mark.parametrize("why", ["atexit", pytest.param("thread", marks=pytest.mark.soak)])
def test_a_rank_that_finished_but_does_not_exit_is_distinguished_from_one_that_exited(why: str) -> None:
    run = labkit.launch(LEAVING, nproc_per_node=2, args=[why], wait=False)
    notices = set()
    while not (state := run.status()).is_final:
        notices.add(state.notice)
        time.sleep(0.2)

    (notice,) = notices - {None}
    pattern = r"^rank 1 has made no progress since .*: rank 0 has finished; rank 1 has finished its script and "
    assert re.search(pattern + r"is still exiting in leaving\.py line \d+: `time\.sleep\(20\)`", notice), notice
    assert state.state == "succeeded"


def test_slow_is_not_stuck_and_a_run_that_has_ended_has_no_stacks() -> None:
    run = labkit.launch(FAULTY, args=["--fault", "slow", "--sleep", "0.8", "--steps", "9"], wait=False)
    notices = []
    while not (state := run.status()).is_final:
        notices += [state.notice] if state.notice else []
        time.sleep(0.2)

    assert run.wait().state == "succeeded"
    assert not notices
    with pytest.raises(labkit.LabError, match="has ended"):
        run.stacks()


def test_the_watchdog_stops_a_run_without_progress_and_leaves_the_stacks() -> None:
    began = time.monotonic()
    with pytest.raises(
        labkit.RankFailedError, match="stopped by the watchdog after 12 s without progress: rank 1 has not"
    ):
        labkit.launch(FAULTY, args=["--fault", "hang"], watchdog=12, wait=True)

    run = labkit.attach("latest")
    assert time.monotonic() - began < 40
    assert run.status().cause["kind"] == "stuck"
    assert "misbehave" in run.folder.stacks(1).read_text()
    assert_over(run.folder)
