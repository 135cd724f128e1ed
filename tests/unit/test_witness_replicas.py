"""Replicas that part are found from what ranks have written, and what may part is left alone."""

import json

import pytest

from labkit.record import RunFolder
from labkit.ring import RingWriter, is_checked
from labkit.witness.evidence import Evidence
from labkit.witness.replicas import Replicas, Settings

NAMES = ["0.weight", "0.bias", "2.weight"]


class Ranks:
    """Writes what two ranks have seen: a set of three parameters, its checks and some facts."""

    def __init__(self, tmp_path, kind="ddp", ranks=2):
        self.attempt, self.kind = RunFolder(tmp_path), kind
        self.evidence = Evidence(self.attempt, range(ranks), "train.py")
        group = [] if kind == "plain" else list(range(ranks))
        for rank in range(ranks):
            self.attempt.rank(rank).mkdir(parents=True)
            self.line(rank, "declared", set=0, what=kind, n=0, ranks=group, of="a", device="cpu", called="model")
            self.detail(rank, k="names", set=0, names=NAMES)

    def line(self, rank, kind, step=0, number=None, line=7, **values):
        record = {
            "t": 1.0,
            "k": kind,
            "step": step,
            "number": step if number is None else number,
            "line": line,
            **values,
        }
        with self.attempt.witnessed(rank).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def detail(self, rank, **record):
        with self.attempt.digests(rank).open("a") as file:
            file.write(json.dumps({"t": 1.0, **record}) + "\n")

    def check(self, at, *sums, graded=("111", "111"), **values):
        """A check at which each rank has these digests of its three parameters."""
        for rank, each in enumerate(sums):
            known = {"opt": 0, "at": at, "set": 0, "calls": at, "scalings": 0, "writes": at, "forwards": at}
            known |= {"passes": [1, 1, True], "local": False, "settings": [{"lr": 0.1}], "sum": str(each)}
            known |= {name: each_rank[rank] for name, each_rank in values.items()}
            self.line(rank, "check", step=at, **known)
            self.detail(rank, k="digests", set=0, at=at, sums=each, graded=graded[min(rank, 1)])

    def judge(self, outcome="", rule=Replicas):
        """What a rule, or a new one of this class, finds."""
        self.evidence.outcome = outcome
        self.evidence.read()
        return list((rule() if isinstance(rule, type) else rule).judge(self.evidence))


def test_checks_are_at_the_same_steps_on_all_ranks():
    assert [n for n in range(3001) if is_checked(n)] == [1, 2, 5, 10, 20, 35, 50, 75, 100, 200, 500, 1000, 2000, 3000]


def test_weights_that_part_are_found_with_their_steps_ranks_and_parameters(tmp_path):
    ranks = Ranks(tmp_path, ranks=3)
    ranks.check(5, [1, 2, 3], [1, 2, 3], [1, 2, 3])
    ranks.check(10, [4, 5, 6], [4, 9, 6], [4, 5, 6])
    assert not ranks.judge()  # they may be equal at the next check
    assert len(ranks.judge("succeeded")) == 1
    ranks.check(20, [7, 8, 9], [7, 7, 9], [7, 8, 9])
    (found,) = ranks.judge()
    assert (found.since, found.until, found.ranks, found.parameters) == (6, 10, (1,), ("0.bias",))
    assert found.certain and "0.bias differs on rank 1" in found.what


def test_the_digests_of_a_check_are_read_once_as_soon_as_they_are_complete(tmp_path):
    ranks, rule = Ranks(tmp_path), Replicas()
    ranks.check(5, [1, 2, 3], [1, 2, 3])
    ranks.check(10, [4, 5, 6], [4, 9, 6])
    path = ranks.attempt.digests(1)
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-1]))  # the last line is yet to be written
    ranks.judge("succeeded", rule)
    path.write_text(whole)
    assert [found.parameters for found in ranks.judge("succeeded", rule)] == [("0.bias",)]
    path.unlink()
    assert [found.parameters for found in ranks.judge("succeeded", rule)] == [("0.bias",)]


@pytest.mark.parametrize("kind", ["ddp", "mesh"])
def test_weights_that_are_equal_again_are_no_finding(tmp_path, kind):
    ranks = Ranks(tmp_path, kind)
    ranks.check(5, [1, 2, 3], [1, 2, 3])
    ranks.check(10, [4, 5, 6], [4, 9, 6])
    ranks.check(20, [7, 8, 9], [7, 8, 9])
    assert not ranks.judge("succeeded")


def test_equal_counts_of_steps_at_different_moments_are_not_compared(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.check(5, [1, 2, 3], [1, 2, 4], calls=(5, 9))
    ranks.check(10, [1, 2, 3], [1, 2, 4], calls=(10, 14))
    assert not ranks.judge("succeeded")


def test_ranks_that_train_models_of_their_own_are_left_alone(tmp_path):
    ranks = Ranks(tmp_path, "plain")
    for at in (1, 2, 5, 10, 20):
        ranks.check(at, [1, 2, at], [1, 3, at])
    assert not ranks.judge("succeeded")


def test_averaging_by_hand_that_forgets_a_parameter_is_a_note(tmp_path):
    ranks = Ranks(tmp_path, "plain")
    for at in (1, 2, 5, 10):
        ranks.check(at, [at, 2, 3], [at, 2, 3])
    ranks.check(20, [20, 5, 3], [20, 6, 3])
    (found,) = ranks.judge("succeeded")
    assert found.parameters == ("0.bias",) and not found.certain


@pytest.mark.parametrize(
    ("began", "is_averaged", "why"),
    [
        (([1, 1, 1], [1, 1, 1]), True, "fully_shard() has left them out"),
        (([1, 1, 1], [1, 1, 1]), False, "the ranks step with other gradients of them"),
        (([1, 1, 1], [2, 1, 1]), True, None),  # a rank's own part of the model
    ],
)
def test_parameters_beside_dtensors_that_part_from_the_first_step_on_are_a_note(tmp_path, began, is_averaged, why):
    ranks = Ranks(tmp_path, "plain")
    for rank in (0, 1) if is_averaged else ():
        ranks.line(rank, "fsdp", ranks=[0, 1])
    ranks.check(0, *began, gradients=("a", "b"))
    for at in (1, 2):
        ranks.check(at, [at, 1, at], [-at, -1, -at], gradients=("a", "b"))
    found = ranks.judge("succeeded")
    assert [(each.since, each.certain) for each in found] == ([(1, False)] if why else [])
    assert why is None or why in found[0].why


@pytest.mark.parametrize("local", [(True, True), (False, True)])
def test_a_step_that_one_rank_alone_does_not_synchronize_is_the_cause(tmp_path, local):
    ranks = Ranks(tmp_path)
    ranks.check(5, [1, 2, 3], [1, 2, 3])
    ranks.check(10, [4, 5, 6], [4, 9, 6], local=local)
    ranks.check(20, [5, 5, 6], [5, 9, 6], local=local)
    found = ranks.judge()
    assert [each.why[:25] for each in found] == ([] if all(local) else ["rank 1 has made a step of"])


def test_replicated_dtensors_that_were_equal_did_not_begin_apart(tmp_path):
    ranks = Ranks(tmp_path, "mesh")
    ranks.check(0, [1, 1, 1], [1, 1, 1], gradients=("a", "b"))
    ranks.check(1, [2, 2, 2], [3, 3, 3], gradients=("a", "b"))
    (found,) = ranks.judge("succeeded")
    assert found.certain and "step with other gradients" in found.why


@pytest.mark.parametrize(
    ("values", "graded", "why"),
    [
        ({"gradients": ("a", "b")}, ("111", "111"), "fully_shard() has left them out"),
        ({"gradients": ("a", "b"), "scalings": (3, 0)}, ("111", "111"), "as by clipping them, by step 1"),
        ({"gradients": ("", "b"), "scalings": (2, 3)}, ("110", "111"), "fully_shard() has left them out"),
        ({"gradients": ("a", "a"), "writes": (1, 2)}, ("111", "111"), "changed these parameters in place"),
    ],
)
def test_parameters_are_left_out_if_their_gradients_differ_before_they_are_scaled(tmp_path, values, graded, why):
    ranks = Ranks(tmp_path, "plain")
    for rank in (0, 1):
        ranks.line(rank, "fsdp", ranks=[0, 1])
    ranks.check(0, [1, 1, 1], [1, 1, 1])
    ranks.check(1, [2, 1, 2], [3, 1, 3], graded=graded, **values)
    (found,) = ranks.judge("succeeded")
    assert why in found.why


def test_parameters_beside_a_ddp_model_do_not_part_for_its_reasons(tmp_path):
    ranks = Ranks(tmp_path, "plain")
    ranks.line(0, "unreduced", step=1, n=0, unfrozen=["0.weight"], added=[])
    ranks.check(0, [1, 1, 1], [1, 1, 1])
    ranks.check(1, [2, 1, 2], [3, 1, 3], gradients=("a", "b"))
    (found,) = ranks.judge("succeeded")
    assert "step with other gradients" in found.why


def test_a_model_that_each_rank_trains_alone_after_a_warm_up_is_left_alone(tmp_path):
    ranks = Ranks(tmp_path, "plain")
    for at in (1, 2, 5, 10):
        ranks.check(at, [at, at, at], [at, at, at])
    ranks.check(20, [4, 5, 6], [7, 8, 9])
    assert not ranks.judge("succeeded")


@pytest.mark.parametrize(
    ("values", "graded", "why"),
    [
        ({"settings": ([{"lr": 0.1}], [{"lr": 0.05}])}, ("111", "111"), "learning rates (rank 0: 0.1, rank 1: 0.05"),
        ({"settings": ([{"betas": [0.9, 1]}], [{"betas": [0.8, 1]}])}, ("111", "111"), "betas (rank 0: [0.9, 1]"),
        ({"scalings": (3, 0)}, ("111", "111"), "as by clipping them, by step 10 (rank 0: 3 times"),
        ({"writes": (10, 11)}, ("111", "111"), "changed these parameters in place unequally often"),
        ({"forwards": (5, 5)}, ("111", "111"), "the DDP model itself is never called"),
        ({"passes": ([4, 1, False], [4, 1, False])}, ("111", "111"), "within no_sync"),
        ({}, ("110", "111"), "2.weight has a gradient on rank 1 alone"),
    ],
)
def test_the_cause_is_told_if_it_was_seen(tmp_path, values, graded, why):
    ranks = Ranks(tmp_path)
    ranks.check(5, [1, 2, 3], [1, 2, 3])
    ranks.check(10, [4, 5, 6], [4, 5, 7], graded=graded, **values)
    (found,) = ranks.judge("succeeded")
    assert why in found.why


def test_facts_of_the_ranks_are_causes(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.check(5, [1, 2, 3], [1, 2, 3])
    ranks.line(1, "loaded", step=7, n=0, line=31)
    ranks.check(10, [4, 5, 6], [4, 5, 7])
    (found,) = ranks.judge("succeeded")
    assert found.why == "after step 7 rank 1 called load_state_dict (train.py line 31), and rank 0 did not"
    ranks.line(0, "unreduced", step=10, n=0, unfrozen=["2.weight"], added=[])
    (found,) = ranks.judge("succeeded")
    assert found.why.startswith("2.weight were frozen") or found.why.startswith("2.weight was frozen")


def test_weights_that_were_never_broadcast_are_told_so(tmp_path):
    ranks = Ranks(tmp_path)
    for rank in (0, 1):
        ranks.line(rank, "declared", set=1, what="wrapped", n=0, ranks=[0, 1], of="a", device="cpu", called="model")
        ranks.line(rank, "check", opt=None, at=0, set=1, sum=str(rank), local=False)
    ranks.check(1, [1, 2, 3], [4, 5, 6])
    (found,) = ranks.judge("succeeded")
    assert "init_sync=False" in found.why and found.since == 1


def test_the_scrubber_narrows_the_range_and_shows_that_it_stays(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.check(10, [1, 2, 3], [1, 2, 3])
    ranks.check(20, [4, 5, 6], [4, 5, 7])
    for rank in (0, 1):
        ranks.line(rank, "scrub", n=0, pieces=1, whole=True)
        ring = RingWriter(ranks.attempt.ring(rank))
        for number in range(1, 33):
            total = (number + rank * (number > 13)) if number % 4 == 0 else 0
            ring.after_step((1, 1, number, 0, 0, total), (number, 7, 0.5, 0))
    (found,) = ranks.judge()
    assert (found.since, found.until) == (13, 16)


def test_different_learning_rates_of_shards_are_found_unless_they_are_equal_again(tmp_path):
    ranks = Ranks(tmp_path, "shard")
    ranks.check(5, [0, 0, 0], [0, 0, 0])
    ranks.check(10, [0, 0, 0], [0, 0, 0], settings=([{"lr": 0.1}], [{"lr": 0.05}]))
    assert not ranks.judge(rule=Settings)
    (found,) = ranks.judge("succeeded", rule=Settings)
    assert "learning rates (rank 0: 0.1, rank 1: 0.05, at step 10)" in found.what
    ranks.check(20, [0, 0, 0], [0, 0, 0])
    assert not ranks.judge("succeeded", rule=Settings)


GRADIENTS = {at: [f"g{at}", f"g{at}"] for at in (1, 2, 5)}


def test_gradients_that_are_averaged_by_hand_over_weights_that_never_were_equal(tmp_path):
    ranks = Ranks(tmp_path, "plain")
    for at in (1, 2, 5):
        assert ranks.judge() == []
        ranks.check(at, [at, 1, 2], [at, 3, 4], gradients=GRADIENTS[at])
    (finding,) = ranks.judge()
    assert (finding.certain, finding.since, finding.ranks) == (False, 1, (0, 1))
    assert "the ranks' weights have never been the same, although all their gradients are" in finding.what


@pytest.mark.parametrize(
    "changed",
    [
        {5: {"gradients": ["g5", "h5"]}},
        {2: {"gradients": ["g2", "h2"]}},
        {at: {"gradients": ["g", "g"]} for at in GRADIENTS},
        {at: {"gradients": ["", ""]} for at in GRADIENTS},
        {at: {"calls": [3, 3]} for at in GRADIENTS},
        {1: {"sums": [[1, 2, 3], [1, 2, 3]]}},
    ],
    ids=["others", "once others", "constant", "unknown", "no collectives", "once equal"],
)
def test_models_of_their_own_whose_gradients_nobody_averages(tmp_path, changed):
    ranks = Ranks(tmp_path, "plain")
    for at in GRADIENTS:
        values = {"gradients": GRADIENTS[at], "sums": [[at, 1, 2], [at, 3, 4]]} | changed.get(at, {})
        ranks.check(at, *values.pop("sums"), **values)
    assert ranks.judge() == []
