"""Pictures that play: each mark is stored once, and what their frames say agrees with the formulas."""

from __future__ import annotations

import base64
import json
import math
import re
import xml.etree.ElementTree as ElementTree
import zlib

import pytest

from labkit_labs import draw
from labkit_labs.draw.over_ranks import chunks_of_ring
from labkit_labs.draw.player import Frame, film
from labkit_labs.draw.strategies import held_by_fsdp, step_of_ddp, step_of_fsdp, talk_in_a_step, zero_bytes
from labkit_labs.labs.experts import routed
from labkit_labs.labs.pipelines import bubble, simulated
from labkit_labs.labs.slow_links import timeline

LONE = simulated("1F1B", 8, 4 * [1])
SCHEDULES = {"one batch": simulated("GPipe", 1, 4 * [8])}
SCHEDULES |= {"GPipe": simulated("GPipe", 8, 4 * [1]), "Interleaved1F1B": simulated("Interleaved1F1B", 8, 8 * [0.5], 4)}
FILMS = {
    "buckets": draw.buckets({"fc": 900_000, "conv": 400_000}),
    "calls": draw.calls({0: ["all_gather", "barrier"], 1: ["all_gather", "broadcast"]}, first=24),
    "ddp": draw.ddp(2),
    "ddp of eight": draw.ddp(8, overlap=False),
    "experts": routed(2, 0.5, moving=True),
    "lanes": timeline(20, moving=True),
    "loader": draw.loader(2, 1, 2),
    "mesh": draw.mesh(2, 2, 2),
    "pipeline": draw.pipeline(LONE, "1F1B"),
    "pipeline of eight": draw.pipeline(simulated("InterleavedZeroBubble", 8, 16 * [0.5], 8), share=False),
    "replicas": draw.replicas(3, share=1 / 3),
    "ring": draw.ring(4),
    "schedules": draw.schedules(SCHEDULES),
    "shards": draw.shards(4, 2),
    "shards that stay": draw.shards(8, 8, reshard=False),
    "split": draw.split(4),
    "zero": draw.zero(8, mixed=True),
}


def data_of(played: draw.Film) -> dict:
    packed = re.search(r'\("([\w+/=]+)"\)</script>$', played.html())[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize("name", FILMS)
def test_every_frame_is_sound_and_says_one_sentence(name):
    played, data = FILMS[name], data_of(FILMS[name])
    assert len(data["says"]) == len(played.frames) > 1
    for number, frame in enumerate(played.frames):
        assert re.fullmatch(r"[A-Z0-9].*[A-Za-z0-9%]\.", frame.says), frame.says
        assert len(frame.says) < 200
        seen = [mark for mark, ranges in data["marks"] if any(first <= number < end for first, end in ranges)]
        assert sorted(seen) == sorted({*frame.marks})
        root = ElementTree.fromstring(f"<svg>{data['base']}{''.join(seen)}</svg>")
        assert not [path for path in root.iter("path") if "--" in path.get("d") or "nan" in path.get("d")]
    assert len(played.html()) < 60_000
    assert "http" not in played.html().replace("http://www.w3.org/2000/svg", "")


def test_what_frames_share_is_stored_once():
    same = '<circle r="9"/>'
    data = data_of(film([], [Frame("One.", [same]), Frame("Two.", []), Frame("Three.", [same])], 10, "</script>"))
    assert data["marks"] == [[same, [[0, 1], [2, 3]]]]
    assert data["label"] == "</script>"  # packed, and set as an attribute


def test_a_film_without_scripts_is_its_best_frame():
    played = draw.shards(2, 2)
    still, *_ = played.html().partition("<script>")
    assert "Backward of unit 1" in still  # in which units are gathered, compute and are scattered
    assert "Backward of unit 2" not in still
    assert played.still().body == played.base + "".join(played.frames[5].marks)


def shown_at_the_end(played: draw.Film) -> list[str]:
    return re.findall(r">([\d.]+)%", "".join(played.frames[-1].marks))


@pytest.mark.parametrize(("name", "v"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
@pytest.mark.parametrize(("ranks", "m"), [(2, 4), (4, 8)])
def test_the_utilization_ends_where_the_formula_of_the_bubble_says(name, ranks, m, v):
    played = draw.pipeline(simulated(name, m, ranks * v * [1 / v], ranks), name)
    busy = v * m / (v * m + ranks - 1)
    assert shown_at_the_end(played) == [f"{100 * busy:.0f}"] * (ranks + 1)
    assert f"computed {busy:.0%} of the time, and the other {1 - busy:.0%} is the bubble" in played.frames[-1].says
    assert f"busy {busy:.1%}" in played.label


def test_utilization_grows_as_the_first_micro_batch_arrives():
    """After the first forward one of four ranks has computed, after the fourth 4 + 3 + 2 + 1 of 16."""
    shares = [re.findall(r">([\d.]+)%", "".join(frame.marks))[-1] for frame in draw.pipeline(LONE, "1F1B").frames]
    assert shares[0] == "25"
    assert shares[3] == f"{100 * 10 / 16:.0f}"
    told = draw.pipeline(LONE).frames[0].says
    assert told == "Forward: rank 0 on micro-batch 0; ranks 1, 2 and 3 wait for the first micro-batch."


def test_without_share_a_pipeline_tells_no_percentage():
    played = draw.pipeline(LONE, "1F1B", share=False)
    assert "%" not in json.dumps(data_of(played))


def test_schedules_end_with_the_share_that_is_no_bubble():
    busy = [f"{100 * (1 - bubble(spans)):.0f}" for spans in SCHEDULES.values()]
    assert shown_at_the_end(draw.schedules(SCHEDULES)) == busy == ["25", "73", "84"]


def test_overlap_hides_all_all_reduces_of_ddp_but_the_last():
    naive, hidden = step_of_ddp(overlap=False), step_of_ddp(overlap=True)
    assert naive[-1].end - hidden[-1].end == 3 * 2  # of four all-reduces of 2
    assert "waited 8 for" in draw.ddp(2, overlap=False).frames[-1].says
    assert "waited 2 for" in draw.ddp(2).frames[-1].says
    both = "Backward computes layer 3; meanwhile an all-reduce averages the gradients of layer 4."
    assert both in [frame.says for frame in draw.ddp(2).frames]


def test_ranks_of_ddp_differ_in_samples_and_agree_in_gradients():
    dealt = draw.ddp(2).frames[1].marks[0]
    numbers = [int(each) for each in re.findall(r">(\d)<", dealt)]
    assert sorted(numbers) == [*range(8)]
    last = "".join(draw.ddp(2).frames[-1].marks)
    assert last.count(" 165h") == last.count(" 176h") == 2 * 4  # both ranks' stripes, in all layers of both


@pytest.mark.parametrize("units", [4, 24])
def test_fsdp_gathers_and_scatters_as_often_as_the_lab_counts(units):
    for reshard, gathers in ((True, 2 * units - 1), (False, units)):
        steps = [*step_of_fsdp(units, reshard=reshard)]
        assert sum(now.gathers is not None for now in steps) == gathers
        assert sum(now.scatters is not None for now in steps) == units
        for now in steps:
            assert now.computes is None or now.computes in now.whole
    assert max(len(now.whole) for now in step_of_fsdp(units)) == 3  # the root, one that computes, and the next


def test_fsdp_gathers_the_root_first_and_frees_it_last():
    steps = [*step_of_fsdp(4)]
    assert [now.gathers for now in steps if now.gathers is not None] == [3, 0, 1, 2, 2, 1, 0]
    assert [now.scatters for now in steps if now.scatters is not None] == [2, 1, 0, 3]
    assert all(3 in now.whole for now in steps[:-2])
    assert not any(now.whole for now in steps[-2:])


def test_fsdp_counts_what_the_formula_of_a_ring_says():
    """An all-gather or a reduce-scatter of one of 4 units sends (N - 1)/N of a quarter from each of N ranks."""
    sent = (7 + 4) * 1 / 4 * (8 - 1) / 8
    assert draw.shards(4, 8).label.endswith(f"a rank sends {sent:.2f} times the model's parameters")
    assert f"has sent {sent:.2f} " in "".join(draw.shards(4, 8).frames[-1].marks)


def test_fsdp_holds_its_shards_between_steps():
    steps = [*step_of_fsdp(4)]
    assert held_by_fsdp(steps[-1], 4, 2) == (0.5, 0.5)
    assert held_by_fsdp(steps[5], 4, 2) == ((1 + 3 / 2) / 4, 0.0)  # forward of the root: it is whole


@pytest.mark.parametrize(("mixed", "whole"), [(False, (4, 4, 8)), (True, (2, 2, 12))])
def test_zero_divides_one_thing_more_with_each_stage(mixed, whole):
    p, g, o = whole
    held = [sum(zero_bytes(stage, 64, mixed=mixed).values()) for stage in range(4)]
    assert held == [p + g + o, p + g + o / 64, p + (g + o) / 64, (p + g + o) / 64]


def test_zero_saves_what_the_paper_says():
    """Figure 1 of arXiv:1910.02054: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    held = [sum(zero_bytes(stage, 64, mixed=True).values()) for stage in range(4)]
    assert [round(7.5 * each, 1) for each in held] == [120, 31.4, 16.6, 1.9]
    assert math.isclose(held[0] / sum(zero_bytes(1, 10**6, mixed=True).values()), 4, rel_tol=1e-3)
    assert math.isclose(held[0] / sum(zero_bytes(2, 10**6, mixed=True).values()), 8, rel_tol=1e-3)
    marks = "".join(draw.zero(64, mixed=True, billions=7.5).frames[1].marks)
    assert "31.4 GB on each rank" in marks


def test_a_mesh_shows_who_talks_in_the_order_of_a_step():
    talk = [*talk_in_a_step(2, 2, 2)]
    there_and_back = ["tensor", "pipeline", "tensor"]
    assert [axis for axis, *_ in talk] == ["data", *there_and_back, *there_and_back, "data"]
    assert talk[1][1] == [0, 1, 2, 3] and talk[3][1] == [4, 5, 6, 7]
    assert {axis for axis, *_ in talk_in_a_step(1, 4, 1)} == {"data", ""}
    assert "no rank communicates" in [*talk_in_a_step(1, 1, 1)][0][2]


def test_a_ring_sends_a_chunk_in_every_step():
    frames = draw.ring(4).frames
    assert len(frames) == 1 + 2 * 3 + 1
    assert all(frame.marks[1].count("data-from") == 4 for frame in frames[1:-1])


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_half_a_ring_leaves_on_each_rank_what_a_reduce_scatter_leaves(ranks):
    whole = {*range(ranks)}
    states = [*chunks_of_ring(ranks)]
    scattered = states[ranks - 1]
    assert [[number for number, chunk in enumerate(each) if chunk == whole] for each in scattered] == [
        [rank] for rank in range(ranks)
    ]
    assert sorted(len(chunk) for chunk in scattered[0]) == [*range(1, ranks + 1)]
    assert states[-1] == [[whole] * ranks] * ranks
