"""Train with FSDP2 (ZeRO-3), everything sharded: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def make_mesh(device_type, args):
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """Each rank keeps 1/N of every parameter; a block is all-gathered just before it computes, then freed."""
    policy = MixedPrecisionPolicy(half_of(args), torch.float32 if half_of(args) else None)  # reduce and shard in fp32
    blocks = blocks_of(model)
    for module in [*blocks, model]:  # the model last: parameters outside the blocks
        fully_shard(placed(module, device, args), mesh=mesh, mp_policy=policy)
    if not blocks:
        model.register_forward_hook(needs_tensors)
    return model


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% gradient_sync
from contextlib import nullcontext


def gradient_sync(model, last):
    """Backward reduce-scatters only on the last micro-batch of a step."""
    model.set_requires_gradient_sync(last)
    return nullcontext()
