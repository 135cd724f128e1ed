"""Train with ZeRO-2, gradients split as well: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """Each rank updates 1/N of every parameter; parameters are gathered once per step and kept until backward ends."""
    # with blocks: blocks = blocks_of(model)
    # with blocks: if not blocks:
    # with blocks:     model.register_forward_hook(needs_tensors)
    # with precision: how = {"mesh": mesh, "mp_policy": policy_of(args), "reshard_after_forward": False}
    for module in [*model.blocks, model]:  # the model last: parameters outside the blocks
        # with blocks instead: for module in [*blocks, model]:  # the model last: parameters outside the blocks
        fully_shard(module.to(device), mesh=mesh, reshard_after_forward=False)
        # with precision instead: fully_shard(placed(module, device, args), **how)
    return model


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% gradient_sync
from contextlib import nullcontext


def gradient_sync(model, last):
    """Every micro-batch reduce-scatters, or full gradients would accumulate; parameters stay gathered to the last."""
    model.set_reshard_after_backward(last)
    return nullcontext()
