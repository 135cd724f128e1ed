"""Judges this process: GPU memory that a notebook's kernel holds is not available to ranks."""

from __future__ import annotations

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import MachineFacts
from labkit.text import gib


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
