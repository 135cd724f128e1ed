"""Rings and lines of ranks that left out a collective or a batch, made up."""

import json
import math

import pytest

from labkit.record import Place, RunFolder
from labkit.ring import (
    CALLED_IN_JOIN,
    CALLS,
    IN_BACKWARD,
    JOINED,
    NO_GRAPH,
    OF_DDP,
    OPERATIONS,
    REDUCED,
    STEPS,
    UNKNOWN,
    RingWriter,
)
from labkit.witness import Judge


class Rank:
    """Writes what a rank of one DDP group would: each step calls `between` collectives and one in its backward pass."""

    def __init__(self, attempt, rank, ranks, ddp=True):
        attempt.ring(rank).parent.mkdir(parents=True)
        self.ring, self.lines = RingWriter(attempt.ring(rank)), attempt.witnessed(rank)
        self.number = self.calls = 0
        if ddp:
            self.line("ddp", n=0, ranks=[*range(ranks)], group="0", parameters=4)
        self.line("group", n=0, name="0", default=True, ranks=[*range(ranks)])

    def line(self, kind, line=7, **values):
        record = {"t": 0.0, "k": kind, "step": self.number, "number": self.number, "line": line, **values}
        with self.lines.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def step(self, between=0, reduced=1, fetched=1, passes=1, flags=0):
        self.calls += between
        before = self.calls
        self.calls += reduced
        self.number += 1
        flags |= REDUCED if reduced else 0
        self.ring.after_step((fetched, passes, self.calls, 0, flags, 0), (self.number, 21, 0.5, before))

    def call(self, operation="all_reduce", elements=1, line=30, passes=0, group=0):
        self.calls += 1
        self.ring.before_call(group, OPERATIONS.index(operation), self.calls, elements, 1, passes, line)

    def steps(self, count, **how):
        for _ in range(count):
            self.step(**how)

    def enter_backward(self, between=0, flags=0):
        self.ring.at_backward(1, 0, self.calls + between, 23, math.nan, IN_BACKWARD | OF_DDP | flags)


@pytest.fixture
def scene(tmp_path):
    def start(count, ddp=True):
        attempt = RunFolder(tmp_path)
        ranks = [Rank(attempt, rank, count, ddp) for rank in range(count)]
        return ranks, Judge(attempt, range(count), "train.py")

    return start


def test_ranks_that_call_the_same_are_not_blamed(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(30, between=1)

    assert not judge.look()
    assert not judge.look("failed")


def test_a_backward_pass_without_a_collective_is_found_once_it_lasts(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(11)
    ranks[0].steps(1)
    ranks[1].steps(1, reduced=0, flags=NO_GRAPH)
    assert not judge.look()
    for rank in ranks:
        rank.steps(3)
    (found,) = judge.look()

    assert (found.kind, found.certain, found.since, found.ranks, found.line) == ("slip", True, 12, (1,), 21)
    assert found.what.startswith("rank 1 left out one collective that rank 0 called in its backward pass; since then")
    assert found.why == "the loss of its backward pass, 0.5, has no graph through the model (train.py line 21)"


def test_a_slip_stays_found_when_the_ring_has_forgotten_it(scene):
    ranks, judge = scene(2)
    ranks[1].step(between=1)
    for rank in ranks:
        rank.steps(20)
    ranks[0].step(between=1)
    ranks[1].step()
    for rank in ranks:
        rank.steps(STEPS + 100)
    judge.look()

    assert not judge.look()  # it was not seen while it was in the ring: which step it was cannot be told

    for rank in ranks:
        rank.steps(2)
    ranks[0].step(between=1)
    for rank in ranks:
        rank.steps(5)
    assert not judge.look()


def test_a_slip_found_early_is_told_to_the_end(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(9)
    ranks[1].step(reduced=0, flags=NO_GRAPH)
    ranks[0].step()
    for rank in ranks:
        rank.steps(5)
    judge.look(), judge.look()
    for rank in ranks:
        rank.steps(STEPS + 5)

    assert [found.since for found in judge.look("failed", "slip")] == [10]


def test_the_minority_is_at_fault(scene):
    ranks, judge = scene(4)
    for rank in ranks:
        rank.steps(9)
    for rank in ranks:
        rank.step(between=rank is ranks[2])
    for rank in ranks:
        rank.steps(5)
    judge.look()
    (found,) = judge.look()

    assert (found.ranks, found.since) == ((2,), 9)
    assert found.what.startswith("rank 2 called one collective more than rank 0 between two backward passes")
    assert found.why == "it went on to its next one (train.py line 21)"


def test_of_two_ranks_neither_is_said_to_be_at_fault_without_a_reason(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(9)
    ranks[0].step(between=1)
    ranks[1].step()
    for rank in ranks:
        rank.steps(5)
    judge.look()
    (found,) = judge.look()

    assert found.what.startswith("rank 1 called one collective fewer than rank 0 between two backward passes")


def test_a_difference_that_ends_is_none(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(9)
    ranks[0].steps(4, between=1)
    ranks[1].steps(4)
    assert not judge.look()  # a thread of its own may call them a moment later
    ranks[0].step()
    ranks[1].step(between=4)
    for rank in ranks:
        rank.steps(9)
    judge.look()

    assert not judge.look()


def test_passes_that_average_nothing_are_no_meeting_points(scene):
    """Local SGD: ranks with different numbers of local steps average by hand."""
    ranks, judge = scene(2)
    for rank, steps in zip(ranks, (5, 8), strict=True):
        for _ in range(4):
            rank.steps(steps, reduced=0)
            rank.calls += 2
    for rank in ranks:
        rank.steps(9, reduced=0)
    judge.look()

    assert not judge.look()
    assert not judge.look("failed")


def test_ranks_within_join_may_have_different_numbers_of_steps(scene):
    ranks, judge = scene(2)
    for rank, steps in zip(ranks, (20, 26), strict=True):
        rank.steps(steps, between=2, flags=JOINED)
    for rank in ranks:
        rank.steps(30, between=1)
    judge.look()

    assert not judge.look()
    assert not judge.look("failed")


def test_a_rank_that_left_out_an_optimizer_step_is_named(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(11)
    ranks[0].steps(6)
    ranks[1].step(passes=2, reduced=2)
    ranks[1].steps(4)

    judge.look()
    (found,) = judge.look("failed")
    assert (found.ranks, found.since) == ((1,), 12)
    assert found.what.startswith("rank 1 left out an optimizer step that others made")


def test_a_rank_that_made_no_backward_pass_is_named(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(9)
    ranks[0].step()
    ranks[1].step(passes=0, reduced=0)
    for rank in ranks:
        rank.steps(5)
    judge.look()
    (found,) = judge.look()

    assert (found.ranks, found.since) == ((1,), 10)
    assert found.why == "it made a step without a backward pass; its newest one was (train.py line 21) before"


def test_one_step_suffices_if_the_run_has_failed_or_is_stuck(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(9)
    ranks[0].step()
    ranks[1].step(reduced=0, flags=NO_GRAPH)
    assert not judge.look()

    judge._looked = -math.inf
    judge.look_again(is_stuck=True)
    assert [found.since for found in judge.findings] == [10]


def test_ranks_that_average_by_hand_are_judged_only_after_a_failure(scene):
    ranks, judge = scene(2, ddp=False)
    for rank in ranks:
        rank.steps(9, between=1, reduced=0)
    ranks[0].step(between=1, reduced=0)
    ranks[1].step(reduced=0)
    for rank in ranks:
        rank.steps(9, between=1, reduced=0)
    judge.look()

    assert not judge.look()
    assert [found.since for found in judge.look("failed")] == [9]
    assert not judge.look("failed", "exception")


def test_a_rank_that_is_one_call_behind_when_the_run_fails_is_named(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(31, between=1)
    ranks[0].enter_backward(between=0)
    assert not judge.look()
    (found,) = judge.look("failed")

    assert (found.since, found.ranks, found.line) == (31, (0,), 23)
    assert found.what == (
        "rank 0 left out one collective between two backward passes that it had called in every step before"
    )
    assert not judge.look("failed", "exception")  # rank 1 failed by itself
    assert judge.look("failed", "slip")


def test_a_rank_that_waits_where_it_always_is_has_left_out_nothing(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(31, between=1)
    ranks[0].enter_backward(between=1)

    assert not judge.look("failed")


def test_a_call_that_one_rank_left_out_is_named_if_both_had_made_it_before(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        for _ in range(2):
            rank.steps(5)
            rank.call()
        rank.steps(5)
    ranks[1].call()
    assert not judge.look()  # rank 0 may still make it
    assert not judge.look("failed")

    ranks[0].enter_backward()
    assert not judge.look()
    (found,) = judge.look("failed")
    assert (found.kind, found.ranks, found.since, found.line) == ("slip", (0,), 15, 30)
    assert found.claim == (
        "rank 0 left out the `all_reduce` that rank 1 called (train.py line 30): it went on to a backward pass "
        "(train.py line 23)"
    )
    assert not judge.look("failed", "exception")  # rank 1 failed by itself


def test_of_two_ranks_none_is_at_fault_if_the_call_came_at_another_step_than_before(scene):
    """A rank that skipped a batch calls what follows the epoch early."""
    ranks, judge = scene(2)
    for rank in ranks:
        for _ in range(2):
            rank.steps(5)
            rank.call()
        rank.steps(4)
    ranks[1].call()
    ranks[0].enter_backward()

    (found,) = judge.look("failed")
    assert found.ranks == (1, 0)
    assert found.claim == (
        "rank 1 called `all_reduce` (train.py line 30) while rank 0 went on to a backward pass (train.py line 23): "
        "since then they do not make the same sequence of calls"
    )


@pytest.mark.parametrize(
    ("flags", "why"),
    [(NO_GRAPH, "the loss of its backward pass, 0.5, has no graph through the model"), (REDUCED, None)],
)
def test_a_call_that_meets_those_of_a_backward_pass_shows_who_left_them_out(scene, flags, why):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(2)
    ranks[0].ring.at_backward(1, 1, 2, 23, 0.5, NO_GRAPH)
    ranks[0].call(passes=1)
    ranks[1].enter_backward()

    (found,) = judge.look("failed")
    assert (found.ranks, found.since) == ((0,), 3)
    assert found.claim == (
        "rank 0 left out the collectives of a backward pass that rank 1 is in: the loss of its backward pass, 0.5, has "
        "no graph through the model (train.py line 23)"
    )


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"operation": "barrier", "elements": 0}, "called `all_reduce` {} while rank 1 called `barrier` {}"),
        (
            {"elements": 5},
            "called `all_reduce` of 1 float32 element {} while rank 1 called `all_reduce` of 5 float32 elements {}",
        ),
    ],
)
def test_different_calls_are_named_with_what_differs(scene, other, what):
    ranks, judge = scene(2, ddp=False)
    for rank in ranks:
        rank.call()
    ranks[0].call(line=31)
    ranks[1].call(line=32, **other)

    (found,) = judge.look("failed")
    assert found.what == "rank 0 " + what.format("(train.py line 31)", "(train.py line 32)")
    assert found.ranks == (0, 1)


def test_different_sizes_that_a_backend_allowed_are_none(scene):
    ranks, judge = scene(2, ddp=False)
    for size, rank in enumerate(ranks, 1):
        rank.call("all_gather", elements=size)
        rank.call()

    assert not judge.look("failed")


def test_a_pass_that_no_ddp_model_is_called_for_says_nothing_of_its_collectives(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(5)
    ranks[1].call()
    ranks[0].ring.at_backward(1, 0, ranks[0].calls, 23, math.nan, IN_BACKWARD)

    assert not judge.look("failed")


def test_one_call_more_than_before_is_not_left_out_by_the_others(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        for _ in range(3):
            rank.steps(4)
            rank.call()
            rank.call()
    ranks[1].call()
    ranks[0].enter_backward()

    (found,) = judge.look("failed")
    assert found.ranks == (1, 0)
    assert "rank 1 called `all_reduce`" in found.what


def test_what_most_ranks_called_the_others_left_out(scene):
    ranks, judge = scene(4)
    for rank in ranks:
        rank.steps(4)
    for rank in ranks[:3]:
        rank.call()
    ranks[3].enter_backward()

    (found,) = judge.look("failed")
    assert found.ranks == (3,)
    assert found.what.startswith("rank 3 left out the `all_reduce` that ranks 0, 1 and 2 called")


def test_a_later_group_of_the_same_name_is_another_one(scene):
    ranks, judge = scene(2, ddp=False)
    for rank in ranks:
        rank.call()
        rank.call()
    ranks[0].line("group", n=1, name="0", default=True, ranks=[0, 1])
    ranks[0].calls = 0
    ranks[0].call("barrier", group=1)

    assert not judge.look("failed")


def test_sizes_that_are_not_known_are_not_compared(scene):
    ranks, judge = scene(2, ddp=False)
    for elements, rank in zip((UNKNOWN, 4), ranks, strict=True):
        rank.call(elements=elements)

    assert not judge.look("failed")


def test_calls_that_the_ring_has_forgotten_are_not_missed(scene):
    ranks, judge = scene(2, ddp=False)
    for rank in ranks:
        for _ in range(2 * CALLS):
            rank.call()
    for _ in range(CALLS):
        ranks[1].call()  # of which the first meets a call that rank 0 still knows, the others none yet

    assert not judge.look("failed")


def test_what_a_stuck_run_was_found_to_wait_for_is_still_known_when_it_has_been_stopped(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(5)
    ranks[1].call("barrier", elements=0)
    ranks[0].enter_backward()
    judge._looked = 0.0
    judge.look_again(is_stuck=True)

    assert "called `barrier`" in judge.look("stopped")[0].what


def test_a_batch_skipped_by_one_rank_is_a_note_until_the_run_fails_by_it(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.steps(29)
    ranks[0].step(fetched=2)
    ranks[1].step()
    for rank in ranks:
        rank.steps(9)
    (note,) = judge.look()
    assert (note.kind, note.certain, note.since, note.ranks) == ("skip", False, 30, (0,))
    assert note.what == "rank 0 fetched 2 batches for a step for which rank 1 fetched 1; its data run out earlier"

    ranks[1].enter_backward()
    (found,) = judge.look("failed")
    assert found.certain
    (note,) = judge.look("failed", "exception")
    assert not note.certain
    judge._looked = 0.0
    judge.look_again(is_stuck=True)  # while rank 0 saves, say
    assert not judge.findings[0].certain


def test_a_rank_that_often_draws_again_means_to(scene):
    ranks, judge = scene(2)
    for step in range(200):
        ranks[0].step(fetched=1 + (step % 9 == 4))
        ranks[1].step()
        judge.look()

    assert not judge.look()


def test_ranks_with_different_shares_of_a_step_are_silent(scene):
    ranks, judge = scene(2)
    ranks[0].steps(50, fetched=3, passes=3)
    ranks[1].steps(50)

    assert not judge.look()


def test_a_collective_within_join_after_a_ranks_inputs_have_ended(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        rank.line("join", n=1)
        rank.line("join_call", n=1, name="all_reduce", line=18)
        rank.steps(20, between=2, flags=JOINED | CALLED_IN_JOIN)
    ranks[0].line("join_end", n=1, pending=True)
    ranks[1].step(between=2, flags=JOINED | CALLED_IN_JOIN)
    assert not judge.look()  # the one after step 20, which both called
    ranks[1].enter_backward(flags=JOINED | CALLED_IN_JOIN)
    (found,) = judge.look()

    assert (found.kind, found.certain, found.ranks, found.line) == ("join", True, (1,), 18)
    assert found.what.startswith("rank 1 calls `all_reduce` (train.py line 18) within Join, and the inputs of rank 0")


def test_collectives_within_join_are_fine_if_the_inputs_are_even(scene):
    ranks, judge = scene(2)
    for rank in ranks:
        for epoch in range(1, 4):
            rank.line("join", n=epoch)
            rank.line("join_call", n=epoch, name="all_reduce", line=18)
            rank.steps(20 + epoch, between=2, flags=JOINED | CALLED_IN_JOIN)
            rank.line("join_end", n=epoch, pending=True)

    assert not judge.look()


def test_a_finding_has_the_place_that_a_cause_has(tmp_path):
    attempt = RunFolder(tmp_path)
    ranks = [Rank(attempt, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.steps(9)
    ranks[0].step()
    ranks[1].step(reduced=0, flags=NO_GRAPH)
    judge = Judge(attempt, range(2), "train.py", lambda line: Place(line, "train.py", "loop", "lab.ipynb cell 4", 2))
    (found,) = judge.look("failed")

    assert found.why.endswith("(train.py line 21, cell `loop` from lab.ipynb cell 4, line 2 of the cell)")


def test_a_model_that_another_group_averages_is_not_compared(scene):
    """Each half of the ranks averages its first model, and all of them a second one: rings count the first one's."""
    ranks, judge = scene(4, ddp=False)
    for number, rank in enumerate(ranks):
        rank.line("ddp", n=0, ranks=[0, 1] if number < 2 else [2, 3], parameters=4)
        rank.line("ddp", n=1, ranks=[0, 1, 2, 3], parameters=4)
        rank.steps(9)
        rank.steps(9, between=number // 2)

    judge.look()
    assert not judge.look()


def test_a_call_before_a_backward_pass_was_left_out_by_the_rank_that_called_another_within_it(scene):
    ranks, judge = scene(2, ddp=False)
    for number in range(5):
        for rank in ranks:
            rank.enter_backward()
            rank.call(elements=4, line=23)
            rank.step(reduced=0)
            if number < 4:
                rank.call(line=30)
    ranks[0].call(line=30)
    ranks[1].enter_backward()
    ranks[1].call(elements=4, line=23)

    (found,) = judge.look("failed")
    assert found.what.startswith("rank 1 left out the `all_reduce` that rank 0 called (train.py line 30)")
