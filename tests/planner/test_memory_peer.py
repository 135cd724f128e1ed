"""The rehearsed peak against that of another tracker in the same step: torch.distributed._tools, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from labkit.planner.model.rehearsal import rehearse
from labkit.write import Script, command_line

PARAMETERS = {"global_batch_size": 16}
THEIRS = """
import json, sys
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from labkit.planner.model.fake.fake_run import CPU, FakeRun
from labkit.planner.model.fake.fakes import silence

text, argv, ranks, shards = json.load(sys.stdin)
run = FakeRun(text, argv)
script, args, mesh = run.script, run.args, run.join_group(ranks)
model = run.prepared()
batches = run.batches()
batch = batches.make(args.global_batch_size // mesh["data"].size(), torch.float32)
with silence():
    model = script.parallelize(model, mesh, CPU, args)
with run.fake, silence():
    optimizer = script.make_optimizer(model, mesh, args)
    if shards:
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
    else:
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batches.tensors(batch))
    with tracker:
        for _ in range(2):
            script.forward_backward(model, batch, mesh["data"], args)
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
print(tracker.get_tracker_snapshot("peak")[CPU]["Total"])
"""


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp", 2), ("tensor_parallel", 2)]
)
def test_torchs_tracker_finds_the_same_peak(strategy: str, ranks: int) -> None:
    script = Script.load(strategy)
    question = [str(script), command_line(script, PARAMETERS), ranks, strategy in ("zero2", "fsdp")]
    done = subprocess.run(
        [sys.executable, "-c", THEIRS], input=json.dumps(question), capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    assert int(done.stdout.splitlines()[-1]) == rehearse(script, ranks, PARAMETERS).peak.bytes
