"""Owns a run as a process of its own: it starts torchrun, watches it and carries out stop requests. When it exits, no
process of the run is left and state.json is correct.

It outlives the notebook's kernel, unless it is given the pid of an owner: when that process exits, the run is stopped.
The supervisor does not carry the run's marker, so a sweep spares it.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from labkit.files import is_deleted, log, write_json
from labkit.hardware import may_have_gpus
from labkit.host import Identity
from labkit.launcher.causes.evidence import place_in, script_of
from labkit.launcher.causes.explain import find_cause, survived_errors
from labkit.launcher.causes.killed import oom_kills
from labkit.launcher.locks import unlock_checkpoints
from labkit.launcher.rank_processes import Programs, named_ranks
from labkit.launcher.shutdown import Leftovers, Shutdown, torchrun_seconds
from labkit.launcher.stalls import PATIENCE_SECONDS, SURVIVOR_SECONDS, Closing, FirstRank, HostNames, Progress, Stalls
from labkit.launcher.stop_condition import StopIf
from labkit.launcher.stopping import SAMPLER, StopRequest, processes_of, request_in_words, requested, sweep
from labkit.launcher.torchrun_command import TORCHRUN, attempt_command, marked
from labkit.launcher.warm.fork import ForkedTorchrun, import_torchrun
from labkit.launcher.warm.process import ROOM, can_show, show_command
from labkit.place import OpenFolder
from labkit.rank_files import REACHABLE
from labkit.record import Cause, Place, RunFolder, State, StateName, Step
from labkit.witness import Judge
from labkit.write import Script

Torchrun = subprocess.Popen[bytes] | ForkedTorchrun
LIBC = ctypes.CDLL(None)  # loaded here because nothing may be loaded between fork and exec
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS, POLL_SECONDS_OF_IMPORT, POLL_SECONDS_OF_LEFTOVERS = 0.1, 0.5, 0.2


def main() -> None:
    folder = RunFolder(sys.argv[1])
    os.environ.pop(ROOM, None)
    if can_show():
        show_command([sys.executable, "-m", "labkit.launcher.supervisor", *sys.argv[1:3]])
    try:
        Supervisor(folder, owner=int(sys.argv[2])).run()
    except Exception as error:
        sweep(folder)  # whatever failed here, leave no process of the run behind
        cause = Cause("supervisor", f"labkit's supervisor failed and the run was stopped: {error!r}")
        if not (state := State.read(folder)).is_final:
            replace(state, state="failed", ended=time.time(), cause=cause).write(folder)
        raise


class Supervisor:
    """Supervises one run from its first attempt to its last. `owner` is the pid that the run is tied to, 0 for none.

    `home` holds the supervisor's own files: the run's folder, or the folder of the one `node` that it supervises.
    """

    def __init__(self, folder: RunFolder, *, owner: int = 0, home: RunFolder | None = None, node: int | None = None):
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks of a killed agent become our children, not init's
        self.folder, self.home, self.node = folder, home or folder, node
        self.opened = OpenFolder(folder.path)
        self.moved: str | None = None  # a notice, if the run's folder was moved
        self.is_tied, self.owner = bool(owner), Identity.of(owner)
        self.title = "the run's supervisor"
        self.decided: float | None = None  # when the decision to stop the run was made, in seconds since the epoch
        self.signals = _Signals()
        self.look_seconds, self.looked = 0.0, 0.0  # between two looks for a stop request, and when the last one was
        self.manifest = folder.read_manifest()
        self.ranks = range(self.manifest.world_size)  # those that are started here
        self.watchdog = self.manifest.watchdog
        self.stalls = Stalls(folder)
        self.first_rank = FirstRank(folder, self.manifest.devices)
        self.leftovers: Leftovers | None = None  # of a run that has succeeded
        self.names = HostNames(folder)
        self.judge = Judge(folder, (), self.manifest.name)  # of the current attempt's training
        self.stop_if: StopIf | None = None  # of the current attempt
        self.script: Script | None = None  # once a finding has named one of its lines
        self.devices: list[str] = []  # those that CUDA shows to the ranks, once one is left out
        own = Identity.of(os.getpid())
        self.identities: dict[str, Any] = {"supervisor": own.as_dict() if own else None, "oom_kills": oom_kills()}
        write_json(self.home.agent, self.identities)
        started = State.written(folder).started or time.time()
        self.state = State("starting", started)
        self.clock = time.monotonic() - (time.time() - started)  # the wall clock may be changed while we run

    def run(self) -> None:
        """Run attempts until one succeeds, one is stopped, or none is left."""
        retries = self.manifest.retries
        fewer = list(self.manifest.fewer_ranks)
        final = self.state
        while not State.is_settled(self.home):
            final = self.attempt()
            if final.state != "failed" or final.attempt > retries or requested(self.folder) is not None:
                break
            ended, ranks = final.as_earlier(), final.ranks
            rank = final.cause.rank if final.cause and final.cause.kind != "stuck" else None
            retried = final.attempt > 1 and not has_stepped(self.folder.attempt(final.attempt))
            if fewer and retried and rank is not None:
                self.leave_out(rank)
                ended["restarted_ranks"] = ranks = fewer.pop(0)
            earlier = [*final.earlier, ended]
            self.state = State("starting", final.started, attempt=final.attempt + 1, earlier=earlier, ranks=ranks)
        self.write(final)
        for folder in self.folder.attempts():
            folder.reserve.unlink(missing_ok=True)
        self.wait_for_leftovers()

    def wait_for_leftovers(self) -> None:
        """Wait for what the ranks of a run that has succeeded left running, after its final state, or end it. Nothing
        else waits for this process any longer."""
        if self.leftovers is not None:
            unlock_checkpoints(self.folder.checkpoint_folder())
            self.leftovers.outlive(self.request_to_end)

    def request_to_end(self) -> StopRequest | None:
        """Wait a moment; returns how what is left of the run must be ended now, None if it need not. The owner of a
        tied run may have exited, and its folder may be moved: the run is over."""
        ready, _, _ = select.select([self.signals.descriptor], [], [], POLL_SECONDS_OF_LEFTOVERS)
        if is_deleted(self.folder.state) and (place := self.opened.path()):
            self.folder.path = place
        return StopRequest() if ready or is_deleted(self.folder.state) else requested(self.folder)

    def leave_out(self, rank: int) -> None:
        """Hide the device of this rank from further attempts, if each rank has one of its own."""
        if not self.devices:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = visible.split(",") if visible else [] if visible == "" else list(self.manifest.gpus)
            ranks = self.manifest.world_size
            self.devices = devices[:ranks] if len(devices) >= ranks else []
        if rank < len(self.devices):
            del self.devices[rank]

    def attempt(self) -> State:
        """Start torchrun, wait for it to exit, and return the final state."""
        folder = self.folder.attempt(self.state.attempt)
        prepare(self.folder, folder)
        self.first_rank = FirstRank(folder, self.manifest.devices)
        if not self.node:  # the first node judges for all ranks
            ranks = range(self.state.ranks or self.manifest.world_size)
            self.judge = Judge(folder, ranks, self.manifest.name, self.locate)
            self.stop_if = StopIf(self.manifest.stop_if, folder) if self.manifest.stop_if else None
        try:
            self.import_torchrun()
        except _StopImporting as stop:
            return self.ended("stopped", cause=stop.cause)
        elapsed, devices = time.monotonic() - self.clock, ",".join(self.devices)
        command = attempt_command(self.manifest.torchrun, self.folder, folder, elapsed, self.state.ranks)
        environment = {**os.environ} | ({"CUDA_VISIBLE_DEVICES": devices} if devices else {})
        try:
            agent = self.start_agent(command, environment, folder, folder.torchrun_log)
        except OSError as error:
            return self.ended("failed", cause=Cause("torchrun", f"torchrun could not be started: {error}"))
        return self.verdict(folder, *self.supervise(agent, folder))

    def import_torchrun(self) -> None:
        """Import torch here, once, so that torchrun and its ranks can be forks. Raises _StopImporting if the run must
        stop before it is done."""
        if self.manifest.new_processes or not can_show() or TORCHRUN in sys.modules:
            return
        stop: _StopImporting | None = None

        def look(*_: object) -> None:
            nonlocal stop
            if why := self.reason_to_stop(wait=False):
                stop = _StopImporting(why[0])
                raise stop
            # not after raising: nobody would catch another
            signal.setitimer(signal.ITIMER_REAL, POLL_SECONDS_OF_IMPORT)

        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, POLL_SECONDS_OF_IMPORT)
        try:
            import_torchrun()
        finally:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a pending one must not kill this process
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        if stop:  # a destructor swallowed it
            raise stop

    def supervise(self, agent: Torchrun, folder: RunFolder) -> tuple[int, Cause | None, int]:
        """Wait until torchrun and everything it started have exited. Returns torchrun's exit code, why it was stopped
        (None if it was not), and how many processes had to be killed."""
        identity = Identity.of(agent.pid)
        write_json(self.home.agent, self.identities | {"agent": identity.as_dict() if identity else None})
        self.write(replace(self.state, state="running"))
        sampler = self.start_sampler()
        why, killed = None, 0
        progress = Progress(folder)
        programs = Programs(folder, identity) if identity else None
        self.names = HostNames(folder)
        closing = Closing(folder, self.home if self.node is not None else folder, self.ranks)
        while agent.poll() is None:
            if programs is not None:
                programs.update()
            why, request = self.reason_to_stop() or self.watch(folder, progress) or (None, StopRequest())
            killed += self.end_survivors(closing)
            if why:
                self.decided = time.time()
                why = self.explained(why, request, folder, progress)
                with suppress(OSError):  # not reachable, or a full disk
                    (folder.requests / "released").touch()  # ranks that are paused may save before they stop
                killed += self.shut_down(identity, request) if identity else self.sweep()
                agent.wait()
                break
        if sampler is not None:
            sampler.kill()
            sampler.wait()
        code = agent.wait()
        if code or why:
            killed += self.sweep()  # after a success, what is left has time to end
        return code, why, killed

    def explained(self, why: Cause, request: StopRequest, folder: RunFolder, progress: Progress) -> Cause:
        """Why a run is stopped, and what its ranks wait for, if they have made no progress for some seconds."""
        if why.kind not in ("stopped", "stuck"):
            return why
        has_time = request.grace is None or request.grace >= PATIENCE_SECONDS  # a look takes as long
        stalled = progress.stalled(PATIENCE_SECONDS) if has_time else {}
        self.look_for_findings(is_stuck=progress.is_stuck(PATIENCE_SECONDS))
        return self.with_places(why, folder, stalled)

    def with_places(self, why: Cause, folder: RunFolder, stalled: dict[int, float] | None = None) -> Cause:
        try:
            return self.stalls.cause(why, folder, stalled)
        except Exception as error:  # a full disk; the run is stopped regardless
            return replace(why, sentence=f"{why.sentence}; its ranks could not be inspected: {error!r}")

    def shut_down(self, agent: Identity, request: StopRequest) -> int:
        """End torchrun and its ranks; returns how many processes had to be killed."""
        before = self.state

        def tell(notice: str, until: float) -> None:
            self.write(replace(before, notice=notice, stuck_since=None, stops_by=until))

        again = self.signals.has_interrupt
        killed = Shutdown(agent, self.folder, request, tell, self.node, self.others_work, again).run()
        self.state = before  # its notice may explain why
        return killed

    def others_work(self, works: bool) -> bool:
        """Whether ranks of other nodes work; a run on one machine has no others. `works` says whether those here do."""
        return False

    def end_survivors(self, closing: Closing) -> int:
        """KILL ranks that torchrun has told to exit because another one failed, at the time limit that torchrun has by
        default, or earlier if they wait for it on their GPUs: there Python runs no handler. Returns how many."""
        seconds = SURVIVOR_SECONDS if self.may_wait_on_gpus() else torchrun_seconds()
        if not (pids := closing.overdue(seconds)):
            return 0
        if self.folder.checkpoint_being_saved():
            return 0
        closing.ended |= pids
        ranks = [process for process in processes_of(self.folder, self.node) if process.pid in pids]
        for rank in ranks:
            with suppress(psutil.Error):  # it has already exited
                rank.kill()
        return len(ranks)

    def may_wait_on_gpus(self) -> bool:
        """Whether the ranks here use NCCL, by the launch or else by this machine, which a job's launch cannot know."""
        backend = self.manifest.backend
        return backend == "nccl" or (backend is None and may_have_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")))

    def sweep(self) -> int:
        return sweep(self.folder, self.node)

    def start_agent(
        self, command: Sequence[str], environment: Mapping[str, str], folder: RunFolder, log_file: Path
    ) -> Torchrun:
        # PDEATHSIG fires when the parent's thread exits; this is the main thread, so it is safe.
        # KILL rather than TERM: without this process nobody would make sure that the ranks exit, too.
        def die_with_parent() -> None:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        environment = marked(environment, self.folder, folder, command)
        with log_file.open("ab") as log:
            if ForkedTorchrun.can_run(command):
                forks = self.manifest.new_processes is None
                return ForkedTorchrun(command, environment, log.fileno(), die_with_parent, forks_ranks=forks)
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def start_sampler(self) -> subprocess.Popen[bytes] | None:
        """Start the process that samples the machine; it exits with this one. The run continues if it cannot start."""
        try:
            return subprocess.Popen(
                [sys.executable, "-m", SAMPLER, str(self.folder.path), str(self.home.path)],
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except OSError as error:
            log(f"the machine is not sampled: {error}")
            return None

    def reason_to_stop(self, *, wait: bool = True) -> tuple[Cause, StopRequest] | None:
        """Wait a moment, unless told otherwise; returns the cause, and how to stop, if the run must stop."""
        ready, _, _ = select.select([self.signals.descriptor], [], [], POLL_SECONDS if wait else 0.0)
        if ready:
            name = self.signals.read()
            cause = Cause("stopped", f"{self.title} received {name}", signal=name)
            return cause, StopRequest(interrupts=name == "SIGINT")
        if self.is_tied and not (self.owner and self.owner.is_alive()):
            return _stopped("the process that started this run has exited"), StopRequest()
        if time.monotonic() < self.looked + self.look_seconds:
            return None
        self.looked = time.monotonic()
        if reason := self.find_folder():
            return _stopped(reason), StopRequest()
        request = requested(self.folder)
        return None if request is None else (request_in_words(self.folder), request)

    def find_folder(self) -> str | None:
        """If the run's folder was moved, leave a link to it in its old place, where the ranks write. Returns why the
        run must stop: the folder was deleted, or no link can be made."""
        if not is_deleted(self.folder.state):
            return None
        old, new = self.folder.path, self.opened.path()
        if new is None or new == old or self.node is not None:
            return "the run's folder was deleted" if self.node is None else "the run's folder was moved or deleted"
        link = old.with_name(f".{old.name}.{os.getpid()}")
        try:
            old.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(new)
            link.replace(old)  # also the link of an earlier move
        except OSError as error:
            link.unlink(missing_ok=True)
            self.folder.path = new  # where the final state is written
            return f"the run's folder was moved from {old} to {new}, and {old} cannot be made a link to it: {error}"
        self.moved = f"its folder was moved to {new}; a link to it is at {old}, where the ranks write"
        return None

    def watch(self, folder: RunFolder, progress: Progress) -> tuple[Cause, StopRequest] | None:
        """Report in state.json what hinders the run; stop it when its watchdog expires."""
        if progress.update():
            self.first_rank.update()
            self.names.update()
            self.look_for_findings(is_stuck=progress.is_stuck())
            if self.stop_if is not None and (sentence := self.stop_if.look()):
                return Cause("stop_if", sentence), StopRequest()
            if self.node is None and (gone := progress.vanished):
                return Cause("early", f"{named_ranks(gone)} exited in a cell", gone), StopRequest()
        self.stalls.update(folder, progress)
        paused = progress.hit
        if progress.paused:
            why = f"paused because {paused}" if paused else "paused"
            how = paused if paused and paused.startswith("held at ") else why
            paused = f"{how}; resume it with run.resume() or `labkit resume`"
        notices = [paused, self.judge.notice(), self.names.notice, self.stalls.notice]
        notices += [*self.first_rank.notices, self.moved, progress.unmeasured]
        notices += [self.stop_if.notice()] if self.stop_if else []
        notice = "; ".join(filter(None, notices)) or None
        is_stuck = self.stalls.notice is not None and progress.is_stuck()
        stuck_since = (self.state.stuck_since or time.time() - progress.idle_seconds) if is_stuck else None
        if (notice, stuck_since) != (self.state.notice, self.state.stuck_since):
            wrong = self.judge.is_certain
            self.write(replace(self.state, notice=notice, stuck_since=stuck_since, wrong=wrong))
        if self.watchdog is None or progress.idle_seconds <= self.watchdog:
            return None
        sentence = f"stopped by the watchdog after {self.watchdog:g} s without progress"
        return Cause("stuck", sentence), StopRequest()

    def locate(self, line: int) -> Place:
        """Where a line of the script is."""
        self.script = self.script or script_of(self.folder, self.manifest)
        return place_in(self.script, self.manifest, line)

    def look_for_findings(self, outcome: StateName | None = None, cause: str = "", *, is_stuck: bool = False) -> None:
        """Judge what the ranks have witnessed, which must not end the run."""
        try:
            self.judge.look(outcome, cause) if outcome else self.judge.look_again(is_stuck=is_stuck)
        except Exception as error:
            log(f"the training could not be judged: {error!r}")

    def verdict(self, folder: RunFolder, code: int, why: Cause | None, killed: int) -> State:
        if why is None and code == -signal.SIGKILL and requested(self.folder) is not None:
            why = self.with_places(_stopped("stopped on request"), folder)  # by a process that did not wait for us
        fields = {"exit_code": code, "killed": killed, "checkpoint": self.folder.newest_checkpoint()}
        if why:
            return self.ended("stopped" if why.is_stop else "failed", cause=why, **fields)
        if code == 0:
            self.leftovers = Leftovers(self.folder, self.home)
            return self.ended("succeeded", **fields)
        self.look_for_findings("failed")  # they may be the cause
        try:
            cause = find_cause(self.folder, folder, code, self.state.notice)
        except Exception as error:  # a correct "failed" matters more than its explanation
            cause = Cause("unknown", f"torchrun exited with code {code}; finding the cause failed: {error!r}")
        return self.ended("failed", cause=cause, **fields)

    def ended(self, name: StateName, **fields: Any) -> State:
        ended = self.state.started + time.monotonic() - self.clock
        notices = []
        if not self.node:  # the first node speaks for all ranks
            progress = Progress(self.folder.attempt(self.state.attempt))
            progress.update()
            cause = fields.get("cause") or Cause()
            self.look_for_findings(name, cause.kind)
            notices = [self.judge.notice(cause.sentence), *self.first_rank.update(), progress.unmeasured]
            if self.stop_if is not None and cause.kind != "stop_if":
                self.stop_if.look()
                notices.append(self.stop_if.notice(has_ended=True))
        if name == "succeeded":
            with suppress(Exception):  # a correct state matters more
                notices.append(survived_errors(self.folder, self.folder.attempt(self.state.attempt), self.ranks))
            notices.append(self.leftovers.notice if self.leftovers else None)
        notice = "; ".join(filter(None, notices)) or None
        wrong = self.judge.is_certain
        return replace(self.state, state=name, ended=ended, notice=notice, stops_by=None, wrong=wrong, **fields)

    def write(self, state: State) -> None:
        self.state = state
        self.find_folder()
        if State.is_settled(self.home):  # by a process that did not wait for us
            return
        try:
            state.write(self.home)
        except OSError as error:  # a full disk, a deleted folder: supervising the processes matters more
            log(f"state.json could not be written: {error}")


def has_stepped(attempt: RunFolder) -> bool:
    """Whether any of its ranks has completed a step."""
    return any(Step.last(attempt.metrics(rank)) for rank in attempt.started_ranks())


def prepare(run: RunFolder, attempt: RunFolder) -> None:
    """Create the files that the ranks of an attempt expect."""
    if attempt is not run:
        attempt.ranks.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.script, attempt.script)
    attempt.keep_reserve()
    if os.environ.get(REACHABLE, os.environ.get("LABKIT_REACHABLE")) != "0":
        attempt.requests.mkdir(mode=0o700, exist_ok=True)


def _stopped(sentence: str) -> Cause:
    return Cause("stopped", sentence)


class _StopImporting(BaseException):
    """The run must stop while torch is imported. Not an Exception, which imports may catch."""

    def __init__(self, cause: Cause):
        self.cause = cause


class _Signals:
    """TERM, INT and HUP as a descriptor for select, so that each stops the run in an orderly way."""

    def __init__(self) -> None:
        self.descriptor, writer = os.pipe()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.write(writer, bytes([number])))

    def read(self) -> str:
        return signal.Signals(os.read(self.descriptor, 1)[0]).name

    def has_interrupt(self) -> bool:
        """Whether a SIGINT has come, which this reads."""
        return bool(select.select([self.descriptor], [], [], 0.0)[0]) and self.read() == "SIGINT"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        LIBC.prctl(option, value)


if __name__ == "__main__":
    main()
