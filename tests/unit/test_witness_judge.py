"""A judge goes on whatever happens to one of its rules."""

import json
import time

import pytest

from labkit.record import RunFolder
from labkit.witness import Findings
from labkit.witness import judge as judging
from labkit.witness.judge import Judge

UNCLEARED = {"k": "uncleared", "t": 1.0, "step": 6, "number": 6, "line": 7, "since": 2, "checks": 3}
SOUND, UNSOUND = UNCLEARED, {"k": "clipped", "t": 1.0, "step": 6, "number": 6, "line": 7, "limit": None}


@pytest.fixture
def judge(tmp_path):
    attempt = RunFolder(tmp_path)
    attempt.witnessed(0).parent.mkdir(parents=True)
    attempt.witnessed(0).write_text("".join(f"{json.dumps(line)}\n" for line in (SOUND, UNSOUND)))
    return Judge(attempt, [0], "train.py")


def test_a_rule_that_fails_is_told_once_and_the_others_go_on(judge, capfd):
    for _ in range(3):
        assert [finding.kind for finding in judge.look()] == ["uncleared gradients"]
    assert capfd.readouterr().out == "the training could not be judged by ScaledClip: " + (
        "TypeError(\"float() argument must be a string or a real number, not 'NoneType'\")\n"
    )


def test_a_look_that_fails_is_not_repeated_at_every_poll(judge, tmp_path, monkeypatch):
    monkeypatch.setattr(judging, "LOOK_SECONDS", 60.0)
    judge = Judge(RunFolder(tmp_path), [0], "train.py")
    judge._looked = time.monotonic() - judge.every
    RunFolder(tmp_path).findings.mkdir()  # it cannot be written
    with pytest.raises(OSError):
        judge.look_again()
    judge.look_again()


def test_on_a_full_disk_a_finding_is_still_told_and_is_written_when_there_is_room(judge):
    judge._attempt.findings.mkdir()
    with pytest.raises(OSError):
        judge.look()
    assert "gradients" in judge.notice()
    judge._attempt.findings.rmdir()
    assert Findings.read(judge._attempt) == ()
    judge.look()
    assert Findings.read(judge._attempt) == judge.findings
