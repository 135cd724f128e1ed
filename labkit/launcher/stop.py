"""End a run so that nothing of it is left: one TERM to the agent, a grace period of ours, KILL by marker, verify."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import psutil

from labkit.errors import RunFolderError
from labkit.record import Identity, RunFolder, State, read_state, write_state
from labkit.record.folder import MARKER, NODE_MARKER, read_json, write_json
from labkit.record.nodes import heard_nodes
from labkit.record.records import finite
from labkit.record.state import supervisor_is_elsewhere

__all__ = ["GRACE_SECONDS", "processes_of", "stop", "sweep"]

# torchrun's own grace is 30 s and cannot be shortened on its failure path.
GRACE_SECONDS = 5.0
# A checkpoint that is being saved when the stop is asked for may take this long to be committed.
SAVING_SECONDS = 60.0
LONGEST_GRACE = 86_400.0
# The nodes of a run end one after another and agree on a cause; of one that is gone they wait to hear for 15 s.
AGREEING_SECONDS = 25.0
LOOK_SECONDS = 0.05
LOOK_FAR_SECONDS = 0.5  # at the files of many nodes


def stop(folder: RunFolder, *, grace: float = GRACE_SECONDS) -> State:
    """Stop a run, whatever state its processes are in; returns its final state. Calling it again is harmless.

    The run's supervisor does the work. When that is gone or does not get it done, this process does.
    """
    if supervisor_is_elsewhere(folder):
        raise RunFolderError(
            f"{folder.id} runs on another machine, or did before this one was restarted; stop it there"
        )
    if not read_state(folder).is_final:
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
    if not state.is_final and (heard := heard_nodes(folder)):
        raise RunFolderError(
            f"{folder.id} was asked to stop and has not ended on {', '.join(heard)}, which can still be heard; look at "
            "supervisor.log in its nodes' folders"
        )
    if state.state == "lost" or not state.is_final:
        sentence = "stopped on request, after the process that watched it was gone"
        state = replace(state, state="stopped", ended=time.time(), cause={"kind": "stopped", "sentence": sentence})
    elif not killed:
        return state
    state = replace(state, killed=state.killed + killed)
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
    """KILL every process that carries the run's marker; twice, for what was being started meanwhile.

    Returns how many were killed. `node`: only those of one node, for several may share a machine.
    """
    killed = set()
    for _ in range(2):
        found = processes_of(folder, node)
        for process in found:
            try:
                process.kill()
                killed.add(process.pid)
            except psutil.NoSuchProcess:
                pass  # it ended by itself in between
        psutil.wait_procs(found, timeout=2.0)
    return len(killed)


def processes_of(folder: RunFolder, node: int | None = None) -> list[psutil.Process]:
    """Every living process of this user that carries the run's marker in its environment, or its and the node's."""
    found, wanted = [], {MARKER: folder.id} | ({} if node is None else {NODE_MARKER: str(node)})
    for process in psutil.process_iter():
        try:
            mine = process.uids().real == os.getuid() and wanted.items() <= process.environ().items()
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # gone, or not ours to look at
    return found


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
