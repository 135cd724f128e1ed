"""labkit's hook for pre-commit, as another repository uses it: its page's settings, and a commit that is refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from environments import output_of
from unit.seeded import HEAD, TAIL

ROOT = Path(__file__).parents[2]
WRONG = HEAD + "if rank == 0:\n    dist.barrier()  # HERE\n" + TAIL
RIGHT = WRONG.replace("if rank == 0:\n    dist.barrier()  # HERE\n", "")


def git(folder: Path, *words: str) -> str:
    return output_of("git", "-c", "user.name=me", "-c", "user.email=me@example.org", *words, cwd=folder)


@pytest.fixture
def consumer(tmp_path, monkeypatch) -> Path:
    """A repository with the settings of docs/how_to/check_in_ci.md, in an environment that has labkit."""
    (hooks := tmp_path / "labkit").mkdir()
    shutil.copy2(ROOT / ".pre-commit-hooks.yaml", hooks)
    git(hooks, "init", "--quiet")
    git(hooks, "add", ".")
    git(hooks, "commit", "--quiet", "-m", "hook")
    page = (ROOT / "docs" / "how_to" / "check_in_ci.md").read_text(encoding="utf-8")
    (settings,) = re.findall(r"# \.pre-commit-config\.yaml\n(.*?)```", page, re.S)
    commit = git(hooks, "rev-parse", "HEAD").strip()
    settings = re.sub(r"repo: .*", f"repo: {hooks}", re.sub(r"rev: .*", f"rev: {commit}", settings))
    (folder := tmp_path / "mine").mkdir()
    (folder / ".pre-commit-config.yaml").write_text(settings)
    monkeypatch.setenv("PRE_COMMIT_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    git(folder, "init", "--quiet")
    output_of(sys.executable, "-m", "pre_commit", "install", cwd=folder)
    return folder


def test_a_commit_with_a_mistake_in_a_script_or_a_notebook_is_refused_until_it_is_corrected(consumer):
    def commit() -> subprocess.CompletedProcess[str]:
        git(consumer, "add", ".")
        command = ["git", "-c", "user.name=me", "-c", "user.email=me@example.org", "commit", "-m", "mine"]
        return subprocess.run(command, cwd=consumer, capture_output=True, text=True, timeout=120)

    (consumer / "right.py").write_text(RIGHT)
    (consumer / "train.py").write_text(WRONG)
    (consumer / "notes.txt").write_text(WRONG)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(WRONG)]), consumer / "lab.ipynb")

    refused = commit()
    told = refused.stdout + refused.stderr
    line = WRONG.splitlines().index("    dist.barrier()  # HERE") + 1
    assert refused.returncode == 1, told
    assert f"train.py:{line}" in told
    assert "lab.ipynb" in told
    assert "rank-0-collective" in told
    assert "right.py: no findings" in told
    assert "notes.txt" not in told

    (consumer / "train.py").write_text(RIGHT)
    (consumer / "lab.ipynb").unlink()
    accepted = commit()
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert "labkit check" in accepted.stdout + accepted.stderr
