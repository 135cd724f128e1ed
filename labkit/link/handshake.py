"""Each rank reports who and where it is, and tries what training needs: all sum 16 MiB, each sends as much to the next
rank, and a group split from all sums again. A plain torchrun script, run by measure.py.

torchrun --standalone --nproc-per-node=2 handshake.py nccl answer.json
"""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

BYTES = 1024  # for the description of a rank
FLOATS = 4 << 20  # 16 MiB: transfers between GPUs may work for a few KiB and break for large ones


def check(values: torch.Tensor, expected: float, what: str) -> None:
    if not bool((values == expected).all()):
        raise RuntimeError(f"{what} is {values[values != expected][0].item()}, expected {expected}")


def main() -> None:
    backend, answer = sys.argv[1], Path(sys.argv[2])
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=20), device_id=device if on_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    expected = world_size * (world_size + 1) / 2
    mine, received = (torch.full((FLOATS,), value, device=device) for value in (float(rank + 1), 0.0))
    started = time.perf_counter()
    total = mine.clone()
    dist.all_reduce(total)
    check(total, expected, "the ranks' sum")
    seconds = time.perf_counter() - started
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    messages = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received, before)]
    for message in dist.batch_isend_irecv(messages) if world_size > 1 else []:
        message.wait()
    check(received, float(before + 1) if world_size > 1 else 0.0, f"the value from rank {before}")
    split = dist.new_group()  # split from the first communicator, because that knows its device
    total = mine.clone()
    dist.all_reduce(total, group=split)
    check(total, expected, "the sum in a split group")
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    here = {"rank": rank, "host": socket.gethostname(), "device": properties.name if properties else "cpu"}
    here["uuid"] = str(getattr(properties, "uuid", ""))
    told = torch.tensor(list(json.dumps(here).encode().ljust(BYTES)), dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(told) for _ in range(world_size)]
    dist.all_gather(everyone, told)  # not all_gather_object, which needs NumPy
    if rank == 0:
        ranks = [json.loads(bytes(each.tolist())) for each in everyone]
        answer.write_text(json.dumps({"ranks": ranks, "all_reduce_seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


main()
