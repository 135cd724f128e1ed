"""Quantities of a training that expressions can use by name. Norms are of the whole model, also where its parameters
are sharded, so all ranks must call them together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from labkit.worker.observed import dead_share, largest_output, update_ratio

__all__ = ["dead_share", "grad_norm", "largest_output", "update_ratio", "weight_norm"]


def grad_norm(model: Any) -> float:
    """The 2-norm of all gradients of a model, nan if it has none."""
    return _norm(model, [p.grad for p in model.parameters() if p.grad is not None])


def weight_norm(model: Any) -> float:
    """The 2-norm of all parameters of a model."""
    return _norm(model, model.parameters())


def _norm(model: Any, tensors: Iterable[Any]) -> float:
    """Over all ranks that hold a part of a tensor; on a pipeline, of this rank's stage."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    by_mesh = defaultdict(list)  # torch's norm takes the tensors of one mesh
    for tensor in tensors:
        by_mesh[getattr(tensor, "device_mesh", None)].append(tensor.detach())
    if not by_mesh:
        return float("nan")
    squares = 0.0
    for mesh, own in by_mesh.items():
        norm: Any = torch.nn.utils.get_total_norm(own)
        squares += float(norm.full_tensor() if mesh is not None else norm) ** 2
    wrapped = next((m for m in model.modules() if isinstance(m, FullyShardedDataParallel)), None)
    if (
        wrapped is not None and wrapped.sharding_strategy is not ShardingStrategy.NO_SHARD
    ):  # its shards are plain tensors
        total = torch.tensor(squares, device=wrapped.compute_device)
        dist.all_reduce(total, group=wrapped.process_group)
        squares = total.item()
    return float(squares**0.5)
