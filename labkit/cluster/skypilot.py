"""A task of SkyPilot as text, with the script in it and a bucket for checkpoints.

Checked with SkyPilot's own schema (PyPI: skypilot), never run on a cloud.
"""

from __future__ import annotations

import shlex

from labkit.cluster.handover import CHECKPOINTS, HandOver
from labkit.cluster.yaml import block, scalar

__all__ = ["sky_task"]

END = "END_OF_SCRIPT"


def sky_task(job: HandOver, *, gpu: str, bucket: str) -> str:
    """The file for `sky jobs launch`. `gpu` is one of SkyPilot's names ("A100"), `bucket` one that nobody else has."""
    file = f"{job.name}.py"
    end = END
    while end in job.text.splitlines():
        end += "_"
    setup = f"""\
pip install "torch>=2.8" numpy
cat > ~/{file} <<'{end}'
{job.text}{end}
"""
    words = shlex.join(job.args)
    run = f"""\
set -eu
# the first node is where all meet; this one's own number and the others' addresses are SkyPilot's
head=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
exec torchrun --nnodes "$SKYPILOT_NUM_NODES" --nproc-per-node {job.nproc_per_node} \\
  --node-rank "$SKYPILOT_NODE_RANK" --master-addr "$head" --master-port 29500 --max-restarts 0 \\
  ~/{file} {words}
""".replace(" \n", "\n")
    return f"""\
# {job.shape}. Written by labkit, whose tests check such files with SkyPilot's own schema; none was run on a cloud.
#   sky jobs launch FILE      replaces machines that are taken away; sky launch FILE does not
#   sky jobs queue, sky jobs logs, sky jobs cancel
# Begun again, {job.goes_on}.
name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: {scalar(f"{gpu}:{job.nproc_per_node}")}
  job_recovery:
    max_restarts_on_errors: 2  # of the script itself; torchrun's own restarts are unreliable in torch 2.13
file_mounts:
  {CHECKPOINTS}:
    name: {scalar(bucket)}  # keep it, and the next launch of this file goes on from there
    # not MOUNT_CACHED: the first node reads what the others wrote before it commits a checkpoint
    mode: MOUNT
envs:
  PYTHONSAFEPATH: "1"  # a script that is called random.py must not hide Python's own
  PYTHONUNBUFFERED: "1"
setup: {block(setup, 2)}
run: {block(run, 2)}
"""
