"""What is called slower than its own past, and what is not."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from labkit.record import RunReader, State
from labkit.record.pace import MOST_BLOCKS, Pace
from labkit.record.records import decode
from labkit.view.live import slowdowns as module
from labkit.view.live.slowdowns import slowdowns
from labkit.view.live.verdict import verdict

RUNNING = State("running", 0.0)
USUAL = {"input": 0.002, "forward": 0.03, "backward": 0.05, "optimizer": 0.005, "communication": 0.01}


@pytest.fixture
def found(folder, write_metrics):
    """`found({rank: {phase: seconds at a step}}, …)`: the slowdowns of a run whose steps take 0.1 s and more, a record
    each, with noise of up to 5 %; `said` are the sentences of its verdict."""

    def run(*ranks, steps=600, samples=lambda step: 8, hosts=None, without=()):
        draw = random.Random(0)
        for rank, changes in enumerate(ranks):
            write_metrics(rank, {"k": "meta", "t": 0.0, "host": (hosts or [""] * 9)[rank], "world_size": len(ranks)})
            t = 0.0
            for step in range(1, steps + 1):
                parts = {n: s * draw.uniform(0.95, 1.05) for n, s in USUAL.items()}
                parts |= {name: seconds(step) for name, seconds in changes.items() if seconds(step)}
                between = parts.pop("between", 0.003)
                parts |= dict.fromkeys(without)
                t += 0.1
                whole = sum(filter(None, parts.values())) + between
                record = {"k": "step", "t": t, "step": step, "n": 1, "seconds": [whole] * 3, "loss": 1.0}
                write_metrics(rank, record | {"samples": samples(step)} | parts)
        reader = RunReader(folder).read_all()
        run.said = verdict(reader, RUNNING, 9)
        return [(each.who, each.phase, each.step, each.is_own) for each in slowdowns(reader, RUNNING)]

    return run


def since(step, slow, fast=0.0, until=10**9):
    return lambda now: slow if step <= now < until else fast


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "between"])
def test_the_rank_and_the_part_that_became_slower_with_the_step(found, phase):
    ((who, what, step, is_own),) = found({}, {phase: since(300, 0.09)})

    assert (who, what, is_own) == ("rank 1", phase, True)
    assert abs(step - 300) <= 12  # a block is about that many records


def test_its_sentence_is_part_of_the_verdict(found):
    found({}, {"forward": since(300, 0.06)})
    (sentence,) = [each for each in found.said if "times as long" in each]
    assert sentence == (
        "rank 1's forward pass takes 2.0 times as long since about step 299 (30 s): 60 ms instead of 30.2 ms"
    )


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(since(300, 0.033), id="by a tenth"),
        pytest.param(since(560, 0.09), id="for a moment until now"),
        pytest.param(since(300, 0.09, until=400), id="for ten seconds, long ago"),
        pytest.param(since(1, 0.09, until=60), id="at the start"),
        pytest.param(since(40, 0.09), id="after a few steps"),
        pytest.param(lambda step: 0.5 if step % 50 == 0 else 0.0, id="every fiftieth step"),
        pytest.param(lambda step: 0.5 if step % 5 == 0 else 0.0, id="the first step of short epochs"),
        pytest.param(lambda step: 0.5 if step % 2 == 0 else 0.0, id="the first step of tiny epochs"),
        pytest.param(lambda step: random.Random(step).choice([0.01, 0.03, 0.12]), id="steps of different lengths"),
        pytest.param(lambda step: 0.09 if step // 60 % 2 else 0.0, id="by turns"),
        pytest.param(lambda step: 0.09 if step > 300 and step // 20 % 3 else 0.0, id="by turns since a step"),
        pytest.param(lambda step: 0.02 + 0.003 * (step // 12 % 8) + 0.022 * (step > 300), id="less than its noise"),
    ],
)
def test_what_is_no_slowdown(found, times):
    assert found({}, {"forward": times}) == []
    assert not any("times as long" in each for each in found.said)


def test_a_part_that_hardly_matters_in_the_step_is_not_told(found):
    assert found({}, {"input": since(300, 0.006)}) == []


def test_what_all_ranks_do_more_of_is_stated_without_a_cause(found):
    longer = {"forward": since(300, 0.06)}
    assert [(who, phase, is_own) for who, phase, _, is_own in found(longer, longer)] == [
        ("every rank", "forward", False)
    ]
    assert any(each.endswith("; whether the script does more per step cannot be told") for each in found.said)


def test_a_single_rank_cannot_be_compared(found):
    assert [(who, is_own) for who, _, _, is_own in found({"forward": since(300, 0.06)})] == [("rank 0", False)]


def test_batches_that_became_larger_are_no_slowdown(found):
    assert found({}, {"forward": since(300, 0.06)}, samples=lambda step: 8 if step < 300 else 16) == []


def test_a_host_is_named_if_all_of_its_ranks_became_slower(found):
    slow = {"forward": since(300, 0.06)}
    hosts = ["a", "a", "b", "b"]
    assert [who for who, *_ in found({}, {}, slow, slow, hosts=hosts)] == ["host b"]


def test_a_rank_of_a_host_is_named_with_it(found):
    hosts = ["a", "a", "b", "b"]
    assert [who for who, *_ in found({}, {}, {}, {"forward": since(300, 0.06)}, hosts=hosts)] == ["rank 3 on b"]


def test_a_rank_that_is_alone_on_its_host_is_named_as_a_rank(found):
    assert [who for who, *_ in found({}, {"forward": since(300, 0.06)}, hosts=["a", "b"])] == ["rank 1 on b"]


def test_where_waits_are_unknown_only_the_input_of_a_rank_is_its_own(found):
    slow = {"forward": since(300, 0.06), "input": since(300, 0.06)}
    assert [phase for _, phase, *_ in found({}, slow, without=["communication"])] == ["input"]


def test_on_a_machine_that_does_other_work_it_must_last_longer(found, monkeypatch):
    monkeypatch.setattr(module, "disturbances", lambda *_: ["other load"])
    assert found({}, {"forward": since(300, 0.06)}) == []  # 30 s


def test_a_rank_that_is_slower_for_long_is_told_on_any_machine_and_all_ranks_are_not(found, monkeypatch):
    monkeypatch.setattr(module, "disturbances", lambda *_: ["other load"])
    assert [who for who, *_ in found({}, {"forward": since(120, 0.06)})] == ["rank 1"]


def test_all_ranks_that_are_slower_on_a_machine_that_does_other_work_are_not_told(found, monkeypatch):
    monkeypatch.setattr(module, "disturbances", lambda *_: ["other load"])
    assert found({"forward": since(120, 0.06)}, {"forward": since(120, 0.06)}) == []


def test_a_long_run_keeps_few_blocks_and_still_knows_the_step():
    pace, record = Pace(), {"k": "step", "n": 1, "seconds": [0.1] * 3, "samples": 8, **USUAL}
    for step in range(1, 40_001):
        parts = {"forward": 0.06} if step >= 30_000 else {}
        pace.take(step / 10, step, decode(record | parts | {"t": step / 10, "step": step}))
        assert step % 1000 or step > 30_000 or pace.change("forward") is None

    assert len(pace.blocks) <= MOST_BLOCKS
    change = pace.change("forward")
    assert abs(change.step - 30_000) < 700
    assert (round(change.before, 3), round(change.now, 3)) == (0.03, 0.06)


def test_a_restart_begins_anew(found, folder, write_metrics):
    found({}, {"forward": since(300, 0.06)})
    reader = RunReader(folder).read_all()
    second = folder.attempt(2)
    second.ranks.mkdir(parents=True)
    for rank in (0, 1):
        second.rank(rank).mkdir()
        second.metrics(rank).write_text('{"k": "meta", "t": 100.0}\n')
    reader.read_all()
    assert slowdowns(reader, replace(RUNNING, attempt=2)) == []
