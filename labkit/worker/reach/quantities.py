"""Defines the quantities of a training that expressions can use by name; `__all__` has their names.

Norms are of the whole model, even where its parameters are sharded, so all ranks must call them together. The others
are of this rank's batch and shards, and only hooks can see them: what modules put out, and what an optimizer's step
changes. A hook is set when its quantity is first asked for, which is then `UNSEEN`, a nan, until the next step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

__all__ = ["dead_share", "grad_norm", "largest_output", "update_ratio", "weight_norm"]

ACTIVATIONS = ("relu", "elu", "gelu", "silu", "mish", "hardswish")  # in the names of their classes, in lower case
SAMPLED = 4096  # elements of a parameter
GOLDEN = 0.6180339887498949  # its multiples are spread over 0 to 1 evenly, and out of step with any matrix's width
CONVOLUTED = (4, 5)  # dimensions of an output whose units are its channels, the second dimension

UNSEEN = float("nan")  # told from other nans by its identity

_seen: dict[Hashable, Any] = {}  # the newest tensor or number of each hook
_handles: list[Any] = []


def grad_norm(model: Any) -> float:
    """The 2-norm of all gradients of a model, nan if it has none."""
    return _norm(model, [p.grad for p in model.parameters() if p.grad is not None])


def weight_norm(model: Any) -> float:
    """The 2-norm of all parameters of a model."""
    return _norm(model, model.parameters())


def _norm(model: Any, tensors: Iterable[Any]) -> float:
    """The norm over all ranks that hold a part of a tensor; in a pipeline, that of this rank's stage."""
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


def largest_output(model: Any, name: str = "") -> float:
    """The largest magnitude in the output of a submodule, or of the model: its logits, if it names them. Raises
    AttributeError if there is no such submodule, ValueError if it is compiled."""
    module = _inner(model).get_submodule(name)
    seen = _observed(("output", id(module)), model, module, _largest)
    return UNSEEN if seen is UNSEEN else float(seen)


def dead_share(model: Any) -> float:
    """The share of units behind activation functions that no sample of the batch made positive.

    Raises ValueError if the model has no modules for them, because functions such as `F.relu` cannot be observed, or if
    they are compiled."""
    modules = [m for m in model.modules() if any(kind in type(m).__name__.lower() for kind in ACTIVATIONS)]
    if not modules:
        raise ValueError(f"{type(model).__name__} has no modules such as nn.ReLU or nn.GELU")
    counts = [_observed(("dead", id(module)), model, module, _dead) for module in modules]
    dead, units = (sum(float(count[i]) for count in counts if not isinstance(count, float)) for i in (0, 1))
    return dead / units if units else UNSEEN


def update_ratio(optimizer: Any) -> float:
    """The norm of a step's change of the weights over the norm of the weights, from up to 4,096 elements of each."""
    import torch

    key = ("update", id(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if key not in _seen:
        places = [_places(p) for p in parameters]
        _seen[key] = places, []

        def before(*_: Any) -> None:
            _seen[key] = places, [_flat(p)[place].clone() for p, place in zip(parameters, places, strict=True)]

        _handles.append(optimizer.register_step_pre_hook(before))
    places, before_step = _seen[key]
    if not before_step:
        return UNSEEN
    changed = weights = torch.zeros((), device="cpu")
    for parameter, place, old in zip(parameters, places, before_step, strict=True):
        new, share = _flat(parameter)[place].float(), _flat(parameter).numel() / max(1, old.numel())
        changed = changed + share * (new - old.float()).square().sum().cpu()
        weights = weights + share * new.square().sum().cpu()
    return float((changed / weights).sqrt())


def remove_hooks() -> None:
    """Remove all hooks. Asking for a quantity again sets its hook again."""
    while _handles:
        _handles.pop().remove()
    _seen.clear()


def _observed(key: Hashable, model: Any, module: Any, measure: Callable[[Any], Any]) -> Any:
    """What the last forward pass of a module of a model gave; UNSEEN before."""
    if key not in _seen:
        if any(_is_compiled(outer) and module in {*outer.modules()} for outer in model.modules()):
            raise ValueError(f"{type(module).__name__} is compiled, so hooks set later are not called")
        _seen[key] = UNSEEN

        def after(module: Any, inputs: Any, output: Any) -> None:
            import torch

            output = getattr(output, "logits", output)
            output = output[0] if isinstance(output, tuple) and output else output
            if torch.is_tensor(output) and output.is_floating_point():
                with torch.no_grad():
                    _seen[key] = measure(_local(output))

        _handles.append(module.register_forward_hook(after))
    return _seen[key]


def _largest(output: Any) -> Any:
    import torch

    return torch.linalg.vector_norm(output.float() if output.itemsize < 4 else output, math.inf)


def _dead(output: Any) -> tuple[Any, int]:
    unit = 1 if output.dim() in CONVOLUTED else output.dim() - 1
    positive = output.movedim(unit, 0).flatten(1).amax(1) > 0
    return (~positive).sum(), positive.numel()


def _inner(model: Any) -> Any:
    """The module without what DDP, FSDP1 or torch.compile put around it."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    while True:
        if isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def _is_compiled(module: Any) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _flat(parameter: Any) -> Any:
    return _local(parameter.detach()).flatten()


def _places(parameter: Any) -> Any:
    """The indices of some of its elements."""
    import torch

    flat = _flat(parameter)
    if flat.numel() <= SAMPLED:
        return slice(None)
    return ((torch.arange(SAMPLED, dtype=torch.float64) * GOLDEN).frac() * flat.numel()).long().to(flat.device)
