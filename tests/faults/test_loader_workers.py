"""The workers of a DataLoader belong to their rank: where they are, what killed them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest
from faults.scene import wait_until

import labkit

# A thread of the rank's holds the lock nearly always, also when the workers are forked.
DEADLOCK = """import threading, time, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

CACHE = threading.Lock()

def refresh():
    while True:
        with CACHE:
            time.sleep(0.2)
        time.sleep(0.001)

def new_lock(_):
    global CACHE
    CACHE = threading.Lock()

class Images(Dataset):
    def __len__(self): return 48
    def __getitem__(self, i):
        if i == 36:
            with CACHE:
                pass
        return torch.randn(4)

def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        threading.Thread(target=refresh, daemon=True).start()
        time.sleep(0.05)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Images(), batch_size=8, num_workers=2, OPTIONS):
        dist.all_reduce(batch)
        model(batch).mean().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
FORK = "multiprocessing_context='fork'"


def write(path: Path, text: str, **values: str) -> Path:
    for name, value in values.items():
        text = text.replace(name, value)
    path.write_text(text)
    return path


def test_a_worker_that_waits_for_a_lock_since_its_fork_is_named(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", DEADLOCK, OPTIONS=FORK)
    run = labkit.launch(script, nproc_per_node=2, wait=False)
    wait_until(lambda: run.status().notice)

    stacks = run.stacks()

    assert re.search(
        r"Rank 1 is at step 4, in `__next__` \(train.py line 32\), waiting for its DataLoader's worker \(pid \d+\), "
        r"which is in train.py line 21: `with CACHE:`, a lock that the rank's thread in `refresh` \(train.py "
        r"line \d+\) may have held when the worker was forked: make a new lock in every worker \(worker_init_fn\), "
        r"or set multiprocessing_context='spawn'; rank 0 is at step 4, waiting in `all_reduce` \(train.py line 33\)$",
        stacks.sentence,
    ), stacks.sentence
    assert all(len(rank.workers) == 2 for rank in stacks.ranks)
    stuck = [w for rank in stacks.ranks for w in rank.workers if any(f.function == "__getitem__" for f in w.frames)]
    assert [worker.pid for worker in stuck] == [stacks.ranks[1].awaited]
    idle = [worker for rank in stacks.ranks for worker in rank.workers if worker not in stuck]
    assert all(worker.text == "It waits for the indices of a batch." for worker in idle), idle
    assert f"== rank 1's DataLoader worker (pid {stuck[0].pid}), sleeping in futex" in repr(stacks)
    assert str(stuck[0].pid) in str(run.status().notice)
    run.stop(grace=0)


def test_the_worker_is_still_named_when_the_others_have_timed_out(tmp_path: Path) -> None:
    limit = 'init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds=15))'
    script = write(tmp_path / "train.py", DEADLOCK, OPTIONS=FORK, **{'init_process_group("gloo")': limit})
    run = labkit.launch(script, nproc_per_node=2, wait=False)
    wait_until(lambda: run.status().is_final)

    cause = run.status().cause
    assert cause is not None
    assert re.search(
        r"^rank 1 had waited for its DataLoader's worker \(pid (\d+)\) for \d+ s when rank 0 \(train.py line 33: .*\) "
        r"timed out waiting for it\. Before that no rank had made progress since .* "
        r"waiting for its DataLoader's worker \(pid \1\), which is in train.py line 21: `with CACHE:`, a lock",
        cause.sentence,
    ), cause.sentence
    assert not cause.advice


@pytest.mark.parametrize("options", [f"{FORK}, worker_init_fn=new_lock", "multiprocessing_context='spawn'"])
def test_what_is_advised_about_a_lock_held_at_the_fork_helps(tmp_path: Path, options: str) -> None:
    script = write(tmp_path / "train.py", DEADLOCK, OPTIONS=options)

    assert labkit.launch(script, nproc_per_node=2, wait=True).status().state == "succeeded"


SLEEPS = """import ctypes, os, time, torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        if i:
            print("waits", flush=True)
            print("interrupted:", ctypes.CDLL(None).poll(None, 0, 5000), flush=True)  # C's, which nobody repeats
        return torch.zeros(2)

if __name__ == "__main__":
    for batch in DataLoader(Slow(), num_workers=1, multiprocessing_context="CONTEXT"):
        pass
"""


def test_an_inquiry_interrupts_no_system_call_of_a_workers_data_set(tmp_path: Path) -> None:
    run = labkit.launch(write(tmp_path / "train.py", SLEEPS, CONTEXT="fork"), nproc_per_node=1, wait=False)
    wait_until(lambda: run.folder.log(0).exists() and "waits" in run.logs(rank=0))

    sentence = run.stacks().sentence

    assert re.search(r"worker \(pid \d+\), which is in train.py line 9: `print\(.*`$", sentence), sentence
    assert "interrupted:" not in run.logs(rank=0), "it was asked too late to prove anything"
    run.wait()
    assert "interrupted: 0" in run.logs(rank=0)


def test_a_worker_that_was_not_forked_is_known_by_its_state(tmp_path: Path) -> None:
    run = labkit.launch(write(tmp_path / "train.py", SLEEPS, CONTEXT="spawn"), nproc_per_node=1, wait=False)
    wait_until(lambda: run.folder.log(0).exists() and "waits" in run.logs(rank=0))

    stacks = run.stacks()

    assert re.search(
        r"worker \(pid \d+\), which is sleeping( in the kernel's `\w*poll.*`)?; its stack cannot be read$",
        stacks.sentence,
    ), stacks.sentence
    assert "Its stack cannot be read: it was not forked from the rank." in repr(stacks)
    run.stop(grace=0)


def test_a_suspended_worker_is_named(tmp_path: Path) -> None:
    run = labkit.launch(write(tmp_path / "train.py", SLEEPS, CONTEXT="fork"), nproc_per_node=1, wait=False)
    wait_until(lambda: run.folder.log(0).exists() and "waits" in run.logs(rank=0))
    (worker,) = run.stacks().ranks[0].workers
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED)

    assert f"worker (pid {worker.pid}), which is stopped by a signal" in run.stacks().sentence
    run.stop(grace=0)


DIES = """import os, signal, sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 40:
            END
        return torch.randn(4)

def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        dist.barrier()  # rank 0 only loses its peer
    for batch in DataLoader(Images(), batch_size=8, OPTIONS):
        pass
    dist.barrier()

if __name__ == "__main__":
    main()
"""
KILLED = "os.kill(os.getpid(), signal.SIG{})"


@pytest.mark.parametrize(
    ("context", "end", "how"),
    [
        ("fork", KILLED.format("SEGV"), r"was killed \(SIGSEGV\)$"),
        ("fork", "os._exit(3)", r"exited with code 3$"),
        ("forkserver", KILLED.format("KILL"), r"was killed \(SIGKILL\) by another process, not by labkit"),
        ("spawn", KILLED.format("ABRT"), r"was killed \(SIGABRT\)$"),
    ],
)
def test_a_worker_that_dies_is_the_cause(tmp_path: Path, context: str, end: str, how: str) -> None:
    options = f"num_workers=2, multiprocessing_context='{context}'"
    script = write(tmp_path / "train.py", DIES, END=end, OPTIONS=options)
    run = labkit.launch(script, nproc_per_node=2, wait=False)
    wait_until(lambda: run.status().is_final)

    cause = run.status().cause
    assert cause is not None
    assert re.search(r"^rank 1 failed: its DataLoader worker \(pid \d+\) " + how, cause.sentence), cause.sentence
    advice = ("with num_workers=0 the rank itself crashes, and its line is named",)
    assert cause.advice == (advice if "SEGV" in end or "ABRT" in end else ())


def test_without_workers_the_line_of_a_crash_is_shown(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", DIES, END=KILLED.format("SEGV"), OPTIONS="num_workers=0")
    run = labkit.launch(script, nproc_per_node=2, wait=False)
    wait_until(lambda: run.status().is_final)

    cause = run.status().cause
    assert cause is not None
    assert cause.sentence.startswith("rank 1 was killed (SIGSEGV) (train.py line 8)")
