"""The times of this suite, and its figures as one JSON file and one page per machine, written before and after every
test: build/gpu/<machine>.json and .md, or in the folder LABKIT_GPU_OUT. A test that hangs fails at its own time limit.
On GPUs, and where LABKIT_GPU_SECONDS is set, a test that would not end in the suite's time is skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from labkit.errors import LaunchError
from labkit.hardware.machine import DRIVER_FILES, driver_version, hardware

OUT = Path(os.environ.get("LABKIT_GPU_OUT") or Path(__file__).parents[2] / "build" / "gpu")
SUITE_SECONDS = float(os.environ.get("LABKIT_GPU_SECONDS") or 540)
TEST_SECONDS = 60.0  # on a GPU; `timeout` marks tests that need more
SHARED_CORES = 3.0  # times as long on a CPU
STARTED = time.monotonic()
RESULTS: dict[str, dict[str, Any]] = {}  # by test


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "timeout(seconds): a test's time on a GPU")


def pytest_sessionstart() -> None:
    """Ends at once where the tests would run on the CPU although there is a GPU."""
    try:
        here = hardware()
    except LaunchError as error:
        pytest.exit(str(error), returncode=1)
    if here.unusable_gpus:
        pytest.exit(f"there are GPUs, but torch sees none: {here.unusable_gpus}", returncode=1)
    if not here.gpus and (seen := _seen_by_torch()):
        looked = ", ".join(map(str, DRIVER_FILES))
        pytest.exit(f"torch sees {seen} GPUs, but labkit none, because none of {looked} exists", returncode=1)


def _seen_by_torch() -> int:
    """In its own process, as labkit asks; a count opens no CUDA context."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=120).stdout)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a test measures, for the report."""
    measured: dict[str, Any] = RESULTS[request.node.nodeid].setdefault("figures", {})
    return measured


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _left(item) < (needed := _limit(item)):
        pytest.skip(f"not started: it may take {needed:.0f} s, and {max(0.0, _left(item)):.0f} s are left")
    RESULTS[item.nodeid] = {"outcome": "running"}
    _write()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Ends a test that hangs: other environments may lack pytest-timeout."""
    seconds = _limit(item) * (1 if hardware().gpus else SHARED_CORES)

    def end(*_: object) -> None:
        pytest.fail(f"not finished after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def _limit(item: pytest.Item) -> float:
    """A test's seconds on a GPU."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else TEST_SECONDS


def _left(item: pytest.Item) -> float:
    """Seconds until the end of a test's suite."""
    if not hardware().gpus and "LABKIT_GPU_SECONDS" not in os.environ:
        return float("inf")
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
        if result.get("outcome") == "skipped":
            figures = result["why"]
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
