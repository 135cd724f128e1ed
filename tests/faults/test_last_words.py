"""How a rank ends: one that succeeded is never called failed, one that failed is named, whatever it does at its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults.scene import known

import labkit
from labkit import RankFailedError, Script
from labkit.launcher.causes.explain import find_cause
from labkit.record import RunFolder
from labkit.worker import failure as written

# What the ranks of one run do with their streams at its end, each something else.
ENDINGS = {
    "closed": "sys.stdout.close(); sys.stderr.close()",
    "none": "sys.stdout = sys.stderr = None",
    "descriptors closed": "print('the last line', end=''); os.closerange(1, 3)",
    # what labkit keeps open, too: it cannot even say that a record was lost
    "everything closed": "sys.stderr.close(); os.closerange(3, 256)",
    "atexit handlers that fail": "atexit.register(sys.exit, 3); atexit.register(lambda: 1 / 0)",
}


def launched(tmp_path: Path, script: str, *, ranks: int = 1) -> labkit.Run:
    path = tmp_path / "train.py"
    path.write_text(f"import atexit, os, signal, sys, threading, time\nfrom pathlib import Path\n{script}\n")
    return labkit.launch(path, nproc_per_node=ranks, wait=False)


def failure(run: labkit.Run) -> RankFailedError:
    with pytest.raises(RankFailedError) as raised:
        run.wait(60)
    return raised.value


def test_a_script_that_succeeded_is_not_called_failed_for_how_it_left_its_streams(tmp_path):
    script = f"exec({[*ENDINGS.values()]}[int(os.environ['RANK'])])"

    run = launched(tmp_path, script, ranks=len(ENDINGS))

    assert run.wait(90).state == "succeeded"
    assert [run.folder.error(rank).exists() for rank in range(len(ENDINGS))] == [False] * len(ENDINGS)


@pytest.mark.parametrize(
    "ending",
    [
        "sys.stdout = sys.stderr = object()",
        "sys.stdout = type('Stream', (), {'flush': lambda self: sys.exit(3)})()",
    ],
)
def test_an_exit_code_that_a_script_has_from_streams_that_cannot_be_flushed_is_explained(tmp_path, ending):
    says = "rank 0 exited with 120: its script ended, and then Python could not flush stdout or stderr"
    assert failure(launched(tmp_path, ending)).cause["sentence"].startswith(says)


def test_a_script_whose_own_module_hides_labkit_trains_and_is_said_not_to_be_measured(tmp_path):
    (tmp_path / "labkit.py").write_text("")
    run = launched(tmp_path, "import labkit, torch\ntime.sleep(4)\nprint(labkit.__file__)")

    says = ", but rank 0 is not measured: ImportError: the script's own module labkit hides labkit"
    assert repr(run.wait(60)).endswith(says)
    assert run.logs(rank=0, stream="stdout").strip() == str(tmp_path / "labkit.py")


@pytest.mark.parametrize(
    "ending",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        pytest.param("raise ValueError('own')", marks=pytest.mark.soak),
    ],
)
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
    assert run.logs(rank=0, stream="stdout").strip() == "heard of boom"


def test_a_failure_that_a_hook_of_the_scripts_own_makes_a_success_is_named(tmp_path):
    """Under Python, too, a hook that exits decides on the exit code."""
    run = launched(tmp_path, "sys.excepthook = lambda *error: sys.exit(0)\nraise ValueError('boom')")

    says = ", but rank 0 failed: ValueError: boom (train.py line 4), and then exited with 0"
    assert repr(run.wait(60)).endswith(says)


def test_a_child_that_the_script_forked_does_not_speak_for_the_rank(tmp_path):
    run = launched(tmp_path, "if os.fork() == 0:\n    sys.exit(3)\nos.wait()")
    assert run.wait(60).state == "succeeded"
    assert not run.folder.error(0).exists()
    assert [line.count('"end"') for line in run.folder.metrics(0).read_text().splitlines()].count(1) == 1


TOGETHER = """def main():
    here = Path(os.environ["LABKIT_RUNS"])  # torchrun ends the others as soon as one has failed
    (here / f"here-{os.environ['RANK']}").touch()
    while len(list(here.glob("here-*"))) < 2:
        time.sleep(0.001)
    argparse.ArgumentParser().error("no such model")
"""


def test_the_same_failure_of_all_ranks_is_reported_once():
    script = Script.parse(str(Script.load("ddp")).replace("def main():\n", TOGETHER), name="together")
    run = labkit.launch(script, nproc_per_node=2, wait=False)
    assert re.search(r"ranks 0, 1 exited with 2: .*error: no such model", str(failure(run)))


def test_an_error_in_a_dataloader_worker_keeps_its_own_words_and_line(tmp_path):
    run = launched(
        tmp_path,
        "from torch.utils.data import DataLoader\n\n\nclass Broken:\n    def __len__(self):\n        return 8\n\n"
        "    def __getitem__(self, i):\n        raise ValueError('item 3 is empty')\n\n\n"
        "for _ in DataLoader(Broken(), num_workers=1):\n    pass",
    )
    first = str(failure(run)).splitlines()[0]
    assert first == "rank 0 failed: ValueError: item 3 is empty (in a DataLoader worker) (train.py line 11)"


# What rank 1 raises, and what must be said of it.
RAISED = {
    "5 MB in one line": ("raise ValueError('x' * 5_000_000)", r"ValueError: x{500}…"),
    "5 MB of lines": ("raise ValueError('first\\n' + 'more\\n' * 1_000_000 + 'the last')", "ValueError: first( |$)"),
    "no str": ("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})()", "Mute: .*str.. failed"),
    "no repr": ("raise KeyError(type('Key', (), {'__repr__': lambda self: 1 / 0})())", "KeyError: .*str.. failed"),
    "a code that exits": ("sys.exit(type('Code', (), {'__str__': lambda self: sys.exit(0)})())", "stopped: .*failed"),
    "odd failures": ("raise type('Odd', (Exception,), {'failures': {1: 2}})('odd')", "Odd: odd"),
    "surrogates": ("raise ValueError('caf\\udce9')", "ValueError: caf"),
    "a table of backends": (
        "import torch\n    torch.ones(2).to_sparse().cumsum(0)",
        r": Could not run 'aten::cumsum' with arguments from the 'SparseCPU' backend\. \(script.py line 4\)$",
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
    "words of one that waited": (
        "raise ValueError('Timed out waiting for the licence')",
        "^rank 1 failed: ValueError: Timed out waiting for the licence",
    ),
}
OWN_RECORD = "(Path(sys.orig_argv[2]).parent / 'ranks/1/error.json')"
# Or how else it ends.
ENDED = {
    "an unreadable record": (
        f"atexit.register({OWN_RECORD}.write_text, '{{')\n    raise ValueError('boom')",
        "^rank 1 failed.*: ValueError: boom",
    ),
    "a record that is too large": (
        f"atexit.register({OWN_RECORD}.write_text, 'x' * (9 << 20))\n    raise ValueError('boom')",
        "^rank 1 failed.*: ValueError: boom",
    ),
    "_exit": ("print('the licence has expired', file=sys.stderr)\n    os._exit(3)", "^rank 1 exited with 3.*licence"),
    "_exit without a word": ("os._exit(3)", "^rank 1 exited with 3"),
    "TERM": ("os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(60)", "^rank 1 was killed .SIGTERM."),
}
LAUNCHED = ("a chain", "words of one that waited", "an unreadable record", "_exit")  # the others only in the soak


def raised_by(text: str) -> BaseException:
    """The exception, as a script's."""
    try:
        exec(compile(f"import sys\nif True:\n    {text}\n", "train.py", "exec"), {})
    except BaseException as error:
        return error
    raise AssertionError(f"nothing was raised by {text}")


@pytest.mark.parametrize(("last", "says"), RAISED.values(), ids=RAISED)
def test_whatever_is_raised_its_record_names_it_in_bounded_words(tmp_path, last, says):
    """Written and read as in a run, without one."""
    folder, error = RunFolder(tmp_path), raised_by(last)
    folder.rank(1).mkdir(parents=True)
    folder.manifest.write_text('{"format": 1, "world_size": 2}')

    written.write(known(error, 1), error, str(folder.path), "train.py")

    cause = find_cause(folder, folder, 1)
    assert cause["rank"] == 1
    assert re.search(says, cause["sentence"]), cause["sentence"]
    assert len(cause["sentence"]) < 1000
    assert folder.error(1).stat().st_size < 300_000


def test_a_traceback_through_a_hook_of_ours_has_no_line_of_it(tmp_path):
    folder, hook = RunFolder(tmp_path), {}
    exec(compile("def call(function):\n    function()", f"{written.OURS}/hooks.py", "exec"), hook)
    folder.rank(1).mkdir(parents=True)
    try:
        hook["call"](lambda: 1 / 0)
    except ZeroDivisionError as error:
        written.write(known(error, 1), error, str(folder.path), "train.py")

    assert re.findall(r"in (\S+)\n", folder.error(1).read_text().replace("\\n", "\n")) == [
        "test_a_traceback_through_a_hook_of_ours_has_no_line_of_it",
        "<lambda>",
    ]


def test_ranks_whose_errors_differ_only_in_further_lines_failed_alike(tmp_path):
    """Such as those of DDP for parameters without a gradient, which name the rank."""
    folder = RunFolder(tmp_path)
    folder.manifest.write_text('{"format": 1, "world_size": 2}')
    for rank in range(2):
        folder.rank(rank).mkdir(parents=True)
        error = RuntimeError(f"no gradient\nof rank {rank}")
        written.write(known(error, rank), error, str(folder.path), "train.py")

    assert find_cause(folder, folder, 1)["sentence"] == "ranks 0, 1 failed: RuntimeError: no gradient"


@pytest.mark.parametrize(
    ("last", "says"),
    [
        pytest.param(*case, id=name, marks=[] if name in LAUNCHED else pytest.mark.soak)
        for name, case in (RAISED | ENDED).items()
    ],
)
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


def test_the_parameters_that_ddp_got_no_gradient_for_are_named(tmp_path):
    run = launched(
        tmp_path,
        "import os, torch, torch.distributed as dist\n"
        "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'INFO'  # torch then names parameters, too\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.ModuleDict({'used': torch.nn.Linear(2, 2), 'unused': torch.nn.Linear(2, 2)})\n"
        "model.forward = lambda x: model['used'](x)\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(model)\n"
        "for _ in range(2):\n"
        "    ddp(torch.ones(1, 2)).sum().backward()\n",
        ranks=2,
    )

    error = failure(run)

    assert "the loss does not depend on unused.weight, unused.bias, for which DDP therefore has no gradient" in str(
        error
    )
    assert "find_unused_parameters=True" in str(error)


def test_who_killed_a_data_loader_worker_is_told(tmp_path):
    run = launched(
        tmp_path,
        "from torch.utils.data import DataLoader\n"
        "class Fatal:\n"
        "    def __len__(self):\n"
        "        return 8\n"
        "    def __getitem__(self, index):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "next(iter(DataLoader(Fatal(), num_workers=1)))\n",
    )

    sentence = (
        r"rank 0 failed: its DataLoader worker \(pid \d+\) was killed \(SIGKILL\) by another process, not by labkit"
    )
    assert re.search(sentence, str(failure(run)))
