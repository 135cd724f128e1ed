"""labkit's scripts beside a loop written by hand, accelerate and Lightning: the same model, batches and threads.

    python benchmarks/script_speed.py [repeats]

All means take turns within a repeat, under bare torchrun with one thread a rank; a ratio is of one repeat's times, the
median of the repeats is printed with its range. Then, from labkit's own records, what a step is made of on one and two
ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import labkit

HERE = Path(__file__).parent
STEPS, BATCH, WARM = 110, 16, 10
RANKS = {"single": 1, "ddp": 2, "fsdp": 2}
MEANS = {"single": ["hand", "accelerate", "lightning"], "ddp": ["hand", "accelerate", "lightning"], "fsdp": ["hand"]}
# Timed as the others are, from the end of the tenth step; nothing else of the script is changed.
TIMED = """            step += 1
            if step == 10:
                tenth = time.perf_counter()
            if step == total_steps and dist.get_rank() == 0:
                print(f"seconds {time.perf_counter() - tenth}", flush=True)
"""


def seconds(script: str | Path, ranks: int, *args: str) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *args], env=env, capture_output=True, text=True, timeout=300)
    found = re.search(r"^seconds (.+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(done.stderr)
    return float(found[1])


def compared(strategy: str, repeats: int, folder: Path) -> None:
    ranks = RANKS[strategy]
    script = folder / f"{strategy}.py"
    text = str(labkit.Script.load(strategy))
    assert text.count("            step += 1\n") == 1
    script.write_text(text.replace("            step += 1\n", TIMED))
    ours, others = [], {means: [] for means in MEANS[strategy]}
    for _ in range(repeats):
        ours.append(seconds(script, ranks, "--steps", str(STEPS), "--global-batch-size", str(BATCH)))
        for means, times in others.items():
            options = ["--steps", str(STEPS), "--batch-size", str(BATCH // ranks)]
            times.append(seconds(HERE / "loops.py", ranks, means, strategy, *options))
    step = median(ours) / (STEPS - WARM) * 1e3
    for means, times in others.items():
        ratios = [mine / theirs for mine, theirs in zip(ours, times, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(f"| {strategy} | {ranks} | {step:.1f} ms | {means} | {median(ratios):.3f} | {spread} |", flush=True)


def shares(strategy: str) -> None:
    env = {"OMP_NUM_THREADS": "1"}
    run = labkit.launch(strategy, nproc_per_node=RANKS[strategy], steps=STEPS, global_batch_size=BATCH, env=env)
    steps = run.metrics().dropna(subset=["step_seconds"]).query(f"step > {WARM}")
    time = (steps["step_seconds"] * steps["steps"]).sum()
    parts = {name: steps[name].sum() / time for name in ("forward", "backward", "optimizer", "communication", "input")}
    rate = steps.groupby("rank")["samples"].sum().sum() / (time / RANKS[strategy])
    said = " | ".join(f"{part:.1%}" for part in parts.values())
    print(f"| {strategy} | {RANKS[strategy]} | {rate:.0f} | {said} |", flush=True)


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LABKIT_RUNS": folder, "LABKIT_UI": "text"}
        print("| script | ranks | step | beside | time of the script over theirs | range |\n|---|---|---|---|---|---|")
        for strategy in RANKS:
            compared(strategy, repeats, Path(folder))
        print("\n| script | ranks | samples/s | forward | backward | optimizer | communication | input |")
        print("|---|---|---|---|---|---|---|---|")
        for strategy in RANKS:
            shares(strategy)


if __name__ == "__main__":
    main()
