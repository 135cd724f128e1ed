"""Train with ZeRO-1, optimizer state split: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """A full replica on every rank, as under DDP: only the optimizer's state is sharded."""
    return DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    # with precision instead: return DistributedDataParallel(placed(model, device, args), gradient_as_bucket_view=True)


def make_optimizer(model, mesh, args):  # each rank updates and broadcasts its part of the parameters
    def of_a_share(groups):
        return optimizer_of([p for group in groups for p in group["params"]], args)

    trained = [p for p in model.parameters() if p.requires_grad]
    return ZeroRedundancyOptimizer(optimizer_of(trained, args).param_groups, of_a_share)


# %% gradient_sync
# of ddp.py
