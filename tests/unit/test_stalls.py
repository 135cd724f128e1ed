"""What a stopped run's cause says of its ranks. The look at them is simulated: it takes ranks that hang."""

from __future__ import annotations

import json

import pytest

from labkit.launcher import stalls as module
from labkit.launcher.causes.evidence import NOT_JOINED
from labkit.launcher.causes.stuck import Stacks
from labkit.launcher.stalls import Stalls
from labkit.record import Cause, RunFolder

STUCK, STOPPED = Cause("stuck", "stopped by the watchdog after 3 s"), Cause("stopped", "stopped on request")


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunFolder:
    folder = RunFolder(tmp_path / "20260101T000000Z-train-0000")
    folder.path.mkdir()
    manifest = {"format": 1, "name": "train", "world_size": 2, "script": {"path": "/x/train.py"}}
    folder.manifest.write_text(json.dumps(manifest))
    folder.script.write_text("work()\n")
    monkeypatch.setattr(module, "look_at", lambda *_: Stacks("rank 0 is at step 3 now", [], (), ""))
    return folder


def test_a_watchdog_looks_at_the_ranks_even_if_none_is_overdue(run):
    assert Stalls(run).cause(STUCK, run, {}).sentence == "stopped by the watchdog after 3 s: rank 0 is at step 3 now"


def test_a_watchdog_does_not_repeat_what_was_seen_long_before(run):
    stalls = Stalls(run)
    stalls.since, stalls._told, stalls._stacks = "no rank …", {0, 1}, Stacks("rank 0 is compiling", [], (), "")
    assert "now" in stalls.cause(STUCK, run, {0: 60.0, 1: 60.0}).sentence


def test_a_stop_looks_at_ranks_that_the_notice_does_not_name(run):
    stalls = Stalls(run)
    assert stalls.cause(STOPPED, run, {}) is STOPPED
    stalls.since, stalls._told, stalls._stacks = "rank 1 …", {1}, Stacks("rank 1 is compiling", [], (), "")
    stalls._ranks = {0, 1}  # a look at both goes on
    assert (
        stalls.cause(STOPPED, run, {1: 9.0}).sentence == "stopped on request; until then rank 1 …: rank 1 is compiling"
    )
    assert "step 3 now" in stalls.cause(STOPPED, run, {0: 9.0, 1: 9.0}).sentence


def test_only_the_key_of_the_default_group_names_a_rank():
    said = NOT_JOINED.search("wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1")
    assert said is not None and said["rank"] == "1"
    assert NOT_JOINED.search("wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/1") is None  # of a new_group
