"""Train on a mesh of data, tensor and pipeline ranks: torchrun --standalone --nproc-per-node=4 train.py --tensor 2"""

# %% tensor
# of tensor_parallel.py

# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def strategy_arguments(parser):
    parser.add_argument("--tensor", type=int, default=1, help="ranks that split each layer")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that split the blocks")


def make_mesh(device_type, args):  # tensor ranks communicate most, so they are adjacent
    ranks, replica = dist.get_world_size(), args.pipeline * args.tensor
    if replica < 1 or ranks % replica:
        raise SystemExit(f"{ranks} ranks cannot be split into --pipeline {args.pipeline} x --tensor {args.tensor}")
    check_schedule(args, args.pipeline)
    shape = (args.pipeline, ranks // replica, args.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=("pipeline", "data", "tensor"))


def parallelize(model, mesh, device, args):
    """Blocks over the pipeline, layers over the tensor axis, and the rest of each parameter over the data axis."""
    model = cut(model, mesh["pipeline"], device, args)
    # with precision: how = {"mesh": mesh["data"], "mp_policy": policy_of(args), "reshard_after_forward": False}
    for stage in model.stages.values():
        if args.tensor > 1:
            split((block.to(device) for block in stage.blocks), model, mesh["tensor"])
            # with precision instead: split((placed(b, device, args) for b in stage.blocks), model, mesh["tensor"])
        for module in [*stage.blocks, stage]:  # gathered once per step, not once per micro-batch
            fully_shard(module.to(device), mesh=mesh["data"], reshard_after_forward=False)
            # with precision instead: fully_shard(placed(module, device, args), **how)
    return model


def make_optimizer(model, mesh, args):
    optimizer = optimizer_of(model.parameters(), args)
    for group in optimizer.param_groups if args.tensor > 1 else ():  # not every torch updates several meshes together
        group["foreach"] = False
    return optimizer


# %% hub_stages
# of pipeline.py

# %% step
# of pipeline.py
