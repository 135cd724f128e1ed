"""The interactive figures: what is in them, that they look finished, and that no name becomes markup."""

from __future__ import annotations

import math
import re
from itertools import chain
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from labkit.charts import Chart, Points
from labkit.files import write_json
from labkit.record import RunReader, State
from labkit.view.comparison import runs_together, scaling
from labkit.view.report import _by_host, memory_held, report_charts, write_report
from unit.test_view import reporting

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def reader(folder, write_metrics):
    for rank in (0, 1):
        held = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB}
        model = {"k": "model", "t": 1.0, "device": f"cuda:{rank}", "limit": 8 * GIB} | held
        usual = {"n": 1, "seconds": [0.1] * 3, "samples": 8, "allocated": 4 * GIB, "peak": 6 * GIB}
        steps = [{"k": "step", "t": float(i), "step": i} | usual for i in range(1, 9)]
        said = [{"k": "report", "t": float(i), "step": i, "loss": 9.0 - i} for i in range(1, 9)]
        write_metrics(rank, {"k": "meta", "t": 0.0}, model, *chain(*zip(steps, said, strict=True)))
    return RunReader(folder).read_all()


def finished(figure):
    layout = figure.to_dict()["layout"]
    assert layout["title"]["text"]
    assert layout["legend"]["y"] < 0  # under the data
    across = [axis for name, axis in layout.items() if name.startswith("xaxis")]
    assert across
    assert all(axis["title"]["text"] for axis in across)
    return figure.to_dict()


def looks(page):
    """The pictures of each chart in a report, by axis and scale."""
    tree = ElementTree.fromstring(page.partition("</svg>")[2])  # after the clips
    return [
        {look: box.find(f"{SVG}svg") for box in figure for look in box.get("data-looks").split("|")}
        for figure in tree.iter("figure")
    ]


def last_hovered(svg):
    return [*svg.iter(f"{SVG}title")][-1].text.splitlines()


def test_the_report_has_every_rank_in_the_colours_of_the_live_view(reader):
    loss, throughput, _, memory = looks(report_charts(reader))

    for svg in loss["time automatic"], throughput["step linear"]:
        lines = {line.get("data-line"): line[-1].get("stroke") for line in svg.iter(f"{SVG}g") if line.get("data-line")}
        assert lines == {"rank 0": "#2f81f7", "rank 1": "#d8752b"}
    assert last_hovered(loss["time automatic"])[1:] == ["rank 0 1", "rank 1 1"]
    assert last_hovered(throughput["step automatic"])[0] == "step 8"
    assert last_hovered(memory["time automatic"])[1:] == ["rank 0 4.00 GiB", "rank 1 4.00 GiB"]
    assert "limit 8.00 GiB" in "".join(memory["time automatic"].itertext())


def test_a_chart_is_in_the_report_once_for_each_look_that_differs(reader):
    loss, throughput, _, _ = looks(report_charts(reader))

    assert len(loss) == len(throughput) == 6
    assert loss["time linear"] is loss["time automatic"]
    assert loss["time logarithmic"] is not loss["time automatic"]
    assert throughput["time logarithmic"] is throughput["time automatic"]
    assert throughput["step automatic"] is not throughput["time automatic"]


def test_a_validation_is_a_thick_line_in_the_chart_of_its_metric(reader, write_metrics):
    for i in (9, 10, 11):
        write_metrics(0, {"k": "report", "t": float(i), "step": i, "test_loss": 5.0 / i, "f1": i / 10})
    loss, *_, last = looks(report_charts(RunReader(reader.folder).read_all()))

    assert last["time automatic"].get("aria-label").startswith("f1")
    assert last_hovered(loss["time automatic"])[-1] == "test_loss 0.455"
    assert "best 0.455" in "".join(loss["time automatic"].itertext())


def test_the_report_shows_each_chart_once(reader):
    write_json(reader.folder.manifest, {"format": 1, "name": "demo", "world_size": 2})
    State("succeeded", 0.0, ended=1.0).write(reader.folder)
    page = write_report(reader.folder).read_text()

    seen = [box for box in re.findall(r"<div data-looks[^>]*>", page) if " hidden" not in box]
    assert len(seen) == 4  # without JavaScript


def test_twelve_metrics_on_eight_ranks_are_a_small_report(tmp_path):
    curves = {f"own{n}": (1, lambda step, n=n: math.sin(step * n) + 2) for n in range(12)}
    for ranks in (1, 8):
        folder = reporting(tmp_path / str(ranks), ranks, 400, **curves)
        State("succeeded", 0.0, 15.0).write(folder)
        assert write_report(folder).stat().st_size <= 145_000


def test_the_values_under_the_pointer_are_in_the_report_once_for_each_axis(tmp_path):
    reader = RunReader(reporting(tmp_path, 2, 100)).read_all()

    loss, *_ = looks(report_charts(reader))

    assert {look: bool([*svg.iter(f"{SVG}title")]) for look, svg in loss.items()} == {
        "time automatic": True,
        "time logarithmic": True,
        "time linear": False,
        "step automatic": True,
        "step logarithmic": True,
        "step linear": False,
    }


@pytest.mark.parametrize(("hosts", "shown"), [(3, [0, 1, 2, "rank 5"]), (8, [*range(8)])])
def test_beside_the_medians_of_hosts_is_the_rank_that_stands_out(hosts, shown):
    ranks = [SimpleNamespace(rank=rank, host=f"{rank % hosts}") for rank in range(hosts * 4)]
    lines = {
        each.rank: Points.of((x, 9.0 if each.rank == 5 else 1 + each.rank / 99) for x in range(9)) for each in ranks
    }
    reader = SimpleNamespace(ranks={each.rank: each for each in ranks})

    chart = _by_host(reader, Chart("loss", lines, str))

    assert [chart.label(i) for i in chart.series] == [*map(str, shown)]
    assert chart.series[0].points()[-1][3] < 2


def test_memory_by_what_holds_it(reader):
    page = memory_held(reader)
    tree = ElementTree.fromstring(re.search("(<svg .*?</svg>)", page, re.S)[1])

    titles = [title.text for title in tree.iter(f"{SVG}title")]
    assert titles == 2 * ["parameters 1.00 GiB", "gradients 1.00 GiB", "optimizer 2.00 GiB", "activations 2.00 GiB"]
    assert "limit 8.00 GiB" in "".join(tree.itertext())


def test_runs_together_by_step_and_by_time(reader):
    figure = finished(runs_together({"a <b>": reader, "b": reader}))

    lines = [trace for trace in figure["data"] if trace.get("fill") is None]
    assert [line["name"] for line in lines] == 2 * ["a &lt;b&gt;", "b"]
    assert list(lines[0]["x"]) == list(range(1, 9))
    assert list(lines[0]["y"]) == [9.0 - i for i in range(1, 9)]


def test_scaling_beside_the_ideal():
    figure = finished(scaling([("ddp", 1, 100.0), ("ddp", 2, 180.0), ("fsdp", 2, 150.0)]))

    assert {t["name"]: list(t["y"]) for t in figure["data"]} == {
        "ddp": [100.0, 180.0],
        "fsdp": [150.0],
        "ideal": [100.0, 200.0],
    }


def test_nothing_to_draw_is_no_error(folder):
    empty = RunReader(folder)
    assert report_charts(empty) == ""
    for figure in (runs_together({"a": empty}), scaling([])):
        assert figure.to_dict()["layout"]["title"]["text"]


def test_the_report_is_one_small_file_with_a_policy_that_names_its_script(folder, reader):
    write_json(folder.manifest, {"format": 1, "name": "x</script><img src=x onerror=alert(1)>", "created": ""})
    folder.script.write_text("print('</script>')")
    folder.command.write_text("torchrun")
    State("succeeded", 0.0, 1.0).write(folder)

    page = write_report(folder).read_text(encoding="utf-8")

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert policy[1].count("sha256-") == page.count("<script>") == 1
    assert "unsafe-eval" not in policy[1]
    assert "'unsafe-inline'" not in policy[1].split("script-src")[1]
    assert "<img" not in page.split("<script>")[0]
    assert "src=http" not in page
    assert len(page) < 100_000
