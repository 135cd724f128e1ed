"""Each rank reports who and where it is, and all sum one number. A plain torchrun script, run by preflight.py.

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


def main() -> None:
    backend, answer = sys.argv[1], Path(sys.argv[2])
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = backend == "nccl"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=20))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    started = time.perf_counter()
    total = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(total)
    expected = world_size * (world_size + 1) / 2
    if not bool((total == expected).all()):
        raise RuntimeError(f"the ranks' sum is {total[0].item()}, expected {expected}")
    seconds = time.perf_counter() - started
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    mine = {"rank": rank, "host": socket.gethostname(), "device": properties.name if properties else "cpu"}
    mine["uuid"] = str(getattr(properties, "uuid", ""))
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        answer.write_text(json.dumps({"ranks": everyone, "all_reduce_seconds": seconds}))
    dist.barrier()
    dist.destroy_process_group()


main()
