"""The conditions of `stop_if`: what they may say, and when they are true of what two ranks have recorded."""

from __future__ import annotations

import math

import pytest

import labkit
from labkit.launcher.stop_condition import StopCondition, StopIf


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("loss != loss", {"loss": math.nan}, True),
        ("loss != loss", {"loss": 1.0}, False),
        ("not (1 < loss <= 2)", {"loss": 2.0}, False),
        ("1 < loss <= 2", {"loss": 3.0}, False),
        ("loss > 2 * -best + 7 % 4 / 1", {"loss": 2.0, "best": 1.0}, True),
        ("'val/loss' > 3", {"val/loss": 4.0}, True),
        ("val_loss > 3", {}, None),
        ("val_loss > 3 or loss > 3", {"loss": 4.0}, True),
        ("val_loss > 3 or loss > 3", {"loss": 2.0}, None),
        ("val_loss > 3 and loss > 3", {"loss": 2.0}, False),
        ("val_loss > 3 and loss > 3", {"loss": 4.0}, None),
        ("loss > 3 > val_loss", {"loss": 2.0}, False),
        ("not val_loss > -3", {}, None),
    ],
)
def test_a_condition_of_values_some_of_which_may_be_missing(text, values, holds):
    assert StopCondition(text).holds(values) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss >",
        "loss",
        "loss + 1",
        "True",
        "loss or val_loss > 3",
        "(loss > 3) + 1 > 2",
        "(loss > 3 or loss < 1) + 1 > 2",
        "loss is None",
        "loss in (1, 2)",
        "isnan(loss) > 0",
        "__import__('os').system('true') > 0",
        "loss.item() > 3",
        "loss[0] > 3",
        "9**9**9 > loss",
        "loss := 3",
        "lambda: loss > 3",
        "loss > 3\0",
        "(" * 250 + "loss > 3",
        "not " * 200 + "loss > 3",
    ],
)
def test_what_is_no_condition_is_refused_before_the_launch(text):
    with pytest.raises(labkit.LaunchError, match="stop_if compares metrics that the run records"):
        labkit.launch("ddp", nproc_per_node=1, stop_if=text)
    assert not labkit.runs()


def step(number, **fields):
    return {"k": "step", "t": float(number), "step": number, "n": 1, "seconds": [0.1] * 3, "samples": 8} | fields


@pytest.fixture
def recorded(folder, write_metrics):
    """Two ranks of ten steps; the loss of rank 1 is NaN from step 6 on, and that of rank 0 from step 8 on."""
    for rank, lost in ((0, 8), (1, 6)):
        losses = ["nan" if number >= lost else 1.0 for number in range(1, 11)]
        write_metrics(rank, {"k": "meta", "t": 0.0})
        write_metrics(rank, *(step(n, loss=loss, rss=1e9) for n, loss in enumerate(losses, 1)))
        write_metrics(rank, {"k": "report", "t": 11.0, "step": 10, "val_loss": 3.0, "note": "text"})
    return folder


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("loss != loss", "stop_if: loss != loss was true at step 6 on rank 1"),
        ("val_loss>2 and   step > 9", "stop_if: val_loss>2 and step > 9 was true at step 10 on rank 0"),
        ("throughput < 81 > memory / 1e9", "stop_if: throughput < 81 > memory / 1e9 was true at step 1 on rank 0"),
        ("step_seconds > 1 or loss > 5", ""),
    ],
)
def test_the_first_step_and_rank_of_which_it_is_true(recorded, text, sentence):
    assert StopIf(text, recorded).look() == sentence


def test_a_metric_that_nobody_records_is_said_with_those_there_are(recorded):
    watched = StopIf("vall_loss > 3", recorded)

    assert watched.look() == ""
    assert watched.notice() is None  # it may still come
    assert watched.notice(has_ended=True) == (
        "stop_if: no rank has recorded 'vall_loss'; did you mean 'val_loss'? There are: loss, memory, step, "
        "step_seconds, throughput, val_loss"
    )


def test_what_cannot_be_computed_is_said(recorded):
    watched = StopIf("loss / (step - step) > 1", recorded)

    assert watched.look() == ""
    assert "cannot be computed on rank" in watched.notice()


def test_a_loss_that_the_script_reports_counts_before_the_measured_one(folder, write_metrics):
    report = {"k": "report", "t": 2.0, "step": 1, "loss": 2.0}
    write_metrics(0, {"k": "meta", "t": 0.0}, step(1, loss=9.0), report, step(2, loss=9.0))

    assert StopIf("loss > 5", folder).look() == "stop_if: loss > 5 was true at step 1 on rank 0"
    assert StopIf("loss > 5 and step > 1", folder).look() == ""
