"""The process that owns a run: starts torchrun, watches it, carries out stop requests, leaves no process and a true
state.json.

It outlives the notebook's kernel, unless it is told the pid of an owner to whom the run is tied: when that is no
longer its parent, the owner is gone, and the run is stopped. It carries no marker itself, so that a sweep spares it.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.launcher.causes.cause import find_cause
from labkit.launcher.causes.signals import oom_kills
from labkit.launcher.causes.stuck import look_at
from labkit.launcher.progress import Progress, Saving
from labkit.launcher.stop import (
    GRACE_SECONDS,
    SAMPLER,
    SAVING_SECONDS,
    request_in_words,
    requested_grace,
    sweep,
    terminate,
)
from labkit.launcher.torchrun import attempt_command, marked
from labkit.record import Identity, RunFolder, State, read_state, write_state
from labkit.record.files import is_deleted
from labkit.record.folder import read_json, write_json
from labkit.record.state import FINAL_STATES

LIBC = ctypes.CDLL(None)  # looked up here: between fork and exec nothing may be loaded
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.1
# Whoever stops the run decides how long ranks may save; torchrun's 30 s (fixed before torch 2.13) must not be shorter.
OWN_GRACE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(2 * SAVING_SECONDS))}


def main() -> None:
    folder = RunFolder(sys.argv[1])
    try:
        Supervisor(folder, owner=int(sys.argv[2])).run()
    except Exception as error:
        sweep(folder)  # nothing of the run stays behind, whatever became of this process's own work
        cause = {"kind": "supervisor", "sentence": f"labkit's supervisor failed, and the run was ended: {error!r}"}
        if not (state := read_state(folder)).is_final:
            write_state(folder, replace(state, state="failed", ended=time.time(), cause=cause))
        raise


class Supervisor:
    """One run from its first attempt to its last. `owner` is the pid the run is tied to, 0 for none.

    `home` is where it keeps what it knows: the run's folder, or that of one `node` of it, of which it then has charge.
    """

    def __init__(self, folder: RunFolder, *, owner: int = 0, home: RunFolder | None = None, node: int | None = None):
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks of a killed agent become our children, not init's
        self.folder, self.owner, self.home, self.node = folder, owner, home or folder, node
        self.called = "the run's supervisor"
        self.decided: float | None = None  # when it was decided to end the run, in seconds since the epoch
        self.signals = _Signals()
        self.manifest = folder.read_manifest()
        self.watchdog: float | None = self.manifest.get("watchdog")
        self.told: set[int] = set()  # the ranks that the notice in state.json names
        self.stalled: str | None = None  # what it says about them
        self.saving = Saving(folder)
        self.looking: Future[Any] | None = None
        self.looker = ThreadPoolExecutor(1)
        own = Identity.of(os.getpid())
        self.identities: dict[str, Any] = {"supervisor": own.as_dict() if own else None, "oom_kills": oom_kills()}
        write_json(self.home.agent, self.identities)
        started = read_state(folder).started or time.time()
        self.state = State("starting", started)
        self.clock = time.monotonic() - (time.time() - started)  # the wall's may be set while we run

    def run(self) -> None:
        """Every attempt, until one succeeds, is stopped, or was the last."""
        retries = self.manifest.get("retries", 0)
        final = self.state
        while not self.is_over():
            final = self.attempt()
            if final.state != "failed" or final.attempt > retries or requested_grace(self.folder) is not None:
                break
            ended = {"ended": final.ended, "exit_code": final.exit_code, "cause": final.cause}
            earlier = [*final.earlier, ended | {"checkpoint": final.checkpoint}]
            self.state = State("starting", final.started, attempt=final.attempt + 1, earlier=earlier)
        self.write(final)
        for folder in self.folder.attempts():
            folder.reserve.unlink(missing_ok=True)

    def attempt(self) -> State:
        """Start torchrun, see it through, and say how it ended."""
        folder = self.folder.attempt(self.state.attempt)
        prepare(self.folder, folder)
        self.saving = Saving(folder)
        command = attempt_command(self.manifest["torchrun"], self.folder, folder, time.monotonic() - self.clock)
        try:
            agent = self.start_agent(command, os.environ, folder, folder.torchrun_log)
        except OSError as error:
            sentence = f"torchrun could not be started: {error}"
            return self.ended("failed", cause={"kind": "torchrun", "sentence": sentence})
        return self.verdict(folder, *self.see_through(agent, folder))

    def see_through(self, agent: subprocess.Popen[bytes], folder: RunFolder) -> tuple[int, dict[str, Any] | None, int]:
        """Until torchrun has ended and all it had started: its exit code, why it was ended if it was, how many
        processes had to be killed."""
        identity = Identity.of(agent.pid)
        write_json(self.home.agent, self.identities | {"agent": identity.as_dict() if identity else None})
        self.write(replace(self.state, state="running"))
        sampler = self.start_sampler()
        why, killed = None, 0
        progress = Progress(folder)
        while agent.poll() is None:
            why, grace = self.reason_to_stop() or self.watch(folder, progress) or (None, 0.0)
            if why:
                self.decided = time.time()
                killed = terminate(identity, self.folder, grace, self.node) if identity else self.sweep()
                agent.wait()
                break
        if sampler is not None:
            sampler.kill()
            sampler.wait()
        killed += self.sweep()  # also after a normal end: a script may have left processes of its own
        return agent.returncode, why, killed

    def sweep(self) -> int:
        return sweep(self.folder, self.node)

    def start_agent(
        self, command: Sequence[str], environment: Mapping[str, str], folder: RunFolder, log_file: Path
    ) -> subprocess.Popen[bytes]:
        with log_file.open("ab") as log:
            return subprocess.Popen(
                command,
                env=marked(environment, self.folder, folder, self.state.attempt) | OWN_GRACE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # This is the main thread, which lives as long as the process: PDEATHSIG is safe here.
                # KILL, and not TERM with its grace: without us nobody would see to it that the ranks follow.
                preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def start_sampler(self) -> subprocess.Popen[bytes] | None:
        """The process that records the machine; it ends with this one. The run goes on without it."""
        try:
            return subprocess.Popen(
                [sys.executable, "-m", SAMPLER, str(self.folder.path), str(self.home.path)],
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except OSError as error:
            print(f"the machine is not recorded: {error}", flush=True)
            return None

    def reason_to_stop(self) -> tuple[dict[str, Any], float] | None:
        """Wait a moment; the cause and the grace period when the run has to end."""
        ready, _, _ = select.select([self.signals.descriptor], [], [], LOOK_SECONDS)
        if ready:
            return _stopped(f"{self.called} received {self.signals.read()}"), GRACE_SECONDS
        if self.owner and os.getppid() != self.owner:
            return _stopped("the process that started this run is gone"), GRACE_SECONDS
        if is_deleted(self.folder.state):
            return _stopped("the run's folder was deleted"), GRACE_SECONDS
        grace = requested_grace(self.folder)
        return None if grace is None else (request_in_words(self.folder), grace)

    def watch(self, folder: RunFolder, progress: Progress) -> tuple[dict[str, Any], float] | None:
        """Tell in state.json when ranks no longer move, and where they are; end the run if its watchdog says so."""
        if progress.look():
            self.saving.look()
        stalled = progress.stalled()
        if self.looking is None and stalled and set(stalled) != self.told:
            self.told = set(stalled)
            self.looking = self.looker.submit(look_at, folder, self.folder)  # takes seconds; a stop must not wait
        elif self.looking is not None and self.looking.done():
            where, self.looking = self.looking, None
            if stalled and where.exception() is None and not where.result().are_gone:
                self.stalled = _notice(stalled, folder, where.result().sentence)
        elif not stalled and self.told:
            self.told, self.stalled = set(), None
        notice = "; ".join(filter(None, [self.stalled, self.saving.failure])) or None
        if notice != self.state.notice:
            self.write(replace(self.state, notice=notice))
        if self.watchdog is None or progress.idle_seconds <= self.watchdog:
            return None
        try:
            where = look_at(folder, self.folder).sentence
        except OSError as error:  # a full disk; the run is ended all the same
            where = f"where its ranks are could not be asked: {error}"
        sentence = f"stopped by the watchdog after {self.watchdog:g} s without progress: {where}"
        return {"kind": "stuck", "sentence": sentence}, GRACE_SECONDS

    def verdict(self, folder: RunFolder, code: int, why: dict[str, Any] | None, killed: int) -> State:
        if why is None and code == -signal.SIGKILL and requested_grace(self.folder) is not None:
            why = _stopped("stopped on request")  # by somebody who would not wait for us
        kept = {"exit_code": code, "killed": killed, "checkpoint": self.folder.newest_checkpoint()}
        if why:
            return self.ended("stopped" if why["kind"] == "stopped" else "failed", cause=why, **kept)
        if code == 0:
            return self.ended("succeeded", **kept)
        try:
            cause = find_cause(self.folder, folder, code, self.state.notice)
        except Exception as error:  # a true "failed" matters more than its explanation
            sentence = f"torchrun exited with code {code}; explaining it failed: {error!r}"
            cause = {"kind": "unknown", "sentence": sentence}
        return self.ended("failed", cause=cause, **kept)

    def ended(self, name: str, **fields: Any) -> State:
        elapsed = time.monotonic() - self.clock
        return replace(self.state, state=name, ended=self.state.started + elapsed, notice=self.saving.look(), **fields)

    def is_over(self) -> bool:
        """Whether somebody else has written the end, who did not see us get it done."""
        written = read_json(self.home.state)
        return isinstance(written, dict) and written.get("state") in FINAL_STATES

    def write(self, state: State) -> None:
        self.state = state
        if self.is_over():
            return
        try:
            write_state(self.home, state)
        except OSError as error:  # a full disk, a deleted folder: what counts is that the processes are looked after
            print(f"state.json could not be written: {error}", flush=True)


def prepare(run: RunFolder, attempt: RunFolder) -> None:
    """What the ranks of an attempt expect to find."""
    if attempt is not run:
        attempt.ranks.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.script, attempt.script)
    attempt.keep_reserve()


def _notice(stalled: dict[int, float], folder: RunFolder, where: str) -> str:
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - min(stalled.values())))
    if len(stalled) == len(folder.started_ranks()):
        return f"no rank has moved since {since}: {where}"
    who = "rank " + ", ".join(map(str, sorted(stalled)))
    return f"{who} {'has' if len(stalled) == 1 else 'have'} not moved since {since}: {where}"


def _stopped(sentence: str) -> dict[str, Any]:
    return {"kind": "stopped", "sentence": sentence}


class _Signals:
    """TERM, INT and HUP as something to select on, so that each ends the run in order."""

    def __init__(self) -> None:
        self.descriptor, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

    def read(self) -> str:
        return signal.Signals(os.read(self.descriptor, 1)[0]).name


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        LIBC.prctl(option, value)


if __name__ == "__main__":
    main()
