"""Does a run move? Told from heartbeats alone."""

from __future__ import annotations

import json

import pytest

from labkit.launcher import stalls as watch_module
from labkit.launcher.stalls import FIRST_STEP_SECONDS, PATIENCE_SECONDS, Progress


@pytest.fixture
def now(monkeypatch):
    clock = {"now": 1000.0}
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock["now"])
    return clock


def beat(folder, rank, step, *, moved=1.0, step_seconds=0.1):
    folder.rank(rank).mkdir(parents=True, exist_ok=True)
    text = json.dumps({"step": step, "moved": moved, "step_seconds": step_seconds})
    folder.heartbeat(rank).write_text(text)


def watch(progress, now, seconds):
    for _ in range(seconds):
        now["now"] += 1.0
        progress.update()


def test_a_rank_that_stops_is_stalled_after_its_patience_and_no_longer_when_it_moves(folder, now):
    progress = Progress(folder)
    beat(folder, 0, 5)
    beat(folder, 1, 5)
    watch(progress, now, 5)
    assert progress.stalled() == {}
    beat(folder, 0, 6)
    watch(progress, now, 2)
    assert list(progress.stalled()) == [1]
    assert not progress.is_stuck()
    watch(progress, now, 6)
    assert list(progress.stalled()) == [0, 1]
    assert progress.is_stuck()
    beat(folder, 1, 6)
    watch(progress, now, 1)
    assert list(progress.stalled()) == [0]
    beat(folder, 0, 7)
    watch(progress, now, 1)
    assert progress.stalled() == {}
    assert not progress.is_stuck()


def test_slow_steps_are_given_twice_their_time(folder, now):
    progress = Progress(folder)
    beat(folder, 0, 1, step_seconds=30.0)
    watch(progress, now, int(PATIENCE_SECONDS) + 60)
    assert progress.stalled() == {}
    watch(progress, now, 2)
    assert list(progress.stalled()) == [0]


def test_a_batch_a_backward_or_a_record_of_the_scripts_own_counts_as_moving(folder, now):
    progress = Progress(folder)
    for second in range(30):
        beat(folder, 0, 5, moved=float(second))
        folder.rank(1).mkdir(parents=True, exist_ok=True)
        beat(folder, 1, 5)
        with folder.metrics(1).open("a") as file:
            file.write("{}\n")
        watch(progress, now, 1)
    assert progress.stalled() == {}
    assert progress.idle_seconds <= 1.0


def test_before_the_first_step_there_is_more_patience(folder, now):
    progress = Progress(folder)
    beat(folder, 0, 0, step_seconds=None)
    watch(progress, now, int(FIRST_STEP_SECONDS))
    assert progress.stalled() == {}
    watch(progress, now, 2)
    assert list(progress.stalled()) == [0]


def test_heartbeats_that_are_none_are_left_out(folder, now):
    progress = Progress(folder)
    for rank, text in enumerate(["", "[]", "null", '{"step": ', "\x00"]):
        folder.rank(rank).mkdir(parents=True, exist_ok=True)
        folder.heartbeat(rank).write_text(text)
    watch(progress, now, 100)
    assert progress.stalled() == {}
    assert progress.idle_seconds == 100


def test_a_rank_whose_script_has_ended_and_that_has_left_is_not_stalled_one_that_stays_is(folder, now):
    progress = Progress(folder)
    for second in range(int(PATIENCE_SECONDS) + 3):
        for rank in (0, 1):
            beat(folder, rank, 5)
            folder.metrics(rank).write_text('{"k": "end", "t": 9, "step": 5, "outcome": "finished"}\n')
        folder.heartbeat(1).write_text(json.dumps({"step": 5, "moved": 1.0, "step_seconds": 30.0, "t": second}))
        watch(progress, now, 1)

    assert list(progress.stalled()) == [1]
