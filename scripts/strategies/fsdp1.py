"""Train with FSDP1, the interface of older code: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
# with precision: from torch.distributed.fsdp import MixedPrecision


def strategy_arguments(parser):
    parser.add_argument("--sharding-strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
                        default="FULL_SHARD", help="ZeRO-3, ZeRO-2, or DDP's memory")  # fmt: skip
    parser.add_argument("--wrap", choices=["transformer", "module", "size", "none"], default="transformer",
                        help="units: each block, each layer with weights, by --wrap-size, or all in one")  # fmt: skip
    parser.add_argument("--wrap-size", type=int, default=100_000, help="minimum number of parameters of a unit")
    parser.add_argument("--cpu-offload", action="store_true", help="keep shards in host memory; needs a GPU")


def make_mesh(device_type, args):
    if args.cpu_offload and device_type != "cuda":
        raise SystemExit("--cpu-offload of FullyShardedDataParallel needs a GPU; fsdp's runs on the CPU too")
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def wrap_policy(model, args):
    """The submodules that become units; a unit is gathered, computed and freed together."""
    if args.wrap == "size":
        return partial(size_based_auto_wrap_policy, min_num_params=args.wrap_size)
    classes = {nn.Linear, nn.Conv2d, nn.Embedding} if args.wrap == "module" else set()
    if args.wrap == "transformer":
        classes = {type(block) for block in model.blocks}
        # with blocks instead: classes = {type(block) for block in blocks_of(model)}
    uses = [module for _, module in model.named_modules(remove_duplicate=False) if type(module) in classes]
    if len({*uses}) < len(uses):
        raise SystemExit("FSDP1 wraps only one use of a layer that is used several times: use fsdp, or --wrap none")
    return ModuleWrapPolicy(classes) if classes else None


def parallelize(model, mesh, device, args):
    """Each unit's parameters become one flat tensor, of which each rank keeps 1/N."""
    # with precision: model, policy = placed(model, "cpu", args), policy_of(args)
    # with precision: half = MixedPrecision(policy.param_dtype, policy.reduce_dtype) if policy.param_dtype else None
    return FullyShardedDataParallel(
        model,  # moved to the GPU unit by unit
        device_mesh=mesh,  # given a process group, checkpoints would store each shard as the whole
        sharding_strategy=ShardingStrategy[args.sharding_strategy],
        auto_wrap_policy=wrap_policy(model, args),
        # with precision: mixed_precision=half,
        cpu_offload=CPUOffload(offload_params=True) if args.cpu_offload else None,
        device_id=device,
        use_orig_params=True,  # so that optimizer and checkpoint use the model's own names
    )


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% gradient_sync
# of ddp.py
