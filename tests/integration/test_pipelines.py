"""Every command of docs/how_to/pipelines.md, one after another, with its notebook; and the call that Airflow makes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest
import yaml

import labkit

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "pipelines.md").read_text(encoding="utf-8")
PARAMETERS, LAUNCH = re.findall(r"```python\n(.*?)```", PAGE, re.S)[:2]
(STEPS,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With the page's notebook, as current folder, where runs are in `runs`."""
    parameters = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    book = nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell(LAUNCH)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, tmp_path / "train.ipynb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LABKIT_RUNS")
    return tmp_path


def output_of(command, **env):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shell = ["bash", "-o", "pipefail", "-ec", command]
    done = subprocess.run(shell, capture_output=True, text=True, env={**os.environ, "PATH": path, **env}, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.skipif(not shutil.which("jq"), reason="no jq on this machine (Debian: apt-get install jq)")
def test_the_commands_of_the_page_work_one_after_another(folder):
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    said = [output_of(command) for command in commands.splitlines()]
    assert re.search(r"steps: int \(default 20\)\s+optimizer steps", said[0])
    assert said[4] == "true\n"
    assert 1 < float(said[5]) < 7
    (run,) = labkit.runs(runs_dir=folder / "runs")
    (nightly,) = labkit.runs(runs_dir=folder / "nightly" / "runs")
    assert (run.status().state, len(run.losses()), len(nightly.losses())) == ("succeeded", 10, 5)

    steps = [step for step in yaml.safe_load(STEPS) if "run" in step]
    for step in steps[1:]:
        output_of(step["run"], GITHUB_OUTPUT="github")
    loss, state = (folder / "github").read_text().splitlines()
    assert re.fullmatch(r"loss=\d\.\d+", loss) and state == "state=succeeded"
    assert run.folder.report.exists()

    (line,) = output_of(re.findall(r'bash_command="(.*)"\)', PAGE)[0]).splitlines()
    assert json.loads(line) == run.to_dict()  # not its text: jq writes 4.0 as 4


def test_the_call_that_airflows_operator_makes_trains_and_fails_with_the_training(folder, monkeypatch):
    """As its source calls papermill, without Airflow."""
    monkeypatch.setenv("LABKIT_RUNS", str(folder / "elsewhere"))

    def operator(output, **parameters):
        papermill.execute_notebook(
            str(folder / "train.ipynb"),
            str(folder / output),
            parameters=parameters,
            progress_bar=False,
            report_mode=True,
            log_output=True,
            kernel_name=None,
            language=None,
            engine_name=None,
        )

    operator("done.ipynb", steps=3)
    with pytest.raises(papermill.PapermillExecutionError, match="steps"):
        operator("failed.ipynb", steps="many")

    (run,) = labkit.runs()
    assert (run.status().state, run.path.parent) == ("succeeded", folder / "elsewhere")
    (shown, *_) = [output for output in nbformat.read(folder / "done.ipynb", 4).cells[-1].outputs if "data" in output]
    assert "step 3 of 3" in shown.data["text/plain"]
