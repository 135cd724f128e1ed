"""labkit's scripts against a hand-written loop, accelerate, Lightning and Trainer: same model, batches and threads.

    python benchmarks/script_speed.py > docs/evidence/script_speed.md  (about twelve minutes on two quiet cores)
    python benchmarks/script_speed.py --repeats 3 --strategies ddp

Under bare torchrun with one thread a rank. All means take turns, in alternating order; a ratio is of two times of one
turn. Exit code 1 if a script takes more than 2 % longer than the best of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

import labkit
from labkit.planner.data_sheets import this_machine
from labkit.planner.model.facts import facts_of

HERE = Path(__file__).parent
STEPS, BATCH, WARM = 50, 16, 10
GPUS = torch.cuda.device_count()
RANKS = {"single": 1, "ddp": 2, "fsdp": 2}
PACKAGES = {"hand": "torch", "accelerate": "accelerate", "lightning": "lightning", "trainer": "transformers"}
INSTALLED = [means for means, package in PACKAGES.items() if find_spec(package)]
MEANS = {"single": INSTALLED, "ddp": INSTALLED, "fsdp": ["hand"]}
ALLOWED = 1.02  # of the best time
# Timed as the others are, from the end of the tenth step; nothing else of the script is changed.
TIMED = f"""            step += 1
            if step in ({WARM}, total_steps) and device.type == "cuda":
                torch.cuda.synchronize()
            if step == {WARM}:
                tenth = time.perf_counter()
            if step == total_steps and dist.get_rank() == 0:
                print(f"seconds {{time.perf_counter() - tenth}}", flush=True)
"""
INTRODUCTION = """
# Speed of the scripts compared with other training loops

The same decoder, data, AdamW and thread count, with batches of {batch} samples, run under bare
torchrun: labkit's composed script, a hand-written loop, accelerate, Lightning and transformers' Trainer. Ratios are the
script's time divided by theirs over steps {warm} to {steps}: the median of {repeats} alternating pairs, and the
range. Measured on {where}, torch {torch}, {day}.
"""


def seconds(script: str | Path, ranks: int, *args: str) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *args], env=env, capture_output=True, text=True, timeout=300)
    reported = re.search(r"^seconds (.+)$", done.stdout, re.MULTILINE)
    if reported is None:
        raise SystemExit(done.stderr)
    return float(reported[1])


def share_of_peak(strategy: str, step_seconds: float) -> str:
    """Of a rank's device in fp32: a backward is counted as two forwards. Empty for a device without a data sheet."""
    peak = this_machine().flops.get("fp32") if GPUS else None
    if peak is None:
        return ""
    forward = sum(unit.flops for unit in facts_of(labkit.Script.load(strategy), {}, ()).units)
    return f"{3 * forward * BATCH / RANKS[strategy] / step_seconds / peak:.1%}"


def compared(strategy: str, repeats: int, folder: Path) -> bool:
    """Print a row for each of the others; whether the script is as fast as the best of them."""
    ranks = RANKS[strategy]
    script = folder / f"{strategy}.py"
    text = str(labkit.Script.load(strategy))
    assert text.count("            step += 1\n") == 1
    script.write_text(text.replace("            step += 1\n", TIMED))
    its = ["--steps", str(STEPS), "--global-batch-size", str(BATCH)]
    theirs = ["--steps", str(STEPS), "--batch-size", str(BATCH // ranks)]
    runs = {"labkit": [str(script), *its]}
    runs |= {means: [str(HERE / "loops.py"), means, strategy, *theirs] for means in MEANS[strategy]}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats):
        for name in list(runs) if number % 2 == 0 else reversed(runs):
            program, *arguments = runs[name]
            times[name].append(seconds(program, ranks, *arguments))
    step = median(ours := times.pop("labkit")) / (STEPS - WARM)
    medians = []
    for means, others in times.items():
        ratios = [mine / other for mine, other in zip(ours, others, strict=True)]
        medians.append(median(ratios))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        cells = [
            strategy,
            ranks,
            f"{step * 1e3:.1f} ms",
            share_of_peak(strategy, step),
            means,
            f"{medians[-1]:.3f}",
            spread,
        ]
        print("|", *(f"{cell} |" for cell in cells), flush=True)
    return max(medians) <= ALLOWED


def shares(strategy: str) -> None:
    options = {"steps": STEPS, "global_batch_size": BATCH, "env": {"OMP_NUM_THREADS": "1"}, "wait": True}
    with contextlib.redirect_stdout(sys.stderr):  # what labkit says of itself
        run = labkit.launch(strategy, nproc_per_node=RANKS[strategy], **options)
    steps = run.metrics().dropna(subset=["step_seconds"]).query(f"step > {WARM}")
    total = (steps["step_seconds"] * steps["steps"]).sum()
    parts = {name: steps[name].sum() / total for name in ("forward", "backward", "optimizer", "communication", "input")}
    rate = steps.groupby("rank")["samples"].sum().sum() / (total / RANKS[strategy])
    cells = [strategy, RANKS[strategy], f"{rate:.0f}", *(f"{part:.1%}" for part in parts.values())]
    print("|", *(f"{cell} |" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--strategies", nargs="*", choices=RANKS, default=list(RANKS))
    chosen = parser.parse_args()
    where = f"{GPUS} x {torch.cuda.get_device_name(0)}" if GPUS else f"{os.cpu_count()} cores"
    print("<!-- written by: python benchmarks/script_speed.py > docs/evidence/script_speed.md -->")
    facts = {"torch": torch.__version__, "day": time.strftime("%Y-%m-%d"), "where": where, "repeats": chosen.repeats}
    print(INTRODUCTION.format(batch=BATCH, warm=WARM, steps=STEPS, **facts))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LABKIT_RUNS": folder, "LABKIT_UI": "text"}
        print("| script | ranks | step | share of the device's peak | compared with | time ratio | range |")
        print("|---|---|---|---|---|---|---|")
        fast = [compared(strategy, chosen.repeats, Path(folder)) for strategy in chosen.strategies]
        print("\n| script | ranks | samples/s | forward | backward | optimizer | communication | input |")
        print("|---|---|---|---|---|---|---|---|")
        for strategy in chosen.strategies:
            shares(strategy)
    raise SystemExit(not all(fast))


if __name__ == "__main__":
    main()
