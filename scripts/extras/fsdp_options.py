"""FSDP2's own options: gathered parameters kept, shards in host memory, several copies of the model."""

# goes with: fsdp

# %% strategy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def strategy_arguments(parser):
    parser.add_argument("--reshard-after-forward", choices=["auto", "always", "never"], default="auto",
                        help="always: gather again for backward; never: keep forward's parameters")  # fmt: skip
    parser.add_argument("--cpu-offload", action="store_true", help="keep shards in host memory between uses")
    parser.add_argument("--replicas", type=int, default=1,
                        help="replicas of the model, each sharded across its part of the ranks")  # fmt: skip


def make_mesh(device_type, args):
    ranks = dist.get_world_size()
    if args.replicas < 1 or ranks % args.replicas:
        raise SystemExit(f"--replicas {args.replicas} must divide the {ranks} ranks")
    return init_device_mesh(device_type, (ranks,), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """Each rank keeps 1/N of every parameter; a block is all-gathered just before it computes, then freed."""
    reshard = {"auto": None, "always": True, "never": False}[args.reshard_after_forward]
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    # with precision: options["mp_policy"] = policy_of(args)
    if args.replicas > 1:  # all-gather and reduce-scatter within a replica, all-reduce between them
        shape = (args.replicas, mesh.size() // args.replicas)
        options["mesh"] = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))
    if args.cpu_offload:  # pinned memory needs a GPU
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    place = torch.device("cpu") if args.cpu_offload else device  # fully_shard moves each part to the GPU and back
    # with blocks: blocks = blocks_of(model)
    # with blocks: if not blocks:
    # with blocks:     model.register_forward_hook(needs_tensors)
    for module in [*model.blocks, model]:  # the model last: parameters outside the blocks
        # with blocks instead: for module in [*blocks, model]:  # the model last: parameters outside the blocks
        fully_shard(module.to(place), **options)
        # with precision instead: fully_shard(placed(module, place, args), **options)
    return model


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)
