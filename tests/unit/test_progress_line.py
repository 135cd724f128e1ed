"""The lines of a run that nobody watches: for people from the left, for programs from the right."""

from __future__ import annotations

import json

import pytest

from labkit.record import RunReader, State
from labkit.view.live.terminal import progress_line, read_progress_line
from labkit.words import headline


@pytest.fixture
def reader(folder, write_eight_steps):
    write_eight_steps({"k": "report", "t": 9.0, "total_steps": 16})
    return RunReader(folder).read_all()


def test_it_is_the_headline_and_what_it_was_made_of(reader):
    state = State("succeeded", 0.0, ended=12.0)

    text, facts = read_progress_line(progress_line(reader, state))

    assert text == headline(reader, state)
    assert facts == {
        "run": reader.folder.id,
        "state": "succeeded",
        "seconds": 12.0,
        "step": 8,
        "total_steps": 16,
        "loss": 2.0,
        "throughput": 160.0,
        "memory_peak": 1_000_000_000,
    }


def test_a_run_without_ranks_has_one(folder):
    text, facts = read_progress_line(progress_line(RunReader(folder), State("failed", 0.0, ended=1.0)))

    assert text == "no rank started"
    assert facts == {"run": folder.id, "state": "failed", "seconds": 1.0, "step": 0}


def test_a_run_that_waits_says_for_what(folder):
    state = State("starting", 0.0, notice="job 7 is waiting in Slurm's queue\nfor nodes to become free")

    text, _ = read_progress_line(progress_line(RunReader(folder), state))

    assert text == "no rank has started yet · job 7 is waiting in Slurm's queue for nodes to become free"


def test_a_loss_that_is_no_number_is_still_json(folder, write_metrics):
    write_metrics(0, {"k": "meta", "t": 0.0}, {"k": "report", "t": 1.0, "step": 1, "loss": "nan"})

    _, facts = read_progress_line(progress_line(RunReader(folder).read_all(), State("running", 0.0, ended=1.0)))

    assert facts["loss"] == "nan"


def test_what_stands_before_it_is_left_aside(reader):
    line = progress_line(reader, State("running", 0.0))

    assert read_progress_line(f"12.3s 4 {line}\n") == read_progress_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "labkit: ",
        "labkit: done",
        "labkit: x {",
        "labkit: x {}",
        "labkit: x {]}",
        'labkit: x {"run": 3}',
        'labkit {"run": "a"}',
        json.dumps({"run": "a"}),
    ],
)
def test_other_lines_are_none(line):
    assert read_progress_line(line) is None
