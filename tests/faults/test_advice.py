"""What labkit advises was carried out: each case fails with this advice, and passes once its text follows it.

The twins of tests/witness/correct carry out what the witness advises, those of tests/unit/seeded.py what the rules do.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults.test_memory import small_memory  # noqa: F401  (a fixture)

import labkit
from labkit import Script
from labkit.launcher.causes import failure_advice
from labkit.launcher.causes.failure_advice import LONGER, MESSAGES, memory_advice
from labkit.record import ScriptFacts
from labkit.witness.slips import ADVICE, ALIKE

HEAD = """import os, time, torch, torch.distributed as dist
from datetime import timedelta
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1))
"""
LOOP = """
model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    data, target = torch.randn(8, 16), torch.randn(8, 1)
    output = model(data)
    loss = torch.nn.functional.mse_loss(output, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
dist.destroy_process_group()
"""
PREPARES = """
if not os.path.exists("prepared"):
    if rank == 0:
        time.sleep(9)
        open("prepared", "w").close()
    dist.barrier()
"""
NO_TARGETS = """    if rank == 1 and step == 4:
        loss = torch.zeros((), requires_grad=True)
    optimizer.zero_grad()
"""
BAD_BATCH = """    bad = torch.tensor(float(rank == 1 and step == 4))
    if bad:
        continue
    mean = loss.detach().clone()
"""
UNEVEN = """
size = torch.tensor([4 + rank])
values = torch.ones(int(size))
gathered = [torch.empty_like(values) for _ in range(2)]
dist.all_gather(gathered, values)
dist.destroy_process_group()
"""
OF_TWO = """
first, second = torch.ones(4), torch.ones(64)
if rank == 0:
    dist.send(first, 1)
    dist.send(second, 1)
else:
    order = second, first
    for each in order:
        dist.recv(each, 0)
dist.barrier()
dist.destroy_process_group()
"""
HUNGRY = """import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
open(CGROUP + "/cgroup.procs", "w").write(str(os.getpid()))
dist.init_process_group("gloo")
BATCH, WORKERS, HELD, MIB = 260, 1, 260, 2**18
held = torch.ones(HELD * MIB)
class Data(Dataset):
    cache = None
    def __len__(self):
        return 4
    def __getitem__(self, number):
        if self.cache is None and WORKERS:
            self.cache = torch.ones(260 * MIB)
        return torch.ones(4)
weight = torch.ones(4, 1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for data in DataLoader(Data(), num_workers=WORKERS):
    (torch.ones(BATCH * MIB // 4, 4) @ weight).sum().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Case:
    """A script whose failure is explained by what `says` it, with this advice, and the change that follows it."""

    advice: str
    script: str
    says: str
    old: str
    new: str


CASES = {
    "a longer timeout": Case(LONGER, HEAD + PREPARES + LOOP, "time.sleep(9)", "seconds=6", "hours=2"),
    "prepared by a run before": Case(
        LONGER, HEAD + PREPARES + LOOP, "time.sleep(9)", "import os", "open('prepared', 'w').close()\nimport os"
    ),
    "a loss that depends on the output": Case(
        ADVICE,
        HEAD + LOOP.replace("    optimizer.zero_grad()\n", NO_TARGETS),
        "left out the collectives of a backward pass",
        "torch.zeros((), requires_grad=True)",
        "output.sum() * 0",
    ),
    "a decision that all ranks make": Case(
        ADVICE,
        HEAD + LOOP.replace("    mean = loss.detach().clone()\n", BAD_BATCH),
        "rank 1 left out the `all_reduce` that rank 0 called",
        "    if bad:",
        "    dist.all_reduce(bad)\n    if bad:",
    ),
    "tensors of one size": Case(
        ALIKE,
        HEAD + UNEVEN,
        "called `all_gather` of 4 float32 elements",
        "values =",
        "dist.all_reduce(size, dist.ReduceOp.MAX)\nvalues =",
    ),
    "messages in the order in which they are sent": Case(
        MESSAGES,
        HEAD + OF_TWO,
        "rank 1 received a message of 256 bytes in a `recv` for 16",
        "second, first\n",
        "first, second\n",
    ),
}
# What is carried out elsewhere, or needs hardware that is not here.
ELSEWHERE = {
    "ALONE": "test_loader_workers.py",
    "BLOCKING": "a GPU",
    "EXPANDABLE": "a GPU",
    "FIREWALL": "a firewall between hosts: it says what to look at",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ended(text: str, ranks: int = 2) -> labkit.Run:
    path = Path("train.py")
    path.write_text(text)
    run = labkit.launch(path, nproc_per_node=ranks, env={"OMP_NUM_THREADS": "1"}, wait=False, watchdog=60)
    with suppress(labkit.RankFailedError):
        run.wait()
    return run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_advised_helps(case: Case) -> None:
    assert case.script.count(case.old) == 1
    failed = ended(case.script).status()
    assert failed.state == "failed"
    assert case.says in failed.cause.sentence
    assert failed.cause.advice == (case.advice,)

    Path("prepared").unlink(missing_ok=True)
    run = ended(case.script.replace(case.old, case.new))
    assert run.status().state == "succeeded"
    assert not run.findings()


def test_every_other_advice_is_known() -> None:
    """Advice that is added needs a case."""
    advice = {name for name, value in vars(failure_advice).items() if name.isupper() and " " in str(value)}
    assert advice - {"DISK_FULL"} == {"LONGER", "MESSAGES", *ELSEWHERE}


WAYS = {
    "a smaller batch": ("BATCH, WORKERS, HELD, MIB = 260", "BATCH, WORKERS, HELD, MIB = 4"),
    "fewer DataLoader workers": ("260, 1, 260", "260, 0, 260"),
    "fewer ranks": ("", ""),
    "less data in memory at once": ("1, 260", "1, 4"),
}


def test_each_way_to_need_less_of_the_hosts_memory_helps(small_memory: Path) -> None:  # noqa: F811
    limit = "memory.limit_in_bytes" if (small_memory / "memory.limit_in_bytes").exists() else "memory.max"
    (small_memory / limit).write_text(str(1700 << 20))
    text = HUNGRY.replace("CGROUP", repr(str(small_memory)))
    failed = ended(text).status()
    assert failed.cause.out_of_memory == "host"
    assert failed.cause.advice == ("to make it fit:" + "".join(f"\n- {way}" for way in WAYS),)

    for way, (old, new) in WAYS.items():
        run = ended(text.replace(old, new, 1) if old else text, ranks=1 if way == "fewer ranks" else 2)
        assert run.status().state == "succeeded", way


def test_each_way_to_need_less_of_a_devices_memory_helps() -> None:
    """Measured by the allocations of a rank's third step, on the CPU."""
    script, options = Script.load("ddp"), {"global_batch_size": 16, "trace_memory": True, "steps": 3}
    facts = ScriptFacts(shards=False, checkpoints=False)
    advised = memory_advice("device", script, {}, facts)

    def peak(script: Script, **changes: object) -> int:
        run = labkit.launch(script, nproc_per_node=2, wait=True, **options, **changes)
        return run.memory().ranks[0].traced.bytes

    whole = peak(script)
    ways = {
        "raise accumulate (now 1)": lambda: peak(script, accumulate=4),
        "activation_checkpointing=True": lambda: peak(script, activation_checkpointing=True),
        "precision='bf16', or 'fp16' on a T4": lambda: peak(script, precision="bf16"),
        "shard the model: Script.load('fsdp')": lambda: peak(Script.load("fsdp")),
    }
    assert advised == "to make it fit:" + "".join(f"\n- {way}" for way in ways)
    for way, measured in ways.items():
        assert measured() < whole, way
