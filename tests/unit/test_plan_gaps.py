"""What a plan does where formulas, defaults or stages are unusual: an answer or a sentence, never an error of ours."""

import pytest

from labkit.errors import LaunchError
from labkit.planner.advice import advise
from labkit.planner.candidate import refusal, refuse
from labkit.planner.layout import layout_of
from labkit.planner.scaling import break_even_curve
from labkit.planner.search import outlook
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.variations import variants
from labkit.record.records import Peak
from labkit.write import Script
from unit.test_advice import GIB, T4, decoder


def test_a_launchs_arguments_are_what_is_refused_or_not():
    refuse(Script.load("ddp"), 3, ["--global-batch-size", "48"])
    with pytest.raises(LaunchError, match="4 ranks cannot be split into pipeline=1 x tensor=3"):
        refuse(Script.load("hybrid"), 4, ["--tensor", "3"])


def test_a_batch_size_that_the_script_computes_is_left_to_the_script():
    computed = Script.parse(str(Script.load("ddp")).replace("type=int, default=64", "type=int, default=8 * 8"))
    refuse(computed, 3, [])
    with pytest.raises(LaunchError, match="pass global_batch_size"):
        layout_of(computed, 2, {})


@pytest.mark.parametrize("options", [{"selective_checkpointing": True}, {"loss_chunk": 100}])
def test_advice_for_what_formulas_do_not_cover_is_given_when_it_does_not_fit(options):
    script, facts = Script.load("fsdp"), decoder()
    found = advise(script, facts, T4, 2, options, None, Peak(20 * GIB, "backward", "", {"activations": 20 * GIB}))

    assert not found.requested.fits
    assert found.largest is None


def test_no_batch_is_recommended_to_a_script_that_fails():
    found = advise(Script.load("ddp"), decoder(), T4, 2, {}, None, None, "this will fail: line 3")

    assert found.largest is None
    assert found.requested.remark == "this will fail: line 3"


def test_what_is_only_rehearsed_is_unknown_to_the_panel_not_impossible():
    scripts = variants(Script.load("fsdp1"), every=True)
    chosen = next(one for one in outlook(scripts, "fsdp1", decoder(), T4, 2, {}) if one.strategy == "fsdp1")

    assert chosen.verdict(T4) == ("unknown", "not planned: its memory is rehearsed only")


def test_no_stages_are_refused_in_a_sentence():
    options = {"schedule": "Interleaved1F1B", "virtual_stages": 0, "accumulate": 2}
    layout = layout_of(Script.load("pipeline"), 2, options)

    assert refusal(decoder(), layout) == "virtual_stages must be at least 1, got 0"


def test_context_ranks_share_the_shards_and_one_device_computes_whole_sequences():
    script, facts = Script.load("context_parallel"), decoder()
    layout = layout_of(script, 4, {"context_ranks": 2})
    assert layout.groups == {"context": (2, 1), "shards": (4, 1)}

    model = SpeedModel(script, facts, T4, 2, {})
    assert break_even_curve(layout, model) == break_even_curve(layout_of(Script.load("ddp"), 2, {}), model)
