"""Starts a prepared launch on this host: writes its folder and starts its supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from labkit.files import Json, removed_on_failure
from labkit.launcher.locks import check_gpus_are_free, lock_checkpoints, one_launch_at_a_time
from labkit.launcher.prepare import Launch, create_run
from labkit.launcher.warm import session as warm
from labkit.launcher.warm.process import with_room
from labkit.record import Node, RunFolder, SweepPoint

CROWDED = 2  # ranks per core above which times mean little
# Supervisors this process has started; one that has ended is a zombie until it is polled.
_supervisors: list[subprocess.Popen[bytes]] = []


def start(
    launch: Launch,
    *,
    tied: bool,
    shares_gpus: bool = False,
    prediction: Mapping[str, Json] | None = None,
    sweep: SweepPoint | None = None,
) -> RunFolder:
    """Start a run on this host and return its folder immediately. If `tied`, it stops with this process.

    `prediction` is written to the folder before the first rank starts, `sweep` is the sweep and point that the run
    belongs to. Raises LaunchError, after which there is no folder.
    """
    folder = create_run(launch, prediction=prediction, sweep=sweep)
    with removed_on_failure(folder.path):
        _print_notices(launch)
        with one_launch_at_a_time() if launch.gpus else nullcontext():
            if not shares_gpus and launch.environment.get("LABKIT_SHARE_GPUS") != "1":
                check_gpus_are_free(launch.gpus)
            _supervise(folder, launch, owner=os.getpid() if tied else 0)
    warm.prepare(folder, launch.environment)
    return folder


def _print_notices(launch: Launch) -> None:
    """Print what the ranks share, or leave unused, of this machine."""
    machine, ranks = launch.machine, launch.ranks
    if machine is None:
        return
    if ranks > CROWDED * machine.cores and not machine.gpus:
        print(f"{ranks} ranks on {machine.cores} cores: they start one at a time, and timings will not be meaningful")
    threads = machine.cores // ranks
    if ranks > 1 and threads > 1 and not machine.gpus and "OMP_NUM_THREADS" not in launch.environment:
        print(f"torchrun gives each rank one thread; to use all cores, pass env={{'OMP_NUM_THREADS': '{threads}'}}")
    if machine.unusable_gpus:
        print(f"this machine has NVIDIA GPUs, but the ranks train on the CPU: {machine.unusable_gpus}")


def _supervise(folder: RunFolder, launch: Launch, *, owner: int) -> None:
    """Start the run's supervisor: a fork of the session's warm process if it fits, else a new process. It holds the
    lock of the checkpoints until it exits."""
    _supervisors[:] = [process for process in _supervisors if process.poll() is None]
    checkpoints = launch.parameters.get("checkpoint_dir")
    lock = lock_checkpoints(Path(checkpoints).absolute(), folder) if checkpoints else None
    descriptors = [] if lock is None else [lock]
    try:
        if not warm.supervise(folder, launch.environment, descriptors, owner=owner):
            _supervisors.append(_start_supervisor(folder, launch.environment, descriptors, owner=owner))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _start_supervisor(
    folder: RunFolder, environment: Mapping[str, str], descriptors: Sequence[int], *, owner: int
) -> subprocess.Popen[bytes]:
    # The environment may hold secrets: it is inherited and never written to disk.
    command = [sys.executable, "-u", str(folder.outermost), "labkit.launcher.supervisor", str(folder.path), str(owner)]
    variables = dict(environment)
    if warm.may_fork(environment):
        command, variables = with_room(command, variables)
    with folder.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a notebook's interrupt reaches the kernel's whole process group
            pass_fds=descriptors,
        )
    Node(folder).record_starting_supervisor(process.pid)
    return process
