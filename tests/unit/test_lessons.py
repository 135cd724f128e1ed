"""What labs are made of: predictions that are scored, drawings that are sound, schedules that agree with formulas."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest

import labkit
from labkit import LabError, Script
from labkit.charts.images import in_attribute
from labkit.record import RunFolder
from labkit_labs import Lesson, defined, draw, sized
from labkit_labs.draw.charts import FORMATS, _borders
from labkit_labs.draw.player import Film
from labkit_labs.draw.strategies import groups
from labkit_labs.guesses import Guess
from labkit_labs.labs.experts import by_rank, routed, sleeping_experts
from labkit_labs.labs.pipelines import bubble, elapsed, in_flight, measured, simulated
from labkit_labs.labs.slow_links import break_even, difference_curves, differences, timeline
from labkit_labs.labs.step_memory import Meter
from labkit_labs.labs.traffic import noting_bytes, sent_in_a_step
from labkit_labs.lesson import Score, _script
from labkit_labs.on_ranks import cells_text
from labkit_labs.other_devices import elsewhere

SVG = "{http://www.w3.org/2000/svg}"
SPANS = simulated("InterleavedZeroBubble", 4, 4 * [0.5], 2)
SIZES = {"c.weight": 900_000, "b.weight": 400_000, "a.weight": 100}
PICTURES = {
    "bars": draw.bars(
        {"a": {"parameters": 2, "other": 1}, "b": 1}, {"a": 3}, unit="B", limit=5, limit_name="T4", title="<&>"
    ),
    "buckets": draw.buckets(SIZES),
    "choice": draw.choice({"a": (2e6, 3e6), "<b>": (0, 1e6)}, {"a": (2.1e6, 2.9e6)}),
    "decision": draw.decision([("<fits>?\nstates", "yes", "DDP\nfirst"), ("waits?", "no", "FSDP")], "a & b"),
    "differences": difference_curves({"<int8>": {30: [0.01, 0.02], 60: [0.0, -0.01]}, "b": {30: [1.0, 2.0]}}, "loss"),
    "formats": draw.formats(),
    "gradients": draw.gradients({-30: 0.2, -20: 0.5, -10: 0.3}, scale=2**16),
    "grid": draw.grid(SPANS, "zero <bubble>"),
    "loader": draw.loader(2, 1, 2),
    "loader without workers": draw.loader(1, 1, 0),
    "mesh": draw.mesh(2, 2, 2),
    "replicas": draw.replicas(3, share=1 / 3),
    "experts": routed(2, moving=True),
    "experts that drop tokens": routed(8, 1.0, 1.25),
    "ring": draw.ring(4),
    "ring of two": draw.ring(2),
    "shards": draw.shards(3, 2, reshard=False),
    "timeline": timeline(20, moving=True),
    "step": draw.step(4, 4, 8, 0, "GB"),
    "split": draw.split(4),
    "stacked": draw.stacked([draw.ring(2), draw.bars({"a": 0})], ["first"]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_sound_svg_within_700_pixels_in_every_viewer(name):
    picture = PICTURES[name]
    root = ElementTree.fromstring(picture.svg)
    shown = picture._repr_mimebundle_()

    assert int(root.get("viewBox").split()[2]) <= 700
    assert root.get("aria-label") == in_attribute(picture.label)
    assert picture.label == shown["text/plain"] == repr(picture)
    page = shown["text/html"].removeprefix('<div class="labkit-film">')
    assert page.startswith('<div class="labkit-picture" style="overflow-x:auto"><img src="data:image/svg+xml;base64,')
    assert "<script" not in picture.svg
    assert len(picture.svg) < 32_000
    for mark in picture.frames[picture.best].marks if isinstance(picture, Film) else ():
        assert mark in picture.still().svg


def test_what_was_predicted_and_what_was_measured_have_the_same_colour():
    drawn = ElementTree.fromstring(draw.bars({"a": {"x": 1, "y": 2}}, {"a": {"y": 3, "x": 4}}).svg)
    bars = [each.attrib for each in drawn.iter(f"{SVG}rect") if each.get("height") == "14"]
    predicted = [bar["fill"] for bar in bars if bar.get("fill-opacity") == ".5"]
    assert predicted == [bar["fill"] for bar in bars if "fill-opacity" not in bar]
    assert len({*predicted}) == 2

    places = ElementTree.fromstring(draw.choice({"a": (1, 1), "b": (2, 2)}, {"b": (2, 1), "a": (1, 2)}).svg)
    rings = [ring.get("stroke") for ring in places.iter(f"{SVG}circle")]
    crosses = [cross.get("stroke") for cross in places.iter(f"{SVG}path") if cross.get("stroke-width") == "2.5"]
    assert rings == crosses
    assert len({*rings}) == 2


def test_buckets_have_one_scale_and_stay_within_the_picture():
    for cap in (0.1, 1, 25):
        sent = [box.attrib for box in ElementTree.fromstring(draw.buckets(SIZES, cap).still().svg).iter(f"{SVG}rect")]
        sent = [box for box in sent if box["y"] == "98.0"]
        sizes = [sum(SIZES[name] for name in names) for names in draw.filled(SIZES, cap)]
        scale = (float(sent[0]["width"]) + 1) / sizes[0]
        assert len(sent) == len(sizes)
        for box, size in zip(sent, sizes, strict=True):
            assert abs(float(box["width"]) - max(1, scale * size - 1)) < 0.2
            assert float(box["x"]) + float(box["width"]) <= 700


def test_a_bucket_is_closed_when_it_has_reached_its_limit():
    assert draw.filled(SIZES) == [["c.weight", "b.weight"], ["a.weight"]]
    assert draw.filled(SIZES, bucket_cap_mb=0.1) == [["c.weight"], ["b.weight"], ["a.weight"]]
    assert draw.filled(SIZES, bucket_cap_mb=25) == [[*SIZES]]


def test_the_borders_of_a_format_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        info, (smallest, normal, infinite) = torch.finfo(dtype), _borders(*FORMATS[name])
        assert (2.0**smallest, 2.0**normal) == (info.smallest_normal * info.eps, info.smallest_normal)
        assert math.log2(info.max / (2 - info.eps)) + 1 == infinite


def test_the_groups_of_a_mesh_are_those_of_torch():
    torch = pytest.importorskip("torch")
    ranks = torch.arange(8).view(2, 2, 2)
    names = ("pipeline", "data", "tensor")
    assert groups(2, 2, 2) == {name: ranks.movedim(i, -1).flatten(0, 1).tolist() for i, name in enumerate(names)}


def test_a_script_that_notes_its_bytes_is_composed_and_read_back(tmp_path):
    script = noting_bytes(Script.load("ddp"))
    assert "register_optimizer_step_post_hook(note_bytes)" in str(script)
    ast.parse(str(script))
    folder = RunFolder(tmp_path)
    for rank, counts in enumerate(([10, 20, 30], [1, 11, 12, 22, 23, 33])):  # the second has two optimizers
        folder.rank(rank).mkdir(parents=True)
        records = [json.dumps({"k": "report", "t": 0.1, "step": 1, "sent": count}) for count in counts]
        folder.metrics(rank).write_text("\n".join(records) + "\n")
    run = SimpleNamespace(folder=folder)
    assert sent_in_a_step(run, ranks=2, steps=3) == (30 - 10) / 2 + (33 - 11) / 2
    assert sent_in_a_step(run, ranks=2, steps=3, after=2) == (30 - 20) + (33 - 22)


def test_a_loss_is_compared_with_that_of_the_same_seed():
    losses = {
        "DDP": {0: {30: 3.0, 60: 2.0}, 1: {30: 4.0, 60: 3.0}},
        "int8": {0: {30: 3.5, 60: 2.0}, 1: {30: 4.0, 60: 3.5}},
    }
    assert differences(losses, "DDP") == {"int8": {30: [0.5, 0.0], 60: [0.0, 0.5]}}


def test_compressed_gradients_hide_behind_backward_and_an_average_of_weights_does_not():
    """One forward is 1, backward 2; eight steps."""
    assert timeline(1).label.endswith("; 25 s")  # DiLoCo's 8 x 3 and its average
    assert timeline(20).label.endswith("; 2 min 48 s")  # DDP's 8 x 21


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_take_as_long_as_the_share_of_the_tokens_on_the_busiest_rank_says(ranks):
    assert f" {ranks * (0.5 + 0.5 / ranks):.2f} times as long" in routed(ranks, 0.5).label
    assert routed(ranks, 0.5, 1).label.endswith("; 44% of the tokens are dropped")  # 9/16 choose expert 0, 1/8 stay
    assert by_rank([*range(8)], ranks)[-1] == sum(range(8 - 8 // ranks, 8))


def test_a_script_whose_experts_sleep_is_composed():
    ast.parse(str(sleeping_experts(0.5)))


def test_the_break_even_is_where_the_speed_up_falls_to_the_least():
    assert break_even(lambda bandwidth: 100 / bandwidth, least=2) == pytest.approx(50, rel=0.01)


def test_what_a_cell_defines_can_be_tried_without_ranks():
    ours = defined(Script.load("ddp"), "model")
    assert ours.Model(width=16, layers=1).blocks


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_simulated_bubbles_and_memory_are_those_of_the_formulas(ranks, micro_batches):
    for schedule, stages in (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)):
        spans = simulated(schedule, micro_batches, ranks * stages * [1 / stages], ranks)
        assert math.isclose(bubble(spans), (ranks - 1) / (stages * micro_batches + ranks - 1))
    assert in_flight(simulated("GPipe", micro_batches, ranks * [1]), 0) == micro_batches
    held = [in_flight(simulated("1F1B", micro_batches, ranks * [1]), rank) for rank in range(ranks)]
    assert held == [min(micro_batches, ranks - rank) for rank in range(ranks)]


def test_the_slowest_stage_of_a_simulated_pipeline_sets_its_pace():
    for schedule, stages in (("GPipe", [1, 3, 2, 1]), ("1F1B", [1, 1, 1, 2])):
        step = elapsed(simulated(schedule, 8, stages))
        assert math.isclose(step, 3 * (sum(stages) + 7 * max(stages)))  # a forward and a backward of 3 forwards


def test_measured_actions_become_the_same_spans():
    halves = [[("forward", 0, 0, 1), ("forward", 0, 1, 2), ("weights", 0, 2, 3), ("backward", 0, 3, 4)]]
    split = [[*halves[0][:3], ("forward", 0, 3, 4), ("backward", 0, 4, 5)]]

    assert [(s.kind, s.chunk, s.start, s.end) for s in measured(halves)] == [
        ("forward", 0, 0, 1),
        ("forward", 1, 1, 2),
        ("backward", 0, 2, 4),
    ]
    assert [s.kind for s in measured(split)] == ["forward", "forward", "weights", "forward", "backward"]


@pytest.mark.parametrize(
    ("default", "unit", "options", "measured_as", "verdict", "text"),
    [
        (4, "", None, 4, "right", "4"),
        (1.5, "MB", None, 1_550_000, "right", "1.4 MiB"),
        (45, "%", None, 0.4, "close: 5 points too high", "45.0%"),
        (10, "", None, 2, "too high by a factor of 5.0", "10"),
        (6, "", None, 10, "40% too low", "6"),
        (1, "", None, 4, "too low by a factor of 4.0", "1"),
        (0.1, "", None, 0, "too high", "0.1"),
        (-0.01, "", None, 0, "too low", "-0.01"),
        (0, "", None, 0, "right", "0"),
        (0.5, "", {"half": 0.5, "all": 1.0}, 0.498, "right", "half"),
        (0.5, "", {"half": 0.5, "all": 1.0}, 1.02, "wrong", "half"),
    ],
)
def test_a_prediction_is_scored(default, unit, options, measured_as, verdict, text):
    guess = Guess("x", "", default, unit, options)
    assert guess.verdict(measured_as) == verdict
    assert guess.text == text


def test_a_default_that_cannot_be_chosen_is_refused():
    with pytest.raises(LabError, match="the default of 'x' must be one of 1, 2; got 3"):
        Guess("x", "", 3, "", {"one": 1, "two": 2})


def test_the_score_holds_every_question(runs_dir, capsys):
    lab = Lesson("99 a lab")
    lab.ask("bytes", default=1, unit="MB", about="How many?")
    assert lab.score().rows == [{"question": "bytes", "predicted": "1,000,000 B", "measured": "not measured"}]
    lab.verify("bytes", 2_000_000, 2_000_000, "B")
    score = lab.score()
    assert score.rows == [
        {
            "question": "bytes",
            "predicted": "1,000,000 B",
            "by the formula": "1.9 MiB",
            "measured": "1.9 MiB",
            "the prediction was": "too low by a factor of 2.0",
        }
    ]
    assert "No one was asked" in repr(score)
    elsewhere = {"question": "x", "predicted": "1", "measured": "not measured"}
    assert "0 of 1 predictions were right" in repr(Score([*score.rows, elsewhere], score.claims, has_reader=True))


def test_what_was_timed_is_graded_by_the_formula_and_says_how_busy_the_machine_was(runs_dir, monkeypatch):
    lab = Lesson("99 a lab")
    lab.ask("idle", default=27.3, unit="%")
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0 * os.cpu_count(), 0, 0))
    lab.verify("idle", 0.273, 0.6, "%", within=0.2, timed=True)
    score = lab.score()
    assert score.rows[0]["the prediction was"] == "right, by the formula"
    assert score.right == 1
    assert re.fullmatch(r"60.0%, too noisy to decide \(load \d+\.\d per core\)", score.rows[0]["measured"])
    assert "0 of the 1 claims of this lab so far hold." in repr(score)


def test_the_score_fails_a_lab_whose_formula_is_wrong(runs_dir):
    lab = Lesson("99 a lab")
    lab.verify_each({"sum": (4, 2 + 2), "product": (5, 2 * 2)})
    with pytest.raises(LabError, match="1 of 2 claims of 99 a lab do not hold: product: predicted 5, measured 4"):
        lab.score()


def test_what_was_calculated_is_not_called_measured(runs_dir):
    lab = Lesson("99 a lab")
    lab.verify("peak", 100, 90, "B", planned=True, because="rehearsed")
    with pytest.raises(LabError, match=r"peak: predicted 100 B, planned 90 B"):
        lab.score()
    row = lab._claims["peak"].row()
    assert (row["measured"], row["planned"]) == ("", "90 B")
    assert "planned" in lab._repr_mimebundle_()["text/html"]


def test_a_lessons_script_is_plain_pytorch_and_has_only_the_helpers_it_uses():
    mine = "import torch\n\n\ndef step(device):\n    return third_step(torch.nn.Linear(2, 2), torch.ones(2, 2))\n"
    script = _script("99 a lab", "step", {"each_rank": mine})
    imports = {node.module or "" for node in ast.walk(ast.parse(str(script))) if isinstance(node, ast.ImportFrom)}

    assert [*script.cells] == ["join", "recorded", "stepped", "held", "each_rank", "main", "run"]
    assert "json.dumps(step(device" in script.cells["main"].text
    assert not any(name.startswith("labkit") for name in imports)


def test_the_cells_of_ranks_are_never_imported():
    text = cells_text("cells")
    assert "import labkit" not in text
    assert "labkit_labs.on_ranks.cells" not in sys.modules
    assert [*Script.parse(text).cells][-1] == "main"


def test_sizes_are_changed_in_model_and_data():
    script = sized(Script.load("fsdp"), context=64, width=32)
    assert "context=64, width=32" in script.cells["model"].text
    assert "context=64" in script.cells["data"].text
    drops = script.with_cells(data=script.cells["data"].text.replace("limit=2**20", "limit=2**20, rate=0.1, eps=1e-5"))
    assert "rate=0.25, eps=1)" in sized(drops, rate=0.25, eps=1).cells["data"].text
    with pytest.raises(LabError, match="no function in the cells model, data has a default depth="):
        sized(script, depth=3)


def test_a_meter_counts_the_bytes_of_tensors_that_are_made_inside_it_until_they_are_freed():
    torch = pytest.importorskip("torch")
    earlier = torch.ones(1000)
    with Meter() as meter:
        doubled = earlier * 2
        doubled.add_(1)
        view = doubled[:10]
        assert meter.held == doubled.nbytes
        other = doubled + doubled
        assert meter.held == 2 * doubled.nbytes
        del doubled, view
        assert meter.held == other.nbytes
    assert max(meter.curve) == 2 * other.nbytes


def test_what_cannot_be_planned_says_why_in_its_row(monkeypatch):
    def refused(*_, **__):
        raise LabError("no such layout")

    monkeypatch.setattr("labkit_labs.other_devices.plan", refused)
    rows = elsewhere({"DDP": "ddp"}, ["2xT4"], {}, "")
    assert rows.rows == [{"": "DDP", "on": "2 × T4", "note": "no such layout"}]
    assert "planned, not run" in rows._repr_mimebundle_()["text/html"]


def test_lessons_are_not_among_the_public_names():
    assert not {"Lesson", "draw", "lessons"} & set(labkit.__all__)


def test_the_bytes_of_collectives_are_those_of_torchs_types(monkeypatch):
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    recorded = defined(Script.parse(cells_text("cells")), "recorded")
    types = torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype in types:
            dist.all_gather([torch.zeros(3, dtype=dtype)], torch.zeros(3, dtype=dtype))
        seen = [size for _, _, size in recorded.calls_since(0)][-len(types) :]
    finally:
        dist.destroy_process_group()
    assert seen == [3 * dtype.itemsize for dtype in types]


def test_all_reduce_is_itself_again_after_a_way_that_fails():
    dist, nn = pytest.importorskip("torch.distributed"), pytest.importorskip("torch.nn")
    cells = Script.parse(cells_text("cells")).cells
    (title,) = [title for title, cell in cells.items() if "timed_steps" in cell.defines]
    timed_steps, before = defined(Script.parse(cells_text("cells")), title).timed_steps, dist.all_reduce

    def way(model, loss):
        raise ValueError("this way fails")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="this way fails"):
            timed_steps({way: nn.Linear(2, 2)}, lambda model: model.weight.sum())
    finally:
        dist.destroy_process_group()
    assert dist.all_reduce is before
