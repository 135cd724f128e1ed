"""Figures of this suite as one JSON file and one page per machine: build/gpu/<machine>.json and .md."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from labkit.launcher.hardware import hardware

OUT = Path(__file__).parents[2] / "build" / "gpu"
RESULTS: dict[str, dict[str, Any]] = {}  # by test


@pytest.fixture(scope="session")
def kind() -> str:
    """The type of device on which ranks train here."""
    return "cuda" if hardware().gpus else "cpu"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What a test measures, for the report."""
    measured: dict[str, Any] = {}
    yield measured
    RESULTS.setdefault(request.node.name, {})["figures"] = measured


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        result = RESULTS.setdefault(report.nodeid.partition("::")[2], {})
        result |= {"outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.outcome != "passed":
            result["why"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)[-2000:]


def pytest_sessionfinish() -> None:
    if not RESULTS:
        return
    here = hardware()
    devices = [gpu.name for gpu in here.gpus] or ["CPU"]
    name = re.sub(r"[^a-z0-9]+", "-", f"{len(devices)}x {devices[0]}".lower()).strip("-")
    machine = {"devices": devices, "torch": version("torch"), "made": datetime.now(UTC).isoformat(timespec="seconds")}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.json").write_text(json.dumps({"machine": machine, "tests": RESULTS}, indent=1), encoding="utf-8")
    (OUT / f"{name}.md").write_text(_page(machine), encoding="utf-8")
    print(f"\n{OUT / name}.md")


def _page(machine: dict[str, Any]) -> str:
    passed = sum(result.get("outcome") == "passed" for result in RESULTS.values())
    lines = [
        f"# {', '.join(machine['devices'])}, torch {machine['torch']}\n",
        f"`make gpu`, {machine['made']}: {passed} of {len(RESULTS)} passed.\n",
        "| test | outcome | seconds | figures |",
        "|---|---|---|---|",
    ]
    for name, result in RESULTS.items():
        figures = ", ".join(f"{key} {_shown(value)}" for key, value in result.get("figures", {}).items())
        lines.append(f"| {name} | {result.get('outcome', '?')} | {result.get('seconds', '')} | {figures} |")
    reasons = [f"\n## {name}\n\n```\n{result['why']}\n```" for name, result in RESULTS.items() if "why" in result]
    return "\n".join([*lines, *reasons]) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
