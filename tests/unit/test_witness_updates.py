"""Findings about checkpoints, updates and schedules, from lines as ranks write them."""

import functools
import json

import pytest

from labkit.record import RunFolder
from labkit.witness import checkpoints
from labkit.witness.checkpoints import FileRace, LonePart, Unloaded
from labkit.witness.evidence import Evidence
from labkit.witness.schedules import Schedules
from labkit.witness.updates import (
    LeftInEvalMode,
    LeftWindow,
    LostUpdates,
    NoOptimizer,
    OtherTensors,
    PartedTies,
    Unfrozen,
)

PLACE = {"t": 10.0, "step": 20, "number": 20, "line": 7}
UNLOADED = {"k": "unloaded", "wanted": 4, "of": 4, "key": "module.0.bias", "own": "0.weight", "change": "+module."}
ORPHANS = {"k": "orphans", "names": ["2.weight"], "lost": 2, "of": 4, "strange": 0, "held": 2, "is_last": True}
ORPHANS |= {"is_idle": False, "is_twice": False, "unfrozen": 0}
SCHEDULE = {
    "k": "schedule",
    "n": 0,
    "type": "StepLR",
    "through_accelerate": False,
    "planned": 0,
    "moves": 0,
    "stops": 0,
}
SCHEDULE |= {
    "fewest": 1,
    "most": 1,
    "gap": 0,
    "ended": 0,
    "steps": 40,
    "idle": 0,
    "last": 0,
    "is_end": False,
    "epochs": 4,
    "passes": 40,
    "alone": True,
    "is_over": True,
}


@pytest.fixture
def judge(tmp_path):
    def judge(rule, *ranks, outcome="succeeded"):
        """What a rule says about the lines of these ranks."""
        attempt = RunFolder(tmp_path)
        for rank, lines in enumerate(ranks):
            attempt.witnessed(rank).parent.mkdir(parents=True, exist_ok=True)
            attempt.witnessed(rank).write_text("".join(f"{json.dumps(PLACE | line)}\n" for line in lines))
        evidence = Evidence(attempt, range(len(ranks)), "train.py")
        evidence.read()
        evidence.outcome = outcome
        return list(rule().judge(evidence))

    return judge


def test_a_checkpoint_with_a_wrappers_prefix_is_not_loaded(judge):
    (finding,) = judge(Unloaded, [UNLOADED], [UNLOADED])
    assert finding.sentence == (
        "since step 20: load_state_dict (train.py line 7) loaded none of the 4 parameters: "
        "the keys are like module.0.bias, the module's names like 0.weight"
    )
    assert finding.advice.startswith("Remove module. from the keys.")
    assert (finding.ranks, finding.certain) == ((0, 1), True)
    (partly,) = judge(Unloaded, [UNLOADED | {"wanted": 1, "change": "-_orig_mod."}])
    assert "did not load 1 of 4 parameters" in partly.sentence
    assert partly.advice.startswith("Put _orig_mod. in front of the keys.")


def test_a_model_that_validations_leave_in_eval_mode(judge):
    line = {"k": "left_in_eval", "steps": 20, "since": 4, "name": "2", "type": "Dropout", "step": 31}
    (finding,) = judge(LeftInEvalMode, [line], [line])
    assert finding.what == (
        "20 steps up to step 31 have trained the model in eval mode, in which its Dropout (2) does something else"
    )
    assert (finding.since, finding.ranks, finding.certain, finding.line) == (4, (0, 1), False, 7)


def test_a_module_that_is_only_marked_as_frozen(judge):
    line = {"k": "unfrozen", "name": "backbone", "type": "Sequential", "parameters": 4}
    (finding,) = judge(Unfrozen, [line | {"step": 5}], [line])
    assert finding.sentence == (
        "by step 5: requires_grad was set to False on backbone (Sequential), but its 4 parameters are trained: "
        "torch does not read this attribute of a module"
    )
    assert (finding.ranks, finding.certain, finding.parameters) == ((0, 1), False, ("backbone",))
    (whole,) = judge(Unfrozen, [line | {"name": ""}])
    assert "on the model (Sequential)" in whole.what


PART = {"k": "part", "file": "last.pt", "name": "0.weight", "parted": 4, "part": [0], "of": 2, "ranks": [0, 1]}
SAVED = {"k": "saves"}


def test_a_rank_that_saves_its_part_of_a_model_alone(judge):
    (finding,) = judge(LonePart, [SAVED, PART, PART], [])
    assert finding.what == (
        "rank 0 saves its own part of 0.weight and 3 more in last.pt (train.py line 7), one of 2, and no rank saves "
        "the others"
    )
    assert finding.certain and (finding.since, finding.ranks) == (20, (0,))


@pytest.mark.parametrize(
    "ranks",
    [
        [[SAVED, PART], [SAVED, PART | {"part": [1]}]],
        [[SAVED, PART], [SAVED]],
        [[SAVED, PART | {"ranks": [0, 1, 2]}], []],
        [[SAVED], []],
    ],
    ids=["each its own", "another one saves something", "a rank of another node", "whole tensors"],
)
def test_parts_that_others_may_have_saved(judge, ranks):
    assert judge(LonePart, *ranks) == []


def test_a_part_is_not_alone_while_others_may_still_save_theirs(judge):
    assert judge(LonePart, [SAVED, PART], [], outcome="") == []
    assert judge(LonePart, [SAVED, PART], [], outcome="failed") == []


def use(kind, began, ended, calls, **values):
    calls = {} if calls is None else {"default_pg": calls}
    return {"k": kind, "path": "/c/last.pt", "host": "a", "began": began, "t": ended, "calls": calls} | values


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (use("save", 1, 3, 5), use("load", 2, 2.5, 5), "rank 1 reads last.pt (train.py line 7) while rank 0 writes it"),
        (
            use("save", 2, 3, 5),
            use("load", 1, 1.5, 5),
            "rank 1 reads last.pt (train.py line 7) before rank 0 writes it",
        ),
        (use("save", 1, 3, 5), use("save", 2, 4, 5), "ranks 0 and 1 write the file last.pt"),
        (use("save", 1, 3, 5), use("load", 2, 4, 6), ""),  # a collective is between
        (use("save", 1, 3, 5), use("load", 3.5, 4, 5), ""),  # complete: a store, or another file, may say so
        (use("save", 1, 3, 5), use("load", 2, 4, 5, host="b"), ""),
        (use("save", 1, 3, 5), use("save", 3.5, 4, 5), ""),  # with a lock
        (use("save", 2, 3, 5), use("load", 1, 1.5, 5, number=3), ""),  # an earlier version, without a collective since
        (use("save", 2, 3, None), use("load", 1, 1.5, None), ""),
    ],
)
def test_a_file_race_is_what_was_seen_without_a_collective_between(judge, first, second, says):
    found = judge(FileRace, [first], [second])
    assert [says in finding.what for finding in found] == [True] * bool(says)


def test_a_file_race_is_looked_for_among_new_uses_only(tmp_path, monkeypatch):
    pairs = []
    real = checkpoints._raced
    monkeypatch.setattr(checkpoints, "_raced", lambda *args: pairs.append(args) or real(*args))
    attempt, rule = RunFolder(tmp_path), FileRace()
    evidence = Evidence(attempt, range(2), "train.py")

    def look(*ranks):
        for rank, lines in enumerate(ranks):
            attempt.witnessed(rank).parent.mkdir(parents=True, exist_ok=True)
            with attempt.witnessed(rank).open("a") as file:
                file.write("".join(f"{json.dumps(PLACE | line)}\n" for line in lines))
        evidence.read()
        pairs.clear()
        return list(rule.judge(evidence))

    assert look(*([use("save", t + rank / 2, t + rank / 2 + 0.1, 5) for t in range(500)] for rank in (0, 1))) == []
    assert len(pairs) <= 2 * 1000 * 100
    assert look([], []) == [] and not pairs
    (found,) = look([use("save", 601, 603, 5)], [use("load", 602, 604, 5)])
    assert 0 < len(pairs) <= 2 * 2 * 100
    assert "rank 1 reads last.pt" in found.what
    assert look([], [use("save", 700, 701, 5)]) == [found] and not pairs


def check(step, moved, since, lr=2e-5, sampled=256):
    values = {"optimizer": 0, "type": "bfloat16", "moved": moved, "since": since, "lr": lr, "sampled": sampled}
    return {"k": "moved", "step": step, **values}


def test_weights_that_never_move_are_found(judge):
    still = [check(step, 0, 0) for step in (1, 2, 5)]
    (finding,) = judge(LostUpdates, [*still, check(10, 2, 5)])
    assert "5 of 256 sampled weights that have gradients changed up to step 10" in finding.sentence
    assert "a learning rate of 2e-05 are below the resolution of bfloat16" in finding.sentence
    for silent in (
        still[:2],
        [*still, check(10, 0, 6)],  # some move over several steps
        [check(1, 200, 200), *still],  # they did move
        [check(step, 0, 0, lr=1e-7 * step) for step in (1, 2, 5)],  # warm-up
        [check(step, 0, 0, lr=0.0) for step in (1, 2, 5)],
        [check(step, 0, 0, sampled=3) for step in (1, 2, 5)],
    ):
        assert judge(LostUpdates, silent) == []


def test_parameters_in_no_optimizer(judge):
    (finding,) = judge(NoOptimizer, [ORPHANS])
    assert (finding.certain, finding.since, finding.until) == (False, 1, 20)
    assert "2 of the model's parameters with gradients, 2.weight among them, are in no optimizer" in finding.what
    assert judge(NoOptimizer, [ORPHANS | {"is_last": False}]) == []  # a head on a backbone that nobody froze
    assert judge(NoOptimizer, [ORPHANS | {"lost": 4}]) == []  # the optimizer has copies
    (unfrozen,) = judge(NoOptimizer, [ORPHANS | {"is_last": False, "unfrozen": 2}])
    assert (unfrozen.certain, unfrozen.why) == (False, "they were frozen when DDP wrapped the model")
    assert judge(NoOptimizer, [ORPHANS | {"is_last": False, "unfrozen": 1}]) == []  # the other never was
    both = ORPHANS | {"lost": 4, "is_twice": True}  # of which each optimizer's steps give a line
    (twice,) = judge(NoOptimizer, [both, both | {"line": 9}])
    assert (twice.certain, twice.why) == (False, "two optimizers step the same 2 parameters")
    assert judge(OtherTensors, [ORPHANS]) == []
    (other,) = judge(OtherTensors, [ORPHANS | {"strange": 1, "lost": 1}])
    assert other.certain
    assert "1 of the optimizer's 2 parameters is not the model's and never has a gradient, while 2.weight" in other.what


def test_an_optimizer_none_of_whose_parameters_is_trained(judge):
    (finding,) = judge(OtherTensors, [ORPHANS | {"is_idle": True, "lost": 4}])
    assert finding.what == (
        "none of the optimizer's 2 parameters ever has a gradient, while 4 of the model's parameters with gradients, "
        "2.weight among them, are in no optimizer and do not move"
    )
    assert (finding.certain, finding.why[:35]) == (True, "the optimizer was created before th")
    assert judge(OtherTensors, [ORPHANS | {"is_idle": True}]) == []  # others are trained
    assert judge(OtherTensors, [ORPHANS | {"lost": 4}]) == []  # the optimizer has copies


def test_a_window_and_a_tie(judge):
    (window,) = judge(LeftWindow, [{"k": "window", "passes": 7, "usual": 4, "left": 3}])
    assert window.what == "step 20 sums 7 backward passes instead of 4: 3 are of the epoch before"
    (tie,) = judge(PartedTies, [{"k": "parted", "names": ["embed.weight", "head.weight"], "by": "_apply"}])
    assert tie.sentence == (
        "since step 20: embed.weight and head.weight were one parameter, and are trained as 2: "
        "to or to_empty (train.py line 7) made a new parameter for each name"
    )


TWICE = {"through_accelerate": True, "moves": 8, "stops": 4, "fewest": 2, "most": 2, "gap": 8}
ENDED = {"type": "LambdaLR", "planned": 48, "moves": 95, "stops": 48, "last": 95, "ended": 24, "steps": 48, "idle": 24}
ENDED |= {"is_end": True}
ONCE_PER_EPOCH = {"type": "OneCycleLR", "planned": 40, "moves": 4, "stops": 4, "gap": 10}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (TWICE, "StepLR moves 2 times at each call, and is called once in 8 optimizer steps (train.py line 7)"),
        (TWICE | {"through_accelerate": False}, ""),
        (TWICE | {"gap": 1, "stops": 40}, ""),  # once per step, as accelerate expects
        (TWICE | {"epochs": 1}, ""),
        (TWICE | {"planned": 8}, ""),
        (ENDED, "LambdaLR (train.py line 7) made the 48 moves for which it was planned by step 24"),
        (ENDED | {"is_end": False}, "has moved, and the learning rate was zero in the last 24 of 48 steps"),
        (ENDED | {"idle": 9}, ""),
        (ENDED | {"steps": 2000}, ""),  # the last 1.2 %
        (ONCE_PER_EPOCH, "planned for 40 moves, as many as the run's optimizer steps, and made 4"),
        (ONCE_PER_EPOCH | {"planned": 160, "passes": 160}, "as many as the run's backward passes"),
        (
            ONCE_PER_EPOCH | {"planned": 44},
            "planned for 44 moves, about as many as the run's optimizer steps, and made 4",
        ),
        (ONCE_PER_EPOCH | {"planned": 45}, ""),
        (ONCE_PER_EPOCH | {"planned": 41, "type": "CosineAnnealingLR"}, ""),
        (ONCE_PER_EPOCH | {"planned": 41, "epochs": 1}, ""),
        (ONCE_PER_EPOCH | {"planned": 200}, ""),  # somebody stopped early
        (ONCE_PER_EPOCH | {"moves": 39}, ""),
        (ONCE_PER_EPOCH | {"planned": 160, "passes": 160, "is_over": False}, ""),  # it may have moved since
        (ENDED | {"is_end": False, "is_over": False}, ""),
        ({"moves": 40, "stops": 40}, ""),
    ],
)
def test_schedules(judge, line, says):
    found = judge(Schedules, [SCHEDULE | line], [SCHEDULE | line])
    assert [(says in finding.what, finding.ranks) for finding in found] == [(True, (0, 1))] * bool(says)
    assert judge(Schedules, [SCHEDULE | ONCE_PER_EPOCH], outcome="") == []


def test_a_class_that_reads_a_flag_of_this_name_anywhere_uses_it():
    nn = pytest.importorskip("torch").nn
    from labkit.worker.witness.frozen import _uses_it

    def uses(**attributes):
        return _uses_it(type("Own", (nn.Module,), {"__module__": "train", **attributes})())

    def read(module):
        return module.requires_grad

    assert uses(forward=read)
    assert uses(is_trained=property(read))
    assert uses(is_trained=property(lambda self: True, lambda self, value: read, read))
    assert uses(is_trained=functools.cached_property(read))
    assert uses(is_trained=staticmethod(read)) and uses(is_trained=classmethod(read))
    assert uses(forward=functools.wraps(read)(lambda *args: read(*args)))
    assert not uses(forward=lambda self, x: x, size=property(lambda self: 1), rate=0.1)


@pytest.mark.parametrize(
    ("line", "is_certain"),
    [
        ({"alone": True}, True),
        ({"alone": False}, False),  # another optimizer may train on
        ({"is_end": False}, False),  # somebody may have set it
        ({"is_end": False, "planned": 0, "through_accelerate": True, "fewest": 2, "most": 2}, False),
    ],
)
def test_a_rate_that_was_zero_is_certainly_wrong_only_since_the_planned_end(judge, line, is_certain):
    (finding,) = judge(Schedules, [SCHEDULE | ENDED | {"alone": True} | line])
    assert finding.certain is is_certain
    assert judge(Schedules, [SCHEDULE | ENDED | {"last": 48}], outcome="") == []  # as a cosine's, it may rise again
    assert judge(Schedules, [SCHEDULE | ENDED | line], outcome="") == ([finding] if line.get("is_end", True) else [])
