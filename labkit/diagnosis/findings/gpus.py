"""Judges the GPUs: memory, precisions, whether torch can use them, and what else does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import Card, MachineFacts, Process
from labkit.hardware import ASKED_AGAIN, FP8, Gpu, install_for, without_kernels
from labkit.planner import OUTSIDE_TENSORS
from labkit.text import gib

FLASH = (8, 0)
OLDEST_WITH_ALL_WHEELS = (7, 5)  # NVML, asked without torch, does not tell what the GPUs can do
MOSTLY_FREE = 0.9
SHOWN = 4


@detection
def devices(facts: MachineFacts) -> Diagnosis:
    here = facts.hardware
    hidden = here.visible_devices is not None
    decides = f"CUDA_VISIBLE_DEVICES={here.visible_devices!r} determines the visible GPUs" if hidden else ""
    if here.gpu_problem:
        reason, _, todo = here.gpu_problem.partition(f". {ASKED_AGAIN} ")
        return Diagnosis("devices", "unknown", f"{reason}: a launch is refused", todo, "stop")
    if not here.gpus:
        if hidden:
            return Diagnosis("devices", "no GPU", decides, "unset it to use all GPUs, or select others", "note")
        if "+rocm" in ((facts.packages or {}).get("torch") or ""):
            why = "this torch is for AMD GPUs, which labkit does not detect and was never tested on"
            return Diagnosis("devices", "no NVIDIA GPU", why, "set the number of ranks: nproc_per_node=…", "warning")
        return Diagnosis("devices", "no GPU", "ranks train on the CPU: correct, but slow")
    outside = "CUDA's context, NCCL's buffers and cuBLAS's workspaces"
    less = f"usable: without {outside}, assumed to take {gib(OUTSIDE_TENSORS)}"
    return Diagnosis("devices", _listed(here.gpus), "; ".join(filter(None, (less, decides))))


def _listed(gpus: Sequence[Gpu]) -> str:
    """Identical GPUs together: `2 x Tesla T4 (14.24 GiB usable of 14.74 GiB, sm_75)`."""
    return ", ".join(
        f"{f'{count} x ' if count > 1 else ''}{gpu.name} ({gib(max(0, gpu.memory - OUTSIDE_TENSORS))} usable of "
        f"{gib(gpu.memory)}, {gpu.sm})"
        for gpu, count in Counter(gpus).items()
    )


@detection
def precision(facts: MachineFacts) -> Diagnosis:
    name = facts.hardware.precision
    if name == "fp16":
        return Diagnosis(
            "precision",
            name,
            f"{_old(facts)}: no bf16 hardware before sm_80; torch emulates it, slower than fp32",
            'precision="fp16"; the scripts include the gradient scaler that it needs',
            "note",
        )
    if name == "fp32":
        return Diagnosis("precision", name, "fp16 has no benefit on a CPU; bf16 is slower on most")
    why = "no gradient scaler needed"
    if all(gpu.capability >= FP8 for gpu in facts.hardware.gpus):
        why += "; fp8 (torchao) would at best halve the time of matrix products; labkit's scripts do not use it"
    return Diagnosis("precision", name, why)


@detection
def attention(facts: MachineFacts) -> Diagnosis | None:
    if not _old(facts):
        return None
    return Diagnosis(
        "attention",
        "no flash attention",
        f"{_old(facts)}: its kernels need sm_80 or newer; torch's scaled_dot_product_attention uses the "
        "memory-efficient or the math kernel",
        "leave the choice to scaled_dot_product_attention; requesting flash attention fails",
        "note",
    )


def _old(facts: MachineFacts) -> str:
    """The GPUs before sm_80."""
    return ", ".join(dict.fromkeys(f"{g.name} is {g.sm}" for g in facts.hardware.gpus if g.capability < FLASH))


@detection
def kernels(facts: MachineFacts) -> Diagnosis | None:
    """A P100 and torch's default wheel: `is_available()` is true and the first operation fails."""
    built, here = facts.torch_build.kernels if facts.torch_build else (), facts.hardware
    without = without_kernels(here.gpus, built)
    if not without:
        return None
    torch = (facts.packages or {}).get("torch")
    return Diagnosis(
        "kernels",
        ", ".join(dict.fromkeys(f"none for {gpu.name} ({gpu.sm})" for gpu in without)),
        f"this torch {torch} is compiled for {', '.join(built)}: the first operation on the GPU fails, although "
        "torch.cuda.is_available() is true",
        "use another GPU (on Kaggle: GPU T4 x2), hide it with CUDA_VISIBLE_DEVICES='', or install a torch for it"
        + (f": {command}" if (command := install_for(here.gpus, facts.nvml.cuda if facts.nvml else None)) else ""),
        "stop",
    )


@detection
def unseen(facts: MachineFacts) -> Diagnosis | None:
    """The machine has GPUs, but torch sees none."""
    here, build, nvml = facts.hardware, facts.torch_build, facts.nvml
    cards = nvml.cards if nvml else ()
    are_here = here.unusable_gpus or (cards and here.visible_devices is None)
    if here.gpus or here.gpu_problem or not build or not are_here:
        return None
    there = ", ".join(str(card.name) for card in cards) or "GPUs that NVML does not list"
    if build.cuda is None:
        why, todo = "this torch is built without CUDA", "install one with: https://pytorch.org/get-started/locally"
    elif nvml and nvml.cuda and int(nvml.cuda.split(".")[0]) < int(build.cuda.split(".")[0]):
        why = f"this torch is built for CUDA {build.cuda}, but the driver {nvml.driver} supports up to {nvml.cuda}"
        command = install_for([Gpu("", 0, OLDEST_WITH_ALL_WHEELS)], nvml.cuda)
        todo = f"install a newer driver, or a torch for CUDA {nvml.cuda.split('.')[0]}: {command}"
    else:
        why = here.unusable_gpus or "torch gives no reason"
        todo = "python -c 'import torch; torch.cuda.init()' shows the error"
    return Diagnosis("unseen GPUs", there, f"{why}: ranks train on the CPU", todo, "warning")


@detection
def cuda_memory(facts: MachineFacts) -> Diagnosis | None:
    held = {card.index: p.memory for card in facts.cards for p in card.processes or () if p.mine}
    kernel = facts.kernel
    if not held and not (kernel and kernel.cuda):
        return None
    # NVML counts the whole process, torch only its tensors; in WSL2 only the latter is available.
    allocated = dict(enumerate(kernel.allocated)) if kernel else {}
    reserved = dict(enumerate(kernel.reserved)) if kernel else {}
    parts = [f"GPU {index}: {gib(memory)}" if memory else f"GPU {index}" for index, memory in held.items()]
    parts = parts or [f"cuda:{index}: {gib(size)} reserved" for index, size in reserved.items() if size]
    tensors = sum(allocated.values())
    return Diagnosis(
        "this process",
        "holds memory on " + (", ".join(parts) or "a GPU (CUDA's context)"),
        f"{gib(tensors)} in tensors of this kernel; ranks on that GPU have that much less",
        "restart the kernel, or del the tensors and call torch.cuda.empty_cache(), which keeps CUDA's context",
        "warning" if parts else "note",
    )


@detection
def others(facts: MachineFacts) -> Diagnosis | None:
    """GPUs that are less than 90 % free or used by another process."""
    if facts.is_wsl:  # the desktop uses memory there, and NVML cannot list processes
        return None
    busy = [(card, processes) for card in facts.cards if (processes := _others(card)) or _unexplained(card)]
    if not busy:
        return None
    value = "; ".join(_described(card, processes) for card, processes in busy)
    runs = sorted({process.run for _, processes in busy for process in processes if process.run})
    ours = f"labkit stop {runs[0]}; " if runs else ""
    hidden = "; this kernel is one of them" if _is_hidden(facts) else ""
    full = any(card.memory and card.free is not None and card.free < MOSTLY_FREE * card.memory for card, _ in busy)
    return Diagnosis(
        "GPUs in use",
        value,
        f"ranks share the GPUs with these processes and may run out of memory{hidden}",
        f"{ours}wait, end them, or select other GPUs: CUDA_VISIBLE_DEVICES",
        "warning" if full else "note",
    )


def _is_hidden(facts: MachineFacts) -> bool:
    """Whether this process uses CUDA but NVML does not list it: in a container its pid differs."""
    mine = any(process.mine for card in facts.cards for process in card.processes or ())
    return facts.kernel is not None and facts.kernel.cuda and not mine


def _others(card: Card) -> list[Process]:
    return [process for process in card.processes or () if not process.mine]


def _unexplained(card: Card) -> bool:
    """Whether much memory is in use without any listed process: a container hides the processes of others."""
    mine = any(process.mine for process in card.processes or ())
    return not mine and bool(card.memory) and card.free is not None and card.free < MOSTLY_FREE * (card.memory or 0)


def _described(card: Card, processes: list[Process]) -> str:
    free = f" ({gib(card.free)} free of {gib(card.memory)})" if card.free is not None else ""
    who = ", ".join(_named(process) for process in processes[:SHOWN]) or "processes that are not visible from here"
    more = f" and {len(processes) - SHOWN} more" if len(processes) > SHOWN else ""
    return f"GPU {card.index}{free}: {who}{more}"


def _named(process: Process) -> str:
    who = f"run {process.run}" if process.run else f"{process.name or 'another container’s process'} {process.pid}"
    return f"{who} {gib(process.memory)}" if process.memory is not None else who
