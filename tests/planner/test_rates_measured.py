"""Short runs on real ranks: the link between them, how fast they compute, and a step time predicted from both."""

import dataclasses

import pytest

import labkit
from labkit import Script
from labkit.errors import LaunchError
from labkit.hardware.machine import hardware
from labkit.link import measure
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import facts_of
from labkit.planner.speed import rates as rates_module
from labkit.planner.speed.rates import measure_rates, remembered_rates
from labkit.planner.speed.step_time import step_time


@pytest.fixture(autouse=True)
def nothing_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_doctor_measures_collectives_and_remembers_them(monkeypatch):
    assert "not measured yet" in str(labkit.doctor())

    measured = labkit.doctor(bandwidth=2)

    rows = {what: value for what, value, _ in measured.findings}
    assert {f"{kind} of 2" for kind in measure.KINDS} <= set(rows)
    assert all("GB/s" in rows[f"{kind} of 2"] for kind in measure.KINDS)
    link = measure.remembered_link(hardware(), 2, "gloo")
    assert link is not None
    assert all(line.per_byte > 0 and line.cpu > 0 for line in link.kinds.values())
    monkeypatch.setattr(measure, "short_run", None)  # asked no more
    assert str(labkit.doctor()) != ""
    assert measure.remembered_link(hardware(), 4, "gloo") is None


def test_a_link_needs_two_ranks():
    with pytest.raises(LaunchError, match="2 or more"):
        labkit.doctor(bandwidth=1)


def test_a_failed_measurement_raises_with_the_ranks_error(monkeypatch, tmp_path):
    broken = tmp_path / "collectives.py"
    broken.write_text("raise RuntimeError('no link at all')\n")
    monkeypatch.setattr(measure, "COLLECTIVES", broken)

    with pytest.raises(LaunchError, match="between 2 ranks could not be measured: .*no link at all"):
        measure.measure_link(2)


def test_rates_are_measured_once_for_a_model_and_any_strategy(monkeypatch):
    ddp, fsdp = Script.load("ddp"), Script.load("fsdp")
    assert remembered_rates(ddp, 2, {}) is None

    found = measure_rates(ddp, 2, {"global_batch_size": 16})

    assert found.both[1] > 0
    # of differences between times, which are 0 where noise on busy cores is larger
    assert min(found.forward[1], found.ends[1], found.dtensor, found.tensor, found.optimizer) >= 0
    assert not found.assumed
    monkeypatch.setattr(rates_module, "short_run", None)
    assert remembered_rates(fsdp, 2, {"reshard_after_forward": "never"}) == found
    assert remembered_rates(ddp, 2, {"precision": "bf16"}) is None
    assert remembered_rates(ddp, 1, {}) is None


def test_a_model_that_cannot_be_trained_is_no_rate():
    broken = Script.load("ddp").with_cells(
        model="""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        raise ValueError("this model cannot be built")
"""
    )

    with pytest.raises(LaunchError, match="could not be measured: .*this model cannot be built"):
        measure_rates(broken, 1, {})


def test_in_sixteen_bits_the_model_is_measured_in_sixteen_bits_also_outside_of_its_blocks():
    """The measured model refuses to compute in anything else, whole or in parts."""
    script = Script.load("single", "precision")
    model, computed = script.cells["model"].text, "return self.head(self.norm(x))"
    assert computed in model
    strict = """logits = self.head(self.norm(x))
        if logits.dtype != torch.bfloat16:
            raise TypeError(f"computed in {logits.dtype}")
        return logits"""

    rates = measure_rates(script.with_cells(model=model.replace(computed, strict)), 1, {"precision": "bf16"})

    assert max(rates.ends) > 0


def test_a_prediction_from_measurements_has_a_band_and_assumes_nothing():
    script, options = Script.load("fsdp"), {"global_batch_size": 8}
    facts = facts_of(script, options)
    layout = layout_of(script, 2, options)
    found = step_time(facts, layout, measure_rates(script, 2, options), measure.measure_link(2))

    assert 0 < found.low < found.seconds < found.high
    assert found.parts["communication"] > 0
    assert found.parts["compute"] > 0
    assert found.assumed == ()
    assert dataclasses.asdict(found)["samples"] == 8
