"""Judges WSL2, according to documentation and issues (docs/reference/platforms.md): labkit has not been tested there
yet."""

from __future__ import annotations

import re

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import MachineFacts
from labkit.text import gib

WINDOWS_DRIVES = ("9p", "drvfs")
MOSTLY_FREE = 0.9
OLDEST_KERNEL = (5, 10, 16, 3)
LATE_SECONDS = 5.0
READINGS = ("free", "utilisation", "power", "temperature")


def version_of(release: str) -> int:
    """1 or 2, by the kernel: 4.4.0-19041-Microsoft is WSL1's, 5.15.153.1-microsoft-standard-WSL2 is WSL2's."""
    return 2 if "microsoft-standard" in release.lower() or "wsl2" in release.lower() else 1


@detection
def version(facts: MachineFacts) -> Diagnosis | None:
    if not facts.is_wsl or facts.release is None:
        return None
    number = version_of(facts.release)
    if number == 2:
        return Diagnosis("WSL", "version 2", "the one with a Linux kernel and the GPU")
    return Diagnosis(
        "WSL",
        "version 1",
        "it has no Linux kernel and no GPU: CUDA is for WSL2 only",
        "in PowerShell: wsl --set-version <distribution> 2",
        "warning",
    )


@detection
def kernel(facts: MachineFacts) -> Diagnosis | None:
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)(?:\.(\d+))?", facts.release or "")
    if not is_wsl2(facts) or numbers is None or tuple(int(each or 0) for each in numbers.groups()) >= OLDEST_KERNEL:
        return None
    return Diagnosis(
        "WSL kernel",
        str(numbers[0]),
        f"NVIDIA's guide for WSL2 recommends {'.'.join(map(str, OLDEST_KERNEL))} or newer",
        "in PowerShell: wsl --update, then wsl --shutdown",
        "warning",
    )


@detection
def gpu(facts: MachineFacts) -> Diagnosis | None:
    """Why there is no GPU: nothing inside WSL can change it."""
    if not is_wsl2(facts) or facts.wsl is None or (facts.wsl.gpu_device and facts.wsl.windows_driver):
        return None
    missing = "driver of NVIDIA's for Windows" if facts.wsl.gpu_device else "/dev/dxg"
    return Diagnosis(
        "WSL GPU",
        f"no {missing}",
        "ranks train on the CPU",
        "if this computer has an NVIDIA GPU: update Windows, wsl --update, and install NVIDIA's driver for Windows; "
        "none belongs into WSL",
        "note",
    )


@detection
def linux_driver(facts: MachineFacts) -> Diagnosis | None:
    if not is_wsl2(facts) or facts.wsl is None or not facts.wsl.linux_drivers:
        return None
    packages = facts.wsl.linux_drivers
    return Diagnosis(
        "Linux driver",
        ", ".join(packages),
        "NVIDIA's guide for WSL2: install no driver for Linux there, because it hides that of Windows",
        f"sudo apt remove {' '.join(packages)}, then wsl --shutdown; torch from pip needs no CUDA toolkit",
        "warning",
    )


@detection
def clock(facts: MachineFacts) -> Diagnosis | None:
    error = (facts.wsl.clock_error if facts.wsl else None) or 0.0
    if not is_wsl2(facts) or abs(error) < LATE_SECONDS:
        return None
    return Diagnosis(
        "clock",
        f"{abs(error):,.0f} s {'behind' if error > 0 else 'ahead of'} the computer's",
        "it stops while the computer sleeps (microsoft/WSL #5324, #10006): times of runs and TLS go wrong",
        "sudo hwclock -s, or wsl --shutdown",
        "warning",
    )


@detection
def network(facts: MachineFacts) -> Diagnosis | None:
    if not is_wsl2(facts) or facts.wsl is None or facts.wsl.networking is None:
        return None
    if facts.wsl.networking != "nat":
        return Diagnosis("WSL network", facts.wsl.networking, "it decides who can reach ranks and Jupyter here")
    return Diagnosis(
        "WSL network", "nat", "other machines reach no rank here; for several of them: networkingMode=mirrored"
    )


@detection
def localhost(facts: MachineFacts) -> Diagnosis | None:
    """In mirrored mode, WSL ignores the setting."""
    if not is_wsl2(facts) or facts.wsl is None or facts.wsl.localhost_forwarding or facts.wsl.networking == "mirrored":
        return None
    return Diagnosis(
        "localhost",
        "localhostForwarding=false",
        "a browser in Windows does not find Jupyter at localhost",
        "remove that line from .wslconfig, then wsl --shutdown; or open the address that hostname -I prints",
        "warning",
    )


@detection
def idle(facts: MachineFacts) -> Diagnosis | None:
    if not is_wsl2(facts):
        return None
    return Diagnosis(
        "detached runs",
        "end with WSL",
        "it may stop soon after its last terminal is closed (microsoft/WSL #8854, #9667, #9968)",
        "keep a terminal open while runs with detach=True train",
        "note",
    )


@detection
def memory(facts: MachineFacts) -> Diagnosis | None:
    if not is_wsl2(facts):
        return None
    return Diagnosis(
        "WSL memory",
        gib(facts.hardware.memory),
        "of WSL's virtual machine, by default half of the computer's memory",
        "for more: [wsl2] memory=… in %UserProfile%\\.wslconfig (UTF-8, lines ending in LF), then wsl --shutdown",
        "note",
    )


@detection
def wslconfig(facts: MachineFacts) -> Diagnosis | None:
    if not is_wsl2(facts) or not facts.wslconfig:
        return None
    return Diagnosis(
        ".wslconfig",
        facts.wslconfig,
        "WSL may ignore it unless it is UTF-8 with lines ending in LF",
        "save it again as UTF-8 with LF, then wsl --shutdown",
        "warning",
    )


@detection
def runs_folder(facts: MachineFacts) -> Diagnosis | None:
    if not facts.is_wsl or facts.runs_filesystem is None:
        return None
    if facts.runs_filesystem not in WINDOWS_DRIVES:
        return Diagnosis("runs folder", f"on {facts.runs_filesystem}", "keep it off /mnt/c: writes there are slow")
    return Diagnosis(
        "runs folder",
        f"on a Windows drive ({facts.runs_filesystem})",
        "writes there are slow, and ranks write records continuously",
        "work in WSL's own file system (cd ~), or export LABKIT_RUNS=~/runs",
        "warning",
    )


@detection
def pinned_memory(facts: MachineFacts) -> Diagnosis | None:
    if not is_wsl2(facts) or not facts.hardware.gpus:
        return None
    return Diagnosis(
        "pinned memory",
        "limited",
        "according to NVIDIA's guide for WSL2, which does not give the limit",
        "if a DataLoader or CPU offload fails to pin memory: pin_memory=False (--no-pin-memory)",
        "note",
    )


@detection
def several_gpus(facts: MachineFacts) -> Diagnosis | None:
    """`communication.preflight` reports the required P2P and SHM settings after a preflight."""
    if not is_wsl2(facts) or len(facts.hardware.gpus) < 2 or facts.preflight is not None:
        return None
    return Diagnosis(
        "GPUs in WSL2",
        str(len(facts.hardware.gpus)),
        "NCCL's notes mention a single GPU in WSL2; failures with two are reported (microsoft/WSL #12467)",
        "labkit doctor --preflight tries NCCL's defaults, then without P2P, then without SHM, and keeps what works",
        "note",
    )


@detection
def desktop(facts: MachineFacts) -> Diagnosis | None:
    """GPU memory used by Windows."""
    if not is_wsl2(facts):
        return None
    taken = [c for c in facts.cards if c.memory and c.free is not None and c.free < MOSTLY_FREE * c.memory]
    if not taken:
        return None
    return Diagnosis(
        "GPU memory",
        ", ".join(f"GPU {c.index}: {gib(c.free)} free of {gib(c.memory)}" for c in taken),
        "the Windows desktop and programs share the GPU: ranks have less memory than the planner assumes",
        "close browsers and games, let the desktop use another GPU, or train smaller",
        "warning",
    )


@detection
def nvml_gaps(facts: MachineFacts) -> Diagnosis | None:
    """Missing values of NVML, which are known to occur in WSL2."""
    gaps = [name for name in READINGS if any(getattr(card, name) is None for card in facts.cards)]
    processes = [card.processes for card in facts.cards]
    if any(each is None or any(p.memory is None for p in each) for each in processes):
        gaps.append("memory per process")
    if not gaps:
        return None
    return Diagnosis(
        "NVML",
        f"missing: {', '.join(gaps)}",
        "the view shows n/a for these; memory per rank is measured inside the ranks and is correct",
        "nothing",
        "note",
    )


def is_wsl2(facts: MachineFacts) -> bool:
    return facts.is_wsl and version_of(facts.release or "") == 2
