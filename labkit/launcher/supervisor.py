"""The process that owns a run: starts torchrun, carries out stop requests, leaves no process and a true state.json.

It outlives the notebook's kernel, unless it is told the pid of an owner to whom the run is tied: when that is no
longer its parent, the owner is gone, and the run is stopped. It carries no marker itself, so that a sweep spares it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from labkit.launcher.cause import find_cause, oom_kills
from labkit.launcher.stop import GRACE_SECONDS, requested_grace, sweep, terminate
from labkit.launcher.torchrun import marked
from labkit.record import Identity, RunFolder, State, read_state, write_state
from labkit.record.folder import write_json

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.1


def main() -> None:
    supervise(RunFolder(sys.argv[1]), owner=int(sys.argv[2]))


def supervise(folder: RunFolder, *, owner: int) -> None:
    """Run torchrun to its end, or to ours. `owner` is the pid the run is tied to, 0 for none."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks of a killed agent become our children, not init's
    reasons = _Signals()
    started = read_state(folder).started or time.time()
    own = Identity.of(os.getpid())
    record = {"supervisor": own.as_dict() if own else None, "oom_kills": oom_kills()}
    write_json(folder.agent, record)
    try:
        agent = _start_agent(folder)
    except OSError as error:
        cause = {"kind": "torchrun", "sentence": f"torchrun could not be started: {error}"}
        write_state(folder, State("failed", started, ended=time.time(), cause=cause))
        return
    identity = Identity.of(agent.pid)
    write_json(folder.agent, record | {"agent": identity.as_dict() if identity else None})
    write_state(folder, State("running", started))
    why, killed = None, 0
    while agent.poll() is None:
        why, grace = _reason_to_stop(folder, reasons, owner)
        if why:
            killed = terminate(identity, folder, grace) if identity else sweep(folder)
            agent.wait()
            break
    killed += sweep(folder)  # also after a normal end: a script may have left processes of its own
    write_state(folder, _final_state(folder, agent.returncode, started, why, killed))


def _start_agent(folder: RunFolder) -> subprocess.Popen[bytes]:
    with folder.torchrun_log.open("ab") as log:
        return subprocess.Popen(
            folder.read_manifest()["torchrun"],
            env=marked(os.environ, folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # This process has one thread, and it lives as long as we do: PDEATHSIG is safe here.
            # KILL, and not TERM with its grace: without us nobody would see to it that the ranks follow.
            preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def _reason_to_stop(folder: RunFolder, signals: _Signals, owner: int) -> tuple[str | None, float]:
    """Wait a moment; `(why, grace)` when the run has to end."""
    ready, _, _ = select.select([signals.descriptor], [], [], LOOK_SECONDS)
    if ready:
        return f"the run's supervisor received {signals.read()}", GRACE_SECONDS
    if owner and os.getppid() != owner:
        return "the process that started this run is gone", GRACE_SECONDS
    grace = requested_grace(folder)
    return ("stopped on request" if grace is not None else None), grace or 0.0


def _final_state(folder: RunFolder, code: int, started: float, why: str | None, killed: int) -> State:
    kept: dict[str, Any] = {"started": started, "ended": time.time(), "exit_code": code, "killed": killed}
    kept["checkpoint"] = _newest_checkpoint(folder)
    if why:
        return State("stopped", cause={"kind": "stopped", "sentence": why}, **kept)
    if code == 0:
        return State("succeeded", **kept)
    try:
        cause = find_cause(folder, code)
    except Exception as error:  # a true "failed" matters more than its explanation
        cause = {"kind": "unknown", "sentence": f"torchrun exited with code {code}; explaining it failed: {error!r}"}
    return State("failed", cause=cause, **kept)


def _newest_checkpoint(folder: RunFolder) -> str | None:
    steps = [p.parent for p in folder.checkpoints.glob("step-*/COMMIT.json") if p.parent.suffix != ".tmp"]
    return max(steps, key=lambda p: int(p.name.removeprefix("step-"))).name if steps else None


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
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()
