"""One or two sentences about a run, each rule from figures that were recorded."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from labkit.record import Cause, RunReader, State
from labkit.series import Series
from labkit.view.live.tables import rank_rows
from labkit.view.live.verdict import training_loss, verdict
from labkit.view.report import memory_held

GIB = 2**30
RUNNING = State("running", 0.0)


@pytest.fixture
def say(folder, write_metrics):
    """`say(rank 0's records' fields, rank 1's, …)`: the verdict on 40 steps of 0.1 s that are like that."""

    def make(*ranks, steps=40, limit=16 * GIB, device="cuda:0"):
        for rank, fields in enumerate(ranks):
            usual = {"input": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.005, "loss": 1.0}
            usual |= {"allocated": 4 * GIB, "peak": 5 * GIB, "retries": 0}
            write_metrics(rank, {"k": "meta", "t": 0.0}, {"k": "model", "t": 0.1, "device": device, "limit": limit})
            for i in range(1, steps + 1):
                told = {name: value(i) if callable(value) else value for name, value in fields.items()}
                record = {"k": "step", "t": i / 10, "step": i, "n": 1, "seconds": [0.1] * 3, "samples": 8}
                write_metrics(rank, record | usual | told)
        return verdict(RunReader(folder).read_all(), RUNNING)

    return make


def test_a_run_at_ease_says_how_much_memory_it_takes(say):
    assert say({}, {}) == ["memory fits: peak 5.00 GiB, 31% of 16.00 GiB"]


def test_ranks_on_the_cpu_share_the_memory_of_their_host(say):
    assert say({}, {}, device="cpu") == ["memory fits: peak 10.00 GiB of 2 ranks, 62% of 16.00 GiB"]


def test_what_a_step_consists_of_where_nothing_else_limits_it(say):
    waits_more = {"forward": 0.02, "backward": 0.05, "communication": 0.02}

    said = say({"forward": 0.024, "backward": 0.055, "communication": 0.012, "input": 0.004}, waits_more)

    assert said[0] == "compute-bound: 84% compute, 12% communication, 4% input"


def test_no_one_is_called_compute_bound_without_phases(say):
    assert not any("compute" in one for one in say({}, {}))  # two ranks wait for each other in backward
    assert not any("compute" in one for one in say({"forward": None, "backward": None, "optimizer": None}))


def test_waiting_for_data(say):
    assert (
        say({"input": 0.061}, {"input": 0.02})[0] == "input-bound: 61% of each step is spent waiting for data on rank 0"
    )


def test_waiting_for_data_on_a_single_rank(say):
    assert say({"input": 0.02})[0] == "input-bound: 20% of each step is spent waiting for data"


def test_waiting_for_workers_that_every_epoch_starts_again(say):
    assert say({"input": 0.06, "restarts": 0.04}, {"input": 0.02})[0] == (
        "the first step of each epoch waits until the DataLoader has started its workers again: 1.6 s of 4 s "
        "on rank 0; persistent_workers=True keeps them"
    )
    assert say({"input": 0.061, "restarts": 0.02}, {"input": 0.02})[0].startswith("input-bound: 61%")


@pytest.mark.parametrize("field", ["forward", "optimizer"])
def test_the_rank_that_the_others_wait_for(say, field):
    slow = {field: {"forward": 0.048, "optimizer": 0.023}[field], "backward": 0.042}

    assert say({}, slow)[0] == f"rank 1 is the straggler: 18 ms (18% of the step) behind rank 0, mostly {field}"


def test_a_straggler_by_its_input_wait_among_four(say):
    behind = "13 ms (13% of the step) behind the median rank, mostly input wait"

    assert say({}, {}, {"input": 0.014}, {})[0] == f"rank 2 is the straggler: {behind}"


def test_communication_is_what_the_rank_waits_that_waits_least(say):
    assert say({"communication": 0.05}, {"communication": 0.034})[0] == "communication takes 34% of the step"


def test_communication_that_one_rank_cannot_tell_is_not_told(say):
    assert not any("communication" in said for said in say({"communication": 0.05}, {"communication": None}))
    assert not any("communication" in said for said in say({"communication": 0.05}))


def test_alike_ranks_have_no_straggler(say):
    assert not any("straggler" in said for said in say({"forward": 0.031}, {"forward": 0.029}))


def test_retries_come_before_everything_but_a_lost_loss(say):
    assert say({"retries": 3, "input": 0.05})[0] == "3 allocation retries on rank 0: nearly out of memory"


def test_nearly_full(say):
    assert say({"peak": 15.5 * GIB})[0] == "rank 0 peaked at 15.50 GiB of 16.00 GiB: nearly out of memory"


def test_a_loss_that_is_no_number(say):
    said = say({}, {"loss": lambda i: "nan" if i > 20 else 1.0})

    advice = "lower the learning rate or check the data"
    assert said[0] == f"the loss is NaN or infinite on rank 1 since step 21: {advice}"


def test_the_rank_that_lost_its_loss_first_is_named(say):
    said = say({"loss": lambda i: "nan" if i > 20 else 1.0}, {"loss": lambda i: "nan" if i > 19 else 1.0})

    assert said[0].startswith("the loss is NaN or infinite on ranks 0, 1 (first on rank 1, at step 20): ")


def test_no_rank_is_called_the_first_if_the_steps_before_were_not_recorded(say):
    """The two ranks record different steps, as they do where steps are short."""
    said = say(
        {"loss": lambda i: "nan" if i > 25 else 1.0 if i < 15 else None},
        {"loss": lambda i: "nan" if i > 20 else 1.0 if i < 18 else None},
    )

    assert said[0].startswith("the loss is NaN or infinite on ranks 0, 1 since step 21 at the latest: ")


def test_a_loss_that_is_finite_again_is_not_called_nan(say):
    assert not any("NaN" in sentence for sentence in say({"loss": lambda i: "nan" if i == 20 else 1.0}))


def test_memory_is_nearly_full_before_the_end_and_not_once_it_was_exceeded(say, folder):
    say({"peak": 15.5 * GIB, "retries": 2})
    reader = RunReader(folder).read_all()

    assert "nearly out of memory" in verdict(reader, State("failed", 0.0, 5.0, 1, Cause("rank", "rank 0 failed")))[0]
    exceeded = Cause("rank", "rank 0 ran out of device memory", out_of_memory="device")
    assert not any("memory" in sentence for sentence in verdict(reader, State("failed", 0.0, 5.0, 1, exceeded), 9))


@pytest.fixture
def sampled(folder, write_metrics):
    """`sampled(bytes that the workers of rank 0 have at each look, bytes copied)`: a verdict on a host of 64 GiB."""

    def make(sizes, copied=0):
        write_metrics(0, {"k": "meta", "t": 0.0, "host": "h", "time": 1.0})
        for i in range(1, 41):
            write_metrics(0, {"k": "step", "t": i / 10, "step": i, "n": 1, "seconds": [0.1] * 3, "input": 0.05})
        folder.hosts.mkdir()
        lines = [{"k": "meta", "t": 0.0, "host": "h", "memory_total": 64 * GIB, "devices": []}]
        for i, size in enumerate(sizes):
            rank = {"rank": GIB, "workers": 4, "workers_pss": size, "copied": copied}
            lines.append({"k": "loaders", "t": 2.0 * i, "ranks": {"0": rank}})
        folder.host("h").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return RunReader(folder).read_all()

    return make


def test_memory_that_the_workers_of_a_loader_copy(sampled):
    said = verdict(sampled([GIB, 2 * GIB], copied=GIB), RUNNING)

    assert said[0].startswith("input-bound")
    assert said[1] == (
        "DataLoader workers have copied 1.00 GiB of memory that they share with their ranks: a list or dict of Python "
        "objects is copied as they read it; a tensor, numpy or pyarrow array is not"
    )


def test_a_copy_of_little_of_the_hosts_memory_is_not_told(sampled):
    assert "copied" not in " ".join(verdict(sampled([GIB, 2 * GIB], copied=GIB // 2), RUNNING, 9))


def test_workers_whose_memory_grows(sampled):
    reader = sampled([GIB + i * GIB // 10 for i in range(40)])

    assert "memory is growing in the DataLoader workers of rank 0: from 2.00 GiB to 4.00 GiB (PSS)" in verdict(
        reader, RUNNING, 9
    )
    assert rank_rows(reader)[0]["peak host memory (PSS)"] == "1.00 GiB + 4 workers 4.90 GiB"


def test_a_report_shows_the_memory_of_a_rank_with_that_of_its_workers(sampled, write_metrics):
    write_metrics(0, {"k": "model", "t": 0.5, "device": "cpu", "parameters": 8, "gradients": 8, "optimizer": 8})

    assert "(PSS, peak): rank 0 1.00 GiB + 4 workers 1.00 GiB<" in memory_held(sampled([GIB]))


def test_workers_that_grow_in_every_epoch_anew_do_not_grow(sampled):
    assert "growing" not in " ".join(verdict(sampled([GIB + i % 5 * GIB for i in range(40)]), RUNNING, 9))


def test_memory_that_grows(say):
    assert say({"allocated": lambda i: (1 + i / 10) * GIB})[0].startswith("memory is growing on rank 0: from 2.")


def test_a_few_steps_say_nothing(say):
    assert say({"input": 0.09}, steps=3) == []


def test_at_most_three_sentences(say):
    assert len(say({"retries": 3, "input": 0.05, "peak": 15.9 * GIB, "loss": "nan"}, {})) == 3


def evaluations(folder, write_metrics, losses, evaluated, name="val_loss"):
    """The verdict on 40 steps with a loss each and an evaluation after every fifth."""
    write_metrics(0, {"k": "meta", "t": 0.0})
    for i in range(1, 41):
        step = {"k": "step", "t": i / 10, "step": i, "n": 1, "seconds": [0.1] * 3, "loss": losses(i)}
        reports = [{"k": "report", "t": i / 10 + 0.01, "step": i, name: evaluated[i // 5 - 1]}] if i % 5 == 0 else []
        write_metrics(0, step, *reports)
    return verdict(RunReader(folder).read_all(), RUNNING)


@pytest.mark.parametrize(
    ("losses", "evaluated", "sentence"),
    [
        (
            lambda i: 1 / i,
            [8, 7, 6, 5, 4, 3, 2, 1],
            "val_loss is still improving: 1, the best so far (4 three evaluations before)",
        ),
        (
            lambda i: 1 / i,
            [8, 4, 3, 4, 5, 6, 7, 8],
            "val_loss has risen since step 15 (best 3) while the training loss fell: overfitting",
        ),
        (lambda i: 1.0, [8, 4, 3, 4, 5, 6, 7, 8], "val_loss was best at step 15: 3, no better in 5 evaluations since"),
        (lambda i: 1.0, [8, 4, 3, 3, 3, 3, 3, 3], "val_loss was best at step 15: 3, no better in 5 evaluations since"),
    ],
)
def test_whether_it_learns(folder, write_metrics, losses, evaluated, sentence):
    assert evaluations(folder, write_metrics, losses, evaluated) == [sentence]


def test_of_more_evaluations_than_are_kept_the_best_is_named_and_none_counted(folder, write_metrics):
    """The best one is between two others in the same bin of time."""
    write_metrics(0, {"k": "meta", "t": 0.0})
    for i in range(1, 2001):
        value = 0.5 if i == 777 else 1.0
        step = {"k": "step", "t": i / 10, "step": i, "n": 1, "seconds": [0.1] * 3}
        write_metrics(0, step, {"k": "report", "t": i / 10 + 0.01, "step": i, "val_loss": value})

    assert verdict(RunReader(folder).read_all(), RUNNING) == ["val_loss was best at step 777: 0.5, no better since"]


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda i: 3 - i / 100, "loss is still falling: median 1.085 over the last 20 steps, 1.302 over the 20 before"),
        (lambda i: 3 - i / 4000, "loss is still falling: median 2.964 over the last 99 steps, 2.99 over the 99 before"),
        (lambda i: max(1, 3 - i / 40), "loss has not fallen by more than its noise since step 82: median 1.002"),
        (lambda i: 100 * 0.8**i, "loss has not fallen by more than its noise since step 43: median 0.002792"),
        (lambda i: 2, "loss has not fallen by more than its noise since the start: median 2.001"),
        (lambda i: 20 if i < 4 else 2, "loss has not fallen by more than its noise since step 4: median 2.002"),
        (
            lambda i: 1 + max(0, i - 120) / 50,
            "loss is rising: median 2.413 over the last 20 steps, 2.012 over the 20 before",
        ),
    ],
)
def test_whether_the_loss_falls_by_more_than_its_noise(folder, write_metrics, loss, sentence):
    draw = random.Random(0)
    for rank in range(2):
        steps = ({"k": "step", "t": i / 10, "step": i, "loss": loss(i) + draw.gauss(0, 0.05)} for i in range(1, 201))
        write_metrics(rank, {"k": "meta", "t": 0.0}, *steps)

    assert verdict(RunReader(folder).read_all(), RUNNING) == [sentence]


@pytest.mark.parametrize(
    ("loss", "sentences"),
    [
        (lambda i: 3 - i / 10, ["loss fell from 2.7 to 1.2 (medians of the first and the last 5 losses recorded)"]),
        (
            lambda i: 2.3 * 1.3**i,
            ["loss rose from 5.053 to 258.6 (medians of the first and the last 5 losses recorded)"],
        ),
        (lambda i: 2 + i % 2, []),
    ],
)
def test_of_few_losses_the_first_and_the_last_are_compared(folder, write_metrics, loss, sentences):
    steps = ({"k": "step", "t": i / 10, "step": i, "loss": loss(i)} for i in range(1, 21))
    write_metrics(0, {"k": "meta", "t": 0.0}, *steps)

    assert verdict(RunReader(folder).read_all(), RUNNING) == sentences


@pytest.mark.parametrize("steps", [60, 400])
def test_noise_is_rarely_taken_for_a_fall_or_a_rise(steps):
    draw, changes = random.Random(0), 0
    for _ in range(100):
        series = {"loss": Series(), "step": Series()}
        for i in range(1, steps + 1):
            series["loss"].add(i / 10, draw.gauss(2, 0.05))
            series["step"].add(i / 10, i)
        reader = SimpleNamespace(lines=lambda name, series=series: {0: series[name]}, restarts=[])
        changes += "has not fallen by more than its noise since the start" not in training_loss(reader, RUNNING)

    assert changes <= 5


def test_two_worse_evaluations_are_stated_and_not_judged(folder, write_metrics):
    sentences = evaluations(folder, write_metrics, lambda i: 1 / i, [8, 7, 6, 5, 4, 3, 4, 5])

    assert sentences == ["val_loss: 5, best 3 at step 30"]


@pytest.mark.parametrize("name", ["val_ppl", "val/perplexity", "eval_nll", "val_bits_per_byte", "Val Loss"])
def test_what_rises_with_the_loss_tells_of_overfitting_as_the_loss_does(folder, write_metrics, name):
    sentences = evaluations(folder, write_metrics, lambda i: 1 / i, [8, 4, 3, 4, 5, 6, 7, 8], name)

    assert sentences == [f"{name} has risen since step 15 (best 3) while the training loss fell: overfitting"]


@pytest.mark.parametrize("name", ["val_fid", "val_latency", "val_wer"])
def test_what_need_not_rise_with_the_loss_tells_nothing_of_overfitting(folder, write_metrics, name):
    sentences = evaluations(folder, write_metrics, lambda i: 1 / i, [8, 4, 3, 4, 5, 6, 7, 8], name)

    assert sentences == [f"{name} was best at step 15: 3, no better in 5 evaluations since"]
