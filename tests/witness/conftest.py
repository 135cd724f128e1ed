"""Runs small scripts and reads what labkit found to be wrong with them."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

import labkit

HERE = Path(__file__).parent


def judged(script, *, ranks=None):
    """The findings of a script's run, and its final state."""
    said = re.search(r"ranks: (\d+)", script.read_text(encoding="utf-8").splitlines()[0])
    ranks = ranks or (int(said[1]) if said else 2)
    run = labkit.launch(script, nproc_per_node=ranks, wait=False, detach=True, watchdog=60)
    with suppress(labkit.RankFailedError):
        run.wait(timeout=170)
    return run.findings(), run.status()


@pytest.fixture(autouse=True)
def as_scripts_run(monkeypatch, tmp_path):
    """In a folder of their own, with one thread for each rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
