"""Starts runs by a scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.checking import warn
from labkit.cluster import JobOptions, prepare_submission, submit_to_slurm
from labkit.errors import LaunchError
from labkit.frontend import ui
from labkit.launch_options import LaunchOptions
from labkit.planner import Plan, ScriptPlan
from labkit.run import Run
from labkit.write import Script


def submit(
    script: Script | str | os.PathLike[str],
    *,
    to: str = "slurm",
    args: Sequence[Any] = (),
    name: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    **parameters: Any,
) -> Run:
    """Submit a training job to Slurm and return immediately; the run is watched, stopped and read like any other.

    `script`, `args`, `name`, `env` and `parameters` are as for `launch`. `runs_dir` must be on a file system that all
    nodes share. `nproc_per_node="auto"` is one rank per GPU of the partition's nodes. `time` is Slurm's: "02:00:00",
    "1-12:00:00", or minutes. `options` are other sbatch options (`["--qos=high", "--mem=64G"]`), and `setup` is shell
    code that runs first ("module load cuda"). The task on each node gets `cpus_per_task` cores (default: two per rank).

    A script with the option `--checkpoint-dir`, such as labkit's own, saves `saving_seconds` before the time limit; its
    job is then requeued and resumes, also when Slurm preempts it. Other scripts run once. The launch file, `job.sbatch`
    in the run folder, explains its contents in comments.

    Raises LaunchError or ScriptError if the job cannot be submitted, with Slurm's own message if there is one.
    """
    if "time" not in parameters:
        raise LaunchError("a Slurm job needs a time limit: pass time='02:00:00', '1-12:00:00' or a number of minutes")
    if to != "slurm":
        raise LaunchError(f"to must be 'slurm', got {to!r}; docs/examples has files for Kubeflow and SkyPilot")
    job, parameters = JobOptions.split(parameters)
    if "retries" in parameters:
        raise LaunchError("Slurm restarts a job from its newest checkpoint; leave retries out")
    if others := sorted(parameters.keys() & LaunchOptions.names()):
        raise LaunchError(f"{others[0]} is an option of launch, not of submit, which lets Slurm choose the nodes")
    if isinstance(script, Plan | ScriptPlan):
        raise LaunchError("a plan can only be launched on one machine; on a cluster, submit its script and parameters")
    warn(script)
    launch = LaunchOptions(args=args, name=name, runs_dir=runs_dir, env=env)
    folder = prepare_submission(script, launch, job, parameters)
    job_id = submit_to_slurm(folder, env)
    run = Run(folder)
    if ui() in ("svg", "display", "static"):
        run.show()
    else:
        print(f"{run.id} is job {job_id}; it outlives this process; stop it with `labkit stop` or run.stop()")
    return run


submit.__signature__ = JobOptions.signature_of(submit)  # type: ignore[attr-defined]
