"""Judges the resources that the ranks share: cores, memory, disk, /dev/shm, and their limits."""

from __future__ import annotations

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import UNLIMITED, MachineFacts
from labkit.text import gib

LITTLE_DISK = 2 << 30
SMALL_SHM = 1 << 30
FEW_FILES = 1024
SMALL_SHARE = 1 << 30  # a rank needs 0.2 GiB before its first tensor, plus data and DataLoader workers


@detection
def cores(facts: MachineFacts) -> Diagnosis:
    here, ranks = facts.hardware, facts.ranks
    threads = max(1, here.cores // ranks)
    of = facts.cores_of_machine
    value = (
        f"{here.cores}{f' of the machine’s {of}' if of and of > here.cores else ''}, {here.cores / ranks:.3g} per rank"
    )
    why = "torchrun gives each of several ranks one thread" if ranks > 1 else "torch uses all of them"
    if ranks > 1 and threads > 1 and not here.gpus:
        why += f"; env={{'OMP_NUM_THREADS': '{threads}'}} uses all cores"
    why += "; this process cannot use the others (affinity or container)" if of and of > here.cores else ""
    if here.cores >= ranks:
        return Diagnosis("cores", value, why)
    why = f"{why}; ranks and DataLoader workers compete for cores"
    return Diagnosis("cores", value, why, f"use nproc_per_node={here.cores}, or more cores", "warning")


@detection
def memory(facts: MachineFacts) -> Diagnosis:
    here = facts.hardware
    share = here.memory_available // facts.ranks
    value = f"{gib(here.memory_available)} free of {gib(here.memory)}, {gib(share)} per rank"
    if share >= SMALL_SHARE:
        return Diagnosis("memory", value, "of the host: for data, DataLoader workers and, without a GPU, the model")
    why = "when it is full, the system kills a process, usually a rank, without a message"
    return Diagnosis("memory", value, why, "end other programs, or start fewer ranks", "warning")


@detection
def disk(facts: MachineFacts) -> Diagnosis | None:
    """Kaggle has its own quota: see kaggle.py."""
    if facts.runs_free is None or facts.kaggle is not None:
        return None
    value = f"{gib(facts.runs_free)} free in the runs folder's file system"
    if facts.runs_free >= LITTLE_DISK:
        return Diagnosis("disk", value, "a run keeps two checkpoints, and a third while it is being saved")
    why = "a checkpoint that does not fit is not written, and training continues without saving"
    return Diagnosis("disk", value, why, "delete old runs, or store them elsewhere: LABKIT_RUNS=…", "warning")


@detection
def memory_limit(facts: MachineFacts) -> Diagnosis | None:
    limit = facts.memory_limit
    if limit is None or limit == UNLIMITED:
        return None
    return Diagnosis(
        "memory limit",
        f"{gib(limit)} of the machine's {gib(facts.hardware.memory)}, {gib(limit // facts.ranks)} per rank",
        "the limit of this container (control group): beyond it a rank is killed, although `free` shows more",
        "docker run --memory=…, or a larger job; files in /dev/shm count, too",
        "warning" if limit // facts.ranks < SMALL_SHARE else "note",
    )


@detection
def address_space(facts: MachineFacts) -> Diagnosis | None:
    """torch maps gigabytes of libraries; CUDA reserves more addresses than there is memory."""
    limit = facts.address_space
    if limit is None or limit == UNLIMITED:
        return None
    return Diagnosis(
        "address space",
        f"{gib(limit)} for each process",
        "`ulimit -v`: it includes all mapped memory, used or not, such as torch's libraries; at the limit imports and "
        "allocations fail although memory is free",
        "`ulimit -v unlimited`; control groups are a better limit for a job",
        "warning",
    )


@detection
def shared_memory(facts: MachineFacts) -> Diagnosis | None:
    size = facts.hardware.shared_memory
    if size is None:
        return None
    if size >= SMALL_SHM:
        return Diagnosis("/dev/shm", gib(size), "DataLoader workers pass batches through it")
    return Diagnosis(
        "/dev/shm",
        gib(size),
        "small: DataLoader workers pass batches through it, and NCCL without peer access its messages; "
        "when it is full, a process dies with a bus error",
        "in docker: --shm-size=2g (or --ipc=host); otherwise num_workers=0",
        "warning",
    )


@detection
def locked_memory(facts: MachineFacts) -> Diagnosis | None:
    limit = facts.locked_memory
    if limit is None or not facts.hardware.gpus:
        return None
    return Diagnosis(
        "locked memory",
        "unlimited" if limit == UNLIMITED else gib(limit),
        "it does not limit CUDA's pinned memory, but that of RDMA network cards between hosts",
        ""
        if limit == UNLIMITED
        else "nothing on one machine; with RDMA `ulimit -l unlimited`, docker --ulimit memlock=-1",
    )


@detection
def open_files(facts: MachineFacts) -> Diagnosis | None:
    allowed = facts.open_files
    if allowed is None:
        return None
    if allowed == UNLIMITED or allowed >= FEW_FILES:
        value = "unlimited" if allowed == UNLIMITED else f"{allowed:,}"
        return Diagnosis("open files", value, "DataLoader workers share tensors through them")
    return Diagnosis(
        "open files",
        f"{allowed:,}",
        "few: DataLoader workers share tensors through them",
        "`ulimit -n 4096` before starting Jupyter",
        "warning",
    )
