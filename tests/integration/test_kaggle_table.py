"""The scheduled run on Kaggle, against a stand-in for its service and with notebooks that take seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kaggle_table  # noqa: E402

pytest_plugins = ["integration.kaggle_stand_in"]  # its fixture `service`
pytestmark = pytest.mark.timeout(400)  # three kernels, one after the other

LAUNCH = "import labkit\nrun = labkit.launch('single', nproc_per_node=1, steps=2, global_batch_size=4)"


def lab(folder: Path, name: str, source: str) -> Path:
    nbformat.write(
        nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path := folder / f"{name}.ipynb"
    )
    return path


@pytest.fixture
def small_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test in place of the GPU suite's, with a page like its own."""
    (tmp_path / "repository" / "tests" / "gpu").mkdir(parents=True)
    test = "import pathlib\ndef test_page():\n    page = pathlib.Path('build/gpu/t4.md')\n"
    test += "    page.parent.mkdir(parents=True)\n    page.write_text('# 2 x T4\\n\\nall well')\n"
    (tmp_path / "repository" / "tests" / "gpu" / "test_page.py").write_text(test)
    monkeypatch.setattr(kaggle_table, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(kaggle_table, "SUITE_FILES", ["tests/gpu"])


def test_suite_and_labs_are_pushed_followed_fetched_and_become_a_table(service, small_suite, tmp_path, monkeypatch):
    labs = [lab(tmp_path, "trains", LAUNCH), lab(tmp_path, "fails", "raise ValueError('a claim')")]
    monkeypatch.setattr(kaggle_table, "LABS", labs)

    code = kaggle_table.main([str(table := tmp_path / "table.md")])

    lines = table.read_text().splitlines()
    suite, trains, fails = (line.split(" | ") for line in lines if line.startswith("| ") and "notebook" not in line)
    assert suite[:2] == ["| gpu_suite", "passed"], lines
    assert (trains[:2], trains[3]) == (["| trains", "passed"], "1 succeeded")
    assert fails[:2] == ["| fails", "**failed**"]
    assert lines[-3:] == ["## 2 x T4", "", "all well"]
    assert code == 1
    assert service.saved["machineShape"] == "NvidiaTeslaT4"


def test_little_quota_or_no_account_leaves_the_table_as_it_is(service, tmp_path, monkeypatch, capsys):
    table = tmp_path / "table.md"
    service.used_hours = 22.0

    assert kaggle_table.main([str(table)]) == 0

    assert "not run: gpu_suite and later ones: 7.5 GPU hours left, 8 are kept" in capsys.readouterr().out
    monkeypatch.setenv("KAGGLE_API_TOKEN", "")  # a fork without the secret
    assert kaggle_table.main([str(table)]) == 0
    assert capsys.readouterr().out == "not run: no account\n"
    assert not table.exists()
    assert "SaveKernel" not in [name for name, _ in service.calls]
