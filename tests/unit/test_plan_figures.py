"""A plan's bars, figures and tables: what is in them, that they can be read, and that no name becomes markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

import labkit
from labkit.charts import Bar, Bars, Chart, Palette, Points, drawn, figure
from labkit.cli import main
from labkit.planner.measured import Trial
from labkit.planner.plan_views import break_even_chart, memory_rows, plan_html, plan_text, scaling_chart
from labkit.planner.scaling import Point
from labkit.record.records import Peak
from labkit.strategy_panel import panel_page
from labkit.view.tables import aligned

GIB = 2**30
HELD = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": 4 * GIB}
SVG = "{http://www.w3.org/2000/svg}"


def tree_of(page):
    return ET.fromstring(f"<div>{page}</div>")


def bars(rows, *limit):
    return drawn(Bars(rows, *limit))


def widths(tree):
    """Of a bar's parts, by colour."""
    return {rect.get("fill"): float(rect.get("width")) for rect in tree.iter(f"{SVG}rect")}


def words_in(tree):
    return ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]


def test_a_bar_is_stacked_by_category_each_in_its_colour_and_proportion():
    tree = tree_of(bars([Bar("ddp", HELD)]))

    found = widths(tree)
    assert found.keys() == {Palette.MEMORY[name] for name in HELD}
    one = found[Palette.MEMORY["parameters"]]
    assert found[Palette.MEMORY["activations"]] == pytest.approx(4 * one, abs=0.2)
    assert "8.00 GiB" in words_in(tree)


def test_every_category_has_a_colour_of_its_own_that_is_not_the_limits():
    assert len({*Palette.MEMORY.values(), Palette.LIMIT}) == len(Palette.MEMORY) + 1
    assert set(Peak.CATEGORIES) < set(Palette.MEMORY)
    assert {*HELD} <= {*words_in(tree_of(bars([Bar("ddp", HELD)])))}


def test_a_limit_is_drawn_when_it_is_near_and_told_when_it_is_far():
    near, far = bars([Bar("ddp", HELD)], 10 * GIB, "T4"), bars([Bar("ddp", HELD)], 100 * GIB, "H100")

    assert Palette.LIMIT in near
    assert "T4 10.00 GiB" in words_in(tree_of(near))
    assert Palette.LIMIT not in far
    assert "H100 100.00 GiB: far beyond all of these" in words_in(tree_of(far))


@pytest.mark.parametrize("limit", [0.0, -1.0 * GIB])
def test_a_device_of_which_nothing_is_left_has_its_limit_where_bars_begin(limit):
    page = bars([Bar("ddp", HELD)], limit, "T4")

    assert "far beyond" not in page
    (line,) = re.findall(r'<path d="M([\d.]+) ', page)
    assert float(line) == min(float(x) for x in re.findall(r'<rect x="([\d.]+)"[^>]*height="14"', page))


def test_a_bar_far_beyond_the_limit_is_cut_and_says_so():
    tree = tree_of(bars([Bar("ddp", {"parameters": 100 * GIB}, fits=False)], GIB, "T4"))

    assert widths(tree)[Palette.MEMORY["parameters"]] < 560 - 60 - 90
    assert "✖ ▸ 100.00 GiB" in words_in(tree)


def test_what_cannot_be_planned_has_its_reason_in_place_of_a_bar():
    tree = tree_of(
        bars([Bar("pipeline", None, "4 blocks cannot be split into 3 stages", fits=False), Bar("ddp", HELD)])
    )

    assert "4 blocks cannot be split into 3 stages" in words_in(tree)
    assert "pipeline: 4 blocks cannot be split into 3 stages" in tree[0][0].get("aria-label")


def test_a_measured_bar_stands_under_the_planned_one_without_its_name():
    tree = tree_of(bars([Bar("ddp", HELD, chosen=True), Bar("ddp", HELD, source="measured"), Bar("fsdp", HELD)]))

    named = [text for text in words_in(tree) if text in ("▸ ddp", "measured", "fsdp")]
    assert named == ["▸ ddp", "measured", "fsdp"]


def test_bars_have_nothing_to_say_without_rows():
    assert drawn(Bars([], GIB, "T4")) == ""


def test_names_never_become_markup():
    hostile = "<script>alert(1)</script>"
    bars = Bars([Bar(hostile, HELD, hostile)], GIB, hostile)
    page = panel_page("fits", hostile, bars, [{"run": hostile}])
    page += plan_html([hostile], Peak(1, hostile, "", {}), [{"strategy": hostile}], [hostile], bars)

    assert "<script" not in page


def finished(shown):
    layout = shown.to_dict()["layout"]
    assert layout["title"]["text"]
    assert layout["legend"]["y"] < 0
    return shown.to_dict()


def test_the_figure_of_bars_stacks_the_same_categories_as_the_picture():
    rows = [Bar("ddp", HELD), Bar("fsdp", HELD), Bar("hybrid", None, "no")]
    found = finished(figure(Bars(rows, 10 * GIB, "T4", title="memory")))

    assert found["layout"]["barmode"] == "stack"
    assert [trace["name"] for trace in found["data"]] == list(HELD)
    assert list(found["data"][0]["y"]) == ["ddp", "fsdp"]
    assert list(found["data"][3]["x"]) == [4.0 * GIB, 4.0 * GIB]
    assert list(found["data"][3]["customdata"]) == ["4.00 GiB", "4.00 GiB"]
    assert "T4 10.00 GiB" in str(found["layout"]["annotations"])


def test_a_limit_far_beyond_the_bars_is_not_in_their_figure():
    found = finished(figure(Bars([Bar("ddp", {"parameters": 2**20})], 10 * GIB, "T4", title="memory")))

    assert not found["layout"].get("annotations")


def test_scaling_has_a_band_around_each_curve_and_the_ideal_line():
    curves = {"ddp": [Point(1, 80, 120, 100), Point(2, 150, 240, 190)], "fsdp": [Point(2, 150, 200, 180)]}
    found = finished(figure([scaling_chart(curves, 2, "T4")]))

    by_name = {trace["name"]: trace for trace in found["data"] if trace.get("showlegend") is not False}
    assert list(by_name["ddp"]["y"]) == [100, 190]
    assert list(by_name["ideal"]["y"]) == [100, 200]
    band = next(trace for trace in found["data"] if trace.get("fill") == "toself" and trace["name"] == "ddp")
    assert list(band["y"]) == [120, 240, 150, 80]
    assert found["layout"]["xaxis"]["type"] == found["layout"]["yaxis"]["type"] == "log"


def test_what_was_changed_is_a_line_on_a_logarithmic_axis_too():
    line = {0: Points.of([(1.0, 0.001), (2.0, 1000.0)])}
    chart = Chart("loss", line, str, changes=((1.5, "lr=0.1"),), from_zero=False, log=None)

    *_, changed = figure([chart]).to_dict()["data"]

    assert (changed["name"], list(changed["y"])) == ("lr=0.1", [0.001, 1000.0])


def test_a_long_number_of_steps_is_whole_under_the_pointer_and_a_name_is_no_template():
    line = {0: Points.of([(123_456.0, 1.0)])}

    (trace,) = figure([Chart("loss", line, str, over="step", label=lambda _: "%{x}")]).to_dict()["data"]

    assert list(trace["customdata"]) == ["step 123,456: 1.0"]
    assert "%{x}" not in trace["hovertemplate"]


def test_a_band_of_runs_is_not_said_to_be_of_ranks():
    lines = {i: Points.of([(1.0, i), (2.0, i)]) for i in range(10)}

    page = drawn([Chart("loss", lines, str, label="run {}".format, legend=True)])

    assert "band: all lines" in page and "rank" not in page


def test_break_even_is_where_two_devices_begin_to_be_faster_than_one():
    points = [Point(x, y * 0.8, y * 1.2, y) for x, y in ((100, 0.3), (1000, 0.5), (4000, 1.5), (10_000, 1.9))]
    names = [trace["name"] for trace in finished(figure([break_even_chart(points)]))["data"]]

    assert "break-even: 2,000 tokens" in names
    assert "break-even: 2,000 tokens" in drawn([break_even_chart(points)])
    assert not any("break-even" in trace["name"] for trace in figure([break_even_chart(points[2:])]).to_dict()["data"])


def test_the_memory_table_says_how_far_ways_are_apart_in_parts_of_the_whole():
    more = HELD | {"parameters": 2 * GIB}
    peaks = {"planned": Peak(8 * GIB, "loss", "", HELD), "measured": Peak(9 * GIB, "backward", "", more)}
    rows = {row["category"]: row for row in memory_rows(peaks)}

    assert rows["total"] == {
        "category": "total", "planned": "8.00 GiB", "of total": "100%", "measured": "9.00 GiB (+12.5%)"
    }  # fmt: skip
    assert rows["parameters"]["measured"] == "2.00 GiB (+12.5% of total)"
    assert rows["at"]["measured"] == "backward"


def test_a_plan_is_told_as_text_from_the_verdict_to_the_assumptions():
    peak = Peak(8 * GIB, "loss", "", HELD)
    text = plan_text(
        ["it fits."], peak, [{"strategy": "ddp", "memory": "8.00 GiB", "verdict": "fits"}], ["40% of peak"]
    )

    assert text.splitlines()[0] == "it fits."
    order = [text.index(word) for word in ("it fits.", "optimizer", "strategy", "40% of peak")]
    assert order == sorted(order)
    assert plan_text(["nothing"], None, [], []) == "nothing"


def test_columns_are_as_wide_as_what_is_in_them():
    lines = aligned([{"a": "x", "b": "1"}, {"a": "long", "c": "22"}]).splitlines()

    assert lines == ["  a     b   c", "  x     1", "  long     22"]


def test_a_trial_says_how_far_off_the_prediction_was():
    step = SimpleNamespace(seconds=0.1)
    layout = SimpleNamespace(global_batch=64)
    planned = SimpleNamespace(strategy="ddp", ranks=2, layout=layout, step=step, peak=Peak(GIB, "loss", "", HELD))
    row = Trial(planned, "20260102T030405Z-ddp-0a1b", 0.125, Peak(2 * GIB, "loss", "", HELD)).row()

    assert row["step measured"] == "125 ms (+25.0%)"
    assert row["memory measured"] == "2.00 GiB (+100.0%)"
    assert Trial(planned, "x", 0.1, None).bar().held is None


def test_the_page_before_anything_is_counted_has_no_bars():
    page = panel_page("", "counting", Bars([]), [])

    assert "counting" in page
    assert "<svg" not in page


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 1), (None, 2)])
def test_labkit_plan_tells_by_its_exit_code_whether_it_fits(fits, code, monkeypatch, capsys):
    asked = {}

    def plan(script, **options):
        asked.update(options, script=script)
        return SimpleNamespace(fits=fits, to_dict=dict, __str__=lambda: "")

    monkeypatch.setattr(labkit, "plan", plan, raising=False)
    argv = [
        "plan",
        "ddp",
        "--device",
        "T4",
        "--nproc-per-node",
        "4",
        "--",
        "--precision",
        "fp16",
        "--activation-checkpointing",
        "--no-gradient-as-bucket-view",
    ]

    assert main(argv) == code
    assert asked == {
        "script": "ddp",
        "device": "T4",
        "nproc_per_node": 4,
        "nodes": 1,
        "network": None,
        "measure": False,
        "args": ["--precision", "fp16", "--activation-checkpointing", "--no-gradient-as-bucket-view"],
    }
    assert capsys.readouterr().out


def test_labkit_plan_refuses_an_option_the_script_does_not_take(capsys):
    assert main(["plan", "ddp", "--", "--precison", "fp16"]) == 2
    assert re.search("did you mean 'precision'", capsys.readouterr().err)
