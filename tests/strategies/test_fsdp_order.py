"""The picture of FSDP shows the order in which `fully_shard` gathers and scatters on two real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit_labs.draw.strategies import step_of_fsdp

BLOCKS = 3
SCRIPT = f"""
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("gloo")
seen = []
sizes = range(8, 8 + {BLOCKS})
blocks = [nn.Linear(8, 2 * size) for size in sizes]  # sizes by which the units are known
units = [nn.Sequential(block, nn.Linear(block.out_features, 8)) for block in blocks]
model = nn.Sequential(nn.Linear(8, 8), *units, nn.Linear(8, 8))
names = {{sum(p.numel() for p in block.parameters()): unit for unit, block in enumerate(units)}}
for block in units:
    fully_shard(block, reshard_after_forward=RESHARD)
fully_shard(model)  # the root: the first and the last layer, as a transformer's embedding and output
class Noted(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kind = {{"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter"}}
        if (name := function.__name__.split(".")[0]) in kind:
            seen.append((kind[name], names.get(max(args[0].numel(), args[1].numel()), {BLOCKS})))
        return function(*args, **(kwargs or {{}}))
for _ in range(2):
    seen.clear()
    with Noted():
        model(torch.rand(4, 8)).sum().backward()
if dist.get_rank() == 0:
    for kind, unit in seen:
        print("SEEN", kind, unit)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("reshard", [True, False])
def test_units_are_gathered_and_scattered_in_this_order(tmp_path: Path, reshard: bool):
    script = tmp_path / "order.py"
    script.write_text(SCRIPT.replace("RESHARD", "None" if reshard else "False"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    seen = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("SEEN")]
    steps = [*step_of_fsdp(BLOCKS + 1, reshard=reshard)]
    for kind, drawn in (("gather", "gathers"), ("scatter", "scatters")):
        expected = [unit for unit in (getattr(now, drawn) for now in steps) if unit is not None]
        assert [int(unit) for each, unit in seen if each == kind] == expected
