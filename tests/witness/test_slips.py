"""Ranks that leave out a collective, a batch or a backward pass are named while they train, and as what ended it."""

import time

import pytest
from witness.conftest import HERE, judged

import labkit

FAULTY = HERE / "faulty"
BY_HAND = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, model = dist.get_rank(), torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(30):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    for p in model.parameters():
        if rank == 1 and step == 12 and p.dim() == 1:
            continue
        dist.all_reduce(p.grad)
    optimizer.step()
dist.destroy_process_group()
"""


def place(name, text):
    """`(number, "name.py line number")` of the script's first line with this text."""
    lines = (FAULTY / f"{name}.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return number, f"{name}.py line {number}"


def test_a_loss_without_a_graph_is_named_with_its_line():
    findings, state = judged(FAULTY / "hang_zero_loss.py")

    (found,), (line, where) = findings, place("hang_zero_loss", "backward()")
    assert (found.kind, found.certain, found.since, found.ranks, found.line) == ("slip", True, 12, (1,), line)
    assert (state.cause.kind, state.cause.ranks, state.cause.step, state.cause.where.line) == ("slip", (1,), 12, line)
    assert f"has no graph through the model ({where})" in state.cause.sentence


def test_a_batch_that_one_rank_skipped_is_why_another_collective_was_met():
    findings, state = judged(FAULTY / "skip_bad_batch_per_rank.py")

    (found,) = findings
    assert (found.kind, found.certain, found.since, found.ranks) == ("skip", True, 5, (0,))
    assert state.cause.kind == "slip"
    assert state.cause.sentence.startswith("in step 5 rank 0 fetched 2 batches for a step for which rank 1 fetched 1")
    _, where = place("skip_bad_batch_per_rank", "dist.all_reduce")
    assert f"`all_reduce` ({where}) because its collective met another one" in state.cause.sentence


def test_a_collective_that_one_rank_left_out_is_named_with_the_rank_that_left_it_out():
    findings, state = judged(FAULTY / "skipped_allreduce.py")

    assert [(found.kind, found.since, found.ranks) for found in findings] == [("slip", 31, (0,))]
    assert (state.cause.kind, state.cause.ranks, state.cause.step) == ("slip", (0,), 31)
    _, where = place("skipped_allreduce", "dist.all_reduce")
    assert f"rank 0 left out the `all_reduce` that rank 1 called ({where})" in state.cause.sentence
    assert f"gloo aborted rank 1 in `all_reduce` ({where})" in state.cause.sentence


def test_a_collective_within_join_is_named_with_its_line():
    findings, state = judged(FAULTY / "join_with_all_reduce.py")

    line, where = place("join_with_all_reduce", "dist.all_reduce")
    assert [(found.kind, found.ranks, found.line) for found in findings] == [("join", (1,), line)]
    assert f"calls `all_reduce` ({where}) within Join" in state.cause.sentence


def test_a_slip_is_told_while_the_ranks_go_on():
    run = labkit.launch(FAULTY / "live_slip.py", nproc_per_node=2, wait=False, detach=True)
    try:
        while not run.findings() and run.status().state in ("starting", "running"):
            time.sleep(0.2)
        state = run.status()
        assert state.state == "running"
        line, _ = place("live_slip", "backward()")
        assert [(found.since, found.ranks, found.line) for found in run.findings()] == [(12, (1,), line)]
    finally:
        run.stop()


def test_of_a_rank_that_ends_early_is_said_what_can_be_known():
    findings, state = judged(FAULTY / "v_closure_break.py")

    assert not findings
    assert state.cause.kind == "early"
    _, where = place("v_closure_break", "backward()")
    assert f"rank 0 had gone on to the backward pass after step 23 ({where})" in state.cause.sentence


@pytest.mark.parametrize("script", ["hang_branch_per_rank"])
def test_torchs_own_error_stays_the_cause(script):
    _, state = judged(FAULTY / f"{script}.py")

    assert state.cause.kind == "exception"


def test_ranks_that_average_by_hand_are_compared_when_the_run_has_failed(tmp_path):
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    findings, state = judged(script)

    assert state.state == "failed"
    assert [(found.kind, found.ranks) for found in findings] == [("slip", (1,))]
    assert state.cause.kind == "slip"
