"""What the GPU suite promises of itself, with tests that stand for its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ENDING = """import os
import pytest

@pytest.mark.timeout(31)
def test_too_long_for_the_rest():
    raise AssertionError

@pytest.mark.timeout(10)
def test_short(figures):
    figures["measured"] = 3

@pytest.mark.timeout(10)
def test_killed():
    os._exit(9)
"""
TORCH = """class cuda:
    device_count = staticmethod(lambda: 2)
"""


def suite(folder: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """The result of the tests in a folder, with the GPU suite's hooks, and the page that they left."""
    own = {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}", "LABKIT_GPU_OUT": str(folder / "out")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "gpu.conftest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        str(folder),
    ]
    done = subprocess.run(
        command, env=os.environ | own | environment, cwd=folder, capture_output=True, text=True, timeout=120
    )
    return done, "".join(page.read_text() for page in (folder / "out").glob("*.md"))


def test_a_killed_machine_leaves_a_page_that_names_the_running_test_and_what_did_not_fit_says_so(tmp_path):
    (tmp_path / "test_ending.py").write_text(ENDING)
    done, page = suite(tmp_path, LABKIT_GPU_SECONDS="30")

    assert done.returncode == 9, done.stdout
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| too long for the rest | skipped | 0.0 | Skipped: not started: it may take 31 s")
    assert rows[2].startswith("| short | passed |")
    assert rows[2].endswith("| measured 3 |")
    assert rows[3].startswith("| killed | running |")


def test_gpus_that_a_simulated_torch_sees_and_labkit_does_not_end_the_suite_at_once(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "test_ending.py").write_text(ENDING)
    done, page = suite(tmp_path)

    assert done.returncode == 1
    assert "torch sees 2 GPUs, but labkit none, because none of /proc/driver/nvidia/version" in done.stdout
    assert "collected" not in done.stdout
    assert page == ""
