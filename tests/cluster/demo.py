"""From one machine to a cluster and back, on a Slurm that this makes and takes down: `make cluster-demo`.

The same script on one machine and on two nodes, a rank that fails, a job whose time is up. Every line that begins with
`$` or `>>>` is what you would type.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from cluster.slurm_cluster import Cluster, why_not  # noqa: E402

import labkit  # noqa: E402

STEPS = 60


def main() -> int:
    if why := why_not():
        print(f"no cluster can be made here: it {why}")
        return 1
    with Cluster() as cluster, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"SLURM_CONF": str(cluster.conf), "LABKIT_RUNS": f"{folder}/runs"}
        text = Path(folder, "data", "a.txt")
        text.parent.mkdir()
        text.write_bytes(b"\n".join(path.read_bytes() for path in sorted(TESTS.rglob("*.py")))[:50_000])
        show(cluster, {"steps": STEPS, "global_batch_size": 8, "data_dir": str(text.parent)})
    print("\nthe cluster is down, and nothing of it is left")
    return 0


def show(cluster: Cluster, options: dict[str, object]) -> None:
    say("Two nodes, each a slurmd with a network, a name and an /etc/hosts of its own")
    typed(["sinfo", "--Node", "--long"])

    say("On one machine", '>>> labkit.launch("ddp", nproc_per_node=2, steps=60, …)')
    here = labkit.launch("ddp", nproc_per_node=2, wait=False, detach=True, env={"OMP_NUM_THREADS": "1"}, **options)
    follow(here)

    say("The same script on both nodes", '>>> labkit.submit("ddp", nodes=2, nproc_per_node=1, time="00:10:00", …)')
    there = submit("ddp", **options)
    typed(["squeue"])
    follow(there)

    say("A rank fails on the second node", '>>> labkit.submit("faulty.py", nodes=2, …, fault="raise")')
    failing = submit(TESTS / "scripts" / "faulty.py", fault="raise")
    try:
        follow(failing)
    except labkit.RankFailedError as error:
        print(f"RankFailedError: {error}")
    for node in (0, 1):
        state = json.loads(failing.folder.node(node).state.read_text())
        print(f"node {node} wrote: {state['state']}, {state['cause']['sentence']}")

    say("Time is nearly up: the ranks save, the job goes back into the queue, and resumes")
    resumed = submit("ddp", **options)
    while (steps := resumed.metrics()).empty or steps["step"].max() < 3:
        time.sleep(0.2)
    # Slurm sends it before the end of --time; here it is sent now
    typed(["scancel", "--batch", "--signal=USR1", json.loads(resumed.folder.job.read_text())["job"]])
    follow(resumed)
    print(resumed.folder.job_output.read_text())

    say("All of them side by side", ">>> labkit.compare([here, there, resumed])")
    print(labkit.compare([here, there, resumed]))
    deadline = time.monotonic() + 30  # Slurm cleans up a job after the run has ended
    while (left := len(cluster.processes())) and time.monotonic() < deadline:
        time.sleep(0.2)
    print(f"processes left on the nodes: {left}")


def submit(script: str | Path, **options: object) -> labkit.Run:
    return labkit.submit(script, nodes=2, nproc_per_node=1, time="00:10:00", cpus_per_task=1, **options)


def follow(run: labkit.Run) -> None:
    run.wait(timeout=300, watch=sys.stdout.isatty())
    print(run)


def say(title: str, code: str = "") -> None:
    print(f"\n== {title} ==\n" + (f"{code}\n" if code else ""), flush=True)


def typed(command: list[str]) -> None:
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
