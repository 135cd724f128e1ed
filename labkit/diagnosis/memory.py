"""What the ranks share: cores, memory, disk, /dev/shm, and the limits set on them."""

from __future__ import annotations

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import UNLIMITED, MachineFacts
from labkit.record.units import gib

LITTLE_DISK = 2 << 30
SMALL_SHM = 1 << 30
FEW_FILES = 1024
SMALL_SHARE = 1 << 30  # a rank has 0.2 GiB before its first tensor, its data and DataLoader workers come on top


@detection
def cores(facts: MachineFacts) -> Diagnosis:
    here, ranks = facts.hardware, facts.ranks
    threads = max(1, here.cores // ranks)
    of = facts.cores_of_machine
    value = (
        f"{here.cores}{f' of the machine’s {of}' if of and of > here.cores else ''}, {here.cores / ranks:.3g} per rank"
    )
    why = f"OMP_NUM_THREADS = cores / ranks = {threads}"
    why += "; the others are kept from this process by its affinity or its container" if of and of > here.cores else ""
    if here.cores >= ranks:
        return Diagnosis("cores", value, why)
    why = f"{why}; ranks wait for each other's turn, and DataLoader workers for theirs"
    return Diagnosis("cores", value, why, f"nproc_per_node={here.cores}, or more cores", "warning")


@detection
def memory(facts: MachineFacts) -> Diagnosis:
    here = facts.hardware
    share = here.memory_available // facts.ranks
    value = f"{gib(here.memory_available)} free of {gib(here.memory)}, {gib(share)} per rank"
    if share >= SMALL_SHARE:
        return Diagnosis("memory", value, "the host's: data, DataLoader workers, without a GPU also the model")
    why = "when it is full the system kills a process, mostly a rank, without a word"
    return Diagnosis("memory", value, why, "end other programs, or start fewer ranks", "warning")


@detection
def disk(facts: MachineFacts) -> Diagnosis | None:
    """Kaggle's has a quota of its own: see kaggle.py."""
    if facts.runs_free is None or facts.kaggle is not None:
        return None
    value = f"{gib(facts.runs_free)} free where runs are kept"
    if facts.runs_free >= LITTLE_DISK:
        return Diagnosis("disk", value, "two checkpoints of a run are kept, a third is there while it is saved")
    why = "a checkpoint that does not fit is not begun, and the training goes on unsaved"
    return Diagnosis("disk", value, why, "delete old runs, or keep them elsewhere: LABKIT_RUNS=…", "warning")


@detection
def memory_limit(facts: MachineFacts) -> Diagnosis | None:
    limit = facts.memory_limit
    if limit is None or limit == UNLIMITED:
        return None
    return Diagnosis(
        "memory limit",
        f"{gib(limit)} of the machine's {gib(facts.hardware.memory)}, {gib(limit // facts.ranks)} per rank",
        "this container's (its control group): beyond it a rank is killed, although `free` shows more",
        "docker run --memory=…, or a larger job; what is in /dev/shm counts, too",
        "warning" if limit // facts.ranks < SMALL_SHARE else "note",
    )


@detection
def address_space(facts: MachineFacts) -> Diagnosis | None:
    """torch maps gigabytes of libraries, CUDA reserves more addresses than there is memory."""
    limit = facts.address_space
    if limit is None or limit == UNLIMITED:
        return None
    return Diagnosis(
        "address space",
        f"{gib(limit)} for each process",
        "`ulimit -v`: what is mapped counts in it, used or not, first torch's libraries; at the limit imports and "
        "allocations fail, although memory is free",
        "`ulimit -v unlimited`; a job is better held by a control group",
        "warning",
    )


@detection
def shared_memory(facts: MachineFacts) -> Diagnosis | None:
    size = facts.hardware.shared_memory
    if size is None:
        return None
    if size >= SMALL_SHM:
        return Diagnosis("/dev/shm", gib(size), "where DataLoader workers hand over batches")
    return Diagnosis(
        "/dev/shm",
        gib(size),
        "small: DataLoader workers hand batches over in it, and NCCL without peer access its messages; "
        "when it is full a process dies with a bus error",
        "in docker: --shm-size=2g (or --ipc=host); elsewhere num_workers=0",
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
        "pinned memory of CUDA is not counted in it, that of RDMA network cards between hosts is",
        ""
        if limit == UNLIMITED
        else "on one machine nothing; with RDMA `ulimit -l unlimited`, docker --ulimit memlock=-1",
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
