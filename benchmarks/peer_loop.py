"""A plain DDP loop that knows of no launcher, for peers.py.

    torchrun --nproc-per-node 2 peer_loop.py FOLDER [--steps N] [--fault raise|stall|deaf] [--watch traceml|trackio]

In FOLDER each rank writes its process id, rank 0 when its first step ended and how many milliseconds a step took.
"""

import argparse
import contextlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

WARM, FAULTY_STEP = 20, 5
GROUP_TIMEOUT = timedelta(seconds=10)

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fault", choices=["raise", "stall", "deaf"])
parser.add_argument("--watch", choices=["traceml", "trackio"])
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
rank = dist.get_rank()
(args.folder / f"rank-{rank}").write_text(str(os.getpid()))
if args.fault == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
trace = contextlib.nullcontext
if args.watch == "traceml":
    import traceml_ai

    traceml_ai.init(mode="auto")
    trace = traceml_ai.trace_step
elif args.watch == "trackio" and rank == 0:
    import trackio

    trackio.init(project="peers", embed=False)

torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.randn(128, 512), batch_size=128)
for step in range(1, args.steps + 1):
    for x in loader:
        with trace(model):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
    if args.watch == "trackio" and rank == 0:
        trackio.log({"loss": loss.item()})
    if step % 10 == 0 and rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if step == 1 and rank == 0:
        (args.folder / "first").write_text(str(time.time()))
    if step == FAULTY_STEP and rank == 1 and args.fault == "raise":
        raise ValueError("of rank 1")
    if step == FAULTY_STEP and rank == 1 and args.fault == "stall":
        time.sleep(3600)
    if step == WARM:
        started = time.perf_counter()
if rank == 0 and args.steps > WARM:
    milliseconds = (time.perf_counter() - started) / (args.steps - WARM) * 1e3
    (args.folder / "milliseconds").write_text(str(milliseconds))
if args.watch == "trackio" and rank == 0:
    trackio.finish()
dist.barrier()
dist.destroy_process_group()
