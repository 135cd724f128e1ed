"""What training that communicates less costs in loss, and from which bandwidth on it pays:
`python benchmarks/talk_less.py --seeds 0 1 2 --steps 300`.

The loss on the test data after the same number of samples, against DDP from the same seed; bytes that each rank sends
per step; and the bandwidth below which a step is faster than DDP's.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path
from statistics import median
from types import ModuleType

import torch

from labkit import Script
from labkit.planner.layout import layout_of
from labkit.planner.model.facts import facts_of
from labkit.planner.speed.traffic import volume, wire

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed"])
SIZES = "width=128, heads=4, layers=4"
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


def small(script: Script) -> Script:
    """With a model that trains in seconds on a CPU."""
    model = script.cells["model"].text
    assert SIZES in model
    return script.with_cells(model=model.replace(SIZES, "width=32, heads=4, layers=2"))


def bytes_sent(name: str, options: dict[str, object], ranks: int, batch: int) -> float:
    """Bytes that each rank sends per step, by the planner's formulas; of PowerSGD by the model's own matrices."""
    parameters = {"global_batch_size": batch, **options}
    layout = layout_of(small(Script.load(name)), ranks, parameters)
    if options.get("compress") == "powersgd":
        return 4 * sent_by_powersgd(int(str(options["powersgd_rank"]))) * wire("all_reduce", ranks)
    facts = facts_of(small(Script.load("single")), {"global_batch_size": batch})
    return sum(each.bytes * wire(each.kind, each.group) for each in volume(facts, layout))


def sent_by_powersgd(rank: int) -> int:
    """Elements: two factors of each matrix of which they are less than half, the rest whole (torch's powerSGD_hook)."""
    module = ModuleType("train")
    exec(str(small(Script.load("single"))), module.__dict__)
    shapes = [(p.shape[0], p.numel() // p.shape[0]) for p in module.Model().parameters()]
    return sum(min(k, r) if 2 * r < k else k for n, m in shapes for k, r in [(n * m, min(n, m, rank) * (n + m))])


def break_even(sent: float, sent_by_ddp: float, compute_seconds: float, *, hidden: bool) -> float:
    """The bandwidth in bytes/s below which a step is faster than DDP's. DDP's communication of W bytes hides behind
    backward, b seconds, so its step is longer by W/B - b. Compressed gradients (`hidden`) hide as well, so they win as
    soon as DDP's do not, at W/b. Averages after the last step do not hide: they win below (W - w)/b."""
    backward = HIDDEN * compute_seconds
    return (sent_by_ddp if hidden else sent_by_ddp - sent) / backward


def trained(script: Path, options: dict[str, object], ranks: int) -> float:
    """The loss on the test data. The ranks are forked with torch imported, without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with FORKS.Manager() as manager:
        losses = manager.list()
        rank_arguments = [(script, rank, ranks, port, argv, losses) for rank in range(ranks)]
        processes = [FORKS.Process(target=a_rank, args=arguments) for arguments in rank_arguments]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return float(losses[0])


def a_rank(script: Path, rank: int, ranks: int, port: int, argv: list[str], losses: list[float]) -> None:
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.args, dict) and "test_loss" in record.args:
                losses.append(record.args["test_loss"])

    logging.getLogger("metrics").addHandler(Collect())
    sys.argv = [str(script), *argv]
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    runpy.run_path(str(script), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--compute-seconds", type=float, default=1.0, help="of a step, for the break-even bandwidth")
    args = parser.parse_args()
    batch, losses = 16, {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (strategy, options) in WAYS.items():
            script = small(Script.load(strategy, *(["ddp_options"] if "compress" in options else [])))
            path = script.write(Path(folder) / f"{len(losses)}.py")
            for seed in args.seeds:
                whole = {"steps": args.steps, "global_batch_size": batch, "seed": seed, **options}
                losses[name, seed] = trained(path, whole, args.ranks)
                print(f"{name}, seed {seed}: {losses[name, seed]:.3f}", file=sys.stderr, flush=True)
    print(f"{args.ranks} ranks, {args.steps} steps of {batch} samples, seeds {' '.join(map(str, args.seeds))}\n")
    table(losses, args.seeds, args.ranks, batch, args.compute_seconds)


def table(losses: dict[tuple[str, int], float], seeds: list[int], ranks: int, batch: int, seconds: float) -> None:
    whole = bytes_sent(*WAYS["ddp"], ranks, batch)
    print("| method | test loss | vs. ddp: median (range) | bytes sent per step and rank | % of ddp | faster below |")
    print("|---|---|---|---|---|---|")
    for name, (strategy, options) in WAYS.items():
        sent = bytes_sent(strategy, options, ranks, batch)
        apart = [losses[name, seed] - losses["ddp", seed] for seed in seeds]
        loss = median(losses[name, seed] for seed in seeds)
        below = break_even(sent, whole, seconds, hidden=strategy == "ddp") * 8 / 1e6
        faster = "" if name == "ddp" else f"{below:.3g} Mbit/s"
        change = "" if name == "ddp" else f"{median(apart):+.3f} ({min(apart):+.3f} to {max(apart):+.3f})"
        print(f"| {name} | {loss:.3f} | {change} | {sent:,.0f} | {sent / whole:.1%} | {faster} |")


if __name__ == "__main__":
    main()
