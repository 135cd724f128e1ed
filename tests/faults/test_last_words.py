"""How a rank ends: one that succeeded is never called failed, one that failed is named, whatever it does at its end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit import RankFailedError

ENDINGS = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "none": "sys.stdout = sys.stderr = None",
    "no streams at all": "sys.stdout = sys.stderr = object()",
    "a stream that exits": "sys.stdout = type('Stream', (), {'flush': lambda self: sys.exit(3)})()",
    "descriptors closed": "print('the last line', end=''); os.closerange(1, 3)",
    # what labkit keeps open, too: it cannot even say that a record was lost
    "everything closed": "sys.stderr.close(); os.closerange(3, 256)",
    "atexit handlers that fail": "atexit.register(sys.exit, 3); atexit.register(lambda: 1 / 0)",
}


TWINS = (
    "TERM",
    "none",
    "no streams at all",
    "5 MB of lines",
    "no repr",
    "a record that is too large",
    "_exit without a word",
)


def each(cases: dict[str, Any]) -> list[Any]:
    """One parameter of a test for each; those that are nearly another only in the soak."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), id=name, marks=[pytest.mark.soak] if name in TWINS else []
        )
        for name, case in cases.items()
    ]


def launched(tmp_path: Path, script: str, *, ranks: int = 1) -> labkit.Run:
    path = tmp_path / "train.py"
    path.write_text(f"import atexit, os, signal, sys, threading, time\nfrom pathlib import Path\n{script}\n")
    return labkit.launch(path, nproc_per_node=ranks, wait=False)


def failure(run: labkit.Run) -> RankFailedError:
    with pytest.raises(RankFailedError) as raised:
        run.wait(60)
    return raised.value


@pytest.mark.parametrize("ending", each(ENDINGS))
def test_a_script_that_succeeded_is_not_called_failed_for_how_it_left_its_streams(tmp_path, ending):
    assert launched(tmp_path, ending).wait(60).state == "succeeded"


@pytest.mark.parametrize("ending", ["sys.exit(0)", "raise ValueError('own')", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_hook_of_the_scripts_own_is_called_and_changes_nothing(tmp_path, ending):
    run = launched(
        tmp_path,
        "def hook(kind, error, trace):\n"
        "    print(f'heard of {error}', flush=True)\n"
        f"    {ending}\n"
        "sys.excepthook = hook\n"
        "raise ValueError('boom')",
    )

    error = failure(run)

    assert error.cause["sentence"] == "rank 0 failed: ValueError: boom (train.py line 7)"
    assert error.cause["traceback"][-1] == "ValueError: boom\n"
    assert run.logs(rank=0).strip() == "heard of boom"


def test_a_child_that_the_script_forked_does_not_speak_for_the_rank(tmp_path):
    run = launched(tmp_path, "if os.fork() == 0:\n    sys.exit(3)\nos.wait()")
    assert run.wait(60).state == "succeeded"
    assert not run.folder.error(0).exists()
    assert [line.count('"end"') for line in run.folder.metrics(0).read_text().splitlines()].count(1) == 1


# What rank 1 does while rank 0 waits for it, and what must be said of it.
LAST_WORDS = {
    "5 MB in one line": ("raise ValueError('x' * 5_000_000)", r"ValueError: x{500}…"),
    "5 MB of lines": ("raise ValueError('first\\n' + 'more\\n' * 1_000_000 + 'the last')", "ValueError: first "),
    "no str": ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()", "Mute: .*str.. failed"),
    "no repr": ("raise KeyError(type('Key', (), {'__repr__': lambda self: 1 / 0})())", "KeyError: .*str.. failed"),
    "a code that exits": ("sys.exit(type('Code', (), {'__str__': lambda self: sys.exit(0)})())", "stopped: .*failed"),
    "odd failures": ("raise type('Odd', (Exception,), {'failures': {1: 2}})('odd')", "Odd: odd"),
    "surrogates": ("raise ValueError('caf\\udce9')", "ValueError: caf"),
    "words of one that waited": (
        "raise ValueError('Timed out waiting for the licence')",
        "^rank 1 failed: ValueError: Timed out waiting for the licence",
    ),
    "a group": (
        "raise ExceptionGroup('of two', [ValueError('this'), KeyError('that')])",
        r"ExceptionGroup: of two \(2 sub-exceptions\), caused by ValueError: this; KeyError: 'that'",
    ),
    "a chain": (
        "try:\n        raise OSError('no\\n' + 'disk' * 2_000_000)\n"
        "    except OSError as error:\n        raise RuntimeError('no data') from error",
        "RuntimeError: no data, caused by OSError: no",
    ),
    "an unreadable record": (
        "atexit.register(Path(os.environ['LABKIT_RUN_DIR'], 'ranks/1/error.json').write_text, '{')\n"
        "    raise ValueError('boom')",
        "^rank 1 failed.*: ValueError: boom",
    ),
    "a record that is too large": (
        "atexit.register(Path(os.environ['LABKIT_RUN_DIR'], 'ranks/1/error.json').write_text, 'x' * (9 << 20))\n"
        "    raise ValueError('boom')",
        "^rank 1 failed.*: ValueError: boom",
    ),
    "_exit": ("print('the licence has expired', file=sys.stderr)\n    os._exit(3)", "^rank 1 exited with 3.*licence"),
    "_exit without a word": ("os._exit(3)", "^rank 1 exited with 3"),
    "TERM": ("os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)", "^rank 1 was killed .SIGTERM."),
}


@pytest.mark.parametrize(("last", "says"), each(LAST_WORDS))
def test_the_rank_that_failed_is_named_whatever_its_last_words_are(tmp_path, last, says):
    run = launched(
        tmp_path,
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        f"if dist.get_rank() == 1:\n    {last}\n"
        "dist.all_reduce(torch.ones(1))\n",
        ranks=2,
    )

    error = failure(run)

    assert error.rank == 1, error
    assert len(error.cause["sentence"]) < 1000
    assert len(str(error)) < 100_000
    assert re.search(says, error.cause["sentence"]), error.cause["sentence"]
