"""What can be counted or calculated of popular claims, without a lab: popular_claims.py prints it.

python benchmarks/counted_claims.py batch_division
"""

from __future__ import annotations

import functools
import sys
import warnings

__all__ = [
    "batch_division",
    "overhead_of_its_table",
    "parameters_of_the_cnn",
    "speedup_when_bound",
    "units_of_the_size_policy",
    "years_of_gpt_3",
]


def _cnn():  # type: ignore[no-untyped-def]
    """Three convolutions and two linear layers of the article's sizes, for images of 28 x 28."""
    from torch import nn

    convolutions = [nn.Conv2d(a, b, 5, padding=2) for a, b in ((1, 32), (32, 64), (64, 128))]
    return nn.Sequential(*convolutions, nn.Linear(128 * 3 * 3, 128), nn.Linear(128, 10))


def parameters_of_the_cnn() -> str:
    return f"{sum(parameter.numel() for parameter in _cnn().parameters()):,} parameters"


def units_of_the_size_policy() -> str:
    """How many modules FSDP1 wraps, the whole one included, for two limits."""
    from torch import device
    from torch import distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    warnings.filterwarnings("ignore")  # of FSDP1: that it is deprecated, and that one rank does not shard
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for limit in (1_000_000, 100_000):
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=limit)
            model = FullyShardedDataParallel(_cnn(), auto_wrap_policy=policy, device_id=device("cpu"))
            units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
            found.append(f"{units} unit{'s' if units > 1 else ''} with a limit of {limit:,}")
    finally:
        dist.destroy_process_group()
    return "; ".join(found)


def batch_division() -> str:
    """Steps of an epoch of 60,000 samples on two ranks, for two values of DataLoader's batch_size."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = DistributedSampler(range(60_000), 2, rank=0)  # type: ignore[arg-type]
    found = []
    for size in (128, 64):
        loader = DataLoader(range(60_000), size, sampler=sampler)  # type: ignore[arg-type, var-annotated]
        found.append(f"batch_size={size}: {len(next(iter(loader)))} on each of 2 ranks, {len(loader)} steps")
    return "; ".join(found)


def overhead_of_its_table() -> str:
    speedup = 44.69 / 34.69  # seconds of its table: one GPU, DDP on two
    return (
        f"{speedup:.2f} times; 2 / (1 + 5%) = {2 / 1.05:.2f}; an overhead of {2 / speedup - 1:.0%} gives {speedup:.2f}"
    )


def years_of_gpt_3() -> str:
    years = 6 * 175e9 * 300e9 / 28e12 / (365.25 * 24 * 3600)
    return f"{years:.0f} years"


def speedup_when_bound() -> str:
    """Of eight ranks, if a part of one rank's step is sending, which more ranks do not shorten."""
    gain = {share: 1 / ((1 - share) / 8 + share) for share in (0.01, 0.5)}
    return "8 ranks: " + "; ".join(f"{times:.1f} times if {share:.0%} is sending" for share, times in gain.items())


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in __all__:
        print(globals()[sys.argv[1]]())
        return 0
    print(f"counted_claims.py takes one of {', '.join(__all__)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
