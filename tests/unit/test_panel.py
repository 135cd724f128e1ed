import pytest

import labkit


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
