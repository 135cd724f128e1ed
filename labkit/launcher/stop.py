"""End a run so that nothing of it is left: one TERM to the agent, a grace period of ours, KILL, verify.

What is of a run carries its marker or descends from its supervisor, which inherits what its ranks leave behind. The
sampler writes down what does, for a supervisor that is killed leaves its processes to nobody who knows them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil

from labkit.errors import RunFolderError
from labkit.record import Identity, RunFolder, State, read_state, write_state
from labkit.record.folder import MARKER, NODE_MARKER, read_json, write_json
from labkit.record.nodes import heard_nodes, supervisor_of
from labkit.record.records import finite
from labkit.record.state import supervisor_is_elsewhere

__all__ = ["GRACE_SECONDS", "descendants", "processes_of", "stop", "supervised", "sweep"]

SUPERVISORS = ("labkit.launcher.supervisor", "labkit.launcher.node")
SAMPLER = "labkit.launcher.sampler"

# torchrun's own grace is 30 s and cannot be shortened on its failure path.
GRACE_SECONDS = 5.0
# A checkpoint that is being saved when the stop is asked for may take this long to be committed.
SAVING_SECONDS = 60.0
LONGEST_GRACE = 86_400.0
# The nodes of a run end one after another and agree on a cause; of one that is gone they wait to hear for 15 s.
AGREEING_SECONDS = 25.0
LOOK_SECONDS = 0.05
LOOK_FAR_SECONDS = 0.5  # at the files of many nodes
DYING_SECONDS = 4.0  # of a process that was sent KILL


def stop(folder: RunFolder, *, grace: float = GRACE_SECONDS) -> State:
    """Stop a run, whatever state its processes are in; returns its final state. Calling it again is harmless.

    The run's supervisor does the work. When that is gone or does not get it done, this process does, and ends a
    supervisor that is stopped by a signal. A run that was lost stays so.
    """
    if supervisor_is_elsewhere(folder):
        raise RunFolderError(
            f"{folder.id} runs on another machine, or did before this one was restarted; stop it there"
        )
    before = read_state(folder)
    if not before.is_final:
        request = {"time": time.time(), "pid": os.getpid(), "grace": grace}
        write_json(folder.stop_request, request, reserve=folder.reserve)  # a full disk is a reason to stop a run
    # at once: do not wait for a supervisor that may be within an earlier grace period
    killed = sweep(folder) if grace <= 0 else 0
    began = time.monotonic()
    latest = began + (SAVING_SECONDS if grace > 0 else 0.0)
    own, look_every = (AGREEING_SECONDS, LOOK_FAR_SECONDS) if folder.nodes.is_dir() else (5.0, LOOK_SECONDS)
    while not (state := read_state(folder)).is_final and time.monotonic() < began + patience(folder, grace) + own:
        if time.monotonic() < latest and folder.checkpoint_being_saved():
            began = time.monotonic()
        time.sleep(look_every)
    killed += sweep(folder)
    for supervisor in _supervisors(folder):  # after the sweep, which found by them what they had inherited
        with suppress(psutil.Error):
            if supervisor.status() == psutil.STATUS_STOPPED:
                supervisor.kill()
    if not state.is_final and (heard := heard_nodes(folder)):
        raise RunFolderError(
            f"{folder.id} was asked to stop and has not ended on {', '.join(heard)}, which can still be heard; look at "
            "supervisor.log in its nodes' folders"
        )
    if not state.is_final or (state.state == "lost" and not before.is_final):
        sentence = "stopped on request, after the process that watched it was gone"
        state = replace(state, state="stopped", ended=time.time(), cause={"kind": "stopped", "sentence": sentence})
    elif not killed:
        return state
    state = replace(state, ended=state.ended or time.time(), killed=state.killed + killed)
    if folder.path.exists():  # of a deleted run nobody is left to read
        write_state(folder, state)
    return state


def terminate(agent: Identity, folder: RunFolder, grace: float, node: int | None = None) -> int:
    """One TERM, then wait, then KILL whatever is left. Returns how many had to be killed. `node`: only what is its.

    Ranks that save when they are stopped may finish their step, and a checkpoint that is being saved, before the TERM
    or because of it, is let finish, unless `grace` is 0 or somebody asks again with 0.
    """
    latest = time.monotonic() + SAVING_SECONDS

    def given() -> float:
        asked = requested_grace(folder)
        return grace if asked is None else min(grace, asked)

    def saving() -> bool:
        return given() > 0 and time.monotonic() < latest and folder.checkpoint_being_saved()

    newest = folder.newest_checkpoint()
    while agent.is_alive() and saving() and folder.newest_checkpoint() == newest:
        time.sleep(LOOK_SECONDS)
    if agent.is_alive():
        os.kill(agent.pid, signal.SIGTERM)  # never a second one: torchrun then abandons its ranks
    began = time.monotonic()
    while processes_of(folder, node) and time.monotonic() < began + patience(folder, given()):
        if saving():
            began = time.monotonic()
        time.sleep(0.1)
    return sweep(folder, node)


def patience(folder: RunFolder, grace: float) -> float:
    """Seconds to wait after a TERM: the grace period, or what ranks that save when they are stopped may need to agree
    on a step and make it. No patience is asked for by 0.
    """
    manifest = read_json(folder.manifest)
    command = manifest.get("torchrun") if isinstance(manifest, dict) else None
    if grace <= 0 or not isinstance(command, list) or "--checkpoint-dir" not in command:
        return grace
    newest = folder.latest
    beats = [read_json(newest.heartbeat(rank)) for rank in newest.started_ranks()]
    steps = [finite(beat.get("step_seconds")) or 0.0 for beat in beats if isinstance(beat, dict)]
    return max(grace, min(SAVING_SECONDS, 2 * max(steps) + 1.0)) if any(steps) else grace


def sweep(folder: RunFolder, node: int | None = None) -> int:
    """KILL every process of the run until none is left. Returns how many were killed.

    `node`: only those of one node, for several may share a machine. Waits for none of them: how torchrun ended is for
    its parent to be told.
    """
    killed = set()
    deadline = time.monotonic() + DYING_SECONDS
    while (left := processes_of(folder, node)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):  # it ended by itself in between, or somebody else's
                process.kill()
                killed.add(process.pid)
        time.sleep(LOOK_SECONDS)
    return len(killed)


def processes_of(folder: RunFolder, node: int | None = None) -> list[psutil.Process]:
    """Every living process of the run, or of one node of it: those of this user with its marker in their environment,
    and whatever descends from its supervisor, or did when that was last seen alive."""
    wanted = {MARKER: folder.id} | ({} if node is None else {NODE_MARKER: str(node)})
    known = [process for process in psutil.process_iter() if _is_marked(process, wanted)]
    for home in _homes(folder, node):
        known += _recorded(home)
    ours = {p.pid: p for supervisor in _supervisors(folder, node) for p in descendants(supervisor, folder.id)}
    for process in known:
        if process.pid not in ours and not _is_another_runs(process, folder.id):
            ours |= {p.pid: p for p in (process, *descendants(process, folder.id))}
    return [process for process in ours.values() if _is_alive(process)]


def descendants(root: psutil.Process, run_id: str) -> list[psutil.Process]:
    """What a process has started, and what that has started, without other runs and without the sampler."""
    found, pids = [], {root.pid}
    with suppress(psutil.Error):
        for process in root.children(recursive=True):  # parents before their children
            with suppress(psutil.Error):
                if process.ppid() in pids and not _is_another_runs(process, run_id):
                    found.append(process)
                    pids.add(process.pid)
    return found


def supervised(process: psutil.Process) -> RunFolder | None:
    """The run that a process has charge of; None of one that is not a supervisor. Raises psutil.Error."""
    command = process.cmdline()
    module = next((word for word in command[:-1] if word in SUPERVISORS), None)
    return RunFolder(command[command.index(module) + 1]) if module else None


def _supervisors(folder: RunFolder, node: int | None = None) -> list[psutil.Process]:
    """The living processes that have charge of a run here, or of one node of it; this one may be it."""
    identities = [supervisor_of(home) for home in _homes(folder, node)]
    found = []
    for pid in {os.getpid(), *(one.pid for one in identities if one is not None and one.is_alive())}:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            run = supervised(process)
            if run is not None and run.id == folder.id and process.uids().real == os.getuid():
                found.append(process)
    return found


def _homes(folder: RunFolder, node: int | None) -> list[RunFolder]:
    """Where the supervisors of a run, or of one node of it, keep what they know."""
    nodes = "*" if node is None else str(node)
    on_nodes = [RunFolder(path) for attempt in folder.attempts() for path in attempt.nodes.glob(nodes)]
    return [folder, *on_nodes] if node is None else on_nodes


def _recorded(home: RunFolder) -> list[psutil.Process]:
    """What the sampler last saw of the descendants of a supervisor, as far as it lives. Nobody else's record is heeded:
    it could name any process of ours."""
    with suppress(OSError):
        if home.processes.stat().st_uid != os.getuid():
            return []
    recorded = read_json(home.processes)
    listed = recorded.get("processes") if isinstance(recorded, dict) else None
    found = []
    for identity in map(Identity.read, listed if isinstance(listed, list) else []):
        with suppress(psutil.Error):
            if identity is not None and identity.is_alive():
                found.append(psutil.Process(identity.pid))
    return found


def _is_marked(process: psutil.Process, wanted: Mapping[str, str]) -> bool:
    try:
        return process.uids().real == os.getuid() and wanted.items() <= process.environ().items()
    except (psutil.Error, OSError):  # gone, or not ours to look at
        return False


def _is_another_runs(process: psutil.Process, run_id: str) -> bool:
    """Whether it has another run's marker, or is labkit's own: a supervisor, or what samples the machine for one."""
    try:
        if not {SAMPLER, *SUPERVISORS}.isdisjoint(process.cmdline()):
            return True
        return process.environ().get(MARKER, run_id) != run_id
    except (psutil.Error, OSError):  # what cannot be looked at is whose child it is
        return False


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def requested_grace(folder: RunFolder) -> float | None:
    """The grace period of a stop request, None when nobody has asked."""
    request = read_json(folder.stop_request)
    if not isinstance(request, dict):
        return None
    grace = finite(request.get("grace"))
    return grace if grace is not None and 0 <= grace < LONGEST_GRACE else GRACE_SECONDS


def request_in_words(folder: RunFolder) -> dict[str, Any]:
    """The cause that a stop request is. `goes_on`: the next attempt will take up what this one saves."""
    request = read_json(folder.stop_request)
    if isinstance(request, dict) and request.get("goes_on") is True:
        return {"kind": "stopped", "goes_on": True, "sentence": "saved and stopped, for its job's time was nearly up"}
    return {"kind": "stopped", "sentence": "stopped on request"}
