import json
import math

import pytest

from labkit import LabError, Run
from labkit.record import RunFolder
from labkit_labs.claims import Claims


@pytest.fixture
def claims():
    return Claims("02 a lab")


def test_a_claim_that_holds_passes_and_is_kept_beside_the_runs(claims, runs_dir):
    assert claims.predict("bytes", 1000, "B") == 1000
    written = json.loads((runs_dir / "claims" / "02-a-lab.json").read_text())["claims"]
    assert [(c["name"], c["measured"], c["holds"]) for c in written] == [("bytes", None, None)]

    assert claims.measure("bytes", 1000) == 1000
    assert claims.check() is claims
    assert json.loads((runs_dir / "claims" / "02-a-lab.json").read_text())["claims"][0]["holds"] is True


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
    claims.predict("x", 100, within=within, how=how)
    claims.measure("x", measured)
    if holds:
        claims.check()
    else:
        with pytest.raises(LabError, match=r"1 of 1 claims of 02 a lab do not hold: x: predicted"):
            claims.check()


def test_a_false_claim_says_by_how_much_and_shows_the_term(claims):
    claims.predict("peak", 2 << 30, "B", within=0.02)
    claims.measure("peak", 3 << 30, because="gathering buffers")
    with pytest.raises(LabError, match=r"peak: predicted 2.00 GiB, measured 3.00 GiB \(\+50.00%, allowed 2.0%\)"):
        claims.check()
    assert "does not hold" in repr(claims)
    assert "gathering buffers" in claims._repr_mimebundle_()["text/html"]


def test_a_claim_measured_with_a_clock_is_shown_and_does_not_fail_the_lab(claims):
    claims.predict("step", 0.1, "s", within=0.1)
    claims.predict("idle", 0.3, "%", within=0.1, timed=True)
    with pytest.raises(LabError, match="predicted, but never measured: 'step', 'idle'"):
        claims.check()
    claims.measure("step", 0.2)
    claims.measure("idle", 0.6)
    assert repr(claims.check()).count("too noisy to decide") == 2
    claims.predict("timeout", 8, "s", timed=False)
    claims.measure("timeout", 9)
    with pytest.raises(LabError, match="1 of 3 claims"):
        claims.check()


def test_what_was_not_measured_is_not_passed_over(claims):
    claims.predict("x", 1)
    with pytest.raises(LabError, match="predicted, but never measured: 'x'"):
        claims.check()


def test_a_prediction_comes_before_its_run(claims, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.manifest.write_text(json.dumps({"format": 1, "created": "2020-01-01T00:00:00+00:00"}))
    claims.predict("x", 1)
    with pytest.raises(LabError, match="'x' was predicted after run was launched: predict first, then run"):
        claims.measure("x", 1, run=Run(folder))
    folder.manifest.write_text(json.dumps({"format": 1, "created": "2100-01-01T00:00:00+00:00"}))
    claims.measure("x", 1, run=Run(RunFolder(folder.path)))
    with pytest.raises(LabError, match="so its prediction cannot change"):
        claims.predict("x", 2)


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
        claims.predict("x", value, how=how)


def test_a_measurement_needs_a_prediction(claims):
    claims.predict("x", 1)
    with pytest.raises(LabError, match="there is no prediction 'y'; there are: x"):
        claims.measure("y", 1)


def test_what_was_chosen_among_options_is_shown_by_its_text(claims):
    claims.predict("the slowest", 1, options={"ddp": 0, "fsdp": 1})
    claims.measure("the slowest", 1)
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
    claims.predict("rank", 1)
    claims.measure("rank", math.nan)
    with pytest.raises(LabError, match=r"predicted 1, measured nan$"):
        claims.check()
