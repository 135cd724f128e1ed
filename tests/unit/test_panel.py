import re
from dataclasses import replace

import pytest

import labkit
from labkit import Script, strategy_panel
from unit.test_advice import decoder


@pytest.mark.parametrize(
    ("device", "ranks", "begins"),
    [
        ("2xT4", None, ("T4", 2)),
        ("8 x H100", None, ("H100", 8)),
        ("T4", None, ("T4", 2)),
        ("2xT4", 4, ("T4", 4)),
        (None, None, ("this machine", 2)),
    ],
)
def test_a_panel_begins_with_as_many_ranks_as_there_are_devices(device, ranks, begins):
    panel = labkit.panel("ddp", device=device, ranks=ranks)
    assert (panel._begin["device"], panel._begin["ranks"]) == begins


def test_a_device_that_is_not_known_is_refused_at_once():
    with pytest.raises(labkit.LaunchError, match="unknown device 'T5'"):
        labkit.panel("ddp", device="T5")


@pytest.mark.parametrize(
    ("task", "divides", "offered"),
    [
        ("bytes", (), {"diloco"}),
        ("bytes", ("context_parallel",), {"diloco", "context_parallel"}),
        ("mixture", ("expert_parallel", "context_parallel"), {"diloco", "expert_parallel", "context_parallel"}),
    ],
)
def test_a_panel_offers_what_the_model_allows_once_it_is_counted(monkeypatch, task, divides, offered):
    monkeypatch.setattr(strategy_panel, "facts_of", lambda *_, **__: replace(decoder(), divides=divides))
    panel = labkit.panel(Script.load("ddp", task=task), device="8xA100 40", global_batch_size=64)
    panel._build()
    panel._draw()
    assert "diloco" in panel._controls.strategy.options

    panel.count([])
    panel._draw()

    controls = panel._controls
    assert {"context_parallel", "expert_parallel", "diloco"} & set(controls.strategy.options) == offered
    assert controls.strategy.value == "ddp"
    assert "diloco" not in [each.strategy for each in panel.candidates]
    for name, option in (
        ("diloco", "sync_every"),
        ("context_parallel", "context_ranks"),
        ("expert_parallel", "expert_ranks"),
    ):
        if name in offered:
            controls.strategy.value = name
            assert option in controls.parameters
            assert controls._made[name][option].tooltip
            assert panel.chosen.strategy == name
            assert panel.chosen.peak, panel.chosen.remark


def test_what_several_strategies_cannot_do_is_stated_once(monkeypatch):
    monkeypatch.setattr(strategy_panel, "facts_of", lambda *_, **__: decoder())
    panel = labkit.panel("fsdp", device="T4", global_batch_size=64)
    panel.count([])

    page = panel.page("fsdp", 2, "T4", {"accumulate": 7})

    refused = [candidate.remark for candidate in panel.candidates if candidate.peak is None]
    notes = [re.sub("<title>.*</title>", "", text) for text in re.findall("<text.*?</text>", page)]
    above, once = panel.chosen.remark, {*refused} - {panel.chosen.remark}
    assert len(refused) > len({*refused}) > 1
    assert above in page.partition("<svg")[0] and not any("2 data ranks x 7" in note for note in notes)
    assert all(sum(remark[:30] in note for note in notes) == 1 for remark in once)
    assert sum(">as fsdp<" in note for note in notes) == refused.count(above) - 1
    assert sum(">see above<" in note for note in notes) == 1


def test_layers_whose_split_is_being_counted_are_not_called_impossible(monkeypatch):
    monkeypatch.setattr(strategy_panel, "facts_of", lambda *_, **__: decoder())
    panel = labkit.panel(Script.load("tensor_parallel"), device="T4", ranks=3, global_batch_size=66)
    panel.count([])
    refused = panel.page("tensor_parallel", 3, "T4", {})
    assert "impossible" in refused and "has not been calculated" in refused

    panel._build()

    assert "without allocating it (a few seconds)" in panel.page("tensor_parallel", 3, "T4", {})
