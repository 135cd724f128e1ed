"""Findings about resumes and repeated random numbers, from lines as ranks write them."""

import json
import tracemalloc

import pytest

from labkit.record import RunFolder
from labkit.witness.evidence import Evidence
from labkit.witness.resumes import LostMoments, Reseeded, RestartedOrder, RestartedSchedule, _saves

PLACE = {"t": 10.0, "step": 24, "number": 24, "line": 7}
FILE = [5, 1_000_000_007, 4881]
SAVED = PLACE | {"k": "saved", "file": FILE, "began": [[0.1]], "order": [2, 0, 256, 2, 16], "passed": 0, "trained": 6}
SCHEDULE = {"type": "LambdaLR", "at": 0, "last": [0.1], "before": [0.02], "made": [0.1], "alike": True}
RESUMED = PLACE | {"k": "resumed", "file": FILE, "path": "last.pt", "lost": 0, "rates": [0.02], "now": [0.1]}
RESUMED |= {"schedules": [SCHEDULE], "moves": 8}
RESUMED |= {"order": [2, 0, 256, 2, 16], "passed": 6, "trained": 7}


def write(folder, *ranks):
    for rank, lines in enumerate(ranks):
        folder.witnessed(rank).parent.mkdir(parents=True, exist_ok=True)
        folder.witnessed(rank).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture
def judge(tmp_path):
    def judge(rule, *ranks, folder=None):
        """What a rule says about the lines of these ranks."""
        attempt = folder or RunFolder(tmp_path / "runs" / "b")
        write(attempt, *ranks)
        evidence = Evidence(attempt, range(len(ranks)), "train.py")
        evidence.read()
        return list(rule().judge(evidence))

    return judge


def resumed(schedule=(), **values):
    return RESUMED | {"schedules": [SCHEDULE | dict(schedule)]} | values


def test_a_schedule_that_restarts_is_noted(judge):
    (finding,) = judge(RestartedSchedule, [SAVED, RESUMED], [RESUMED])
    assert finding.sentence == (
        "since step 25: LambdaLR restarts at a learning rate of 0.1, after the optimizer (train.py line 7) was "
        "resumed at 0.02: the schedule's state in last.pt, after 8 moves, is not loaded"
    )
    assert (finding.certain, finding.ranks) == (False, (0, 1))
    made_before = resumed({"before": [0.1]}, now=[0.02])  # its next move will be from the beginning
    assert judge(RestartedSchedule, [SAVED, made_before])


@pytest.mark.parametrize(
    "line",
    [
        resumed({"at": 8, "last": [0.02]}, now=[0.02]),  # its state is loaded
        resumed({"at": 8}),  # it is stepped to where it was
        resumed({"last": [0.02], "made": [0.02]}, now=[0.02]),  # its function knows the epochs before
        resumed({"last": [0.03], "made": [0.03]}, now=[0.03]),  # it does not begin where the saved one had
        resumed({"alike": False}),  # of another plan
        resumed(now=[0.05]),  # the script sets another rate
        resumed({"before": [0.1]}),  # the script sets the first rate again itself
        resumed(moves=0),  # the saved one had ended, or there is none
        resumed(file=[5, 3, 4881]),  # a file that this script has not saved
        resumed(rates=[], now=[]),  # tensors
    ],
)
def test_a_schedule_that_may_be_meant_so_is_not_noted(judge, line):
    assert not judge(RestartedSchedule, [SAVED, line])


def test_a_scheduler_that_overwrites_the_loaded_rate_is_certain(judge):
    line = resumed({"at": 8, "last": [0.02]}, file=[])
    (finding,) = judge(RestartedSchedule, [resumed({"at": 8, "last": [0.02]} | {"before": [0.02]}, file=[])])
    assert finding.sentence == (
        "since step 25: the optimizer (train.py line 7) was resumed at a learning rate of 0.02, and makes its first "
        "step at 0.1: LambdaLR, which was made later, wrote its first learning rate over the loaded one"
    )
    assert finding.certain
    assert not judge(RestartedSchedule, [line | {"now": [0.05]}])
    assert not judge(RestartedSchedule, [resumed({"at": 8, "last": [0.02], "before": [0.1]})])  # made before


def test_batches_that_are_passed_over_in_another_order_are_found(judge):
    wrong = resumed(order=[0, 0, 256, 2, 16])
    (finding,) = judge(RestartedOrder, [SAVED, wrong], [wrong])
    assert finding.sentence == (
        "since step 25: the resume (train.py line 7) skips 6 batches, as many as had been trained of epoch 2, "
        "but in the order of epoch 0: some samples are trained again, and others are left out: "
        "the new DistributedSampler is not at the epoch in which the checkpoint was saved"
    )
    assert (finding.certain, finding.ranks) == (True, (0, 1))


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        (SAVED, RESUMED),
        (SAVED, resumed(order=[3, 0, 256, 2, 16], passed=0)),  # the next epoch
        (SAVED, resumed(order=[0, 0, 256, 2, 16], passed=4)),  # passed over for another reason
        (SAVED | {"passed": 6}, resumed(order=[3, 0, 256, 2, 16])),  # as in all epochs
        (SAVED, resumed(order=[0, 0, 256, 4, 16])),  # on more ranks
        (SAVED, resumed(order=[])),  # not shuffled, or another sampler
        (SAVED | {"order": []}, resumed(order=[])),
        (SAVED, resumed(order=[0, 0, 256, 2, 16], file=[5, 3, 4881])),  # not this file
    ],
)
def test_orders_that_may_be_right_are_not_accused(judge, saved, line):
    assert not judge(RestartedOrder, [saved, line])


AGAIN = RESUMED | {"order": [0, 0, 256, 2, 16], "passed": 0, "now": [0.02], "schedules": [], "epochs": [3, 7]}
BEGAN_AT_0 = SAVED | {"first": [0, 0, 256, 2, 16]}


def test_epochs_that_are_counted_from_0_again_are_noted(judge):
    (finding,) = judge(RestartedOrder, [BEGAN_AT_0, AGAIN], [AGAIN])
    assert finding.sentence == (
        "since step 25: the resume (train.py line 7) of last.pt, which was saved in epoch 2, begins in the order of "
        "epoch 0, in which the training had begun: the new DistributedSampler's epochs are counted from 0 again"
    )
    assert (finding.certain, finding.ranks) == (False, (0, 1))
    goes_on = SCHEDULE | {"at": 8, "last": [0.02]}
    assert judge(RestartedOrder, [BEGAN_AT_0, AGAIN | {"schedules": [goes_on], "epochs": [2]}])


@pytest.mark.parametrize(
    ("saved", "change"),
    [
        (BEGAN_AT_0, {"order": [3, 0, 256, 2, 16]}),  # the next epoch
        (BEGAN_AT_0, {"order": [1, 0, 256, 2, 16]}),  # rolled back
        (BEGAN_AT_0, {"order": [0, 1, 256, 2, 16]}),  # another seed
        (BEGAN_AT_0, {"order": []}),
        (BEGAN_AT_0, {"now": [0.01]}),  # a second phase
        (BEGAN_AT_0, {"rates": [], "now": []}),
        (BEGAN_AT_0, {"schedules": [SCHEDULE]}),  # of its own
        (BEGAN_AT_0, {"epochs": []}),
        (BEGAN_AT_0, {"epochs": [5]}),
        (BEGAN_AT_0, {"passed": 1}),
        (BEGAN_AT_0 | {"order": [0, 0, 256, 2, 16]}, {"epochs": [1]}),  # saved in the first epoch
        (BEGAN_AT_0 | {"first": [2, 0, 256, 2, 16]}, {}),  # resumed before
        (SAVED, {}),
    ],
)
def test_epochs_that_may_begin_at_0_are_not_noted(judge, saved, change):
    assert not judge(RestartedOrder, [saved, AGAIN | change])


def test_the_saves_of_a_file_are_read_line_by_line(tmp_path):
    path = tmp_path / "witness.jsonl"
    path.write_text("".join(f"{json.dumps(PLACE | {'k': 'check', 'sum': 'a' * 1000})}\n" for _ in range(2000)))
    with path.open("a") as file:
        file.write(f"{json.dumps(SAVED)}\n")
    tracemalloc.start()
    assert [line.values["file"] for line in _saves(path)] == [FILE]
    assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    tracemalloc.stop()


def test_the_save_is_looked_for_in_earlier_attempts_and_runs_of_the_script(judge, tmp_path):
    wrong = resumed(order=[0, 0, 256, 2, 16])
    run, other = (RunFolder(tmp_path / "runs" / name) for name in ("b", "a"))
    for folder, script in ((run, "/x/train.py"), (other, "/x/other.py")):
        folder.path.mkdir(parents=True)
        folder.manifest.write_text(json.dumps({"format": 1, "script": {"sha256": None, "path": script}}))
    write(other, [SAVED])
    assert not judge(RestartedOrder, [wrong])
    assert not judge(RestartedOrder, [wrong], folder=run.attempt(2))
    other.manifest.write_text(other.manifest.read_text().replace("other", "train"))
    assert judge(RestartedOrder, [wrong])
    other.witnessed(0).unlink()
    write(run, [SAVED])
    assert judge(RestartedOrder, [wrong], folder=run.attempt(2))


def test_moments_that_have_no_place_are_lost(judge):
    (finding,) = judge(LostMoments, [resumed(lost=12)], [RESUMED])
    assert finding.what == (
        "the optimizer that load_state_dict (train.py line 7) resumes has none of the 12 values of its state that the "
        "checkpoint has"
    )
    assert (finding.since, finding.ranks, finding.certain) == (25, (0,), True)
    assert not judge(LostMoments, [RESUMED])


def test_steps_that_draw_the_same_are_noted(judge):
    line = PLACE | {"k": "reseeded", "steps": [13, 25, 37], "seed": 0}
    (finding,) = judge(Reseeded, [line], [line])
    assert finding.sentence == (
        "since step 13: steps 13, 25 and 37 draw the same random numbers (dropout, noise, augmentations): before each "
        "of them torch.manual_seed(0) was called (train.py line 7), and the generators' states were not set back"
    )
    assert (finding.certain, finding.ranks) == (False, (0, 1))
