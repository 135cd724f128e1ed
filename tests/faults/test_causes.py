"""Failures of public reports, made small: each is blamed on what caused it, with its line."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest

import labkit

HEAD = """import multiprocessing, os, queue, signal, subprocess, sys, threading, time
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

def end(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)

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
def größe():
    time.sleep(12)  # BUSY
if rank == 0:
    größe()
dist.barrier()  # CALL
""",
        r"^rank 0 had been in `größe` (BUSY) for \d+ s when rank 1 (CALL) timed out waiting for it; "
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
        r"^the ranks waited for each other until the process group's timeout: rank 0 in `recv` from rank 1 (CALL), "
        r"rank 1 in `recv` from rank 0 (CALL)$",
        (),
    ),
    "a message was not sent": (
        """
if rank == 0:
    dist.recv(torch.empty(4), 1)  # RECEIVES
dist.barrier()  # CALL
""",
        r"^the ranks waited for each other until the process group's timeout: rank 0 in `recv` from rank 1 (RECEIVES), "
        r"rank 1 in `barrier` (CALL)$",
        (),
    ),
    "a message had another tag": (
        """
large = torch.zeros(1 << 22)
if rank == 0:
    dist.recv(large, 1, tag=3)  # RECEIVES
else:
    dist.send(large, 0, tag=4)  # SENDS
""",
        r"rank 0 in `recv` from rank 1 with tag 3 (RECEIVES), rank 1 in `send` to rank 0 with tag 4 (SENDS)$",
        (),
    ),
    "a message was longer than its receiver expected": (
        """
if rank == 0:
    dist.recv(torch.empty(4), 1)  # RECEIVES
else:
    dist.send(torch.ones(16), 0)
dist.barrier()
""",
        r"^rank 0 received a message of 64 bytes in a `recv` for 16 bytes (RECEIVES), for which gloo aborted it",
        (0,),
    ),
    "ranks of a group waited for each other": (
        """
limit = timedelta(seconds=7)
pairs = [dist.new_group([0, 1], timeout=limit), dist.new_group([0, 1], timeout=limit, group_desc="pair")]
dist.all_reduce(torch.ones(1), group=pairs[rank])  # CALL
""",
        r"^the ranks waited .*: rank 0 in `all_reduce` of the group of ranks 0, 1 (CALL), "
        r"rank 1 in `all_reduce` of group `pair` (CALL)$",
        (),
    ),
    "a rank was late for a monitored barrier": (
        """
def compile():
    time.sleep(12)  # BUSY
if rank == 1:
    compile()
dist.monitored_barrier(timeout=timedelta(seconds=6))  # CALL
""",
        r"^rank 1 had been in `compile` (BUSY) for \d+ s when rank 0 (CALL) timed out waiting for it; it ",
        (1,),
    ),
    "a rank of an FSDP model skipped a backward pass": (
        """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
for layer in (*model, model):
    fully_shard(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(8, 16)).square().mean()
    if rank == 0 or step != 10:
        loss.backward()  # FSDP
    optimizer.step()
    optimizer.zero_grad()
""",
        r"^in step 11 rank 1 left out the `reduce_scatter_tensor` that rank 0 called (FSDP): it went on to a later "
        r"`all_gather_into_tensor` (FSDP)",
        (1,),
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
    "a process of a pool was killed": (
        """
if rank == 1:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(end, range(8))  # CALL
dist.barrier()
""",
        r"^rank 1 had been at its top level (CALL) for \d+ s when rank 0 .* timed out waiting for it; .*: "
        r"a multiprocessing\.Pool waits for ever if one of its processes was killed$",
        (1,),
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


JOIN = """import os, time
import torch.distributed as dist
from datetime import timedelta

rank = int(os.environ["RANK"])
def join():
    dist.init_process_group("gloo", timeout=timedelta(seconds=7))  # JOIN

"""
NEVER_JOINED = {
    "WORLD_SIZE is the script's own": (
        "os.environ['WORLD_SIZE'] = '4'\njoin()\n",
        r"^rank 2 never joined the process group, because it does not exist: the run has 2 ranks, and the script asks "
        r"for more .*; rank \d (JOIN) waited for it$",
        (),
    ),
    "a rank had ended": (
        "if rank == 0:\n    join()\n",
        r"^rank 1 never joined the process group: it ended at step 0 without an error; rank 0 (JOIN) waited for it "
        r"for 7 s$",
        (1,),
    ),
    "a rank was elsewhere": (
        "if rank == 1:\n    time.sleep(12)  # BUSY\njoin()\n",
        r"^rank 1 never joined the process group: it had been at its top level (BUSY) for \d+ s; rank 0 (JOIN) waited "
        r"for it for 7 s$",
        (1,),
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
    assert_blamed(tmp_path / "train.py", HEAD + script + "dist.destroy_process_group()\n", says, ranks)


@pytest.mark.parametrize(("script", "says", "ranks"), NEVER_JOINED.values(), ids=NEVER_JOINED)
def test_a_rank_that_never_joined_is_named(tmp_path, script, says, ranks):
    assert_blamed(tmp_path / "train.py", JOIN + script, says, ranks)


def assert_blamed(path, text, says, ranks):
    path.write_text(text)
    run = labkit.launch(path, nproc_per_node=2, env={"OMP_NUM_THREADS": "1"}, wait=False, watchdog=60)
    with suppress(labkit.RankFailedError):
        run.wait()

    cause = run.status().cause
    assert re.search(pattern(says, path.read_text()), cause.sentence), cause.sentence
    assert cause.ranks == ranks
