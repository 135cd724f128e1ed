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
    for module in [*model.blocks, model]:  # the model last: parameters outside the blocks
        # with blocks instead: for module in [*blocks, model]:  # the model last: parameters outside the blocks
        fully_shard(module.to(device), mesh=mesh)
        # with precision instead: fully_shard(placed(module, device, args), **how)
    return model


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% gradient_sync
from contextlib import nullcontext


def gradient_sync(model, last):
    """Backward reduce-scatters only on the last micro-batch of a step."""
    model.set_requires_gradient_sync(last)
    return nullcontext()
