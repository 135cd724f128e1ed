"""What may differ between a program under bare torchrun and under labkit, and why: the entries of docs/reference/same_program.md.

cd tests && python -m same_program.differences > ../docs/reference/same_program.md
"""

from __future__ import annotations

import difflib
import re
import signal

from same_program.harness import Seen

NCCL = "TORCH_NCCL_(?:DUMP_ON_TIMEOUT|DEBUG_INFO_TEMP_FILE|WAIT_TIMEOUT_DUMP_MILSEC)"
VARIABLES = rf"LABKIT_RUN|GLOO_SOCKET_IFNAME|TORCH_FR_\w+|{NCCL}|MASTER_ADDR"
# What differs, why, and how it looks in what a program prints or writes (None: in nothing that the programs do).
ENTRIES: list[tuple[str, str, re.Pattern[str] | None]] = [
    (
        "A few environment variables",
        "`LABKIT_RUN` (on several hosts also `LABKIT_NODE`) marks every process of a run, so that all of them can be found "
        "and stopped. `TORCH_FR_…`, `TORCH_NCCL_DUMP_ON_TIMEOUT`, `TORCH_NCCL_DEBUG_INFO_TEMP_FILE` and "
        "`TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC` turn on torch's flight recorder, which records the collective that ranks wait "
        "in. `GLOO_SOCKET_IFNAME` and `MASTER_ADDR` (on hosts also `NCCL_SOCKET_IFNAME`) keep the ranks of one "
        "machine on its loopback, since its name may not resolve. Variables that an earlier torchrun or a job has left "
        "(`RANK`, `PET_…`) are removed. `profile=True` adds `KINETO_LOG_LEVEL`. Variables that you set keep your values.",
        re.compile(rf"\('({VARIABLES})', '[^']*'\)(, )?|^({VARIABLES})[ =].*\n", re.MULTILINE),
    ),
    (
        "A run has a folder, output goes into files, and there is no input",
        "The folder is in `runs/` of the working directory, unless `LABKIT_RUNS` or `runs_dir` names another place. Name "
        "one if the script itself creates, lists or deletes a folder `runs`. A run outlives the terminal or notebook that "
        "started it. stdout and stderr are files in the run's folder, "
        "written without a buffer, as with torchrun's `--redirects 3`; stdin is empty. So from the import of torch on, in a "
        "run that can be reached, `breakpoint()` in a rank's main thread is not `pdb`, but holds all ranks until the run is "
        "resumed (`sys.breakpointhook`), unless `PYTHONBREAKPOINT` is set.",
        None,
    ),
    (
        "One more thread, and up to six descriptors from 1023 downwards",
        "The thread writes a heartbeat once a second. It is not one of Python's `threading`, and descriptors are numbered "
        "from 3 upwards as usual. From Python 3.12 on, an `os.fork()` in the script itself warns of several threads.",
        None,
    ),
    (
        "Stacks can be dumped at any time",
        "`faulthandler` is enabled and writes into the run's folder, so that a crash can be traced to a line. The "
        "real-time signal 62 also dumps the stacks, of ranks that hold the GIL too, and of the children that a rank "
        "forks, such as a DataLoader's workers, into memory of their own. These dumps, like your own, contain "
        "labkit's thread and two or three outermost frames. Only `sys._current_frames()` and audit hooks show them "
        "otherwise, and recursion ends three calls earlier.",
        re.compile(
            r"Previous line repeated \d+ more times"
            r'|\n?Thread 0xADDRESS.*\n  (File ".*labkit/worker/guest.py", line \d+ in live|<no Python frame>)\n'
            r'|  File ".*labkit/(worker|launcher)/.*\n'
        ),
    ),
    (
        "What labkit adds to torch",
        "Importing torch, or asking for the logger `metrics`, also loads labkit's modules, which wrap that logger and the "
        "functions that make up a step, such as `torch.autograd.backward`, `DataLoader`'s `__next__`, `GradScaler.step` and "
        "`destroy_process_group`; on CPUs, DDP measures every step instead of some. Once there is torch, the calls that log "
        "numbers to trackers are wrapped, too, such as `SummaryWriter.add_scalar` and W&B's `Run.log`. A finder for all these "
        "modules is the first in `sys.meta_path`. `os.execv` and `os.execve` are wrapped, too: a script that starts itself again is still "
        "recorded. A profiler of your own also shows these functions and the copy of a loss.",
        None,
    ),
    (
        "The command line of the process",
        "`ps` and `sys.orig_argv` show `python -u …/guest.pyc train.py`; `sys.argv` is the script's own. A module "
        "is run by `runpy` in both cases.",
        None,
    ),
    (
        "Nothing of a run outlives it for long",
        "A rank dies with its torchrun. Processes that a rank leaves running when it succeeds, such as an upload, have 60 "
        "seconds to end. A training that has succeeded remains a success even where gloo's threads would abort the process "
        "at its very end (torch 2.10 to 2.13: up to half of all ranks).",
        None,
    ),
    (
        "Ranks may be forks",
        "If nothing in a script can tell (see [How fast a run starts](../how_to/launch.md#how-fast-a-run-starts)), its ranks are "
        "forked from a process that has imported torch. They share the seed of Python's hashes, so sets of texts have "
        "one order on all ranks, `multiprocessing`'s authkey, and torch's memory, so each rank's own is smaller. The "
        "modules of torch that an optimizer and torchrun import are loaded from the start, with their loggers and filters "
        "of warnings. `env={'LABKIT_WARM': '0'}` "
        "turns it off.",
        None,
    ),
]


def differences(bare: Seen, ours: Seen) -> list[str]:
    """What differs beyond the entries."""
    found = []
    for name in ("succeeded", "running", "shared_memory"):
        if getattr(bare, name) != getattr(ours, name):
            found.append(f"{name}: {getattr(bare, name)} / {getattr(ours, name)}")
    # torchrun ends the other ranks with TERM as soon as one has failed: which of them end by themselves is chance
    ended = {rank for codes in (bare.codes, ours.codes) for rank, code in codes.items() if code == -signal.SIGTERM}
    a, b = ({rank: code for rank, code in seen.codes.items() if rank not in ended} for seen in (bare, ours))
    if a != b or bool(bare.codes) != bool(ours.codes):
        found.append(f"exit codes: {bare.codes} / {ours.codes}")
    for what, theirs, mine in (("output", bare.printed, ours.printed), ("file", bare.files, ours.files)):
        for name in sorted(theirs.keys() | mine.keys()):
            a, b = _but_for_entries(theirs.get(name, "(missing)")), _but_for_entries(mine.get(name, "(missing)"))
            if a != b:
                found += [f"{what} {name}:", *_compared(a, b)]
    return found


def _compared(a: str | bytes, b: str | bytes) -> list[str]:
    if isinstance(a, bytes) or isinstance(b, bytes):
        return [repr(a)[:300], repr(b)[:300]]
    lines = difflib.unified_diff(a.splitlines(), b.splitlines(), "bare", "labkit", lineterm="", n=0)
    return [line[:600] for line in lines][2:30]


def _but_for_entries(text: str | bytes) -> str | bytes:
    if isinstance(text, bytes):
        return text
    for _, _, pattern in ENTRIES:
        text = pattern.sub("", text) if pattern else text
    return text


PAGE = """# The same program

A script does under labkit what it does under bare torchrun: it sees the same interpreter before its first line, ends in
the same way with the same exit code, prints the same and leaves the same files. `make same-program` checks it on {count}
small programs, each run by bare torchrun, by labkit with new processes and by labkit with forks. What differs is this:

{entries}
"""


def page(count: int) -> str:
    entries = "\n".join(f"{number}. **{title}.** {why}" for number, (title, why, _) in enumerate(ENTRIES, start=1))
    return PAGE.format(count=count, entries=entries)


if __name__ == "__main__":
    from same_program.composed import composed
    from same_program.harness import programs

    print(page(len(programs()) + len(composed())), end="")
