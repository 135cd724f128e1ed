"""Failures of public reports, made small: each is blamed on what caused it, with its line."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest

import labkit

HEAD = """import multiprocessing, os, queue, subprocess, sys, threading, time
import torch, torch.distributed as dist
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", timeout=timedelta(seconds=7))
rank = dist.get_rank()
model = DDP(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps, fetch=lambda: torch.randn(8, 16)):
    for step in range(steps):
        loss = model(fetch()).square().mean()
        optimizer.zero_grad()
        loss.backward()  # PASS
        optimizer.step()

def fail(text):
    return {"a": 1}[text]  # IN POOL

"""
SCRIPTS = {
    "a rank skipped the all_reduce of one epoch": (
        """
for epoch in range(3):
    train(5)
    if rank == 0 and epoch == 1:
        continue
    dist.all_reduce(torch.ones(1))  # CALL
""",
        r"^in step 10 rank 0 left out the `all_reduce` that rank 1 called (CALL): it went on to a backward pass (PASS)"
        r".* `labkit check` says of line \d+: `all_reduce` needs all ranks, but not always all of them get here",
        (0,),
    ),
    "a rank called one collective more": (
        """
for step in range(20):
    train(1)
    dist.all_reduce(torch.ones(1))
    if rank == 1 and step == 10:
        dist.all_reduce(torch.ones(1))  # CALL
""",
        r"^in step 11 rank 1 called `all_reduce` (CALL) while rank 0 went on to a backward pass (PASS)",
        (1, 0),
    ),
    "rank 0 alone gathered objects": (
        """
train(5)
if rank == 0:
    dist.all_gather_object([None, None], {"loss": 1.0})  # CALL
train(5)
""",
        r"^in step 5 rank 0 called `all_gather` (CALL) while rank 1 went on to a backward pass (PASS)",
        (0, 1),
    ),
    "ranks reduced different numbers of elements": (
        "dist.all_reduce(torch.ones(4 + rank))  # CALL\n",
        r"^rank 0 called `all_reduce` of 4 float32 elements (CALL) while rank 1 called `all_reduce` of 5 float32 "
        r"elements (CALL)\. gloo aborted rank \d",
        (0, 1),
    ),
    "a rank prepared data for longer than the time limit": (
        """
def tokenize():
    time.sleep(12)  # BUSY
if rank == 0:
    tokenize()
dist.barrier()  # CALL
""",
        r"^rank 0 had been in `tokenize` (BUSY) for \d+ s when rank 1 (CALL) timed out waiting for it; "
        r"it was idle",
        (0,),
    ),
    "a rank computed for longer than the time limit": (
        """
end = time.time() + 12
while rank == 0 and time.time() < end:
    sum(range(10**6))  # BUSY
dist.barrier()  # CALL
""",
        r"^rank 0 had been at its top level (train.py line \d+: `.*`) for \d+ s when rank 1 (CALL) timed out waiting "
        r"for it; it was computing",
        (0,),
    ),
    "both ranks received first": (
        """
other = torch.empty(1 << 22)
dist.recv(other, 1 - rank)  # CALL
dist.send(other, 1 - rank)
""",
        r"^the ranks waited for each other until the process group's timeout: rank 0 (CALL), rank 1 (CALL)$",
        (),
    ),
    "a rank exited early": (
        """
train(5)
if rank == 1:
    sys.exit(0)  # EXIT
train(5)
""",
        r"^rank 1 exited at step 5 (EXIT) without an error, while rank 0 waited for it",
        (1,),
    ),
    "a thread that prefetched has died": (
        """
batches = queue.Queue()
def prefetch():
    for number in range(20):
        if rank == 1 and number == 9:
            raise OSError("shard 3 is truncated")  # THREAD
        batches.put(torch.randn(8, 16))
threading.Thread(target=prefetch, daemon=True).start()
train(20, batches.get)
""",
        r"^a thread of rank 1 raised OSError: shard 3 is truncated (THREAD)\. Rank 1 had been in `train` (",
        (1,),
    ),
    "a rank waited for the others in a finally": (
        """
try:
    train(5)
    if rank == 1:
        open("shard_9.tar")  # OPENS
    train(5)
finally:
    dist.barrier()
""",
        r"^rank 1 failed: FileNotFoundError: .*shard_9\.tar' (OPENS); it then waited for the others while",
        (1,),
    ),
    "a command that a rank ran has failed": (
        """
if rank == 0:
    subprocess.check_call(["sh", "-c", "echo 'gzip: shard-3.gz: unexpected end' >&2; exit 2"])  # CALL
dist.barrier()
""",
        r"^rank 0 failed: CalledProcessError: .* status 2\. It printed: gzip: shard-3\.gz: unexpected end (CALL)$",
        (0,),
    ),
    "a process of a pool has failed": (
        """
if rank == 0:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.map(fail, ["a", "b"])
dist.barrier()
""",
        r"^rank 0 failed: KeyError: 'b' (in a process of a pool) (IN POOL)$",
        (0,),
    ),
}


def pattern(says: str, text: str) -> str:
    """A place's mark becomes its line, perhaps with its text, and a parenthesis stands for itself."""
    marks = {line.rpartition("  # ")[2]: n for n, line in enumerate(text.splitlines(), 1) if "  # " in line}
    for mark, number in marks.items():
        says = says.replace(f"({mark})", rf"\(train.py line {number}(: `[^`]*`)?\)")
    return re.sub(r"(?<!\\)\((?!: `)", r"\(", re.sub(r"(?<!\\)\)(?!\?)", r"\)", says))


@pytest.mark.parametrize(("script", "says", "ranks"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_failure_is_blamed_on_what_caused_it(tmp_path, script, says, ranks):
    path = tmp_path / "train.py"
    path.write_text(HEAD + script + "dist.destroy_process_group()\n")
    run = labkit.launch(path, nproc_per_node=2, env={"OMP_NUM_THREADS": "1"}, wait=False, watchdog=60)
    with suppress(labkit.RankFailedError):
        run.wait()

    cause = run.status().cause
    assert re.search(pattern(says, path.read_text()), cause.sentence), cause.sentence
    assert cause.ranks == ranks
