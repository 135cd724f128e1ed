"""What training that communicates less costs in loss, and from which bandwidth on it pays:
`python benchmarks/talk_less.py --seeds 0 1 2 --steps 300`.

The loss on the test data after the same number of samples, against DDP from the same seed; bytes that each rank sends
per step; and the bandwidth below which a step is faster than DDP's.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from statistics import median
from types import ModuleType

import labkit
from labkit import Script
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import facts_of
from labkit.planner.speed.traffic import volume, wire

HIDDEN = 2 / 3  # of a step's computation is backward, behind which DDP communicates
WAYS = {
    "ddp": ("ddp", {}),
    "fp16": ("ddp", {"compress": "fp16"}),
    "int8": ("ddp", {"compress": "int8"}),
    "PowerSGD, rank 4": ("ddp", {"compress": "powersgd", "powersgd_rank": 4}),
    "PowerSGD, rank 1": ("ddp", {"compress": "powersgd", "powersgd_rank": 1}),
    "local SGD, 10 steps": ("diloco", {"sync_every": 10, "outer_lr": 1, "outer_momentum": 0}),
    "DiLoCo, 10 steps": ("diloco", {"sync_every": 10}),
    "DiLoCo, 50 steps": ("diloco", {"sync_every": 50}),
}


def bytes_sent(name: str, options: dict[str, object], ranks: int, batch: int) -> float:
    """Bytes that each rank sends per step, by the planner's formulas; of PowerSGD by the model's own matrices."""
    parameters = {"global_batch_size": batch, **options}
    layout = layout_of(Script.load(name), ranks, parameters)
    if options.get("compress") == "powersgd":
        return 4 * sent_by_powersgd(int(str(options["powersgd_rank"]))) * wire("all_reduce", ranks)
    facts = facts_of(Script.load("single"), {"global_batch_size": batch})
    return sum(each.bytes * wire(each.kind, each.group) for each in volume(facts, replace(layout, ranks=ranks)))


def sent_by_powersgd(rank: int) -> int:
    """Elements: two factors of each matrix of which they are less than half, the rest whole (torch's powerSGD_hook)."""
    module = ModuleType("train")
    exec(str(Script.load("single")), module.__dict__)
    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in module.Model().parameters()]
    return sum(min(k, r) if 2 * r < k else k for n, m in shapes for k, r in [(n * m, min(n, m, rank) * (n + m))])


def break_even(sent: float, sent_by_ddp: float, compute_seconds: float, *, hidden: bool) -> float:
    """The bandwidth in bytes/s below which a step is faster than DDP's. DDP's communication of W bytes hides behind
    backward, b seconds, so its step is longer by W/B - b. Compressed gradients (`hidden`) hide as well, so they win as
    soon as DDP's do not, at W/b. Averages after the last step do not hide: they win below (W - w)/b."""
    backward = HIDDEN * compute_seconds
    return (sent_by_ddp if hidden else sent_by_ddp - sent) / backward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compute-seconds", type=float, default=1.0, help="of a step, for the break-even bandwidth")
    args = parser.parse_args()
    batch, losses = 16, {}
    for name, (strategy, options) in WAYS.items():
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                run = labkit.launch(
                    strategy, nproc_per_node=args.ranks, steps=args.steps, global_batch_size=batch, seed=seed,
                    runs_dir=folder, wait=True, **options
                )  # fmt: skip
                losses[name, seed] = float(run.metrics()["test_loss"].dropna().iloc[0])
    whole = bytes_sent(*WAYS["ddp"], args.ranks, batch)
    print(f"{args.ranks} ranks, {args.steps} steps of {batch} samples, seeds {' '.join(map(str, args.seeds))}\n")
    print("| way | test loss | against ddp: median (range) | bytes sent per step and rank | of ddp's | faster below |")
    print("|---|---|---|---|---|---|")
    for name, (strategy, options) in WAYS.items():
        sent = bytes_sent(strategy, options, args.ranks, batch)
        apart = [losses[name, seed] - losses["ddp", seed] for seed in args.seeds]
        loss = median(losses[name, seed] for seed in args.seeds)
        below = break_even(sent, whole, args.compute_seconds, hidden=strategy == "ddp") * 8 / 1e6
        faster = "" if name == "ddp" else f"{below:.3g} Mbit/s"
        change = "" if name == "ddp" else f"{median(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})"
        print(f"| {name} | {loss:.3f} | {change} | {sent:,.0f} | {sent / whole:.1%} | {faster} |")


if __name__ == "__main__":
    main()
