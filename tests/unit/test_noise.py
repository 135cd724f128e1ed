"""A difference counts when it is larger than repeats of the same run differ."""

from __future__ import annotations

import re

import pytest

from labkit.view.comparison import findings


def run(recipe, seconds, state="succeeded", **more):
    return {
        "recipe": recipe,
        "script": recipe,
        "ranks": 2,
        "last_ranks": None,
        "nodes": 1,
        "state": state,
        "training_seconds": seconds,
    } | more


def test_a_difference_beyond_the_noise_is_told_with_both_figures():
    said = findings([run("ddp", 10.0), run("ddp", 10.2), run("fsdp", 12.0), run("fsdp", 12.2)])

    assert said == [
        "fsdp on 2 ranks (2 runs) vs. ddp on 2 ranks (2 runs): more than noise: training time +19.8% "
        "(repeats differ by 1.4%)"
    ]


def test_one_within_the_noise_is_told_as_such():
    (said,) = findings([run("ddp", 10.0), run("ddp", 14.0), run("fsdp", 12.5)])

    assert said.endswith(": within the noise: training time +4.2% (repeats differ by 23.6%)")


def test_two_repeats_alone_tell_little_about_the_noise():
    few = [run("ddp", 10.0), run("ddp", 10.2), run("fsdp", 11.0)]
    many = [*(run("ddp", seconds) for seconds in (10.0, 10.2, 10.1, 10.0, 10.2)), run("fsdp", 11.0)]

    assert "within the noise: training time +8.9%" in findings(few)[0]
    assert "more than noise: training time +8.9%" in findings(many)[0]


def test_the_parameters_in_which_runs_differ_name_them():
    runs = [
        run(lr, 10.0 + i / 9, script="ddp", parameters_given={"lr": lr, "seed": str(i)}, val_loss=float(lr))
        for i, lr in enumerate(["0.1", "0.1", "0.2", "0.2"])
    ]

    [sentence] = findings(runs)
    assert sentence.startswith("ddp lr=0.2 on 2 ranks (2 runs) vs. ddp lr=0.1 on 2 ranks (2 runs): more than noise: ")
    assert "val loss +100.0% (repeats differ by 0.0%)" in sentence


def test_nodes_are_named_where_there_are_several():
    runs = [run("ddp", 10.0), *(run("two nodes", seconds, script="ddp", nodes=2) for seconds in (9.0, 9.1))]

    assert findings(runs)[0].startswith("ddp on 2 ranks on 2 nodes (2 runs) vs. ddp on 2 ranks (1 run)")


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [run("ddp", 1.0)],
        [run("ddp", 1.0), run("fsdp", 2.0)],
        [run("ddp", 1.0), run("ddp", 2.0)],
        [run("ddp", 1.0), run("ddp", 1.0), run("fsdp", 2.0, "failed")],
        [run("a", None), run("a", None), run("b", None)],
    ],
)
def test_without_repeats_of_runs_that_succeeded_nothing_is_claimed(runs):
    assert findings(runs) == []


def test_every_figure_that_was_measured_is_compared():
    runs = [
        run(r, s, test_accuracy=a, test_bits_per_byte=2 * a, test_samples=9, memory_peak=m)
        for r, s, a, m in (("a", 9, 0.9, 4), ("a", 9.1, 0.91, 4), ("b", 5, 0.90, 2))
    ]
    [sentence] = findings(runs)
    names = ["training time", "peak memory", "test accuracy", "test bits per byte"]
    assert sorted(re.findall(r"[:,] ([a-z ]+) [+-]\d", sentence)) == sorted(names)


def test_the_speed_of_a_disturbed_run_is_not_compared():
    busy = run("fsdp", 12.2, throughput=5.0, memory_peak=2.0, disturbances=["other programs used 80% of these cores"])
    calm = [run("ddp", seconds, throughput=9.0, memory_peak=1.0) for seconds in (10.0, 10.2)]
    (said,) = findings([*calm, busy])

    assert said.endswith("more than noise: peak memory +100.0% (repeats differ by 0.0%)")
