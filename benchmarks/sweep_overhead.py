"""A sweep of many runs of a toy, killed in the middle and resumed: each point once, and what a run costs over a launch.

    python benchmarks/sweep_overhead.py [100]      (about five minutes)

The runs follow each other, so that their seconds can be compared with those of launches one by one.
"""

from __future__ import annotations

import io
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import psutil

import labkit
from labkit.files import read_json
from labkit.launcher.stopping import processes_of

LAUNCHES = 10
TOY = "import argparse, pathlib\np = argparse.ArgumentParser()\np.add_argument('--point', type=int)\n"
TOY += (
    "p.add_argument('--ran')\na = p.parse_args()\nwith pathlib.Path(a.ran).open('a') as f: f.write(f'{a.point}\\n')\n"
)


def main() -> None:
    points = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        os.environ |= {"LABKIT_RUNS": f"{folder}/runs", "LABKIT_UI": "text"}
        script, ran = Path(folder, "toy.py"), Path(folder, "ran")
        script.write_text(TOY)
        alone = []
        for _ in range(LAUNCHES + 1):  # the first one has no warm process
            began = time.perf_counter()
            labkit.launch(script, nproc_per_node=1, point=0, ran=os.devnull, wait=True)
            alone.append(time.perf_counter() - began)
        began = time.perf_counter()
        sweep = labkit.sweep(script, point=list(range(points)), ran=str(ran), at_once=1, detach=True, wait=False)
        while sum(result.state == "succeeded" for result in sweep.results()) < points // 2:
            time.sleep(0.1)
        psutil.Process(read_json(sweep.folder.agent)["sweeper"]["pid"]).kill()
        while sweep.status().state != "lost":
            time.sleep(0.05)
        state = sweep.resume(wait=False).wait()
        each, launch = (time.perf_counter() - began) / points, statistics.median(alone[1:])
        times = Counter(Counter(ran.read_text().split()).values())
        left = sum(len(processes_of(run.folder)) for run in sweep.runs())
    print(f"{state.sentence}; points by how often they ran: {dict(times)}; processes left: {left}")
    print(f"a launch {launch:.2f} s; a run of the sweep {each:.2f} s, its overhead {each - launch:+.2f} s")


if __name__ == "__main__":
    main()
