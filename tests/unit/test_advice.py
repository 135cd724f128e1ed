"""Advice on a decoder whose facts are written down here: what fits, what is fastest, why not the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from labkit.errors import LaunchError
from labkit.planner.advice import advise
from labkit.planner.candidate import ALIKE, MARGIN, Candidate, RecomputedNotCountedError, fastest, refusal
from labkit.planner.data_sheets import device_named
from labkit.planner.layout import layout_of
from labkit.planner.memory.peak import worst
from labkit.planner.model.facts import ByteCount, ModelFacts, Moment, Profile, Unit, Variant, Work
from labkit.planner.scaling import break_even_curve, bytes_per_parameter, largest_micro_batch, scaling_curves
from labkit.planner.search import BOX, Search, outlook, remedies
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.strategies.known import CUSTOM, strategy_named
from labkit.planner.variations import extras_of, needed, own_parameters, variants
from labkit.record.records import Peak
from labkit.write import Script

GIB = 2**30
T4 = device_named("T4")
PEAK = Peak(GIB, "backward", "", {"parameters": GIB})


def profile(elements, saved, itemsize, tokens):
    """A unit that keeps `saved` bytes of a sample."""
    kept = ByteCount(0, saved)
    gradients = itemsize * sum(elements)
    flops = 2 * tokens * sum(elements)
    return Profile(
        parameters=elements,
        rows=tuple(64 for _ in elements),
        input=ByteCount(0, 1000),
        output=ByteCount(0, 1000),
        forward=(Moment(kept, kept, 0),),
        saved=kept,
        keeps_input=True,
        keeps_output=True,
        cached=0,
        backward=(Moment(kept, kept, 0), Moment(ByteCount(gradients, 0), ByteCount(), gradients)),
        backward_in_stage=(Moment(kept, kept, 0), Moment(ByteCount(gradients, 0), ByteCount(), gradients)),
        work=(
            Work("matmul", "forward", ByteCount(0, flops), ByteCount(), 1),
            Work("matmul", "backward", ByteCount(0, 2 * flops), ByteCount(), 1),
        ),
    )


def decoder(width=1024, layers=4, saved=10_000_000, unsplit=None, tokens=500):
    """ModelFacts of a decoder whose blocks each save so many bytes per sample."""
    block = (3 * width * width, width * width, 4 * width * width, 4 * width * width)
    sizes = [(256 * width,), *[block] * layers, (256 * width,)]
    names = ["embed", *(f"blocks.{i}" for i in range(layers)), "unembed"]
    units = tuple(
        Unit(name, elements, 0, 0, 2 * tokens * sum(elements), 1000)
        for name, elements in zip(names, sizes, strict=True)
    )
    profiles = {}
    ways_of_computing = [("fp32", False), ("16", False), ("16", True)]
    for (precision, half), recomputed, tensor in product(ways_of_computing, [False, True], [1, 2]):
        variant = Variant(precision, half, recomputed, tensor)
        kept = saved // (20 if recomputed else 1) // (2 if precision == "16" else 1)
        profiles[variant] = tuple(profile(elements, kept, variant.itemsize, tokens) for elements in [*sizes, ()])
    return ModelFacts(units, 4, 1000, 1000, 10_000, profiles, unsplit or {})


@pytest.fixture(scope="module")
def ddp():
    return Script.load("ddp")


def advice(facts, script, ranks=2, **parameters):
    return advise(script, facts, T4, ranks, parameters, SpeedModel(script, facts, T4, ranks))


def row(found, strategy, place=0):
    return [each for each in found.rows if each.strategy == strategy][place]


def test_the_users_cells_go_into_every_strategy_and_the_strategy_stays_its_own(ddp):
    model = ddp.cells["model"].text + "\nMINE = 1\n"
    mine = ddp.with_cells(model=model)
    made = variants(mine)

    assert made["ddp"] == mine
    assert {script.cells["model"] for script in made.values()} == {mine.cells["model"]}
    assert made["fsdp"].cells["strategy"] == Script.load("fsdp").cells["strategy"]
    assert made["pipeline"].cells["step"] == Script.load("pipeline").cells["step"]
    for script in made.values():
        script.check()


def test_recomputed_layers_are_only_missed_where_they_may_decide(ddp):
    def without_recomputed(facts):
        plain = {variant: each for variant, each in facts.profiles.items() if not variant.recomputed}
        return replace(facts, profiles=plain, recomputed=False)

    def rescued(facts, batch):
        search = Search({"ddp": ddp}, facts, T4, SpeedModel(ddp, facts, T4, 2))
        return search.rescue(search.look("ddp", 2, {"global_batch_size": batch}))

    slower = decoder(saved=1_800_000_000)
    assert rescued(without_recomputed(slower), 8) == rescued(slower, 8)
    assert rescued(slower, 8).changes == ("accumulate=4",)
    with pytest.raises(RecomputedNotCountedError):
        rescued(without_recomputed(decoder(saved=3_000_000_000)), 2)


def test_a_strategy_of_ones_own_stands_beside_labkits(ddp):
    mine = replace(ddp.with_cells(strategy=ddp.cells["strategy"].text + "\nMINE = 1\n"), name="mine")

    assert list(variants(mine))[:3] == ["mine", "single", "ddp"]
    assert variants(mine)["fsdp"] == Script.load("fsdp")


def test_a_strategy_of_ones_own_is_not_taken_for_labkits_with_the_scripts_name():
    fsdp = Script.load("fsdp")
    mine = fsdp.with_cells(strategy=fsdp.cells["strategy"].text + "\nMINE = 1\n")
    found = advice(decoder(), mine)

    assert mine.name == "fsdp"
    assert variants(mine)["your fsdp"] == found.requested.script == mine
    assert found.requested.layout.strategy is CUSTOM
    assert (found.requested.peak, found.requested.step) == (None, None)
    assert "MINE" not in str(row(found, "fsdp").script)


def test_extras_and_the_task_go_into_every_strategy_that_they_go_with():
    script = Script.load("ddp", "accumulate", "precision", "ddp_options", task="digits")
    made = variants(script)

    for name, other in made.items():
        theirs = Script.load(name, "precision", task="digits").cells
        assert other.cells["model"] == script.cells["model"]
        assert other.cells["precision"] == script.cells["precision"]
        if name in ("pipeline", "hybrid"):  # micro-batches are theirs
            assert other.cells["step"] == theirs["step"]
        else:
            assert other.cells["step"] == script.cells["step"]
            assert other.cells["gradient_sync"] == Script.load(name, "accumulate").cells["gradient_sync"]
        assert (other.cells["strategy"] == theirs["strategy"]) == (name != "ddp")
        other.check()
    assert extras_of(script) == ("precision", "accumulate")


def test_a_step_of_the_users_own_stays_under_every_strategy_that_brings_none(ddp):
    accumulated = Script.load("ddp", "accumulate")
    mine = accumulated.with_cells(step=accumulated.cells["step"].text + "\nMINE = 1\n")
    made = variants(mine)

    assert [n for n, script in made.items() if "MINE = 1" not in script.cells["step"].text] == ["pipeline", "hybrid"]
    assert made["zero2"].cells["gradient_sync"] == Script.load("zero2", "accumulate").cells["gradient_sync"]
    for script in made.values():
        script.check()


def test_options_of_extras_are_taken_and_defaults_need_no_extra(ddp):
    asked = {"clip": 1.0, "replicas": 2, "precision": "fp32", "global_batch_size": 8}

    assert own_parameters(ddp, asked) == {"clip": 1.0, "precision": "fp32", "global_batch_size": 8}
    assert own_parameters(Script.load("fsdp"), asked) == asked
    assert needed(ddp, asked) == {"clip": 1.0, "replicas": 2, "global_batch_size": 8}


@pytest.mark.parametrize(
    ("strategy", "extra"),
    [
        ("ddp", "ddp_options"),
        ("fsdp", "fsdp_options"),
        ("tensor_parallel", "sequence_parallel"),
        ("ddp", "accumulate"),
    ],
)
def test_an_extra_with_its_defaults_changes_no_layout(strategy, extra):
    assert layout_of(Script.load(strategy, extra), 2, {}) == layout_of(Script.load(strategy), 2, {})


def test_what_fits_is_said_and_the_fastest_of_it_is_chosen(ddp):
    found = advice(decoder(), ddp)

    assert found.requested.fits
    assert found.requested.strategy == "ddp"
    assert found.requested.remark.startswith("fits")
    assert found.best.fits
    assert found.best.step.seconds <= ALIKE * min(r.step.seconds for r in found.rows if r.fits and r.ranks <= 2)
    assert "ddp on 2 x T4 needs" in found.sentences[0]
    assert found.sentences[0].endswith("fits.")
    assert found.sentences[1].startswith(f"Recommended: {found.best.name}")


def test_a_rehearsal_that_holds_more_than_the_formulas_adds_no_second_row(ddp):
    more = Peak(8 * GIB, "backward", "", {})
    rows = advise(ddp, decoder(), T4, 2, {}, rehearsed=more).rows

    assert [row.peak for row in rows if row.strategy == "ddp"] == [more]


@pytest.mark.parametrize(
    ("saved", "batch", "change", "options"),
    [
        (1_800_000_000, 8, "accumulate=4", {"accumulate": 4}),
        (3_000_000_000, 2, "activation checkpointing", {"activation_checkpointing": True}),
    ],
)
def test_the_change_that_makes_it_fit_at_the_least_cost_in_time_is_named(ddp, saved, batch, change, options):
    found = advice(decoder(saved=saved), ddp, global_batch_size=batch)

    assert not found.requested.fits
    assert "of 14.24 GiB" in found.requested.remark
    rescued = row(found, "ddp", 1)
    assert rescued.fits
    assert rescued.changes == (change,)
    assert rescued.parameters == {"global_batch_size": batch} | options
    assert f"fits with {change}" in rescued.remark
    ((name, value),) = options.items()
    assert found.sentences[1] == f"It would fit with {name}={value}."


def test_advice_is_given_as_arguments_of_a_call():
    facts, fsdp = decoder(width=2560, layers=30, saved=400_000_000), Script.load("fsdp")
    rescued = advice(facts, fsdp, precision="fp16")
    assert rescued.sentences[1] == "It would fit with activation_checkpointing=True, cpu_offload=True."
    assert "cpu_offload=" not in rescued.sentences[2]  # it is the choice: once is enough

    asked_for_ddp = advice(facts, Script.load("ddp"), precision="fp16")
    assert f"{asked_for_ddp.best.strategy} (activation_checkpointing=True, cpu_offload=True), " in "".join(
        asked_for_ddp.sentences
    )
    more_ranks = advice(decoder(width=3000, layers=20, saved=1000), Script.load("zero2"))
    assert more_ranks.sentences[1] == f"It would fit with nproc_per_node={row(more_ranks, 'zero2', 1).ranks}."
    ordinary = [each for each in advice(decoder(), fsdp, precision="fp16").sentences if "fused" not in each]
    assert "=" not in "".join(ordinary)  # the defaults need no argument


def test_of_several_changes_none_is_kept_without_which_it_still_fits():
    script, facts = Script.load("fsdp"), decoder(width=2560, layers=30, saved=400_000_000)
    asked = {"global_batch_size": 64, "precision": "fp16"}
    rescued = row(advice(facts, script, **asked), "fsdp", 1)
    changed = {name: value for name, value in rescued.parameters.items() if asked.get(name) != value}

    assert (rescued.ranks, rescued.fits, len(changed)) == (2, True, len(rescued.changes))
    assert changed == {"activation_checkpointing": True, "cpu_offload": True}
    for left_out in changed:
        fewer = {name: value for name, value in rescued.parameters.items() if name != left_out}
        assert worst(facts, layout_of(script, 2, fewer), on_gpu=True)[1].bytes > T4.usable


def test_when_no_option_helps_the_fewest_ranks_are_named():
    zero2 = Script.load("zero2")
    facts = decoder(width=3000, layers=20, saved=1000)
    found = advice(facts, zero2, global_batch_size=64)

    rescued = row(found, "zero2", 1)
    assert rescued.fits
    assert rescued.ranks > 2
    assert f"needs {rescued.ranks - 2} more ranks" in rescued.remark
    fewer = replace(layout_of(zero2, 2, rescued.parameters), ranks=rescued.ranks // 2, data=rescued.ranks // 2)
    assert worst(facts, fewer, on_gpu=True)[1].bytes > T4.usable
    assert found.best is None or found.best.strategy != "zero2"


def test_states_that_no_sharding_makes_small_enough_can_be_offloaded():
    found = advice(decoder(width=3000, layers=64, saved=1000), Script.load("fsdp"), global_batch_size=64)

    rescued = row(found, "fsdp", 1)
    assert (rescued.ranks, rescued.changes) == (2, ("CPU offload",))
    assert rescued.fits


def test_what_cannot_be_laid_out_says_why_and_the_others_are_still_planned(ddp):
    found = advice(
        decoder(layers=4, unsplit={3: "4 heads cannot be split across 3 tensor ranks"}),
        ddp,
        3,
        global_batch_size=12,
    )

    assert row(found, "pipeline").remark == "4 blocks cannot be split into 3 pipeline stages"
    assert row(found, "tensor_parallel").remark == "4 heads cannot be split across 3 tensor ranks"
    assert row(found, "fsdp").fits
    assert row(found, "single").ranks == 1


def test_strategies_that_cannot_train_a_gradient_penalty_say_so(ddp):
    penalty = "\ndef slope(y, x):\n    return torch.autograd.grad(y.sum(), x, create_graph=True)\n"
    found = advice(decoder(), ddp.with_cells(task=ddp.cells["task"].text + penalty))

    assert found.best.strategy in ("ddp", "zero1")
    assert row(found, "ddp").fits
    for strategy in ("zero2", "fsdp", "hybrid"):
        assert "does not support a backward pass through a gradient" in row(found, strategy).remark


def test_a_layout_that_does_not_multiply_up_is_refused(ddp):
    with pytest.raises(LaunchError, match="cannot be split evenly into 3 data ranks"):
        advice(decoder(), ddp, 3, global_batch_size=64)


def test_a_precision_the_device_lacks_is_said_once_and_the_advice_is_with_one_that_it_has(ddp):
    found = advice(decoder(), ddp, precision="bf16")
    with_fp16 = advice(decoder(), ddp, precision="fp16")

    assert not found.requested.fits
    assert found.requested.remark == "T4 does not support bf16; it supports fp32, fp16: use precision='fp16'"
    assert found.sentences[0].startswith(f"ddp on 2 x T4 cannot run: {found.requested.remark}.")
    assert [each.remark for each in found.rows if "bf16" in each.remark] == [found.requested.remark]
    assert found.sentences[1:] == with_fp16.sentences
    assert [each.remark for each in found.rows[1:]] == [each.remark for each in with_fp16.rows]
    assert found.best.parameters["precision"] == "fp16"
    assert found.best.strategy == with_fp16.best.strategy


def test_what_is_superseded_is_not_the_choice_however_fast_it_is():
    facts = decoder(width=3000, layers=12, saved=1000)
    found = advise(Script.load("fsdp1"), facts, T4, 2, {}, SpeedModel(Script.load("fsdp1"), facts, T4, 2, {}), PEAK)

    assert found.requested.fits
    assert found.best.strategy != "fsdp1"
    assert found.requested.remark.endswith(", but superseded by fsdp")
    assert " fsdp1" not in found.sentences[1]


def test_for_one_device_no_strategy_for_several_is_named(ddp):
    found = advice(decoder(), ddp, 1, global_batch_size=4)
    assert {each.strategy for each in found.rows} == {"ddp", "single"}
    assert found.best.strategy == "single"

    too_large = advice(decoder(width=4096, layers=20), ddp, 1, global_batch_size=4)
    assert too_large.best is None
    assert all(each.ranks > 1 for each in too_large.rows if each.fits)


@pytest.mark.parametrize("width", [64, 1024, 2048])
@pytest.mark.parametrize("batch", [4, 64])
def test_the_choice_is_the_same_whichever_strategy_is_asked_for(width, batch):
    facts = decoder(width=width, saved=1_000_000)
    names = [name for name in variants(Script.load("ddp")) if name != "single"]
    choices = {name: advice(facts, Script.load(name), global_batch_size=batch).best for name in names}

    assert len({choice.name for choice in choices.values()}) == 1, {name: c.name for name, c in choices.items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "hybrid"])
@pytest.mark.parametrize("batch", [4, 64])
def test_what_is_said_of_the_times_is_what_they_are(strategy, batch):
    found = advice(decoder(saved=1_000_000), Script.load(strategy), global_batch_size=batch)
    least = found.best.step.seconds
    alike = set()
    for each in (r for r in found.rows if r.fits and r.ranks <= 2 and ": recommended" not in r.remark):
        ratio, text = each.step.seconds / least, each.remark.partition("; ")[2].partition(",")[0]
        if "% faster" in text:
            pytest.fail(f"{each.strategy} is faster than the choice")
        elif "times" in text:
            assert ratio > ALIKE
        else:
            assert text == "about as fast"
            assert 1 / ALIKE <= ratio <= ALIKE
        if ratio <= ALIKE and each.strategy != found.best.strategy:
            alike.add(each.strategy)
    assert ("Within 5%" in found.sentences[1]) == bool(alike)
    others = found.sentences[1].partition("larger or less simple: ")[2].rstrip(".")
    assert set(filter(None, others.split(", "))) == alike


def test_another_precision_is_a_last_resort(ddp):
    facts = decoder(saved=2_000_000_000)
    found = advice(facts, ddp, global_batch_size=8)

    assert found.best.layout.precision == "fp32"


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_a_schedule_needs_its_micro_batches(schedule):
    script = Script.load("pipeline")
    layout = layout_of(script, 4, {"schedule": schedule, "accumulate": 2, "global_batch_size": 8})
    facts = decoder(layers=8)

    assert "micro-batches" in refusal(facts, layout)
    assert refusal(facts, replace(layout, accumulate=4)) == ""


def test_the_largest_micro_batch_is_the_last_that_fits(ddp):
    facts, layout = decoder(), layout_of(ddp, 2, {})
    largest = largest_micro_batch(facts, layout, T4)

    assert worst(facts, replace(layout, micro_batch=largest), on_gpu=True)[1].bytes <= (1 - MARGIN) * T4.usable
    assert worst(facts, replace(layout, micro_batch=largest + 1), on_gpu=True)[1].bytes > (1 - MARGIN) * T4.usable


def test_a_model_too_large_for_one_sample_has_no_largest_batch(ddp):
    assert largest_micro_batch(decoder(width=9000, layers=8), layout_of(ddp, 2, {}), T4) == 0


@pytest.mark.parametrize(
    ("strategy", "options", "bytes_each"),
    [
        ("ddp", {}, (20, 16)),
        ("ddp", {"gradient_as_bucket_view": False}, (24, 20)),
        ("zero1", {}, (14, 12)),
        ("zero2", {}, (12, 10)),
        ("fsdp", {}, (10, 8)),
        ("pipeline", {}, (10, 8)),
        ("tensor_parallel", {}, (8, 8)),
    ],
)
def test_states_bound_the_model_as_in_the_zero_paper_and_by_the_update_on_a_gpu(strategy, options, bytes_each):
    layout = layout_of(Script.load(strategy), 2, options)

    shared = replace(T4, shared=True)
    assert tuple(bytes_per_parameter(layout, device) for device in (T4, shared)) == bytes_each


def test_remedies_are_those_the_strategy_and_the_device_have():
    said = [word for _, word in remedies(layout_of(Script.load("fsdp"), 2, {"global_batch_size": 8}), T4)]

    assert said == [
        *("fused AdamW", "activation checkpointing", "fp16", "reshard always"),
        *("accumulate=2", "accumulate=4", "CPU offload"),
    ]
    ddp = layout_of(
        Script.load("ddp"),
        2,
        {
            "activation_checkpointing": True,
            "precision": "fp16",
            "gradient_as_bucket_view": False,
            "global_batch_size": 2,
        },
    )
    assert [word for _, word in remedies(ddp, device_named("A100 40"))] == ["fused AdamW", "gradients as bucket view"]


@pytest.mark.parametrize(
    ("samples", "accumulate", "counts"), [(64, 1, {1, 16}), (8, 1, {1, 8}), (4, 1, {1, 4}), (6, 2, {2}), (64, 32, {32})]
)
def test_a_pipeline_is_planned_with_as_many_micro_batches_as_its_batch_makes(samples, accumulate, counts):
    tried = {
        options.get("accumulate", accumulate)
        for options, _ in strategy_named("pipeline").ways(4, accumulate, samples, BOX)
    }

    assert tried == counts


@pytest.mark.parametrize(("ranks", "axes"), [(4, 3), (8, 7)])
def test_a_hybrid_uses_two_axes_at_least(ranks, axes):
    found = list(strategy_named("hybrid").ways(ranks, 1, 64, BOX))

    assert len(found) == axes
    for options, _ in found:
        sizes = options["tensor"], options["pipeline"], ranks // (options["tensor"] * options["pipeline"])
        assert sum(size > 1 for size in sizes) >= 2


@pytest.mark.parametrize(("ranks", "words"), [(2, "fits with 2 data ranks"), (3, "fits with 3 data ranks")])
def test_a_hybrid_on_ranks_that_do_not_split_two_ways_is_the_same_wherever_it_is_shown(ddp, ranks, words):
    facts, batch = decoder(), {"global_batch_size": 12}
    beside = row(advice(facts, ddp, ranks, **batch), "hybrid")
    asked = advice(facts, Script.load("hybrid"), ranks, **batch).requested
    shown = next(s for s in outlook(variants(ddp), "ddp", facts, T4, ranks, batch) if s.strategy == "hybrid")

    assert beside.layout == asked.layout == shown.layout
    assert beside.fits and asked.fits and shown.fits
    assert beside.remark.partition("; ")[0].partition(":")[0] == words
    assert beside.peak == asked.peak == shown.peak


def test_of_equally_fast_ones_the_simplest_is_chosen_in_whatever_order(ddp):
    def one(name, seconds, size=1):
        step = type("Step", (), {"seconds": seconds})()
        return Candidate(name, ddp, 2, {}, peak=Peak(size, "loss", "", {}), step=step, fits=True)

    for candidates in ([one("ddp", 1.04), one("fsdp", 1.0)], [one("fsdp", 1.0), one("ddp", 1.04)]):
        assert fastest(candidates).strategy == "ddp"
    assert fastest([one("ddp", 1.1), one("fsdp", 1.0)]).strategy == "fsdp"
    assert fastest([first := one("ddp", 1.04), one("ddp", 1.0)]) is first
    assert fastest([]) is None
    untimed = [replace(one("ddp", 1.0, 9), step=None), replace(one("fsdp", 1.0, 3), step=None)]
    assert fastest(untimed).strategy == "fsdp"


def test_an_outlook_has_every_strategy_as_it_is_asked(ddp):
    facts = decoder()
    scripts = variants(ddp)
    shown = outlook(scripts, "fsdp", facts, T4, 2, {"global_batch_size": 8, "reshard_after_forward": "never"})

    assert [one.strategy for one in shown] == list(scripts)
    chosen = next(one for one in shown if one.strategy == "fsdp")
    assert chosen.parameters["reshard_after_forward"] == "never"
    assert all("reshard_after_forward" not in one.parameters for one in shown if one.strategy != "fsdp")
    assert chosen.verdict(T4)[0] == "fits"
    assert "its speed is unknown" in chosen.verdict(T4)[1]
    assert sum(chosen.bar().held.values()) == chosen.peak.bytes


def test_what_is_impossible_is_said_in_one_line(ddp):
    shown = outlook(variants(ddp), "ddp", decoder(), T4, 3, {"global_batch_size": 64})
    chosen = next(one for one in shown if one.strategy == "ddp")

    assert chosen.verdict(T4)[0] == "impossible"
    assert "cannot be split evenly into 3 data ranks" in chosen.bar().note
    assert chosen.bar().held is None


def test_curves_begin_at_one_rank_and_end_where_a_strategy_has_no_use_for_more(ddp):
    facts = decoder(layers=8)
    speed_model = SpeedModel(ddp, facts, T4, 2)
    curves = scaling_curves(advise(ddp, facts, T4, 2, {}, speed_model).rows, speed_model)

    assert [point.x for point in curves["ddp"]] == [2**n for n in range(11)]
    assert curves["tensor_parallel"][-1].x == 8
    for points in curves.values():
        assert all(point.low <= point.value <= point.high for point in points)


def test_a_second_device_is_worth_more_the_more_each_has_to_do(ddp):
    facts = decoder(tokens=50)
    points = break_even_curve(layout_of(ddp, 2, {}), SpeedModel(ddp, facts, T4, 2))
    worth = [point.value for point in points]

    assert worth == sorted(worth)
    assert worth[0] < 1 < worth[-1] <= 2
    assert points[0].x == facts.predictions
    assert all(point.low <= point.value <= point.high for point in points)


def test_advice_leaves_room_on_a_gpu_and_says_when_there_is_none(ddp):
    def held(saved):
        return worst(decoder(saved=saved), layout_of(ddp, 2, {}), on_gpu=True)[1].bytes

    few, more = held(10**8), held(2 * 10**8)
    saved = 10**8 * (1 + (T4.usable * (1 - MARGIN / 2) - few) / (more - few))
    found = advice(decoder(saved=int(saved)), ddp)

    assert found.requested.is_tight
    assert "% to spare" in found.requested.remark
    assert "fits, but with less than 5% to spare for fragmentation (env=" in found.sentences[0]
    assert found.best.strategy != "ddp"
    assert not found.best.is_tight


def test_sixteen_bits_are_said_beside_a_choice_in_fp32(ddp):
    said = [each for each in advice(decoder(), ddp).sentences if each.startswith("In fp16, ")]

    assert len(said) == 1
    assert "times as fast (precision='fp16'" in said[0]
    assert not any(each.startswith("In fp16") for each in advice(decoder(), ddp, precision="fp16").sentences)


def test_fused_adamw_is_named_where_the_update_is_part_of_the_step_and_needs_no_temporaries(ddp):
    start = "With fused AdamW (optimizer='adamw_fused'), "
    asked = {
        "precision": "fp16",
        "global_batch_size": 8,
        "find_unused_parameters": True,
    }  # then no buckets are replaced
    plain, fused = (advice(decoder(saved=1000), ddp, **asked, **more) for more in ({}, {"optimizer": "adamw_fused"}))
    said = [each for each in plain.sentences if each.startswith(start)]

    assert len(said) == 1
    assert "times as fast, in " in said[0]
    assert fused.requested.step.parts["optimizer"] < plain.requested.step.parts["optimizer"] / 2
    assert plain.requested.peak.categories["temporary"] == 4 * decoder().elements  # in the optimizer's step
    assert fused.requested.peak.phase == "backward"
    assert not any(each.startswith("With fused") for each in fused.sentences)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (decoder(width=40_000, saved=1000), "adamw8bit"),
        (decoder(saved=10**12), "offload_activations"),
    ],
)
def test_when_nothing_fits_methods_beyond_labkit_are_named_by_what_is_most(facts, says):
    found = advice(facts, Script.load("fsdp"), precision="fp16", global_batch_size=2)

    assert found.best is None
    assert says in found.sentences[-1]


@pytest.mark.parametrize(("name", "is_named"), [("H100", True), ("A100 80", False)])
def test_fp8_is_named_where_matrix_products_decide_and_the_device_has_it(ddp, name, is_named):
    facts, device, asked = decoder(layers=2), device_named(name), {"precision": "bf16"}
    sentences = advise(ddp, facts, device, 2, asked, SpeedModel(ddp, facts, device, 2, asked)).sentences

    assert any("fp8" in each for each in sentences) == is_named


@pytest.mark.parametrize(
    ("strategy", "ranks", "device", "box", "are_named"),
    [
        ("tensor_parallel", 2, "A100 80", 8, ["symmetric memory", "async tensor parallelism"]),
        ("hybrid", 4, "H100", 8, ["symmetric memory"]),
        ("fsdp", 2, "H100", 8, []),
        ("tensor_parallel", 2, "H100", 1, []),
        ("tensor_parallel", 2, "A100 PCIe 80", 8, []),
        ("tensor_parallel", 2, "V100 32", 8, []),
        ("tensor_parallel", 2, "T4", 2, []),
    ],
)
def test_symmetric_memory_is_named_for_tensor_ranks_that_nvlink_joins(strategy, ranks, device, box, are_named):
    script, facts = Script.load(strategy), decoder(layers=8)
    device = replace(device_named(device), box=box, nodes=-(-ranks // box))
    asked = {"tensor": 2, "pipeline": 2, "accumulate": 2} if strategy == "hybrid" else {"global_batch_size": 16}
    sentences = advise(script, facts, device, ranks, asked, SpeedModel(script, facts, device, ranks, asked)).sentences

    every = ("symmetric memory", "async tensor parallelism")
    assert [name for name in every if name in " ".join(sentences)] == are_named


@pytest.mark.parametrize(
    ("ranks", "expert_ranks", "says"),
    [
        (4, 4, ""),
        (8, 4, ""),
        (16, 0, "8 experts cannot be split across 16 expert ranks"),
        (12, 4, "100 features of the experts cannot be split across 3 replicas"),
    ],
)
def test_ranks_that_cannot_divide_the_experts_are_refused(ranks, expert_ranks, says):
    facts = decoder()
    units = [replace(unit, expert_sizes=((8, 100),)) if unit.name == "blocks.0" else unit for unit in facts.units]
    script = Script.load("expert_parallel", task="mixture")
    layout = layout_of(script, ranks, {"expert_ranks": expert_ranks, "global_batch_size": 16 * ranks})

    assert refusal(replace(facts, units=tuple(units)), layout) == says


def test_updates_in_backward_are_named_if_what_does_not_fit_would_fit_without_gradients_together():
    facts, said = decoder(width=2048, layers=20, saved=1_000_000), "single with optimizer_in_backward=True"
    asked = {"global_batch_size": 8}

    sentences = advice(facts, Script.load("single"), 1, **asked).sentences
    assert any(each.startswith(said) and each.endswith("which fits.") for each in sentences)
    assert said not in "".join(advice(facts, Script.load("single"), 1, **asked, optimizer="muon").sentences)
    for more in ({"clip": 1.0}, {"warmup_steps": 5}, {"accumulate": 2}, {"precision": "fp16"}):
        assert said not in "".join(advice(facts, Script.load("single"), 1, **asked, **more).sentences)
        layout = layout_of(Script.load("single"), 1, {**asked, **more, "optimizer_in_backward": True})
        assert refusal(facts, layout).startswith(f"optimizer_in_backward leaves no gradients for {next(iter(more))}")
    assert said not in "".join(advice(decoder(), Script.load("single"), 1).sentences)
    assert said not in "".join(advice(decoder(width=9000, layers=8), Script.load("single"), 1).sentences)


def test_expert_parallelism_is_named_if_nothing_fits():
    facts = replace(decoder(width=40_000, saved=1000), experts=8)
    found = advice(facts, Script.load("fsdp"), precision="fp16", global_batch_size=2)

    assert "Expert parallelism" in found.sentences[-1]
