"""The interactive figures: what is in them, that they look finished, and that no name becomes markup."""

from __future__ import annotations

import re

import pytest

from labkit.record import RunReader, State, write_state
from labkit.record.folder import write_json
from labkit.view.charts.run_figures import memory_by_category, over_time, runs_together, scaling
from labkit.view.report import write_report

GIB = 2**30


@pytest.fixture
def reader(folder, write_metrics):
    for rank in (0, 1):
        held = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB}
        model = {"k": "model", "t": 1.0, "device": f"cuda:{rank}", "limit": 8 * GIB} | held
        usual = {"n": 1, "seconds": [0.1] * 3, "samples": 8, "allocated": 4 * GIB, "peak": 6 * GIB}
        steps = [{"k": "step", "t": float(i), "step": i} | usual for i in range(1, 9)]
        said = [{"k": "report", "t": float(i), "step": i, "loss": 9.0 - i} for i in range(1, 9)]
        write_metrics(rank, {"k": "meta", "t": 0.0}, model, *steps, *said)
    return RunReader(folder).read_all()


def finished(figure):
    layout = figure.to_dict()["layout"]
    assert layout["title"]["text"]
    assert layout["legend"]["y"] < 0  # under the data
    across = [axis for name, axis in layout.items() if name.startswith("xaxis")]
    assert across
    assert all(axis["title"]["text"] for axis in across)
    return figure.to_dict()


def test_every_rank_over_time_in_the_colours_of_the_live_view(reader):
    figure = finished(over_time(reader))

    assert len(figure["data"]) == 8
    assert [trace["name"] for trace in figure["data"][:2]] == ["rank 0", "rank 1"]
    assert figure["data"][0]["line"]["color"] == figure["data"][2]["line"]["color"] == "#2f81f7"
    assert list(figure["data"][0]["y"])[-1] == 1.0
    assert list(figure["data"][6]["y"]) == [4.0] * 8  # GiB
    assert sum(bool(trace["showlegend"]) for trace in figure["data"]) == 2


def test_a_validation_is_a_thick_line_in_the_chart_of_its_metric(reader, write_metrics):
    for i in (9, 10, 11):
        write_metrics(0, {"k": "report", "t": float(i), "step": i, "test_loss": 5.0 / i, "f1": i / 10})
    figure = finished(over_time(RunReader(reader.folder).read_all()))

    assert [a["text"] for a in figure["layout"]["annotations"]][-1] == "f1"
    evaluated, best = (trace for trace in figure["data"] if trace["xaxis"] == "x" and not trace.get("legendgroup"))
    assert list(evaluated["y"]) == [5 / 9, 5 / 10, 5 / 11]
    assert list(best["y"]) == [5 / 11]


def test_the_report_shows_each_chart_once(reader):
    write_json(reader.folder.manifest, {"format": 1, "name": "demo", "world_size": 2})
    write_state(reader.folder, State("succeeded", 0.0, ended=1.0))
    page = write_report(reader.folder).read_text()

    assert page.count('"text":"step time"') == 1
    assert 'aria-label="loss' not in page


def test_memory_by_what_holds_it(reader):
    figure = finished(memory_by_category(reader))

    held = {trace["name"]: list(trace["y"]) for trace in figure["data"]}
    assert held == {
        "parameters": [1.0, 1.0],
        "gradients": [1.0, 1.0],
        "optimizer": [2.0, 2.0],
        "activations, buffers, temporaries (at the peak)": [2.0, 2.0],
    }
    assert figure["layout"]["yaxis"]["title"]["text"] == "GiB"
    assert "device limit" in str(figure["layout"]["annotations"])


def test_runs_together_by_step_and_by_time(reader):
    figure = finished(runs_together({"a <b>": reader, "b": reader}))

    assert [trace["name"] for trace in figure["data"]] == ["a &lt;b&gt;", "a &lt;b&gt;", "b", "b"]
    assert list(figure["data"][0]["x"]) == list(range(1, 9))
    assert list(figure["data"][0]["y"]) == [9.0 - i for i in range(1, 9)]


def test_scaling_beside_the_ideal():
    figure = finished(scaling([("ddp", 1, 100.0), ("ddp", 2, 180.0), ("fsdp", 2, 150.0)]))

    assert {t["name"]: list(t["y"]) for t in figure["data"]} == {
        "ddp": [100.0, 180.0],
        "fsdp": [150.0],
        "ideal": [100.0, 200.0],
    }


def test_nothing_to_draw_is_no_error(folder):
    empty = RunReader(folder)
    for figure in (over_time(empty), memory_by_category(empty), runs_together({"a": empty}), scaling([])):
        assert figure.to_dict()["layout"]["title"]["text"]


def test_the_report_is_one_file_with_plotly_once_and_a_policy_that_names_its_scripts(folder, reader):
    write_json(folder.manifest, {"format": 1, "name": "x</script><img src=x onerror=alert(1)>", "created": ""})
    folder.script.write_text("print('</script>')")
    folder.command.write_text("torchrun")
    write_state(folder, State("succeeded", 0.0, 1.0))

    page = write_report(folder).read_text(encoding="utf-8")

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert policy[1].count("sha256-") == page.count("<script>") == 2
    assert "unsafe-eval" not in policy[1]
    assert "'unsafe-inline'" not in policy[1].split("script-src")[1]
    assert "<img" not in page.split("<script>")[0]
    assert "src=http" not in page
    assert len(page) < 6 << 20
