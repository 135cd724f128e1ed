"""Measures how long collectives take, each kind at sizes from 4 KiB to 64 MiB. A plain torchrun script, run by
measure.py.

torchrun --standalone --nproc-per-node=2 collective_times.py gloo answer.json
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]  # bytes of the whole array
FLOAT = 4
BATCHES = 3
UNITS, LAYERS, WIDE = 6, 6, 384  # 3.4 MiB a unit
LONGEST = 0.5  # seconds of one call; a kind that takes longer is not measured at larger sizes


def repeats(size: int) -> int:
    return max(BATCHES, min(20, (16 << 20) // size))


def calls(size: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """Each kind of collective on an array of `size` bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = max(1, size // FLOAT // ranks)
    whole, part = torch.zeros(share * ranks, device=device), torch.zeros(share, device=device)
    # renamed in torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    partner, arrived = rank ^ 1, torch.empty_like(whole)

    def ping_pong() -> None:
        if partner < ranks:
            for sends in (rank < partner, rank > partner):
                dist.send(whole, partner) if sends else dist.recv(whole, partner)

    def one_from_each_rank() -> None:
        """Broadcast from each rank in turn, as ZeroRedundancyOptimizer sends the parameters that each rank has
        updated."""
        for work in [dist.broadcast(whole, root, async_op=True) for root in range(ranks)]:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, part),
        "reduce_scatter": lambda: scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(arrived, whole),
        "broadcast": one_from_each_rank,
        "send": ping_pong,
    }


def timed(call: Callable[[], None], times: int, device: torch.device) -> tuple[float, float]:
    """(seconds of a call: the slowest rank's mean, the median of BATCHES; core-seconds of a call: the mean over ranks).

    Ranks that share cores wait for each other now and then, which a mean includes and a median of calls does not.
    """
    call()
    seconds = []
    dist.barrier()
    busy = time.process_time()
    for _ in range(times):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    busy = (time.process_time() - busy) / times
    each = times // BATCHES
    means = [fmean(seconds[each * number : each * (number + 1)]) for number in range(BATCHES)]
    slowest = torch.tensor([median(means)], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    spent = torch.tensor([busy], dtype=torch.float64, device=device)
    dist.all_reduce(spent)
    return slowest.item(), spent.item() / dist.get_world_size()


def sharding() -> tuple[float, float]:
    """Core-seconds per step that a rank's main thread spends on FSDP2's hooks and copies, without waiting: (per unit,
    per byte gathered or scattered). Most of the second comes from memory that is allocated again for every unit."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def spent(width: int, *, sharded: bool) -> float:
        model = nn.Sequential(*(nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))) for _ in range(UNITS)))
        for unit in [*model, model] if sharded else []:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        x, times = torch.ones(1, width), []
        for _ in range(8):
            started = time.thread_time()
            model(x).sum().backward()
            times.append(time.thread_time() - started)
            model.zero_grad()
        return median(times[2:]) / UNITS

    small, large = (spent(width, sharded=True) - spent(width, sharded=False) for width in (4, WIDE))
    moved = 3 * LAYERS * WIDE * (WIDE + 1) * FLOAT  # gathered for forward and for backward, scattered
    return max(0.0, small), max(0.0, large - small) / moved


def main() -> None:
    backend, answer = sys.argv[1], Path(sys.argv[2])
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=device if on_gpu else None)
    host = (0.0, 0.0) if on_gpu else sharding()
    torch.set_grad_enabled(False)
    measured, slow = [], set()
    for size in SIZES:
        for kind, call in calls(size, device).items():
            if kind in slow:
                continue
            seconds, cpu = timed(call, repeats(size), device)
            messages = {"send": 2, "broadcast": dist.get_world_size()}.get(kind, 1)
            measured.append({"kind": kind, "bytes": size, "seconds": seconds / messages, "cpu": cpu / messages})
            if seconds > LONGEST:  # the same on every rank
                slow.add(kind)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps({"kinds": measured, "sharding": host}))
    dist.barrier()
    dist.destroy_process_group()


main()
