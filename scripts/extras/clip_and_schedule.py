"""Gradients clipped by their norm over the whole model, and a learning rate with warm-up and decay."""

# %% schedule
import math


def schedule_arguments(parser):
    parser.add_argument("--lr-schedule", choices=["constant", "cosine"], default="constant")
    parser.add_argument("--warmup-steps", type=int, default=0, help="steps of linear learning-rate warmup")


def lr_factor(step, total_steps, args):
    """The factor of every learning rate: rising during the warm-up, then constant or falling along half a cosine.
    It depends only on the step, so checkpoints need not store it."""
    rise = min(1.0, (step + 1) / args.warmup_steps) if args.warmup_steps else 1.0
    if args.lr_schedule == "constant":
        return rise
    after = max(0, step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    return rise * (1 + math.cos(math.pi * after)) / 2


# %% update
import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def update_arguments(parser):
    parser.add_argument("--clip", type=float, default=0.0, help="maximum global gradient norm (0: no clipping)")


def update(model, optimizer, mesh, step, total_steps, args):
    """One optimizer step, the first being step 0. Returns further values to report: {name: number or tensor}."""
    measured = {}
    if args.clip:
        # with precision: scaler.unscale_(optimizer)
        measured["gradient_norm"] = clip_gradients(model, mesh, args.clip)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor(step, total_steps, args)
    optimizer.step()
    # with precision instead: scaler.step(optimizer)
    # with precision: scaler.update()
    optimizer.zero_grad()
    return measured


@torch.no_grad()
def clip_gradients(model, mesh, largest):
    """Shrink all gradients by one factor so that their norm, over the whole model, is at most `largest`; returns it.

    torch's clip_grad_norm_ knows neither the other pipeline stages nor how to add shards of different meshes. Here
    each rank adds up what it holds, weighted so that an element that several ranks hold alike counts once.
    """
    stages = mesh["pipeline"].size() if "pipeline" in mesh.mesh_dim_names else 1
    # FullyShardedDataParallel's parameters are plain tensors, which do not show that they are shards
    flat = getattr(model, "sharding_strategy", None)
    shards = defaultdict(list)  # by the number of ranks that shard a parameter
    for p in model.parameters():
        if p.grad is None:
            continue
        pieces = stages * (mesh.size() if flat and flat.name != "NO_SHARD" else 1)
        if isinstance(p, DTensor):
            if p.grad.placements != p.placements:  # sequence parallel leaves partial sums
                p.grad = p.grad.redistribute(placements=p.placements)
            sizes = [p.device_mesh.size(axis) for axis, where in enumerate(p.placements) if not where.is_replicate()]
            pieces *= math.prod(sizes)
        shards[pieces].append(p.grad.to_local() if isinstance(p, DTensor) else p.grad)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)  # offloaded gradients are on the CPU
    for pieces, grads in shards.items():
        total += get_total_norm(grads).to(total) ** 2 * pieces
    if not hasattr(model, "outer_state"):  # DiLoCo's replicas clip independently
        dist.all_reduce(total)
        total /= dist.get_world_size()
    norm = total.sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for grads in shards.values():
        torch._foreach_mul_(grads, factor.to(grads[0].device, grads[0].dtype))
    return norm
