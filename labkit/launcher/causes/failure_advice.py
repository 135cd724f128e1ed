"""Advice on failures of a known kind: memory, disk, ranks that disagree."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Any

from labkit.record import RankHistory, RunFolder, number
from labkit.text import gib
from labkit.write import Script, extra_options, options_of

__all__ = ["BLOCKING", "EXPANDABLE", "disk_advice", "fragmented", "memory_advice", "memory_in_words"]

FULL_BYTES = 16 << 20
FRAGMENTED = 0.03  # of the device's memory; less is usual
# The name that every torch since 2.8 knows; PYTORCH_ALLOC_CONF is newer.
EXPANDABLE = "{'PYTORCH_CUDA_ALLOC_CONF': 'expandable_segments:True'}"
# An error of a kernel is raised by a later call.
BLOCKING = "with env={'CUDA_LAUNCH_BLOCKING': '1'} the traceback ends at the kernel that failed, not at a later call"
DISK_FULL = re.compile(r"No space left on device|unexpected pos \d+ vs \d+")


def memory_in_words(kind: str, memory: Mapping[str, Any], history: RankHistory | None) -> str:
    """What a rank's memory held when it ran out: `; 13.9 of 14.7 GiB were allocated (parameters 3.1 GiB, …)`."""
    peak = history.memory_peak if history else 0.0
    if kind == "host":
        most = number(memory.get("peak")) or peak
        return f"; it held up to {gib(most)} (resident set)" if most else ""
    allocated, total = number(memory.get("allocated")) or peak, number(memory.get("total"))
    held = {name: size for name, size in (history.held if history else {}).items() if size}
    shares = [f"{name} {gib(size)}" for name, size in held.items()]
    if held and allocated > sum(held.values()):
        shares.append(f"activations and buffers {gib(allocated - sum(held.values()))}")
    usage = f"; {gib(allocated)}{f' of {gib(total)}' if total else ''} were allocated" if allocated else ""
    others = (total or 0) - (number(memory.get("free")) or 0) - (number(memory.get("reserved")) or 0)
    outside = f", {gib(others)} of the device were held by other processes, CUDA or NCCL" if others > 2**30 else ""
    idle = fragmented(memory)
    apart = f", {gib(idle)} reserved but unallocated" if idle else ""
    return usage + (f" ({', '.join(shares)})" if usage and shares else "") + apart + outside


def fragmented(memory: Mapping[str, Any]) -> float:
    """Bytes that CUDA's allocator had reserved and could not use for the failed request, 0 if they matter little."""
    allocated, reserved, total = (number(memory.get(name)) or 0.0 for name in ("allocated", "reserved", "total"))
    return idle if allocated and (idle := reserved - allocated) > FRAGMENTED * total else 0.0


def memory_advice(kind: str, script: Script, parameters: Mapping[str, Any], fragments: float = 0.0) -> str:
    """The changes that would make it fit, one a line, among the options that this script has and does not use yet.
    `fragments`: bytes that the allocator had reserved but could not use."""
    try:
        options = options_of(script)
        for more in extra_options(script).values():  # an option adds its extra
            options |= more
    except SyntaxError:
        options = {}
    ways = ["a smaller batch", "fewer DataLoader workers", "fewer ranks", "less data in memory at once"]
    if kind == "device":
        ways = []
        if fragments:
            ways.append(f"env={EXPANDABLE}, which reduces fragmentation")
        if "accumulate" in options:
            ways.append(f"raise accumulate (now {parameters.get('accumulate', options['accumulate'].default)})")
        if "activation_checkpointing" in options and "activation_checkpointing" not in parameters:
            ways.append("activation_checkpointing=True")
        if parameters.get("precision", "fp32") == "fp32" and "precision" in options:
            ways.append("precision='bf16', or 'fp16' on a T4")
        if "fully_shard" not in str(script):
            ways.append("shard the model: Script.load('fsdp')")
        ways = ways or ["a smaller batch", "activation checkpointing"]
    return "to make it fit:" + "".join(f"\n- {way}" for way in ways)


def disk_advice(folder: RunFolder, message: str) -> str:
    """Advice if the disk is full, whatever torch reports ("unexpected pos 704 vs 598"); otherwise empty."""
    where = folder.checkpoint_folder() if folder.checkpoint_folder().exists() else folder.path
    free = shutil.disk_usage(where).free
    if not DISK_FULL.search(message) or free > FULL_BYTES:  # if there is room, another disk was full, such as /dev/shm
        return ""
    checkpoint = folder.newest_checkpoint()
    safe = f"; checkpoint {checkpoint} is complete" if checkpoint else ""
    return f"{free / 2**20:.0f} MiB free on the disk of {where}{safe}"
