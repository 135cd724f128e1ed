"""Stops a run so that none of its processes is left: asks its supervisor (shutdown.py), waits for it, KILLs, verifies.

A process of a run carries the run's marker or descends from its supervisor, which adopts the orphans of its ranks. The
sampler records these descendants, because a supervisor that is killed leaves them to a parent that does not know them.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from labkit.arguments import LONGEST_GRACE
from labkit.errors import RunFolderError
from labkit.files import finite, in_parallel, read_json, write_json
from labkit.hardware import ask_nvml
from labkit.host import Identity
from labkit.launcher.rank_processes import cleans_up, is_alive
from labkit.rank_files import MARKER, NODE_MARKER
from labkit.record import Cause, LeftRunning, Node, RunFolder, State
from labkit.text import gib

SUPERVISORS = ("labkit.launcher.supervisor", "labkit.launcher.node")
SAMPLER = "labkit.launcher.sampler"

# torchrun's own grace is 30 s and cannot be shortened on its failure path.
GRACE_SECONDS = 5.0
# A checkpoint that is being saved when a stop is requested may take this long to be committed.
SAVING_SECONDS = 60.0
# The nodes of a run end one after another and agree on a cause; they wait 15 s for a node that is gone.
AGREEING_SECONDS = 25.0
POLL_SECONDS = 0.05
POLL_NODES_SECONDS = 0.5  # reads the files of many nodes
KILL_SECONDS = 4.0  # how long processes may take to receive a KILL
EXIT_SECONDS = 30.0  # how long one that was killed may take to exit
QUIET_SECONDS = 1.0  # a shorter wait is not reported
NVML_SECONDS, NVML_POLL_SECONDS = 5.0, 0.5
FREEING_SECONDS = 10.0  # how long a driver may take to free the memory of a process that has exited
CLEANING_SECONDS = 3.0  # torch's manager of shared memory notices within 2 s that its ranks are dead


@dataclass(frozen=True)
class StopRequest:
    """How to stop a run. `grace` is the seconds from TERM to KILL, None for as long as the ranks need (shutdown.py).
    With `interrupts` they are sent SIGINT first, as by Ctrl-C under bare torchrun."""

    grace: float | None = None
    interrupts: bool = False


def stop(
    folder: RunFolder,
    *,
    grace: float | None = None,
    interrupts: bool = False,
    say: Callable[[str], object] = str,
) -> State:
    """Stop a run, whatever state its processes are in, and return its final state. Calling it again is harmless.

    The run's supervisor does the work, and `say` is called with what it waits for. If it is gone or does not finish,
    this process does the work, and kills a supervisor that is suspended by a signal. The state of a run that was lost
    stays "lost". Raises RunFolderError for a run of another user or of another machine, and for a copy of a run's
    folder.
    """
    check_may_stop(folder)
    if Node(folder).supervisor_is_elsewhere():
        raise RunFolderError(
            f"{folder.id} runs on another machine, or started before this one was rebooted; stop it there"
        )
    before = State.read(folder)
    if before.is_final and folder.original():
        return before
    if before.is_final and before.state != "lost":
        return _end_leftovers(folder, before, grace)
    if not before.is_final:
        request_stop(folder, grace, interrupts)
    # immediately: the supervisor may still be in an earlier grace period
    killed = sweep(folder, say=lambda notice, _: say(notice)) if grace is not None and grace <= 0 else 0
    margin, period = (AGREEING_SECONDS, POLL_NODES_SECONDS) if folder.nodes.is_dir() else (5.0, POLL_SECONDS)
    until, notice = time.time() + (GRACE_SECONDS if grace is None else grace), None
    while not (state := State.read(folder)).is_final and time.time() < max(until, state.stops_by or 0.0) + margin:
        if state.stops_by is not None and state.notice not in (None, notice):
            say(notice := str(state.notice))
        time.sleep(period)
    killed += _sweep_all(folder, say)
    if not state.is_final and (nodes := Node.heard(folder)):
        raise RunFolderError(
            f"{folder.id} was asked to stop but has not ended on {', '.join(nodes)}, whose heartbeats continue; see "
            "supervisor.log in its nodes' folders"
        )
    if not state.is_final or (state.state == "lost" and not before.is_final):
        starting = Node(folder).supervisor_is_starting()
        when = "before its supervisor had started" if starting else "after its supervisor had exited"
        sentence = f"stopped on request, {when}"
        state = replace(state, state="stopped", ended=time.time(), cause=Cause("stopped", sentence))
    elif not killed:
        return state
    state = replace(state, ended=state.ended or time.time(), killed=state.killed + killed)
    if folder.path.exists():
        state.write(folder)
    return state


def check_may_stop(folder: RunFolder) -> None:
    """Raise RunFolderError unless the run belongs to this user, and this is its folder and not a copy."""
    folder.check_own("stop it")
    if not State.written(folder).is_final:  # else there is nothing to stop
        folder.check_original()


def sweep(folder: RunFolder, node: int | None = None, say: Callable[[str, float], object] | None = None) -> int:
    """KILL every process of the run until none is left. Returns how many were killed.

    What frees the shared memory of ranks ends by itself once they are dead, or the memory would stay in use forever.
    One that was killed exits when the system has freed its memory, which takes a driver seconds for that of GPUs: `say`
    is called with what it waits for and the seconds that this may take. `node` limits it to one node, since several may
    share a machine. The processes are not reaped: torchrun's exit code belongs to its parent.
    """
    killed: dict[int, psutil.Process] = {}
    began, said = time.monotonic(), ""
    while True:
        exiting = {pid for pid, process in killed.items() if is_alive(process)}  # they no longer have an environment
        left, seconds = processes_of(folder, node), time.monotonic() - began
        if not left and not exiting or seconds > (EXIT_SECONDS if exiting else CLEANING_SECONDS + KILL_SECONDS):
            return len(killed)
        for process in left:
            with suppress(psutil.Error):  # it has exited, or belongs to another user
                if process.pid in exiting or (cleans_up(process) and seconds < CLEANING_SECONDS):
                    continue
                process.kill()
                killed[process.pid] = process
        waits = f"stopping: waiting for {len(exiting)} of its processes that were killed: the system frees their memory"
        if exiting and say and said != waits and seconds > QUIET_SECONDS:
            say(said := waits, EXIT_SECONDS - seconds)
        time.sleep(POLL_SECONDS)


def processes_of(folder: RunFolder, node: int | None = None) -> list[psutil.Process]:
    """Every live process of the run, or of one node of it: this user's processes with the run's marker in their
    environment, and the descendants of its supervisor, including those that the sampler recorded last."""
    markers = {MARKER: folder.marker} | ({} if node is None else {NODE_MARKER: str(node)})
    candidates = [process for process in psutil.process_iter() if _is_marked(process, markers)]
    for recorded in in_parallel(_recorded, _homes(folder, node)):
        candidates += recorded
    ours = {p.pid: p for supervisor in _supervisors(folder, node) for p in descendants(supervisor, folder.marker)}
    for process in candidates:
        if process.pid not in ours and not _is_another_runs(process, folder.marker):
            ours |= {p.pid: p for p in (process, *descendants(process, folder.marker))}
    return [process for process in ours.values() if is_alive(process)]


def descendants(root: psutil.Process, run_id: str) -> list[psutil.Process]:
    """The descendants of a process, except those of other runs and labkit's own processes."""
    processes, pids = [], {root.pid}
    with suppress(psutil.Error):
        for process in root.children(recursive=True):  # parents before their children
            with suppress(psutil.Error):
                if process.ppid() in pids and not _is_another_runs(process, run_id):
                    processes.append(process)
                    pids.add(process.pid)
    return processes


def supervised(process: psutil.Process) -> RunFolder | None:
    """The run that a process supervises; None if it is not a supervisor. Raises psutil.Error."""
    command = process.cmdline()
    module = next((word for word in command[:-1] if word in SUPERVISORS), None)
    return RunFolder(command[command.index(module) + 1]) if module else None


def _supervisors(folder: RunFolder, node: int | None = None) -> list[psutil.Process]:
    """The live processes on this machine that supervise a run, or one node of it; this process may be one."""
    identities = in_parallel(lambda home: Node(home).supervisor(), _homes(folder, node))
    supervisors = []
    for pid in {os.getpid(), *(one.pid for one in identities if one is not None and one.is_alive())}:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            run = supervised(process)
            if run is not None and run.id == folder.marker and process.uids().real == os.getuid():
                supervisors.append(process)
    return supervisors


def _homes(folder: RunFolder, node: int | None) -> list[RunFolder]:
    """The folders in which the supervisors of a run, or of one node of it, keep their files."""
    nodes = "*" if node is None else str(node)
    on_nodes = [RunFolder(path) for attempt in folder.attempts() for path in attempt.nodes.glob(nodes)]
    return [folder, *on_nodes] if node is None else on_nodes


def _recorded(home: RunFolder) -> list[psutil.Process]:
    """The supervisor's descendants that the sampler recorded last and that are still alive. A record that belongs to
    another user is ignored: it could name any process of ours."""
    with suppress(OSError):
        if home.processes.stat().st_uid != os.getuid():
            return []
    record = read_json(home.processes)
    identities = record.get("processes") if isinstance(record, dict) else None
    processes = []
    for identity in map(Identity.read, identities if isinstance(identities, list) else []):
        with suppress(psutil.Error):
            if identity is not None and identity.is_alive():
                processes.append(psutil.Process(identity.pid))
    return processes


def _is_marked(process: psutil.Process, markers: Mapping[str, str]) -> bool:
    try:
        return process.uids().real == os.getuid() and markers.items() <= process.environ().items()
    except (psutil.Error, OSError):  # gone, or not readable for us
        return False


def _is_another_runs(process: psutil.Process, run_id: str) -> bool:
    """Whether it carries another run's marker, or is one of labkit's own processes: a supervisor or a sampler."""
    try:
        if not {SAMPLER, *SUPERVISORS}.isdisjoint(process.cmdline()):
            return True
        return process.environ().get(MARKER, run_id) != run_id
    except (psutil.Error, OSError):  # its parent decides
        return False


def _end_leftovers(folder: RunFolder, final: State, grace: float | None) -> State:
    """Have the supervisors of a run that is over end what its ranks left running. The written state stays as it is."""
    homes = {home.path for home in still_running(folder)}
    if homes:
        request_stop(folder, grace)
        margin = AGREEING_SECONDS if folder.nodes.is_dir() else KILL_SECONDS
        until = time.monotonic() + (GRACE_SECONDS if grace is None else grace) + margin
        while still_running(folder) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
    killed = sum(len(left.killed) for home, left in LeftRunning.read(folder).items() if home.path in homes)
    return replace(final, killed=final.killed + killed + _sweep_all(folder))


def still_running(folder: RunFolder) -> dict[RunFolder, LeftRunning]:
    """What the ranks of a run that is over left running, by the folder of the supervisor that waits for it."""
    running = {}
    for home, left in LeftRunning.read(folder).items():
        supervisor = Node(home).supervisor()
        if left.ended is None and supervisor is not None and left.until is not None:
            is_late = time.time() > left.until + GRACE_SECONDS + KILL_SECONDS
            if supervisor.is_alive() or (supervisor.is_elsewhere and not is_late):
                running[home] = left
    return running


def _sweep_all(folder: RunFolder, say: Callable[[str], object] = str) -> int:
    """Sweep, and end supervisors that a signal has suspended."""
    killed = sweep(folder, say=lambda notice, _: say(notice))
    for supervisor in _supervisors(folder):  # after the sweep, which finds their descendants through them
        with suppress(psutil.Error):
            if supervisor.status() == psutil.STATUS_STOPPED:
                its_own = [supervisor, *supervisor.children()]  # the sampler is killed with it
                supervisor.kill()
                psutil.wait_procs(its_own, timeout=KILL_SECONDS)
    return killed


def request_stop(folder: RunFolder, grace: float | None = None, interrupts: bool = False) -> None:
    """Ask the supervisors of a run to stop it. Raises OSError."""
    request = {"time": time.time(), "pid": os.getpid(), "grace": grace, "interrupts": interrupts}
    write_json(folder.stop_request, request, reserve=folder.reserve)  # a full disk is a reason to stop a run


def requested(folder: RunFolder) -> StopRequest | None:
    """The stop request, whoever wrote it; None if there is none."""
    request = read_json(folder.stop_request)
    if not isinstance(request, dict):
        return None
    grace = finite(request.get("grace"))
    sound = grace if grace is not None and 0 <= grace < LONGEST_GRACE else None
    return StopRequest(sound, request.get("interrupts") is True)


def request_in_words(folder: RunFolder) -> Cause:
    """The stop request as a cause. `goes_on` means that the next attempt resumes from what this one saves."""
    request = read_json(folder.stop_request)
    if isinstance(request, dict) and request.get("goes_on") is True:
        return Cause("stopped", "saved and stopped near the job's time limit", goes_on=True)
    return Cause("stopped", "stopped on request")


def left_in_words(folder: RunFolder, *, memory: bool) -> str:
    """How many processes of a stopped run are left; if none, with `memory` also whether the GPUs' memory is free."""
    count = len(processes_of(folder))
    freed = freed_in_words(folder) if memory and not count else ""
    return f"{count} process{'' if count == 1 else 'es'} left" + (f", {freed}" if freed else "")


def freed_in_words(folder: RunFolder) -> str:
    """What NVML says about the processes of a run that has been stopped: `and their GPU memory is free`, or which of
    them it still lists. Empty if it cannot tell: it did not list them while they ran, as in many containers, does not
    answer now, or the run had several nodes."""
    record = read_json(folder.processes)
    pids = set(record.get("on_gpus") or ()) if isinstance(record, dict) else set()
    until = time.monotonic() + FREEING_SECONDS
    while pids and not folder.nodes.is_dir():
        try:
            cards = ask_nvml(NVML_SECONDS)["cards"]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return ""
        if any(card["processes"] is None for card in cards):
            return ""
        listed = [(card["index"], each) for card in cards for each in card["processes"] or () if each["pid"] in pids]
        if not listed:
            return "and their GPU memory is free"
        if time.monotonic() > until:
            each = ", ".join(
                f"pid {process['pid']}{f' with {gib(memory)}' if (memory := process['memory']) else ''} on GPU {index}"
                for index, process in listed
            )
            return f"but after {FREEING_SECONDS:.0f} s NVML still lists {each}"
        time.sleep(NVML_POLL_SECONDS)
    return ""
