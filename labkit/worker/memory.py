"""How much memory this rank uses, by the means its device has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["allocator", "held_by", "resident_set"]


def resident_set() -> Callable[[], dict[str, float]]:
    """A reader of this process's resident set in bytes, and its largest value so far. Costs two microseconds."""
    if not Path("/proc/self/statm").exists():
        import resource

        def largest() -> dict[str, float]:  # macOS tells only the peak, in bytes
            return {"rss": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}

        return largest
    file, page = os.open("/proc/self/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")
    peak = 0.0

    def read() -> dict[str, float]:
        nonlocal peak
        rss = float(os.pread(file, 100, 0).split()[1]) * page
        peak = max(peak, rss)
        return {"rss": rss, "peak": peak}

    return read


def allocator(torch: Any) -> dict[str, float]:
    """What CUDA's caching allocator holds for this rank, in bytes. One `memory_stats` call: each of torch's
    `memory_*` functions builds the whole dictionary again. The peak is torch's own and is never reset here: the
    script may read it too."""
    if not torch.cuda.is_initialized():
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats.get("allocated_bytes.all.current", 0),
        "peak": stats.get("allocated_bytes.all.peak", 0),
        "reserved": stats.get("reserved_bytes.all.current", 0),
        "retries": stats.get("num_alloc_retries", 0),
    }


def held_by(optimizer: Any) -> dict[str, int]:
    """Bytes this rank holds of parameters, gradients and optimizer state; of a sharded tensor, its own shard."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for values in optimizer.state.values() for v in values.values()]
    return {
        "parameters": sum(map(_bytes, parameters)),
        "gradients": sum(_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_bytes, state)),
    }


def _bytes(value: Any) -> int:
    local = value.to_local() if hasattr(value, "to_local") else value
    return local.numel() * local.element_size() if hasattr(local, "element_size") else 0
