"""Figures of this suite as one JSON file and one page per machine, written after every test:
build/gpu/<machine>.json and .md. On GPUs each suite ends within nine minutes: a test that hangs fails."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

OUT = Path(__file__).parents[2] / "build" / "gpu"
SUITE_SECONDS, LATEST_SECONDS = 540.0, 480.0  # on GPUs: a suite's end, and the latest start of a test
TEST_SECONDS = 180.0
STARTED = time.monotonic()
RESULTS: dict[str, dict[str, Any]] = {}  # by test

try:
    version("labkit")
except PackageNotFoundError:  # with another environment's Python, labkit is on PYTHONPATH only
    information = OUT / "labkit-0.0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: labkit\nVersion: 0.0\n")
    sys.path.append(str(OUT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(OUT))))

from labkit.launcher.hardware import driver_version, hardware  # noqa: E402


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What a test measures, for the report."""
    measured: dict[str, Any] = {}
    yield measured
    RESULTS.setdefault(request.node.nodeid, {})["figures"] = measured
    _write()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if hardware().gpus and _left(item) < SUITE_SECONDS - LATEST_SECONDS:
        pytest.skip("not started: the suite's time is up")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Ends a test that hangs. pytest-timeout, which other environments may lack, does not know when the suite ends."""
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else TEST_SECONDS
    if hardware().gpus:
        seconds = min(seconds, _left(item))

    def end(*_: object) -> None:
        pytest.fail(f"not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _left(item: pytest.Item) -> float:
    """Seconds until the end of a test's suite."""
    suites = 2 if item.path.stem == "test_two_gpus" else 1
    return suites * SUITE_SECONDS - (time.monotonic() - STARTED)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        result = RESULTS.setdefault(report.nodeid, {})
        result |= {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.outcome != "passed":
            result["why"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[-2000:]
        _write()


def _write() -> None:
    here = hardware()
    devices = [gpu.name for gpu in here.gpus] or ["CPU"]
    name = re.sub(r"[^a-z0-9]+", "-", f"{len(devices)}x {devices[0]}".lower()).strip("-")
    machine = {
        "devices": devices,
        "torch": version("torch"),
        "driver": driver_version(),
        "python": sys.version.split()[0],
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - STARTED),
    }
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps({"machine": machine, "tests": RESULTS}, indent=1), encoding="utf-8")
    (OUT / f"{name}.md").write_text(_page(machine), encoding="utf-8")


def _page(machine: dict[str, Any]) -> str:
    outcomes = [result.get("outcome") for result in RESULTS.values()]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in ("passed", "failed", "skipped") if each in outcomes)
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    lines = [
        f"# {', '.join(machine['devices'])}, torch {machine['torch']}{driver}\n",
        f"`make gpu`, {machine['made']}, Python {machine['python']}, {machine['seconds']} s: {counts}.\n",
        "| test | outcome | seconds | figures |",
        "|---|---|---|---|",
    ]
    for test, result in RESULTS.items():
        name = test.partition("::test_")[2].replace("_", " ")
        figures = ", ".join(f"{key} {_shown(value)}" for key, value in result.get("figures", {}).items())
        lines.append(f"| {name} | {result.get('outcome', '?')} | {result.get('seconds', '')} | {_cell(figures)} |")
    reasons = [
        f"\n## {test.partition('::')[2]}\n\n```\n{result['why']}\n```"
        for test, result in RESULTS.items()
        if result.get("outcome") == "failed"
    ]
    return "\n".join([*lines, *reasons]) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
