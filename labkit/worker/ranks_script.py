"""The script of `labkit.ranks`: what every rank has, and then it waits for cells."""

# %% ranks
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)


def join_ranks(
    seconds=float(sys.argv[1]) if sys.argv[1:] else 60.0,
    *,
    rank=rank,  # so that a cell may use these names for something else
    world_size=world_size,
    device=device,
    gpus=gpus,
):
    """Make the process group of all ranks. A collective in which a rank waits longer than these seconds is an error."""
    nccl, gloo = {"backend": "nccl", "device_id": device}, {"backend": "cpu:gloo,cuda:gloo" if gpus else "gloo"}
    own_gpu = gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
    store, *_ = next(dist.rendezvous("env://"))  # torchrun's, which keeps what earlier groups have left in it
    store = dist.PrefixStore(f"group {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    own = {"store": store, "rank": rank, "world_size": world_size, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group(**own, **(nccl if own_gpu else gloo))


join_ranks()

# %% cells
from labkit.worker.cells import serve

serve()

# %% end
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
