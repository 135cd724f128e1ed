"""Train with FSDP2 (ZeRO-3), everything sharded: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """Each rank keeps 1/N of every parameter; a block is all-gathered just before it computes, then freed."""
    # with blocks: blocks = blocks_of(model)
    # with blocks: if not blocks:
    # with blocks:     model.register_forward_hook(needs_tensors)
    # with precision: how = {"mesh": mesh, "mp_policy": policy_of(args)}
    for block in model.blocks:
        # with blocks instead: for block in blocks:
        fully_shard(block.to(device), mesh=mesh)
        # with precision instead: fully_shard(placed(block, device, args), **how)
    return fully_shard(model.to(device), mesh=mesh)  # the other parameters
    # with precision instead: return fully_shard(placed(model, device, args), **how)  # the other parameters


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% gradient_sync
from contextlib import nullcontext


def gradient_sync(model, last):
    """Backward reduce-scatters only on the last micro-batch of a step."""
    model.set_requires_gradient_sync(last)
    return nullcontext()
