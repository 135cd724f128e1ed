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
