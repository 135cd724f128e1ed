"""Tools of single labs: scripts broken on purpose, steps that are calculated, sequences that are divided, drawings."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from labkit import LabError, Script
from labkit.charts import Palette
from labkit.charts.images import in_attribute
from labkit_labs import defined, draw
from labkit_labs.labs.broken_scripts import replaced
from labkit_labs.labs.other_runs import changed, differing_words
from labkit_labs.labs.overlap import pauses, simulated, sleeping
from labkit_labs.labs.saving import copy_with_a_bit_flipped, lost, on_slow_disk
from labkit_labs.labs.sequences import divided, in_order, pairs, zigzag
from labkit_labs.labs.small_data import adapter

TITLES = [*Script.load("ddp").cells]
PICTURES = {
    "adapter": adapter(128, 256, 8),
    "calls": draw.calls({0: ["all_gather", "barrier"], 1: ["all_gather", "<all_gather>"]}, first=24),
    "cells": draw.cells(TITLES, {"yours": ["model"], "the strategy": ["strategy"]}),
    "curves": draw.curves({"a": [(1, 2.0), (2, math.nan), (3, 0.5)]}, "<loss>", log=True, marks={2: "here"}),
    "speedups": draw.speedups({"<a>": [(1, 1.0), (2, 1.9), (4, 3.1)], "b": [(1, 1.0), (2, 1.5)]}),
    "divided": divided(8),
    "hosts": draw.hosts(4, 8),
    "lanes": draw.lanes(simulated(4, 1, 4, 8, slow=10), "a <dawdler>", moving=True),
    "lost": lost(save_every_minutes=20, hours_between_failures=3, save_seconds=60),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_sound_svg(name):
    root = ElementTree.fromstring(PICTURES[name].svg)

    assert int(root.get("viewBox").split()[2]) <= 700
    assert root.get("aria-label") == in_attribute(PICTURES[name].label)
    assert len(PICTURES[name].svg) < 16_000


def test_where_the_names_of_calls_differ_all_wait():
    same = draw.calls({0: ["step", "save"], "later": ["", "", "load"]})
    assert "waits" not in same.svg
    assert same.label == "rank 0: step, save; later: load"
    assert PICTURES["calls"].svg.count(">waits<") == 2
    assert PICTURES["calls"].label == "call 25 differs: rank 0 barrier, rank 1 <all_gather>; all of them wait"


def test_each_part_of_a_step_has_a_colour_of_its_own():
    step = dict.fromkeys(("optimizer", "communication", "compute", "copies"), 1.0)
    fills = re.findall(r'fill="(#\w{6})"', draw.bars({"a step": step}).svg)
    assert len({*fills} & {*Palette.LINES}) == len(step)


def test_nothing_finite_cannot_be_drawn():
    with pytest.raises(LabError, match="no finite number to draw in a$"):
        draw.curves({"a": [(1, math.nan)]})
    with pytest.raises(LabError, match="no finite number above 0 to draw in a$"):
        draw.curves({"a": [(1, -1.0)]}, log=True)


def test_one_place_of_a_script_is_changed():
    script = Script.load("ddp")
    assert changed(replaced(script, "gradient_as_bucket_view=True", "gradient_as_bucket_view=False"), script) == [
        "strategy"
    ]
    with pytest.raises(LabError, match="must occur once in the script; it occurs 0 times"):
        replaced(script, "no such text", "")
    with pytest.raises(LabError, match=r"once in the script; it occurs \d+ times"):
        replaced(script, "import torch", "")


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_backward_hides_all_buckets_but_the_last(buckets):
    spans = simulated(4, 1, 4, 8, buckets=buckets)
    ends = {span.rank: span.end for span in spans if span.kind == "backward"}
    sent = [span for span in spans if span.kind == "all_reduce" and span.rank == 0]
    waited = [span.seconds for span in spans if span.kind == "waiting"]

    assert [span.end <= ends[0] for span in sent] == [True] * (buckets - 1) + [False]
    assert waited == [8 / buckets] * 2


def test_the_others_wait_for_a_slow_rank_within_their_own_all_reduces():
    spans = simulated(4, 1, 4, 8, slow=10, slow_rank=1)
    waited = {span.rank: span.seconds for span in spans if span.kind == "waiting"}
    sending = {rank: sum(s.seconds for s in spans if s.rank == rank and s.kind == "all_reduce") for rank in (0, 1)}

    assert waited == {0: 12, 1: 2}
    assert sending[0] > sending[1] == 8


def test_layers_that_sleep_are_a_script_of_any_strategy():
    script = sleeping("fsdp")
    assert changed(script, Script.load("fsdp")) == ["model", "data"]
    assert "labkit" not in str(script)
    assert pauses(4, 0.01, 0.04)["PAUSES"].endswith('"slow_rank": -1}')


def test_a_zigzag_gives_all_ranks_the_same_work():
    assert in_order(2) == [0, 0, 1, 1]
    assert zigzag(2) == [0, 1, 1, 0]
    assert pairs(in_order(1), 4) == [10]
    for ranks in (2, 3, 8):
        work, even = (pairs(owners(ranks), 48 * ranks) for owners in (in_order, zigzag))
        assert len(set(even)) == 1
        assert sum(even) == sum(work)
        assert math.isclose(work[-1] / (sum(work) / ranks), 2 - 1 / ranks, rel_tol=0.01)


def test_launch_lines_are_compared_word_by_word():
    assert differing_words("torchrun --node-rank 0 x\ntorchrun --node-rank 1 x") == 1


def test_a_slow_disk_only_delays_the_mark():
    script = Script.load("fsdp", "checkpoints")
    slow = on_slow_disk(script, "60 if step == 8 else 0")

    assert changed(script, slow) == ["checkpoints"]
    assert {"commit", "write_mark"} <= vars(defined(slow, "checkpoints")).keys()


def test_one_bit_of_a_copy_is_flipped(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(bytes(5))

    copy = copy_with_a_bit_flipped(tmp_path / "kept", "file")
    assert (copy / "file").read_bytes() == b"\0\0\1\0\0"
    assert (tmp_path / "kept" / "file").read_bytes() == bytes(5)


def test_least_is_lost_where_saving_costs_as_much_as_failures():
    assert "least with a save every 19 minutes" in lost(20, 3, 60).label
    assert "10.6%" in lost(20, 3, 60).label  # 60 / 1200 + 600 / 10800
