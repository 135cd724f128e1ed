"""Judges the GPUs: memory, precisions, and whether torch can use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import MachineFacts
from labkit.hardware import ASKED_AGAIN, FP8, Gpu, install_for, without_kernels
from labkit.planner import OUTSIDE_TENSORS
from labkit.text import gib

FLASH = (8, 0)
OLDEST_WITH_ALL_WHEELS = (7, 5)  # NVML, asked without torch, does not tell what the GPUs can do


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
    """The machine has GPUs, but torch has none."""
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
