"""Train with DDP, a whole model on every rank: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """A full replica on every rank; backward all-reduces gradients bucket by bucket while it still computes."""
    return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    # with precision instead: return DistributedDataParallel(placed(model, device, args), gradient_as_bucket_view=True)


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% gradient_sync
from contextlib import nullcontext


def gradient_sync(model, last):
    """Within this context backward all-reduces only on the last micro-batch of a step."""
    return nullcontext() if last else model.no_sync()
