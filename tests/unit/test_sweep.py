"""What a sweep runs, in which order and where, before any process starts."""

from __future__ import annotations

import json
import math
import os
import time

import pytest
from conftest import SCRIPTS

import labkit
from labkit.errors import LabError, LaunchError, RunFolderError
from labkit.files import write_json
from labkit.frontend import close_widget
from labkit.host import Identity
from labkit.record import RunFolder
from labkit.stored_runs import list_runs, unfinished_launches
from labkit.sweeps.folder import Job, RunIndex, SweepFolder, SweepState, find_sweep
from labkit.sweeps.options import SweepOptions, expanded, varied
from labkit.sweeps.prepare import create
from labkit.sweeps.results import Results, best_of
from labkit.sweeps.sweeper import Request, Sweeper, chosen, due, rungs_of
from labkit.sweeps.view import SweepDashboard, sweep_bundle, sweep_html, sweep_text
from labkit.verbs.sweep import parameters_in


def test_a_grid_is_every_combination_of_its_lists_the_last_varying_fastest():
    points = expanded({"lr": [0.1, 0.2], "seed": range(2), "steps": 5})

    assert points == [
        {"steps": 5, "lr": 0.1, "seed": 0},
        {"steps": 5, "lr": 0.1, "seed": 1},
        {"steps": 5, "lr": 0.2, "seed": 0},
        {"steps": 5, "lr": 0.2, "seed": 1},
    ]
    assert varied(points) == ["lr", "seed"]


def test_an_array_is_an_axis_and_its_numbers_are_plain():
    numpy = pytest.importorskip("numpy")
    points = expanded({"lr": numpy.array([0.5, 0.25]), "width": numpy.int64(8)})

    assert points == [{"width": 8, "lr": 0.5}, {"width": 8, "lr": 0.25}]
    assert {type(value) for point in points for value in point.values()} == {int, float}


def test_random_points_are_different_in_their_ranges_and_the_same_for_the_same_seed():
    axes = {"lr": (1e-5, 1e-2, "log"), "width": (4, 8), "dropout": (0.0, 0.5), "task": ["a", "b"], "steps": 3}
    points = expanded(axes, samples=50, seed=1)

    assert points == expanded(axes, samples=50, seed=1) != expanded(axes, samples=50, seed=2)
    assert len({json.dumps(point) for point in points}) == 50
    assert all(1e-5 <= p["lr"] <= 1e-2 and 0 <= p["dropout"] <= 0.5 and p["steps"] == 3 for p in points)
    assert {p["width"] for p in points} == {4, 5, 6, 7, 8}
    assert 10 < sum(p["lr"] < math.sqrt(1e-7) for p in points) < 40  # half of the draws, in the logarithm


def test_whole_numbers_drawn_in_the_logarithm_stay_whole():
    widths = [point["width"] for point in expanded({"width": (1, 1024, "log")}, samples=30)]

    assert all(isinstance(width, int) and 1 <= width <= 1024 for width in widths)


def test_samples_of_a_small_grid_are_all_of_it():
    points = expanded({"lr": [1, 2], "seed": [0, 1]}, samples=4)

    assert sorted(map(str, points)) == sorted(map(str, expanded({"lr": [1, 2], "seed": [0, 1]})))
    with pytest.raises(LabError, match="samples=5, but these axes have only 4 distinct points"):
        expanded({"lr": [1, 2], "seed": [0, 1]}, samples=5)


@pytest.mark.parametrize(
    ("parameters", "options", "says"),
    [
        ({"steps": 5}, {}, "a sweep needs a parameter to vary: pass a list"),
        ({"lr": []}, {}, "lr has no values, so the sweep has no points"),
        ({"lr": [1, 2, 1]}, {}, "lr has 1 twice; each point runs once"),
        ({"lr": [object()]}, {}, "lr of a point must be a number, text, True, False or None; got <object"),
        ({"lr": (1e-4, 1e-2)}, {}, r"lr=\(0.0001, 0.01\) is a range, which needs samples=N"),
        ({"lr": (1e-2, 1e-4)}, {"samples": 2}, "with low < high"),
        ({"lr": (0, 1, "log")}, {"samples": 2}, "drawn on a logarithmic scale, so low must be above 0"),
        ({"lr": (1, 2, "lin")}, {"samples": 2}, r'must be \(low, high\) or \(low, high, "log"\)'),
        ({"lr": [1]}, {"points": [{"lr": 1}]}, "points and lr both say what to run"),
        ({}, {"points": [{"lr": 1}], "samples": 2}, "points and samples both say what to run"),
        ({}, {"points": []}, "points must be a list of dicts"),
        ({}, {"points": {"lr": 1}}, "points must be a list of dicts"),
        ({}, {"points": [1]}, "each of the points must be a dict such as"),
        ({}, {"points": [{"lr": 1}, {"lr": 1}]}, "points 0 and 1 are the same"),
        ({"lr": 2}, {"points": [{"lr": 1}]}, "lr is set for all points and again in one of them"),
        ({"lr": range(200), "seed": range(200)}, {}, "this grid has 40,000 points; the maximum is 10,000"),
    ],
)
def test_what_makes_no_points_is_refused_with_what_would(parameters, options, says):
    with pytest.raises(LabError, match=says):
        expanded(parameters, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at_once": 0}, "at_once must be an integer, at least 1, got 0"),
        ({"samples": 2.5}, "samples must be an integer"),
        ({"halving": 1}, "halving must be an integer, at least 2, got 1"),
        ({"mode": "lowest"}, "mode must be 'min' or 'max'"),
        ({"metric": ""}, "metric must be the name of a reported value"),
        ({"hosts": ["a"]}, "a sweep runs on one machine"),
        ({"min_ranks": 1, "retries": 2}, "a sweep does not change the number of ranks"),
        ({"profile": True}, "trace_memory and profile do not work in a sweep"),
    ],
)
def test_options_that_no_sweep_can_have_are_refused(options, says):
    with pytest.raises(LaunchError, match=says):
        SweepOptions(**options).check()


def test_the_mode_decides_which_point_is_best_then_the_script_then_the_name_of_the_metric():
    lowest = {name: SweepOptions(metric=name).lowest({}) for name in ("loss", "val_ppl", "test_accuracy", "f1", "mae")}

    assert lowest == {"loss": True, "val_ppl": True, "test_accuracy": False, "f1": False, "mae": True}
    assert SweepOptions(metric="f1", mode="min").lowest({"f1": "higher"})
    assert not SweepOptions(metric="loss", mode="max").lowest({})
    assert SweepOptions(metric="score").lowest({"val_score": "lower"})


def test_a_metric_of_which_nothing_says_what_is_better_is_refused_before_anything_is_created(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path))

    with pytest.raises(LabError, match='a high val_score is good; pass mode="min" or mode="max"'):
        labkit.sweep("single", lr=[0.1, 0.2], metric="val_score")

    assert not [*tmp_path.iterdir()]


def test_free_gpus_are_chosen_in_their_order_and_shared_ones_by_how_many_runs_hold_them():
    assert chosen(["0", "1"], [], 1, False) == ["0"]
    assert chosen(["0", "1"], ["0"], 1, False) == ["1"]
    assert chosen(["0", "1"], ["1", "0"], 1, False) is None
    assert chosen(["3", "1", "2"], ["1"], 2, False) == ["3", "2"]
    assert chosen(["0", "1"], ["0", "0", "1"], 1, True) == ["1"]
    assert chosen(["0"], ["0"], 2, True) is None


def test_jobs_are_due_once():
    assert due(3, {}, {}) == [Job(0), Job(1), Job(2)]
    assert due(3, {Job(1): "running"}, {}) == [Job(0), Job(2)]
    assert due(2, {Job(0): "failed", Job(1): "succeeded"}, {}) == []


def test_a_rung_starts_when_the_one_before_has_ended_with_its_best():
    states = {Job(point): "succeeded" for point in range(6)}
    scores = {Job(point): float(point != 4) for point in range(6)} | {Job(5): math.nan}

    assert due(6, states | {Job(3): "running"}, scores, rungs=3, factor=3) == []
    assert due(6, states, scores, rungs=3, factor=3) == [Job(0, 1), Job(4, 1)]
    states |= {Job(0, 1): "succeeded", Job(4, 1): "failed"}
    assert due(6, states, scores | {Job(0, 1): 5.0}, rungs=3, factor=3) == [Job(0, 2)]
    assert due(6, states | {Job(0, 2): "succeeded"}, scores | {Job(0, 1): 5.0}, rungs=3, factor=3) == []
    assert due(2, {Job(0): "failed", Job(1): "failed"}, {}, rungs=2, factor=2) == []


@pytest.mark.parametrize(
    ("steps", "points", "factor", "rungs"),
    [(900, 9, 3, [100, 300, 900]), (900, 10, 3, [34, 100, 300, 900]), (10, 1, 3, [10]), (2, 16, 2, [1, 2])],
)
def test_rungs_leave_one_point_for_the_last(steps, points, factor, rungs):
    assert rungs_of(steps, points, factor) == rungs


def test_a_terminal_says_axes_with_commas_ranges_with_colons_and_flags_alone():
    words = ["--lr", "1e-3,3e-4", "--width=64:512", "--decay", "1e-5:1e-2:log", "--amp", "--task", "digits"]
    words += ["--bias", "-1", "--url", "http://a:80"]

    assert parameters_in(words) == {
        "lr": [1e-3, 3e-4],
        "width": (64, 512),
        "decay": (1e-5, 1e-2, "log"),
        "amp": True,
        "task": "digits",
        "bias": -1,
        "url": "http://a:80",
    }
    with pytest.raises(LabError, match="expected --NAME VALUE, got '1e-3'"):
        parameters_in(["1e-3"])
    with pytest.raises(LabError, match="--lr is given twice"):
        parameters_in(["--lr", "1", "--lr", "2"])


OPTIONS = {"metric": "test_loss", "lowest": True, "halving": None}


@pytest.fixture
def sweep(runs_dir):
    """A sweep of three points without a process: the first has a run, the third was refused."""
    folder = SweepFolder(RunFolder.create(runs_dir / "sweeps", "toy").path)
    points = [{"lr": 1, "tag": "<b>"}, {"lr": 2, "tag": "b"}, {"lr": 3, "tag": "c"}]
    script = {"name": "toy", "path": None, "origins": {}}
    manifest = {"format": 1, "name": "toy", "points": points, "options": OPTIONS, "rungs": None, "script": script}
    write_json(folder.manifest, manifest)
    folder.write_state(SweepState("stopped", time.time(), time.time(), "because <i>", {"2": ["failed", "no <disk>"]}))
    return folder


def add_run(sweep, point, *, id=None, **values):
    run = RunFolder.create(sweep.runs, f"toy-{point}")
    write_json(run.manifest, {"format": 1, "name": "toy", "sweep": {"id": id or sweep.id, "point": point, "rung": 0}})
    write_json(run.state, {"state": "succeeded", "started": 1.0, "ended": 3.0})
    run.rank(0).mkdir(parents=True)
    records = [
        {"k": "meta", "t": 0.0},
        {"k": "report", "t": 1.0, "step": 1, "loss": 4.0, "test_loss": 0.5},
        {"k": "report", "t": 2.0, "step": 2, "loss": 3.0, "test_loss": 0.75, **values},
    ]
    run.metrics(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_neither_a_sweep_nor_the_folder_of_sweeps_is_taken_for_a_run(sweep, runs_dir):
    assert list_runs() == []
    assert unfinished_launches() == []
    run = add_run(sweep, 0)
    assert [each.id for each in list_runs()] == [run.id]


def test_results_have_the_newest_run_of_each_point_of_this_sweep_only(sweep):
    add_run(sweep, 0)
    newest = add_run(sweep, 0)
    add_run(sweep, 1, id="another")
    results = Results(sweep).poll()

    assert [(r.state, r.run) for r in results] == [("succeeded", newest.id), ("waiting", None), ("failed", None)]
    assert (results[0].last, results[0].best, results[0].loss, results[0].seconds) == (0.75, 0.5, 3.0, 2.0)
    assert results[2].why == "no <disk>"


def test_an_index_reads_each_run_once_and_waits_for_one_that_is_being_launched(sweep):
    index = RunIndex(sweep)
    launching = RunFolder.create(sweep.runs, "toy-1")
    assert index.poll() == {}
    write_json(launching.manifest, {"sweep": {"id": sweep.id, "point": 1}})
    assert {job: run.id for job, run in index.poll().items()} == {Job(1): launching.id}
    launching.manifest.unlink()
    assert list(index.poll()) == [Job(1)]


def test_the_best_of_a_run_counts_every_report_and_no_nan(sweep):
    add_run(sweep, 0)
    add_run(sweep, 1, test_loss="nan")
    seen = Results(sweep)
    results = seen.poll()

    assert (results[1].last, results[1].best) == (None, 0.5)
    assert best_of(results, True).point == 0
    assert best_of(results[2:], True) is None


def test_everything_that_the_view_shows_is_escaped(sweep):
    add_run(sweep, 0)
    seen = Results(sweep)
    page = sweep_html(sweep.id, sweep.read_state(), seen.poll(), seen)
    text = sweep_text(sweep.id, sweep.read_state(), seen.poll(), seen)

    assert "&lt;b&gt;" in page
    assert "because &lt;i&gt;" in page
    assert "<b>" not in page.replace("<b style", "").replace("<b>" + sweep.id, "")
    assert "1 of 3 points succeeded, 1 failed · best test_loss 0.5 at point 0 (lr=1, tag=<b>)" in text
    assert "point 2 failed: no <disk>" in text
    assert "point 2 failed: no &lt;disk&gt;" in page


def test_the_live_view_shows_the_same_page_and_ends_with_the_sweep(sweep):
    add_run(sweep, 0)
    dashboard = SweepDashboard(sweep, stop=lambda: None, status=sweep.read_state)
    try:
        assert dashboard._draw()
        seen = Results(sweep)
        assert dashboard._html.value.endswith(sweep_html(sweep.id, sweep.read_state(), seen.poll(), seen))
        sweep.write_state(SweepState("running", time.time()))
        sweep.write_agent(os.getpid())
        assert not dashboard._draw()
        assert "running" in dashboard._html.value
    finally:
        close_widget(dashboard.box)


def test_a_static_page_has_pictures_instead_of_svg(sweep):
    add_run(sweep, 0)
    seen = Results(sweep)
    page = sweep_bundle(sweep.id, sweep.read_state(), seen.poll(), seen)["text/html"]

    assert "<svg" not in page
    assert page.count('<img src="data:image/svg+xml') == 3  # two charts, and the point that has run


def test_a_large_sweep_is_shown_in_bounded_space(sweep):
    manifest = json.loads(sweep.manifest.read_text())
    write_json(sweep.manifest, manifest | {"points": [{"lr": i} for i in range(1000)]})
    for point in range(60):
        add_run(sweep, point, test_loss=1 / (point + 3))
    seen = Results(sweep)
    page = sweep_html(sweep.id, sweep.read_state(), seen.poll(), seen)

    assert len(page) < 40_000
    assert "960 more points" in page
    assert 'aria-label="loss: point ' in page


def test_a_sweep_whose_process_left_no_result_is_lost(sweep):
    sweep.write_state(SweepState("running", time.time()))
    state = sweep.read_state()

    assert (state.state, state.is_final) == ("lost", True)
    assert "resume() runs the remaining points" in state.sentence


def test_a_sweep_is_found_by_id_part_path_or_latest(sweep):
    assert find_sweep("latest").id == find_sweep(sweep.id).id == find_sweep(sweep.path).id == sweep.id
    assert find_sweep(sweep.id[-4:]).id == sweep.id
    with pytest.raises(RunFolderError, match="no sweep matches 'other'"):
        find_sweep("other")
    with pytest.raises(RunFolderError, match="is not a sweep this labkit can read"):
        find_sweep(sweep.runs / "sweeps")


def test_requests_to_stop_single_points_add_up(sweep):
    assert sweep.requested_stop() == []
    sweep.request_stop([2])
    sweep.request_stop([0])
    assert sweep.requested_stop() == [0, 2]
    sweep.request_stop()
    sweep.request_stop([1])
    assert sweep.requested_stop() is None


@pytest.mark.parametrize(("on_request", "state"), [(False, None), (True, "stopped")])
def test_a_run_that_ends_with_the_process_that_started_it_runs_again_unless_it_was_asked_to_stop(on_request, state):
    folder = create(SCRIPTS / "swept.py", SweepOptions(at_once=1), {"lr": [1, 2], "ran": os.devnull}, {})
    run = add_run(folder, 0)
    write_json(run.state, {"state": "running", "started": time.time()})
    write_json(run.agent, {"supervisor": Identity.of(os.getpid()).as_dict()})
    sweeper = Sweeper(folder, Request(), owner=0)
    assert sweeper.states == {Job(0): "running"}
    write_json(run.state, {"state": "stopped", "started": 1.0, "ended": 2.0})
    sweeper.look()
    assert sweeper.states == {Job(0): "running"}  # its supervisor is still there
    write_json(run.agent, {"supervisor": None})
    if on_request:
        write_json(run.stop_request, {"time": 1.0})
    sweeper.look()

    assert sweeper.states.get(Job(0)) == state
