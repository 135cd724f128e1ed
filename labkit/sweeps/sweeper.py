"""Owns the queue of a sweep as a process of its own: it starts runs as others end, and records how the sweep ended.

python -m labkit.sweeps.sweeper SWEEP_FOLDER OWNER_PID < JSON

It outlives the notebook's kernel, unless it is given the pid of an owner; when that is no longer its parent, the sweep
is stopped. If it is killed itself, runs that are not tied to it go on, and the next process of the sweep adopts them.
The JSON has the variables for the ranks, which may be secrets and are never written to disk.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from labkit.errors import LabError, LaunchError
from labkit.export import start_exporter
from labkit.hardware import hardware
from labkit.launch_options import LaunchOptions
from labkit.launcher import GpusInUseError, busy_gpus, check_ranks, prepare_launch, start, stop
from labkit.record import RunFolder, RunReader, State, SweepPoint
from labkit.sweeps.folder import Job, RunIndex, SweepFolder, SweepState
from labkit.sweeps.results import counted, measured

SHARE = "LABKIT_SHARE_GPUS"


@dataclass(frozen=True)
class Room:
    """`ranks` of each run, `at_once` runs at a time, `gpus` as `CUDA_VISIBLE_DEVICES` names them (empty on the CPU),
    `gpus_each` of them for a run, and `threads` of each rank."""

    ranks: int
    at_once: int
    gpus: tuple[str, ...]
    gpus_each: int
    threads: int
    shared: bool = False

    def free_gpus(self) -> list[str] | None:
        """The GPUs for the next run; None if too few are free. Runs that are not of the sweep hold theirs, too."""
        if not self.gpus:
            return []
        return chosen(self.gpus, busy_gpus(self.gpus), self.gpus_each, self.shared)

    def environment(self, gpus: Sequence[str]) -> dict[str, str]:
        """The variables of a run on these GPUs. Runs share the cores, so each gets its part of the threads."""
        threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(self.threads)}
        return threads | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def room_for(nproc_per_node: int | str, backend: str | None, at_once: int | None, env: Mapping[str, str]) -> Room:
    """What fits this machine. Raises LaunchError when one run does not fit, or not `at_once` of them."""
    machine = hardware(env.get("CUDA_VISIBLE_DEVICES"))
    ranks = check_ranks(nproc_per_node, backend, machine)
    gpus = tuple(machine.gpu_names(len(machine.gpus)))
    each = min(ranks, len(gpus))
    shared = {**os.environ, **env}.get(SHARE) == "1"
    fitting = max(1, len(gpus) // each if gpus else machine.cores // ranks)
    if gpus and at_once is not None and at_once > fitting and not shared:
        raise LaunchError(
            f"at_once={at_once} runs of {each} GPU{'s' * (each > 1)} each need {at_once * each} GPUs; this machine has "
            f"{len(gpus)}, enough for {fitting}. Leave at_once out, or let runs share GPUs: env={{'{SHARE}': '1'}}"
        )
    at_once = at_once or fitting
    return Room(ranks, at_once, gpus, each, max(1, machine.cores // (at_once * ranks)), shared)


def chosen(gpus: Sequence[str], busy: Sequence[str], each: int, shared: bool) -> list[str] | None:
    """`each` GPUs that no run holds, or, if they are shared, those that the fewest runs hold; None if too few are free.

    >>> chosen(["0", "1", "2"], ["0"], 2, False)
    ['1', '2']
    """
    runs = Counter(busy)
    candidates = sorted(gpus, key=lambda gpu: runs[gpu]) if shared else [gpu for gpu in gpus if not runs[gpu]]
    return sorted(candidates[:each], key=list(gpus).index) if len(candidates) >= each else None


POLL_SECONDS = 0.1
GPU_POLL_SECONDS = 1.0  # looking for GPUs that other runs hold reads every process of the machine
SETTLED = ("succeeded", "failed", "stopped", "lost")
STOPPING_AT_ONCE = 16


@dataclass(frozen=True)
class Request:
    """What the process is started with, on its standard input: the ranks' variables, and whether failed points run
    again."""

    env: dict[str, str] = field(default_factory=dict)
    failed: bool = False


def main() -> None:
    folder, owner = SweepFolder(sys.argv[1]), int(sys.argv[2])
    request = Request(**json.load(sys.stdin))
    folder.write_agent(os.getpid())
    started = time.time()
    try:
        sweeper = Sweeper(folder, request, owner)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, sweeper.on_signal)
        sweeper.run()
    except Exception as error:
        sentence = f"the sweep's process failed: {error}; resume() runs the remaining points"
        folder.write_state(SweepState("failed", started, time.time(), sentence))
        raise


class Sweeper:
    """One process of a sweep, from its first launch or its resumption to its end."""

    def __init__(self, folder: SweepFolder, request: Request, owner: int):
        self.folder, self.owner, self.env = folder, owner, request.env
        self.manifest = folder.read_manifest()
        self.script = folder.read_script(self.manifest)
        self.room = room_for(self.manifest.nproc_per_node, self.manifest.backend, self.manifest.at_once, self.env)
        self.states: dict[Job, str] = {}
        self.scores: dict[Job, float] = {}
        self.active: dict[Job, RunFolder] = {}
        self.not_launched: dict[str, list[str]] = {}
        self.stopping: set[Job] = set()
        self.adopted: set[Job] = set()  # started by an earlier process
        self.stopper = ThreadPoolExecutor(STOPPING_AT_ONCE)
        self.signalled = ""
        self.started = time.time()
        self.gpus_tried = -GPU_POLL_SECONDS
        self._adopt(failed=request.failed)
        self.write()

    def run(self) -> None:
        """Run the queue until it is empty or the sweep must stop."""
        while True:
            self.look()
            if why := self.reason_to_stop():
                stop_runs(self.active.values(), stop)
                self.look()
                return self.end("stopped", why)
            if not self.fill() and not self.active:
                return self.end(*self.verdict())
            time.sleep(POLL_SECONDS)

    def _adopt(self, *, failed: bool) -> None:
        """Take over what earlier processes of this sweep have started. Points that were stopped or lost run again."""
        final = ("succeeded",) if failed else ("succeeded", "failed")
        for job, run in RunIndex(self.folder).poll().items():
            state = State.read(run)
            if not state.is_final:
                self.states[job], self.active[job] = "running", run
                self.adopted.add(job)
            elif state.state in final:
                self._settle(job, run, state.state)

    def look(self) -> None:
        """Note which runs have ended, with all of their processes, except what the ranks of one that succeeded left."""
        for job, run in [*self.active.items()]:
            state = State.read(run)
            if not state.is_final or (state.state != "succeeded" and state.supervisor_is_alive(run)):
                continue
            del self.active[job]
            if job in self.adopted and state.state in ("stopped", "lost") and not run.stop_request.exists():
                del self.states[job]  # it ended because the earlier process did, so it runs again
                self.adopted.remove(job)
            else:
                self._settle(job, run, state.state)
            self.write()  # its time says how long the sweep lasted if its process is killed

    def _settle(self, job: Job, run: RunFolder, state: str) -> None:
        self.states[job] = state
        if state == "succeeded" and self.manifest.rungs:
            value = measured(RunReader(run).read_all(), self.manifest.metric).last
            if value is not None:
                self.scores[job] = value if self.manifest.lowest else -value

    def reason_to_stop(self) -> str:
        """Why the sweep must stop, empty if it need not. Stops single points that were asked to."""
        points = self.folder.requested_stop()
        if self.signalled:
            return f"the sweep's process received {self.signalled}"
        if self.owner and os.getppid() != self.owner:
            return "the process that started this sweep has exited"
        if points is None:
            return "stopped on request"
        if not self.folder.path.is_dir():
            return "the sweep's folder was deleted"
        for job in [job for job in self.active if job.point in points and job not in self.stopping]:
            self.stopping.add(job)
            self.stopper.submit(stop, self.active[job])
        return ""

    def fill(self) -> bool:
        """Start what may start and fits; returns whether any job is left to start."""
        rungs, factor = self.manifest.rungs, self.manifest.halving or 1
        waiting = due(len(self.manifest.points), self.states, self.scores, rungs=len(rungs or [0]), factor=factor)
        for job in waiting:
            if job.point in (self.folder.requested_stop() or []):
                self._note(job, "stopped", "stopped before it was launched")
            elif len(self.active) >= self.room.at_once or not self.launch(job):
                return True
        return bool(waiting)

    def launch(self, job: Job) -> bool:
        """Start a job, unless too few GPUs are free. One that cannot be launched is recorded, and the sweep goes on."""
        if self.room.gpus and time.monotonic() < self.gpus_tried + GPU_POLL_SECONDS:
            return False
        try:
            gpus = self.room.free_gpus()
        except LabError as error:
            print(error, flush=True)
            gpus = None
        if gpus is None:
            self.gpus_tried = time.monotonic()
            return False
        parameters, args = self.manifest.parameters_of(job, self.folder.checkpoints)
        options = LaunchOptions(
            nproc_per_node=self.room.ranks,
            backend=self.manifest.backend,
            args=args,
            name=f"{self.manifest.name}-{job.point}",
            runs_dir=self.folder.runs,
            env=self.env | self.room.environment(gpus),
            retries=self.manifest.retries,
            watchdog=self.manifest.watchdog,
            stop_if=self.manifest.stop_if,
        )
        source = self.manifest.script_path
        mark = SweepPoint(self.folder.id, job.point, job.rung, self.manifest.better)
        try:
            launch = prepare_launch(
                self.script, options, parameters, source=Path(source) if source else None, ends_with_session=True
            )
            self.active[job] = start(launch, tied=self.owner != 0, sweep=mark)
        except GpusInUseError:  # another launch was faster
            self.gpus_tried = time.monotonic()
            return False
        except LabError as error:
            self._note(job, "failed", str(error))
            return True
        if formats := self.manifest.export:
            start_exporter(self.active[job], formats)
        self.states[job] = "running"
        return True

    def _note(self, job: Job, state: str, why: str) -> None:
        self.states[job] = state
        self.not_launched[str(job.point)] = [state, why]
        self.write()

    def verdict(self) -> tuple[str, str]:
        """The final state, and how many points succeeded and failed."""
        last = {job.point: self.states[job] for job in sorted(self.states)}
        counts = Counter(last.values())
        failed = counts["failed"] + counts["lost"]
        state = "failed" if failed else "stopped" if counts["stopped"] else "succeeded"
        return state, counted([*last.values()])

    def end(self, state: str, sentence: str) -> None:
        self.write(SweepState(state, self.started, time.time(), sentence, self.not_launched))

    def write(self, state: SweepState | None = None) -> None:
        try:
            self.folder.write_state(state or SweepState("running", self.started, not_launched=self.not_launched))
        except OSError as error:  # a full disk, a deleted folder: the runs matter more
            print(f"state.json could not be written: {error}", flush=True)

    def on_signal(self, number: int, _: object) -> None:
        self.signalled = signal.Signals(number).name


def rungs_of(steps: int, points: int, factor: int) -> list[int]:
    """The steps, in total, that a point has been trained for at the end of each rung; the last one has all `steps`.

    Each rung trains `factor` times as long as the one before, and there are as many as leave one point for the last.

    >>> rungs_of(900, 9, 3)
    [100, 300, 900]
    """
    rounds = 0
    while points > 1:
        points, rounds = math.ceil(points / factor), rounds + 1
    return sorted({max(1, math.ceil(steps / factor**rung)) for rung in range(rounds + 1)})


def due(
    points: int, states: Mapping[Job, str], scores: Mapping[Job, float], *, rungs: int = 1, factor: int = 1
) -> list[Job]:
    """The jobs that have no state yet and may start, in order.

    A rung starts when every job of the one before has ended. `scores` are those of jobs that succeeded; lower is
    better, and a job without one, or with NaN, is not kept.
    """
    jobs = [Job(point) for point in range(points)]
    for rung in range(rungs):
        if waiting := [job for job in jobs if job not in states]:
            return waiting
        if rung + 1 == rungs or any(states[job] not in SETTLED for job in jobs):
            return []
        jobs = [Job(job.point, rung + 1) for job in survivors(jobs, scores, factor)]
    return []


def survivors(jobs: Sequence[Job], scores: Mapping[Job, float], factor: int) -> list[Job]:
    """The best 1/factor of a rung's jobs, at least one if any has a score, in the order of their points."""
    ranked = sorted((job for job in jobs if not math.isnan(scores.get(job, math.nan))), key=lambda job: scores[job])
    return sorted(ranked[: math.ceil(len(jobs) / factor)])


def stop_runs(runs: Iterable[RunFolder], stop: Callable[[RunFolder], object]) -> None:
    """Call `stop` for each of them, some at a time: each may take the grace period of a run."""
    with ThreadPoolExecutor(STOPPING_AT_ONCE) as pool:
        for stopped in [pool.submit(stop, run) for run in runs]:
            try:
                stopped.result()
            except LabError as error:  # the others are stopped all the same
                print(error, flush=True)


if __name__ == "__main__":
    main()
