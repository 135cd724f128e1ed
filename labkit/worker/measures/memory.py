"""Measures how much memory this rank uses on its device."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from labkit.hardware import memory_limit
from labkit.rank_files import RankFile


def resident_set() -> Callable[[], dict[str, float]]:
    """A reader of this process's resident set in bytes, now and at its peak. Each call takes about 6 us."""
    if not Path("/proc/self/status").exists():
        import resource

        def largest() -> dict[str, float]:  # macOS reports only the peak, in bytes
            return {"rss": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}

        return largest
    file = RankFile("/proc/self/status", os.O_RDONLY)

    def read() -> dict[str, float]:
        status = file.read(1 << 16)  # it also lists the groups of the user, who may be in hundreds
        # getrusage's maximum would include torchrun's agent, whose memory a rank shares until exec
        return {"rss": _kibibytes(status, b"VmRSS:"), "peak": _kibibytes(status, b"VmHWM:")}

    return read


def _kibibytes(status: bytes, field: bytes) -> float:
    start = status.index(field) + len(field)
    return float(status[start : status.index(b"kB", start)]) * 1024


def computing_device(torch: Any, device: Any) -> Any:
    """The device that computes with parameters on `device`: the current GPU if they are offloaded to the CPU, which it
    shows by having allocated memory. A script that trains on the CPU may have asked for the GPU's name."""
    if device.type == "cpu" and torch.cuda.is_initialized() and torch.cuda.max_memory_allocated():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def allocator(torch: Any, device: Any) -> Callable[[], dict[str, float]]:
    """A reader of what CUDA's caching allocator holds for this rank, in bytes.

    It makes one `memory_stats` call, because each of torch's `memory_*` functions builds the whole dictionary. The peak
    is torch's own and is never reset here, because the script may read it, too.
    """

    def read() -> dict[str, float]:
        stats = torch.cuda.memory_stats(device)
        return {
            "allocated": stats.get("allocated_bytes.all.current", 0),
            "peak": stats.get("allocated_bytes.all.peak", 0),
            "reserved": stats.get("reserved_bytes.all.current", 0),
            "retries": stats.get("num_alloc_retries", 0),
        }

    return read


def host_memory() -> int:
    """Bytes of memory of this machine or container."""
    total, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), memory_limit()
    return total if limit is None else min(total, limit)


def live_optimizers() -> list[Any]:
    """Every optimizer of this process: a GAN has two, and some wrap others."""
    from torch.optim import Optimizer

    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def held_by(optimizers: Iterable[Any]) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on this rank; only the local shard of a sharded tensor."""
    parameters = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}.values()
    state = {id(v): v for each in optimizers for values in each.state.values() for v in values.values()}.values()
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, state)),
    }


def _bytes(value: Any) -> int:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size() if hasattr(local, "element_size") else 0
