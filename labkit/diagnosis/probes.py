"""Determines each field of MachineFacts by a function of its name, quickly and without side effects.

A function returns None if the fact does not apply. `gather` records its exceptions and continues with the next one.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from labkit import frontend, session
from labkit.data import SOURCES, complete
from labkit.diagnosis.facts import (
    UNLIMITED,
    Kaggle,
    MachineFacts,
    NotebookKernel,
    Nvml,
    Preflight,
    TorchBuild,
    Wsl,
    nvml_from_json,
)
from labkit.errors import LabError
from labkit.hardware import (
    WSL_DRIVER,
    GpusUnknownError,
    Hardware,
    ask_nvml,
    check_interface,
    hardware,
    may_have_gpus,
    torch_report,
)
from labkit.hardware import memory_limit as _memory_limit
from labkit.launcher import without_leftovers
from labkit.link import remembered_links, remembered_preflight
from labkit.rank_files import MARKER, NODE_MARKER
from labkit.record import RunFolder
from labkit.stored_runs import runs_root

PACKAGES = ("torch", "ipykernel", "ipywidgets", "IPython")
NVML_SECONDS = 10.0
MOUNTS = Path("/proc/self/mounts")
WINDOWS_USERS = Path("/mnt/c/Users")
WSL_DEVICE, CLOCK = Path("/dev/dxg"), Path("/sys/class/rtc/rtc0/since_epoch")
PACKAGES_INSTALLED = Path("/var/lib/dpkg/info")
LINUX_DRIVER = "libnvidia-compute-*.list"  # the packages with libcuda.so.1, which the other packages of the driver need
LOOK_SECONDS = 0.2  # limit for each of the two folders
# The address of Google's name server: without internet, resolving a name would take seconds.
OUTSIDE = ("8.8.8.8", 53)
PROBE_SECONDS = 0.5


def gather(here: Hardware | None = None) -> MachineFacts:
    """Gather all facts within a few tenths of a second. It never raises: a fact that cannot be determined is None."""
    here = here or hardware(may_be_unknown=True)
    answers: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for each in dataclasses.fields(MachineFacts):
        if each.name not in ("hardware", "problems"):
            try:
                answers[each.name] = globals()[each.name](here)
            except GpusUnknownError:
                pass  # `here` has the reason
            except Exception as error:  # one failing probe must not prevent the others
                problems[each.name] = f"{type(error).__name__}: {error}"
    return MachineFacts(here, **answers, problems=problems)


def release(here: Hardware) -> str:
    return platform.release()


def python(here: Hardware) -> str:
    return platform.python_version()


def packages(here: Hardware) -> dict[str, str | None]:
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_build(here: Hardware) -> TorchBuild | None:
    report = None if here.gpu_problem else torch_report(here.visible_devices)  # this takes as long as the first time
    return TorchBuild(report["cuda"], tuple(report["kernels"]), tuple(report["uuids"])) if report else None


def nvml(here: Hardware) -> Nvml | None:
    if not may_have_gpus(None):  # NVML knows no CUDA_VISIBLE_DEVICES
        return None
    report = ask_nvml(NVML_SECONDS)
    cards = [
        {**card, "processes": each and [{**process, **_who(process["pid"])} for process in each]}
        for card in report["cards"]
        for each in [card["processes"]]
    ]
    return nvml_from_json({**report, "cards": cards})


def _who(pid: int) -> dict[str, Any]:
    """Facts about a process that NVML lists. In a container its pid may be unknown or another process's."""
    try:
        process = psutil.Process(pid)
        name = process.name()
    except psutil.Error:
        return {"name": None}
    try:
        run = process.environ().get(MARKER)
    except (psutil.Error, OSError):
        run = None
    return {"name": name, "run": run, "mine": pid == os.getpid()}


def kernel(here: Hardware) -> NotebookKernel:
    """Query torch only if it has initialized CUDA already, because a query would initialize it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NotebookKernel(cuda=False)
    devices = range(torch.cuda.device_count())
    return NotebookKernel(
        True, tuple(map(torch.cuda.memory_allocated, devices)), tuple(map(torch.cuda.memory_reserved, devices))
    )


def cores_of_machine(here: Hardware) -> int | None:
    return os.cpu_count()


def memory_limit(here: Hardware) -> int | None:
    limit = _memory_limit()
    return UNLIMITED if limit is None or limit >= here.memory else limit


def address_space(here: Hardware) -> int | None:
    return _limit("RLIMIT_AS")


def locked_memory(here: Hardware) -> int | None:
    return _limit("RLIMIT_MEMLOCK")


def open_files(here: Hardware) -> int | None:
    return _limit("RLIMIT_NOFILE")


def _limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # native Windows
        return None
    number = getattr(resource, name, None)
    if number is None:
        return None
    soft = resource.getrlimit(number)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def runs_filesystem(here: Hardware) -> str | None:
    """The type of the runs folder's file system: "9p" or "drvfs" is a Windows drive seen from WSL."""
    if not MOUNTS.exists():
        return None
    root, best, kind = runs_root(None), PurePosixPath("/"), None
    for line in MOUNTS.read_text().splitlines():
        _, where, fstype, *_ = line.split()
        mount = PurePosixPath(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), where))
        if root.is_relative_to(mount) and len(mount.parts) >= len(best.parts):
            best, kind = mount, fstype
    return kind


def runs_free(here: Hardware) -> int:
    root = runs_root(None)
    return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free


def refusals(here: Hardware) -> dict[str, str]:
    checks: dict[str, Callable[[], object]] = {
        "GLOO_SOCKET_IFNAME": lambda: check_interface(os.environ.get("GLOO_SOCKET_IFNAME", "")),
        "runs folder": lambda: RunFolder.check_root(runs_root(None)),
    }
    messages = {}
    for what, check in checks.items():
        try:
            check()
        except LabError as error:
            messages[what] = str(error)
    return messages


def wslconfig(here: Hardware) -> str | None:
    """What is wrong with the .wslconfig of a Windows user, or ""."""
    if here.platform != "wsl2" or (text := _wslconfig()) is None:
        return None
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    return "lines end in CR LF" if b"\r\n" in text else ""


def _wslconfig() -> bytes | None:
    """The start of the .wslconfig of a Windows user."""
    for file in WINDOWS_USERS.glob("*/.wslconfig"):
        with suppress(OSError):  # another user's
            return file.read_bytes()[:4096]
    return None


def wsl(here: Hardware) -> Wsl | None:
    if here.platform != "wsl2":
        return None
    forwarding = re.search(rb"^\s*localhostForwarding\s*=\s*false\b", _wslconfig() or b"", re.IGNORECASE | re.MULTILINE)
    return Wsl(
        gpu_device=WSL_DEVICE.exists(),
        windows_driver=WSL_DRIVER.exists(),
        linux_drivers=tuple(sorted(re.split("[:.]", path.name)[0] for path in PACKAGES_INSTALLED.glob(LINUX_DRIVER))),
        networking=_wsl_networking(),
        localhost_forwarding=forwarding is None,
        clock_error=_clock_error(),
    )


def _wsl_networking() -> str | None:
    """What WSL's own program says; None in a version that has none."""
    try:
        asked = ["wslinfo", "--networking-mode"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _clock_error() -> float | None:
    try:
        return round(int(CLOCK.read_text()) - time.time(), 1)
    except (OSError, ValueError):
        return None


def front_end(here: Hardware) -> str:
    return frontend.ui()


def is_headless(here: Hardware) -> bool:
    return frontend.is_headless()


def leftovers(here: Hardware) -> tuple[str, ...]:
    return tuple(sorted(os.environ.keys() - without_leftovers(os.environ).keys() - {MARKER, NODE_MARKER}))


def nccl_settings(here: Hardware) -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}


def preflight(here: Hardware) -> Preflight | None:
    result = remembered_preflight(here, here.default_ranks, here.backend)
    if result is None:
        return None
    when = datetime.fromtimestamp(result.when).strftime("%Y-%m-%d %H:%M")
    return Preflight(str(result), result.env, when)


def bandwidth(here: Hardware) -> dict[str, str]:
    """The measured time of each kind of collective, by number of ranks."""
    return {
        f"{kind} of {link.ranks}": f"{line} (off by {line.residual:.0%})"
        for link in remembered_links(here)
        for kind, line in link.kinds.items()
    }


def kaggle(here: Hardware) -> Kaggle | None:
    """The session's facts; None elsewhere. Testing the internet connection is the doctor's only network access."""
    if here.platform != "kaggle":
        return None
    working, input_folder = session.working_folder(), session.input_folder()
    inputs = sorted(path.name for path in input_folder.iterdir()) if input_folder.is_dir() else []
    return Kaggle(
        run_type=os.environ.get("KAGGLE_KERNEL_RUN_TYPE", ""),
        session_seconds=_age(),
        session_length=_length(),
        disk_free=shutil.disk_usage(working).free,
        disk_used=_size(working),
        internet=_internet(),
        tpu=session.has_tpu(),
        inputs=tuple(inputs),
        data_sets=tuple(_data_sets(input_folder)),
    )


def _age() -> float | None:
    try:
        return session.age()
    except psutil.Error:
        return None


def _length() -> float | None:
    try:
        return session.length()
    except LabError:
        return None


def _internet() -> bool:
    try:
        with socket.create_connection(OUTSIDE, PROBE_SECONDS):
            return True
    except OSError:
        return False


def _folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder below `root` and its files. Raises TimeoutError if there are too many."""
    until = time.monotonic() + LOOK_SECONDS
    for folder, _, files in os.walk(root):
        if time.monotonic() > until:
            raise TimeoutError
        yield folder, files


def _size(root: Path) -> int | None:
    try:
        return sum(os.lstat(Path(folder, file)).st_size for folder, files in _folders(root) for file in files)
    except OSError:  # includes TimeoutError
        return None


def _data_sets(root: Path) -> set[str]:
    names = set()
    try:
        for _, files in _folders(root):
            names |= {name for name, (_, required) in SOURCES.items() if complete(required, files)}
    except OSError:  # too many or unreadable files: return those found so far
        pass
    return names
