import json
import math
import os

import pytest

from labkit import LabError
from labkit_labs.claims import BUSY, Claims


@pytest.fixture
def load(monkeypatch):
    """Sets the processes that want to run, per core."""
    return lambda load: monkeypatch.setattr(os, "getloadavg", lambda: (load * os.cpu_count(), 0.0, 0.0))


@pytest.fixture
def claims(runs_dir):
    return Claims("02 a lab")


def test_a_claim_that_holds_passes_and_is_kept_beside_the_runs(claims, runs_dir):
    claims.verify("bytes", 1000, 1000, "B")
    claims.require()
    written = json.loads((runs_dir / "claims" / "02-a-lab.json").read_text())["claims"]
    assert [(claim["name"], claim["measured"], claim["holds"]) for claim in written] == [("bytes", 1000, True)]


@pytest.mark.parametrize(
    ("how", "within", "measured", "holds"),
    [
        ("equals", 0, 100, True),
        ("equals", 0, 101, False),
        ("equals", 0.02, 98, True),
        ("equals", 0.02, 97.9, False),
        ("at least", 0, 99.9, False),
        ("at least", 0, 1000, True),
        ("at least", 0.1, 90, True),
        ("at most", 0, 100.1, False),
        ("at most", 0, -5, True),
        ("equals", 0.5, math.nan, False),
    ],
)
def test_what_is_allowed(claims, how, within, measured, holds):
    claims.verify("x", 100, measured, within=within, how=how)
    if holds:
        claims.require()
    else:
        with pytest.raises(LabError, match=r"1 of 1 claims of 02 a lab do not hold: x: predicted"):
            claims.require()


def test_a_false_claim_says_by_how_much_and_shows_the_term(claims):
    claims.verify("peak", 2 << 30, 3 << 30, "B", within=0.02, because="gathering buffers")
    with pytest.raises(LabError, match=r"peak: predicted 2.00 GiB, measured 3.00 GiB \(\+50.00%, allowed 2.0%\)"):
        claims.require()
    assert "does not hold" in repr(claims)
    assert "gathering buffers" in claims._repr_mimebundle_()["text/html"]


def test_a_claim_measured_with_a_clock_on_a_busy_machine_is_shown_and_does_not_fail_the_lab(claims, load):
    load(3.1)
    claims.verify("step", 0.1, 0.2, "s", within=0.1)
    claims.verify("idle", 0.3, 0.6, "%", within=0.1, timed=True)
    claims.require()
    assert repr(claims).count("too noisy to decide (load 3.1 per core)") == 2
    claims.verify("timeout", 8, 9, "s", timed=False)
    with pytest.raises(LabError, match="1 of 3 claims"):
        claims.require()


@pytest.mark.parametrize("idle", [1.0, BUSY])
def test_a_claim_measured_with_a_clock_does_not_hold_on_a_machine_that_is_not_busy(claims, load, idle):
    load(idle)
    claims.verify("step", 0.1, 0.2, "s", within=0.1)
    assert "does not hold" in repr(claims)
    claims.require()  # a machine that computes at another speed is no mistake of the lab


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_what_is_no_number_fails_the_lab_however_busy_the_machine_is(claims, load, measured):
    load(9.0)
    claims.verify("step", 0.1, measured, "s", within=0.1)
    assert "does not hold" in repr(claims)
    with pytest.raises(LabError, match="1 of 1 claims"):
        claims.require()


@pytest.mark.parametrize(
    ("value", "how", "message"),
    [
        ("many", "equals", "a prediction must be a finite number; got 'many' for 'x'"),
        (math.inf, "equals", "finite number"),
        (1, "nearly", "how must be one of 'equals', 'at least', 'at most', got 'nearly'"),
    ],
)
def test_an_invalid_prediction_raises(claims, value, how, message):
    with pytest.raises(LabError, match=message):
        claims.verify("x", value, 1, how=how)


def test_what_was_chosen_among_options_is_shown_by_its_text(claims):
    claims.verify("the slowest", 1, 1, options={"ddp": 0, "fsdp": 1})
    assert claims._rows() == [
        {
            "claim": "the slowest",
            "predicted": "fsdp",
            "measured": "fsdp",
            "off by": "0",
            "allowed": "0",
            "verdict": "holds",
        }
    ]


def test_the_message_shows_a_measured_nan(claims):
    claims.verify("rank", 1, math.nan)
    with pytest.raises(LabError, match=r"predicted 1, measured nan$"):
        claims.require()
