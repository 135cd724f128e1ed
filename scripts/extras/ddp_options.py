"""DDP's own options: buckets, unused parameters, a static graph, batch statistics over all ranks, compression."""

# goes with: ddp

# %% compress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


def compress_arguments(parser):
    parser.add_argument("--compress", choices=["none", "fp16", "bf16", "int8", "powersgd"], default="none",
                        help="how gradients are sent; fp16 and bf16 halve them")  # fmt: skip
    parser.add_argument("--powersgd-rank", type=int, default=4, help="rank of the two factors sent for each matrix")


def compressed(model, args):
    """What int8 and PowerSGD leave out is added to the next step's gradient. Checkpoints do not hold it."""
    if args.compress in ("fp16", "bf16"):
        model.register_comm_hook(None, getattr(default_hooks, f"{args.compress}_compress_hook"))
    if args.compress == "int8":
        model.register_comm_hook({}, in_int8)
    if args.compress == "powersgd":  # from the third step on, because DDP rebuilds its buckets after the first
        state = PowerSGDState(None, args.powersgd_rank, start_powerSGD_iter=2, use_error_feedback=True, warm_start=True)
        model.register_comm_hook(state, in_turn)
    return model


def in_turn(state, bucket):
    """PowerSGD sends several times for a bucket. Gloo calls what follows a collective from a thread of its own, so that
    ranks might send those of two buckets in different orders; NCCL queues them at once, in the order of the buckets."""
    mean = powerSGD_hook(state, bucket)
    if dist.get_backend() != "nccl":
        mean.wait()
    return mean


def in_int8(kept, bucket):
    """Every rank sends all others its gradients in 8 bits, with a scale per parameter. Nothing waits for the GPU."""
    gradients, flat, ranks = bucket.gradients(), bucket.buffer(), dist.get_world_size()
    key = tuple(map(id, bucket.parameters()))
    if bucket.index() == 0 and key not in kept:
        kept.clear()  # DDP has rebuilt its buckets
    sizes, left_out = kept.get(key) or (torch.tensor([g.numel() for g in gradients], device=flat.device), 0)
    flat += left_out
    scales = torch.stack([gradient.abs().max() for gradient in gradients]).clamp(min=1e-30) / 127
    scale = scales.repeat_interleave(sizes, output_size=len(flat))
    sent = (flat / scale).round().to(torch.int8)
    kept[key] = sizes, (flat - sent * scale).nan_to_num_(0, 0, 0)  # fp16 overflows
    every_scale, every = scales.new_empty(ranks, len(scales)), sent.new_empty(ranks, len(sent))
    dist.all_gather([*every_scale], scales)
    gathered = dist.all_gather([*every], sent, async_op=True).get_future()
    return gathered.then(partial(mean_of, flat, every, every_scale, sizes))


def mean_of(flat, every, scales, sizes, _):
    for tensor in (every, scales, sizes) if flat.is_cuda else ():  # NCCL calls this on its own stream
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    torch.sum(every * scales.repeat_interleave(sizes, 1, output_size=len(flat)), 0, out=flat)
    return flat.div_(len(every))


# %% strategy
import argparse

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def strategy_arguments(parser):
    parser.add_argument("--find-unused-parameters", action="store_true", help="for models that skip layers")
    parser.add_argument("--static-graph", action="store_true", help="assert that every step uses the same parameters")
    parser.add_argument("--gradient-as-bucket-view", action=argparse.BooleanOptionalAction, default=True,
                        help="gradients are views of the all-reduce buckets: saves one copy")  # fmt: skip
    parser.add_argument("--bucket-mib", type=float, default=0.0,
                        help="size of every bucket (0: torch's default, 25, and 1 for the first)")  # fmt: skip
    parser.add_argument("--sync-batch-norm", action="store_true", help="batch statistics over all ranks; needs GPUs")


def make_mesh(device_type, args):
    if args.sync_batch_norm and device_type != "cuda":
        raise SystemExit("--sync-batch-norm needs GPUs: torch's SyncBatchNorm does not run on the CPU")
    if args.static_graph and getattr(args, "accumulate", 1) > 1:
        raise SystemExit("--static-graph does not work with --accumulate: torch aborts on no_sync; leave one out")
    if args.find_unused_parameters and getattr(args, "loss_chunk", 0):
        raise SystemExit("--loss-chunk applies the head outside of DDP's forward: leave out --find-unused-parameters")
    if args.compress == "bf16" and dist.get_backend() != "nccl":
        raise SystemExit("--compress bf16 needs NCCL, which sums bf16: use fp16")
    if args.compress == "powersgd" and getattr(args, "precision", "") == "fp16":
        raise SystemExit("--compress powersgd never recovers from an overflow of fp16: use another --compress")
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """A full replica on every rank; backward all-reduces gradients bucket by bucket while it still computes."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_batch_norm else model
    model = DistributedDataParallel(
        model.to(device),
        # with precision instead: placed(model, device, args),
        gradient_as_bucket_view=args.gradient_as_bucket_view,
        find_unused_parameters=args.find_unused_parameters,
        static_graph=args.static_graph,
        bucket_cap_mb=args.bucket_mib or None,  # 25 differs from the default, whose first bucket is smaller
    )
    return compressed(model, args)


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)
