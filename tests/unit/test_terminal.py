"""The view of a terminal: what the notebook shows, in characters; nothing from a rank is markup there."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from labkit.charts import spark_text
from labkit.errors import LabError
from labkit.frontend import check_kernel
from labkit.record import RunReader, State
from labkit.run import Run
from labkit.view.live.terminal import picture
from labkit.view.run_list import RunList


def drawn(reader, state, width=120):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system="truecolor").print(picture(reader, state))
    return out.getvalue()


@pytest.fixture
def reader(folder, write_eight_steps):
    write_eight_steps(input=0.06)
    folder.log(0).write_bytes(
        b"[bold red]markup[/] \x1b[31mred\x1b[0m \x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07\n"
    )
    return RunReader(folder).read_all()


def test_it_shows_what_the_notebook_shows(reader):
    ended = {"cause": {"sentence": "rank 1 fell"}, "checkpoint": "step-4"}
    notice = "no rank has made progress since 12:00:00"
    shown = drawn(reader, State("running", 0.0, notice=notice, earlier=[ended], attempt=2))

    for text in (
        "running",
        reader.folder.id,
        "step 8",
        "input-bound: 60% of each step is spent waiting for data",
        notice,
        "attempt 1 failed: rank 1 fell; restarted from step-4",
        "samples/s",
        "resident set",
        "log of rank 0",
    ):
        assert text in shown, text


def test_a_table_of_ten_columns_fits_80_characters(folder, write_eight_steps):
    model = {"k": "model", "t": 0.0, "device": "cpu", "parameters": 5e5, "gradients": 5e5, "optimizer": 1e6}
    write_eight_steps(model, input=0.06, communication=0.01, peak=4e8)
    shown = drawn(RunReader(folder).read_all(), State("running", 0.0), width=80)

    assert all(word in shown for word in ("samples/s", "communication", "state", "resident"))
    assert "…" not in shown


def test_text_from_a_rank_is_neither_markup_nor_terminal_codes(reader):
    shown = drawn(reader, State("running", 0.0))

    assert "[bold red]markup[/] red link" in shown
    assert "\x1b[31mred" not in shown
    assert "]8;;" not in shown


def test_a_run_without_ranks_can_be_drawn(folder):
    assert "starting the ranks" in drawn(RunReader(folder), State("starting", 0.0))


def test_sparks_go_from_the_lowest_to_the_highest():
    assert spark_text(range(8)) == "▁▂▃▄▅▆▇█"
    assert len(spark_text([*range(8), *[7.0] * 1000])) <= 24


def test_constant_values_are_drawn_too():
    assert spark_text([5.0]) == "▁"


@pytest.mark.parametrize("release", ["7.0.0", "7.0.1"])
def test_an_ipykernel_in_which_no_thread_may_touch_a_widget_is_refused(release):
    with pytest.raises(LabError, match=rf"ipykernel {release} raises LookupError .*pip install"):
        check_kernel(release)


@pytest.mark.parametrize("release", ["6.17.1", "6.29.5", "7.1.0", "7.4.0"])
def test_others_are_not(release):
    check_kernel(release)


def test_a_run_that_is_followed_says_each_thing_once(folder, monkeypatch, capsys):
    begun_again = {"attempt": 2, "earlier": [{"cause": {"sentence": "rank 1 fell"}, "checkpoint": "step-4"}]}
    states = iter(
        [
            State("starting", 0.0, notice="job 7 waits", **begun_again),
            State("starting", 0.0, notice="job 7 has its nodes", **begun_again),
            State("running", 0.0, **begun_again),
            State("succeeded", 0.0, ended=1.0),
        ]
    )
    last = State("succeeded", 0.0, ended=1.0)
    monkeypatch.setattr(Run, "status", lambda _: next(states, last))

    Run(folder).wait()

    assert capsys.readouterr().out.splitlines() == [
        "attempt 1 failed: rank 1 fell; restarted from step-4",
        "job 7 waits",
        "job 7 has its nodes",
    ]


def test_a_list_of_runs_says_what_one_waits_for(folder, monkeypatch):
    monkeypatch.setattr(
        Run, "status", lambda _: State("starting", 0.0, notice="job 7 is waiting in Slurm's queue\nor so")
    )

    assert repr(RunList([Run(folder)])).endswith("  job 7 is waiting in Slurm's queue")
