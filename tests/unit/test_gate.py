"""Conditions on two groups of runs: what holds, what does not, and what their noise does not let tell."""

import json
import random
from pathlib import Path
from statistics import stdev

import pytest
from json_page import schemas

import labkit
from labkit import cli
from labkit.errors import LabError
from labkit.record import RunFolder, State
from labkit.view.gate import PARTS, Condition, Samples, decide, step_time

FIELDS = Path(__file__).parent / "golden" / "json_fields.txt"


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))
    return tmp_path


def ended(root, number, *, state="succeeded", reports=(), seconds=()):
    folder = RunFolder(root / f"20260101T{number:06}Z-ddp-{number:04x}")
    folder.rank(0).mkdir(parents=True)
    folder.manifest.write_text(json.dumps({"format": 1, "name": "ddp", "world_size": 1}))
    State(state, 1000.0, ended=1060.0).write(folder)
    steps = [{"k": "step", "n": 1, "seconds": [each, each, each]} for each in seconds]
    records = [
        {"t": n, "step": n} | each for n, each in enumerate([*steps, *({"k": "report"} | r for r in reports)], 1)
    ]
    folder.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def samples(*values, noise=0.0, **more):
    return Samples(values, tuple(noise for _ in values) if noise else (), **more)


@pytest.mark.parametrize(
    ("text", "base", "new", "holds"),
    [
        ("step_time > 5%", samples(1.0, noise=0.01), samples(1.1, noise=0.01), True),
        ("step_time > 5%", samples(1.0, noise=0.01), samples(1.04, noise=0.01), False),
        ("step_time > 5%", samples(1.0, noise=0.05), samples(1.1, noise=0.05), None),
        ("step_time > 5%", samples(1.0, noise=0.05), samples(0.8, noise=0.05), False),
        ("step_time > 5%", samples(1.0, 1.01, 0.99), samples(1.1, 1.11, 1.09), True),
        ("step_time > 5%", samples(1.0, 1.2, 0.8), samples(1.1, 1.3, 0.9), None),
        ("step_time > 0.05", samples(1.0, noise=0.01), samples(1.1, noise=0.01), True),
        ("step_time > -5%", samples(1.0, noise=0.01), samples(0.99, noise=0.01), True),  # it must be 5% faster
        ("step_time > -5%", samples(1.0, noise=0.05), samples(0.99, noise=0.05), None),
        ("val_accuracy < -0.01", samples(0.9), samples(0.88), True),
        ("val_accuracy < -0.01", samples(0.9), samples(0.895), False),
        ("val_accuracy < -1%", samples(0.9), samples(0.88), True),
        ("val_loss > 10%", samples(-1.0), samples(-0.8), True),
        ("peak_memory > 2%", samples(100.0), samples(103.0), True),
        ("peak_memory > 2%", samples(100.0, is_rough=True), samples(103.0, is_rough=True), None),
        ("peak_memory > 2%", samples(100.0, is_rough=True), samples(101.0, is_rough=True), False),
        ("peak_memory > 2%", samples(100.0, 100.1, is_rough=True), samples(103.0, 103.1, is_rough=True), True),
        # an increase on a disturbed machine, and what a disturbed base may hide
        ("step_time > 5%", samples(1.0, noise=0.01), samples(1.1, noise=0.01, disturbed=("other load",)), None),
        ("step_time > 5%", samples(1.0, noise=0.01), samples(1.0, noise=0.01, disturbed=("other load",)), False),
        ("step_time > 5%", samples(1.0, noise=0.01, disturbed=("hot",)), samples(1.0, noise=0.01), None),
        ("step_time > 5%", samples(1.0, noise=0.01, disturbed=("hot",)), samples(1.1, noise=0.01), True),
    ],
)
def test_what_a_condition_tells(text, base, new, holds):
    outcome = decide(Condition.parse(text), base, new)

    assert outcome.holds is holds
    assert str(outcome).startswith({True: "FAILED: ", False: "passed: ", None: "cannot be told: "}[holds] + text)
    if holds is None:
        assert "repeat the runs" in str(outcome)


def test_a_line_has_the_numbers():
    outcome = decide(Condition.parse("step_time>5%"), samples(0.0146, noise=0.0001), samples(0.0148, noise=0.0001))
    assert str(outcome) == "passed: step_time>5%: 14.6 ms -> 14.8 ms, +1.37% ± 2.03%"
    outcome = decide(Condition.parse("val_loss > 0.01"), samples(2.0), samples(2.5, 2.5))
    assert str(outcome) == "FAILED: val_loss > 0.01: 2 -> 2.5, +0.5 ± 0 (1 and 2 runs)"


def chances(slower, runs, noise, tries=500):
    """How often a gate of 5% holds if the times of runs spread by `noise`, and of their parts, too."""
    draw = random.Random(0).gauss
    gate = Condition.parse("step_time > 5%")

    def group(mean):
        values = [draw(mean, noise) for _ in range(runs)]
        return Samples(tuple(values), tuple(stdev(draw(mean, noise) for _ in range(PARTS)) for _ in range(runs)))

    return sum(decide(gate, group(1.0), group(1.0 + slower)).holds is True for _ in range(tries)) / tries


@pytest.mark.parametrize(("runs", "noise"), [(1, 0.02), (1, 0.05), (1, 0.2), (3, 0.05), (3, 0.2)])
def test_noise_closes_no_gate(runs, noise):
    assert chances(0.0, runs, noise) < 0.03  # of one tail of 95%


def test_what_is_slower_closes_it():
    assert chances(0.1, 1, 0.01) > 0.95
    assert chances(0.1, 3, 0.02) > 0.95


@pytest.mark.parametrize("text", ["", "step_time", "step_time > ", "> 5%", "step_time > fast", "step_time >= 5%", 5])
def test_what_is_no_condition_is_refused_with_the_syntax(text):
    with pytest.raises(LabError, match=r"is not a condition: expected NAME > LIMIT .*step_time > 5%"):
        Condition.parse(text)


def test_a_percentage_of_zero_is_refused():
    with pytest.raises(LabError, match="'val_loss > 1%' is a percentage of 0, .* give the limit without %"):
        decide(Condition.parse("val_loss > 1%"), samples(0.0), samples(1.0))


def test_a_gate_never_passes_what_it_cannot_compare(root):
    good, other = (ended(root, n, reports=[{"val_loss": 0.5}]) for n in (1, 2))
    lost = ended(root, 3, reports=[{"val_loss": 0.4}, {"val_loss": "nan"}])
    failed = ended(root, 4, state="failed", reports=[{"val_loss": 0.5}])
    wrong = ended(root, 5, reports=[{"val_loss": 0.5}])
    State("succeeded", 1000.0, ended=1060.0, exit_code=0, wrong=True).write(wrong)
    paths = {name: folder.path for name, folder in locals().items() if isinstance(folder, RunFolder)}

    def refuses(new, condition, why):
        with pytest.raises(LabError, match=why):
            labkit.compare([paths["good"], paths[new]]).gate(condition)

    assert labkit.compare([paths["good"], paths["other"]]).gate("val_loss > 0.01").passed is True
    refuses("lost", "val_loss > 0.01", r"0003 has no finite val_loss, so that it cannot be compared")
    refuses("failed", "val_loss > 0.01", r"0004 failed.*: a gate needs runs that succeeded")
    refuses("wrong", "val_loss > 0.01", r"0005 succeeded, but wrong: a gate needs runs that succeeded")
    refuses("other", "val_los > 0.01", r"no run has 'val_los'; did you mean 'val_loss'")
    refuses("other", "step_time > 5%", r"0001 has fewer than 16 records of steps")
    refuses("good", "val_loss > 0.01", "other runs than those of the base, none of them twice")


def test_runs_of_a_base_are_compared_with_the_others_however_they_are_sorted(root):
    runs = [ended(root, n, reports=[{"val_loss": loss}]).path for n, loss in enumerate((0.5, 0.52, 0.9, 0.92))]
    for sort in (None, "val_loss", "started"):  # by the first of these, the base comes last
        gate = labkit.compare(runs[:2], base=runs[2:], sort=sort).gate("val_loss < -0.1", "val_loss < -0.5")
        assert [(each.holds, each.runs) for each in gate] == [(True, (2, 2)), (False, (2, 2))]
        assert gate.passed is False


def test_what_is_slow_at_first_or_now_and_then_is_not_in_the_step_time(root):
    time, noise = step_time(ended(root, 1, seconds=[9.0] * 8 + [0.1] * 15 + [5.0] + [0.1] * 16))
    assert (time, noise) == (0.1, 0.0)
    assert step_time(ended(root, 2, seconds=[0.1] * 18)) is None
    assert step_time(ended(root, 3)) is None


def test_the_fields_of_the_page_are_those_that_programs_rely_on():
    """A field that is no longer there breaks programs of others: its schema needs another number."""
    fields = [f"{schema} {field}: {kind}" for schema, fields in schemas().items() for field, kind in fields.items()]
    assert fields == FIELDS.read_text(encoding="utf-8").splitlines()


def test_a_run_in_another_format_is_lost_in_a_list_with_both_versions(root, capsys):
    folder = ended(root, 1)
    content = folder.manifest.read_text().replace('"format": 1', '"format": 2')
    folder.manifest.write_text(content)

    (run,) = labkit.runs()
    facts = run.to_dict()
    assert facts["state"] == "lost" and facts["cause"]["kind"] == "version"
    assert f"format 2, expected format 1; this is labkit {labkit.__version__}" in facts["cause"]["sentence"]
    assert cli.main(["runs", run.id, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"expected format 1; this is labkit {labkit.__version__}" in said.err
