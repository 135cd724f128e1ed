"""Python's reports of errors that ended a thread: read from a rank's stderr, however long and mixed it is."""

from __future__ import annotations

import json

import pytest

from labkit.launcher.causes import background_errors as module
from labkit.launcher.causes.explain import survived_errors
from labkit.record import RunFolder

START = """Exception in thread Thread-1 (train):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
"""
FRAME = '  File "/x/train.py", line 4, in train\n    work()\n    ^^^^^^\n'
ELSEWHERE = '  File "/lib/utils.py", line 7, in work\n    raise ValueError\n'
CHAINED = """Traceback (most recent call last):
  File "/x/train.py", line 2, in first
KeyError: 'first'

The above exception was the direct cause of the following exception:

"""
GROUP = """Exception in thread Thread-1 (train):
  + Exception Group Traceback (most recent call last):
  |   File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
  |     self.run()
  |   File "/x/train.py", line 4, in train
  | ExceptionGroup: many (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +------------------------------------
"""
HEAD = START.partition("\n")[0] + "\n"


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "20260101T000000Z-train-0000")
    folder.rank(0).mkdir(parents=True)
    manifest = {"format": 1, "name": "train", "world_size": 1, "script": {"path": "/x/train.py"}}
    folder.manifest.write_text(json.dumps(manifest))
    folder.script.write_text("# %% model\nimport os\n# %% main\nwork()\n")
    return folder


def sentence(run: RunFolder, log: str) -> str | None:
    run.log(0, "stderr").write_text(log)
    return survived_errors(run, run, [0, 1])


@pytest.mark.parametrize(
    ("log", "raised"),
    [
        (START + FRAME + "ValueError: boom\n", "ValueError: boom (train.py line 4, cell `main`, line 1 of the cell)"),
        (START + FRAME + ELSEWHERE + "torch.OutOfMemoryError\n", "OutOfMemoryError (train.py line 4, cell `main`"),
        (START + ELSEWHERE + "ValueError: two\nlines\n", "ValueError: two (utils.py line 7)"),
        (HEAD + CHAINED + START.partition("\n")[2] + FRAME + "ValueError: boom\n", "ValueError: boom (train.py line 4"),
        (GROUP, "ExceptionGroup: many (2 sub-exceptions) (train.py line 4"),
        ("\r30%|███ loss=1.3" + START + FRAME + "ValueError: boom\n", "ValueError: boom (train.py line 4"),
    ],
    ids=["plain", "from a library", "elsewhere", "chained", "group", "behind a progress bar"],
)
def test_a_report_is_read_with_its_place(log, raised, run) -> None:
    assert sentence(run, f"10%|███\r20%|█\nwarning\n{log}more\n").startswith(f"a thread of rank 0 raised {raised}")


@pytest.mark.parametrize(
    "log",
    [
        "",
        "Exception in thread Thread-1:\nValueError: boom\n",
        HEAD + CHAINED,  # it has no frame of a thread
        START,  # cut off
        START + FRAME,
        START + FRAME + "SystemExit: 3\n",
        START + FRAME + "another thread printed here\nValueError: boom\n",
        f"logged: {START}{FRAME}ValueError: boom\n",
    ],
)
def test_what_is_not_surely_a_report_is_none(log, run) -> None:
    assert sentence(run, log) is None


def test_a_long_log_is_read_at_both_ends_only(run, monkeypatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 10_000)
    report = START + FRAME + "ValueError: boom\n"
    noise = "x" * 99 + "\n"

    assert "boom" in sentence(run, report + noise * 10_000)
    assert "boom" in sentence(run, noise * 10_000 + report)
    assert sentence(run, noise * 5000 + report + noise * 5000) is None
    assert sentence(run, report * 3) == sentence(run, report)  # once, however often it was raised
    several = "".join(report.replace("boom", f"boom {number}") for number in range(8))
    assert sentence(run, several).endswith("; and 5 more")
