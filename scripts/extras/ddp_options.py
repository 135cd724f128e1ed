"""DDP's own options: buckets, unused parameters, a static graph, batch statistics over all ranks."""

# goes with: ddp

# %% strategy
import argparse

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def strategy_arguments(parser):
    parser.add_argument("--find-unused-parameters", action="store_true", help="for models that skip layers")
    parser.add_argument("--static-graph", action="store_true", help="every step uses the same parameters")
    parser.add_argument("--gradient-as-bucket-view", action=argparse.BooleanOptionalAction, default=True,
                        help="gradients are views of the all-reduce buckets: saves one copy")  # fmt: skip
    parser.add_argument("--bucket-mib", type=float, default=0.0,
                        help="size of every bucket (0: torch's default, 25 after a first one of 1)")  # fmt: skip
    parser.add_argument("--sync-batch-norm", action="store_true", help="batch statistics over all ranks; needs GPUs")


def make_mesh(device_type, args):
    if args.sync_batch_norm and device_type != "cuda":
        raise SystemExit("--sync-batch-norm needs GPUs: torch's SyncBatchNorm does not run on the CPU")
    if args.static_graph and getattr(args, "accumulate", 1) > 1:
        raise SystemExit("--static-graph does not go with --accumulate: torch aborts on no_sync; leave one of them out")
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """A full replica on every rank; backward all-reduces gradients bucket by bucket while it still computes."""
    return DistributedDataParallel(
        placed(nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_batch_norm else model, device, args),
        gradient_as_bucket_view=args.gradient_as_bucket_view,
        find_unused_parameters=args.find_unused_parameters,
        static_graph=args.static_graph,
        bucket_cap_mb=args.bucket_mib or None,  # 25 differs from the default, whose first bucket is smaller
    )


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)
