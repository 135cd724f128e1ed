"""Holds what only one run may have at a time: a GPU, or a folder of checkpoints, which two runs would overwrite."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from labkit.errors import LaunchError
from labkit.files import read_json
from labkit.hardware import GpusUnknownError, torch_report
from labkit.launcher.stopping import supervised
from labkit.record import RunFolder, State

ENDING_SECONDS = 10.0  # a supervisor exits shortly after it has written the final state
EVERY_GPU = ",".join(map(str, range(64)))  # CUDA ignores the indices from the first one that does not exist


class GpusInUseError(LaunchError):
    """Another run holds a GPU that the launch needs."""


def check_gpus_are_free(wanted: list[str]) -> None:
    """Raise LaunchError when an active run holds one of these GPUs: a second run would run out of memory."""
    uses = gpus_in_use()
    card = cards([*wanted, *(gpu for _, gpus in uses for gpu in gpus)])
    for folder, gpus in uses:
        held = {card[gpu] for gpu in gpus}
        if busy := [gpu for gpu in wanted if card[gpu] in held]:
            raise GpusInUseError(
                f"run {folder.id} uses GPU {', '.join(busy)}. Wait for it: labkit.attach({str(folder.path)!r}).wait(), "
                f"stop it: labkit stop {folder.path}, use other GPUs: env={{'CUDA_VISIBLE_DEVICES': …}}, "
                "or share them: env={'LABKIT_SHARE_GPUS': '1'}"
            )


def busy_gpus(names: Sequence[str]) -> list[str]:
    """The GPUs that active runs hold, once for each run; those among `names` as they are named there."""
    busy = [gpu for _, gpus in gpus_in_use() for gpu in gpus]
    card = cards([*names, *busy])
    named = {card[name]: name for name in names}
    return [named.get(card[gpu], gpu) for gpu in busy]


def cards(names: Iterable[str]) -> dict[str, str]:
    """One name for each card, by a GPU's name in `CUDA_VISIBLE_DEVICES` (its index, its UUID or the beginning of it).

    Raises LaunchError if indices and UUIDs are mixed, and torch cannot list the GPUs.
    """
    names = set(names)
    indices = {name for name in names if name.isdecimal()}
    uuids: list[str] = []
    if indices and indices != names:
        try:
            report = torch_report(EVERY_GPU)
            uuids = [f"GPU-{uuid}" for uuid in report["uuids"]] if report else []
        except GpusUnknownError as error:
            raise LaunchError(
                f"runs select GPUs both by index and by UUID ({', '.join(sorted(names))}). Use one kind of id, or "
                f"share the GPUs: env={{'LABKIT_SHARE_GPUS': '1'}}. They cannot be matched, because {error}"
            ) from None
    known = [*uuids, *names - indices]
    card = dict(zip(map(str, range(len(uuids))), uuids, strict=True))
    return {
        name: card.get(name, name) if name in indices else max((k for k in known if k.startswith(name)), key=len)
        for name in names
    }


def gpus_in_use() -> list[tuple[RunFolder, list[str]]]:
    """The active runs on this machine, each with its GPUs as `CUDA_VISIBLE_DEVICES` names them."""
    return [(folder, list(folder.glimpsed_manifest().gpus)) for folder in active_runs()]


def active_runs() -> list[RunFolder]:
    """The runs that have a supervisor on this machine, wherever their folders are."""
    runs = []
    for process in psutil.process_iter():
        try:
            folder = supervised(process)
            if folder is None or process.uids().real != os.getuid():
                continue
            if not State.read(folder).is_final:  # the supervisor writes the final state just before it exits
                runs.append(folder)
        except (psutil.Error, OSError):
            continue
    return runs


@contextmanager
def one_launch_at_a_time() -> Iterator[None]:
    """Let one launch of this user run at a time, so that no other launch sees the GPUs as free before this one holds
    them."""
    import fcntl  # missing on native Windows, where the launch is refused earlier

    lock = Path(tempfile.gettempdir(), f"labkit-{os.getuid()}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lock_checkpoints(checkpoints: Path, run: RunFolder) -> int | None:
    """A descriptor that holds the folder's lock while any process has it open; None if the folder cannot be written to.
    The lock is `.NAME.lock` next to the folder and names its run. Raises LaunchError when another run holds it."""
    import fcntl  # missing on native Windows, where the launch is refused earlier

    checkpoints = checkpoints.resolve()
    lock = _lock_of(checkpoints)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:  # the script itself reports that it cannot save there
        return None
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(lock)
            path, host = (holder.get("run"), holder.get("host")) if isinstance(holder, dict) else (None, None)
            if path and time.monotonic() < deadline and Path(path).exists() and State.read(RunFolder(path)).is_final:
                time.sleep(0.05)
                continue
            os.close(descriptor)
            name = f"run {Path(path).name} on {host}" if path else "another run"
            remedy = f": labkit.attach({path!r}).wait(), stop it: labkit stop {path}" if path else ""
            raise LaunchError(
                f"{name} is still running and saves its checkpoints to {checkpoints}. Wait for it{remedy}, or use "
                "another checkpoint_dir"
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"run": str(run.path), "host": socket.gethostname()}).encode(), 0)
        return descriptor


def unlock_checkpoints(checkpoints: Path) -> None:
    """Give up the folder's lock, if this process holds it: it may have inherited the descriptor."""
    import fcntl

    with suppress(OSError):  # there is no such lock
        lock = _lock_of(checkpoints.resolve()).stat()
        for descriptor in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with suppress(OSError):  # that of the list itself
                if os.path.samestat(os.fstat(descriptor), lock):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                    os.close(descriptor)


def run_that_saves_to(checkpoints: Path) -> str | None:
    """The live run that holds the folder's lock, as its path; None if there is none."""
    import fcntl

    lock = _lock_of(checkpoints.resolve())
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = read_json(lock)
        return str(holder.get("run")) if isinstance(holder, dict) else "another run"
    except OSError:
        return None
    return None


def _lock_of(checkpoints: Path) -> Path:
    return checkpoints.with_name(f".{checkpoints.name}.lock")
