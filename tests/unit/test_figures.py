"""The interactive figures: what is in them, that they look finished, and that no name becomes markup."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from labkit.charts.run_figures import runs_together, scaling

from labkit.files import write_json
from labkit.record import RunReader, State
from labkit.view.report import chart_data, still_charts, write_report

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


def test_the_report_has_every_rank_in_the_colours_of_the_live_view(reader):
    over = {axis["name"]: axis["charts"] for axis in chart_data(reader)["axes"]}
    loss, throughput, _, memory = over["time"]

    assert [line["name"] for line in loss["lines"]] == ["rank 0", "rank 1"]
    assert loss["lines"][0]["colour"] == throughput["lines"][0]["colour"] == "#2f81f7"
    assert loss["lines"][0]["points"][-1][1] == 1.0
    assert {y for _, y in memory["lines"][0]["points"]} == {4.0}
    assert (memory["unit"], memory["peak"], memory["limit"]) == ("GiB", 6.0, 8.0)
    assert [x for x, _ in over["step"][1]["lines"][1]["points"]] == list(range(1, 9))


def test_a_validation_is_a_thick_line_in_the_chart_of_its_metric(reader, write_metrics):
    for i in (9, 10, 11):
        write_metrics(0, {"k": "report", "t": float(i), "step": i, "test_loss": 5.0 / i, "f1": i / 10})
    charts = chart_data(RunReader(reader.folder).read_all())["axes"][0]["charts"]

    assert charts[-1]["title"] == "f1"
    evaluated = charts[0]["lines"][-1]
    assert evaluated["name"] == "evaluated"
    assert [y for _, y in evaluated["points"]] == pytest.approx([5 / 9, 5 / 10, 5 / 11], rel=1e-5)
    assert charts[0]["best"][1] == pytest.approx(5 / 11, rel=1e-5)


def test_the_report_shows_each_chart_once(reader):
    write_json(reader.folder.manifest, {"format": 1, "name": "demo", "world_size": 2})
    State("succeeded", 0.0, ended=1.0).write(reader.folder)
    page = write_report(reader.folder).read_text()

    assert page.count('"title":"step time"') == 2  # by time and by step
    assert page.count('aria-label="loss') == 1  # without JavaScript


def test_memory_by_what_holds_it(reader):
    tree = ElementTree.fromstring(re.search("(<svg .*?</svg>)", still_charts(reader).partition("<h3>")[2], re.S)[1])

    titles = [title.text for title in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == 2 * ["parameters 1.00 GiB", "gradients 1.00 GiB", "optimizer 2.00 GiB", "activations 2.00 GiB"]
    assert "limit 8.00 GiB" in "".join(tree.itertext())


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
    assert chart_data(empty)["axes"]
    for figure in (runs_together({"a": empty}), scaling([])):
        assert figure.to_dict()["layout"]["title"]["text"]


def test_the_report_is_one_small_file_with_a_policy_that_names_its_scripts(folder, reader):
    write_json(folder.manifest, {"format": 1, "name": "x</script><img src=x onerror=alert(1)>", "created": ""})
    folder.script.write_text("print('</script>')")
    folder.command.write_text("torchrun")
    State("succeeded", 0.0, 1.0).write(folder)

    page = write_report(folder).read_text(encoding="utf-8")

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert policy[1].count("sha256-") == page.count("<script>") == 2
    assert "unsafe-eval" not in policy[1]
    assert "'unsafe-inline'" not in policy[1].split("script-src")[1]
    assert "<img" not in page.split("<script>")[0]
    assert "src=http" not in page
    assert len(page) < 100_000
