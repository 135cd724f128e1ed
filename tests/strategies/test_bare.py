"""Every script under bare torchrun, in a place where labkit cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from labkit import Script
from labkit.write import script_names


@pytest.fixture
def without_labkit(tmp_path):
    """A folder to copy a script into, and an environment in which importing labkit fails."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "labkit.py").write_text("raise ImportError('labkit is not installed here')\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")}
    env |= {"PYTHONPATH": str(hidden), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import labkit"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert "labkit is not installed here" in done.stderr
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 600)
    return env


OFTEN = ("ddp", "pipeline")  # the others differ from these in one cell


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in sorted(script_names())],
)
def test_a_script_trains_alone(name, without_labkit, tmp_path):
    Script.load(name, "checkpoints", "validate", "precision", "clip_and_schedule").write(tmp_path / f"{name}.py")
    ranks = 1 if name == "single" else 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"{name}.py"]
    command += ["--steps", "3", "--global-batch-size", "8", "--data-dir", "data", "--checkpoint-dir", "saved"]

    done = subprocess.run(command, env=without_labkit, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "step 3  epoch 0  loss" in done.stdout
    assert "test_accuracy" in done.stdout
    assert (tmp_path / "saved" / "best" / "full.pt").exists()
