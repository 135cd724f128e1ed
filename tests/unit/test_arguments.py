"""Arguments of a wrong type: one sentence that says what was expected, from every public function."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import labkit
from labkit.arguments import AtLeastOne, Seconds, ZeroOrMore, checked
from labkit.cluster.sbatch import JobOptions
from labkit.errors import LabError, LaunchError
from labkit.files import write_json
from labkit.launch_options import LaunchOptions
from labkit.record import RunFolder, State
from labkit.sweeps.options import SweepOptions
from labkit.view.run_list import RunList

NOTHING_TAKES = [object(), b"x", 1j, type, {1: 2}.keys()]
WRONG: dict[str, list[Any]] = {
    "int": [None, "3", 2.5, True, [], math.nan],
    "float": [None, "3", True, [], math.nan, 10**400],
    "str": [3, ["x"], Path("x"), "\ud800"],
    "bool": ["yes", 1, "", []],
    "list": ["x", 3, {}],
}


@checked()
def function(
    count: int = 0,
    share: float = 0.0,
    name: str = "",
    flag: bool = False,
    path: str | os.PathLike[str] | None = None,
    kind: Literal["a", "b"] = "a",
    names: Sequence[str] | None = None,
    table: Mapping[str, Any] | None = None,
    at_least: AtLeastOne = 1,
    or_none: ZeroOrMore | None = None,
    seconds: Seconds = 1.0,
    anything: Any = None,
    *rest: int,
    unknown: NotImportedHere = None,  # noqa: F821  # type: ignore[name-defined]
    **more: Any,
) -> str:
    """Documented."""
    return "called"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *(("count", value, "an integer") for value in WRONG["int"]),
        *(("share", value, "a number") for value in WRONG["float"]),
        *(("name", value, "text") for value in WRONG["str"]),
        *(("flag", value, "True or False") for value in WRONG["bool"]),
        *(("path", value, "a path") for value in (3, [], b"x", 1j)),
        *(("kind", value, "'a' or 'b'") for value in ("c", 1, None, ["a"])),
        *(("names", value, "a list") for value in (*WRONG["list"], [1])),
        *(("table", value, "a mapping") for value in ("x", [], 3)),
        *(("at_least", value, "an integer, at least 1") for value in (0, -1, "1", 1.0)),
        *(("or_none", value, "an integer, 0 or more") for value in (-1, True)),
        *(("seconds", value, "a number of seconds, 0 or more") for value in (-1, -0.5, math.nan, "1", None)),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_one_sentence(name, value, words):
    with pytest.raises(LabError, match=f"^{name} must be {words}, got ") as raised:
        function(**{name: value})

    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"count": np.int64(3)},
        {"share": 3},
        {"share": np.float32(0.5)},
        {"seconds": math.inf},
        {"path": Path("x")},
        {"path": "not\udcffUTF-8"},
        {"path": None},
        {"names": ("a", "b")},
        {"table": {}},
        {"or_none": None},
        {"anything": 1j},
        {"unknown": 3},
        {"other": 3},
    ],
    ids=repr,
)
def test_a_right_argument_is_passed_on(given):
    assert function(**given) == "called"


def test_each_of_several_arguments_is_checked_and_a_missing_one_is_pythons_own_error():
    with pytest.raises(LabError, match="rest must be an integer, got 'x'"):
        function(1, 0.5, "", False, None, "a", None, None, 1, None, 1.0, None, 4, "x")
    with pytest.raises(TypeError, match="multiple values"):
        function(1, count=2)


def test_a_checked_function_keeps_its_name_its_documentation_and_its_signature():
    assert (function.__name__, function.__doc__) == ("function", "Documented.")
    assert [*inspect.signature(function).parameters][:2] == ["count", "share"]


def test_a_long_value_is_shortened_to_one_line():
    with pytest.raises(LabError) as raised:
        function(count=np.arange(10_000).reshape(100, 100))

    assert len(str(raised.value)) < 400
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("options", [LaunchOptions, SweepOptions, JobOptions])
def test_every_option_refuses_what_no_option_takes(options):
    base = {"time": "10"} if options is JobOptions else {}
    for name in options.names():
        for value in NOTHING_TAKES:
            with pytest.raises(LaunchError, match=f"^{name} must be "):
                options(**base | {name: value})


@pytest.fixture
def run(runs_dir):
    folder = RunFolder(runs_dir / "20260101T000000Z-ddp-0001")
    folder.path.mkdir(parents=True)
    write_json(folder.manifest, {"format": 1, "name": "ddp", "world_size": 1, "id": folder.id})
    State("succeeded", 1.0, ended=2.0).write(folder)
    return labkit.attach(folder.path)


CALLS = {
    labkit.runs: {},
    labkit.plan: {"script": "single"},
    labkit.doctor: {},
    labkit.fetch: {},
    labkit.Script.load: {"name": "ddp"},
    labkit.Script.parse: {"text": ""},
    labkit.Script.of: {"name": "x"},
    RunList.rm: {},
    RunList.sorted: {},
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__qualname__)
def test_every_public_function_refuses_what_none_of_its_parameters_takes(call, run):
    values = {**CALLS[call], **({"self": RunList([run])} if call.__qualname__.startswith("RunList") else {})}
    for parameter in inspect.signature(call).parameters.values():
        if parameter.name == "self" or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for value in NOTHING_TAKES:
            with pytest.raises(LabError, match=f"^{parameter.name} must be "):
                call(**values | {parameter.name: value})


def test_every_method_of_a_run_refuses_what_none_of_its_parameters_takes(run, runs_dir):
    before = sorted(path.name for path in run.path.iterdir())
    seen = 0
    for name, method in inspect.getmembers(type(run), inspect.isfunction):
        parameters = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = [each for each in parameters if each.kind not in several]
        plain = {each.name: "1" for each in parameters if each.default is each.empty}
        for parameter in parameters:
            if name.startswith("_"):
                continue
            seen += 1
            for value in NOTHING_TAKES:
                with pytest.raises(LabError, match=f"^{parameter.name} must be "):
                    method(run, **plain | {parameter.name: value})
    assert seen > 20
    assert sorted(path.name for path in run.path.iterdir()) == before


@pytest.mark.parametrize("grace", [-1, math.nan, math.inf, "5", 86_400])
def test_a_grace_period_that_is_none_does_not_kill_at_once(run, grace):
    with pytest.raises(LabError, match="grace must be a number of seconds from 0 to 86,400, got"):
        run.stop(grace=grace)


@pytest.mark.parametrize("keep", [-1, None, 1.5, "1"])
def test_a_number_of_runs_to_keep_that_is_none_deletes_nothing(run, keep):
    with pytest.raises(LabError, match="keep must be an integer, 0 or more, got"):
        labkit.runs().rm(keep=keep)

    assert run.path.exists()


@pytest.mark.parametrize("folder", ["", " ", 5, 0, [], b"x"])
def test_a_folder_of_runs_that_is_none_is_not_taken_for_the_default(run, folder):
    for call in (labkit.runs, labkit.attach, labkit.Sweep.attach):
        with pytest.raises(LabError, match="runs_dir must be (a|the) path"):
            call(runs_dir=folder)
