"""From a launch to the end of the first step: bare torchrun, labkit's first launch of a session, its later ones, and a
launch whose ranks are new processes.

    python benchmarks/launch_latency.py            (about three minutes on two quiet cores)

They alternate, since a shared machine's speed changes; the figures are medians of the ratios to bare torchrun.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labkit import Script

ROUNDS = 7
RANKS = 2
PRINTS = "            step += 1\n"  # in the main cell
LAUNCHES = """
import select, sys, time
import labkit
from labkit.launcher.warm import session

for launch in range(3):
    session.FORKS = launch < 2
    began = time.time()
    run = labkit.launch(sys.argv[1], nproc_per_node=int(sys.argv[2]), args=sys.argv[3:], wait=True)
    print("seconds", float(run.logs(rank=0, stream="stdout").split("first ")[1].split()[0]) - began, flush=True)
    select.select([session._warm[0].control], [], [])  # until it is ready
"""


def seconds_of_torchrun(script: Path, options: list[str]) -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    began = time.time()
    printed = subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
    return min(float(line.split()[1]) for line in printed.splitlines() if line.startswith("first ")) - began


def seconds_of_labkit(script: Path, options: list[str]) -> list[float]:
    """Of the first and of the second launch in a new process, and of one that forks nothing."""
    command = [sys.executable, "-c", LAUNCHES, str(script), str(RANKS), *options]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [float(line.split()[1]) for line in printed.splitlines() if line.startswith("seconds ")]


def main() -> None:
    text = str(Script.load("ddp"))
    first = f'{PRINTS}            if step == 1:\n                sys.stdout.write(f"first {{time.time()}}\\n")\n'
    options = ["--steps", "3", "--global-batch-size", "4"]
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LABKIT_RUNS": folder, "OMP_NUM_THREADS": "1"}
        script = Path(folder) / "train.py"
        script.write_text(text.replace(PRINTS, first))
        for number in range(ROUNDS):
            if number % 2:
                launches, bare = seconds_of_labkit(script, options), seconds_of_torchrun(script, options)
            else:
                bare, launches = seconds_of_torchrun(script, options), seconds_of_labkit(script, options)
            ratios.append([seconds / bare for seconds in launches])
            first, second, cold = launches
            print(f"torchrun {bare:.2f} s, labkit {first:.2f} s, then {second:.2f} s, cold {cold:.2f} s", flush=True)
    for name, values in zip(("first launch", "second launch", "cold launch"), zip(*ratios, strict=True), strict=True):
        print(f"{name}: {statistics.median(values):.2f} of torchrun's time ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
