"""Advises on failures of a known kind: memory, disk, errors of a kernel. Advice rests only on what is known of the
script."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping

from labkit.record import RunFolder, ScriptFacts
from labkit.words import EXPANDABLE
from labkit.write import Script, extra_options, options_of

FULL_BYTES = 16 << 20
FRAGMENTED = 0.03  # of the device's memory; less is usual
# An error of a kernel is raised by a later call.
BLOCKING = "with env={'CUDA_LAUNCH_BLOCKING': '1'} the traceback ends at the kernel that failed, not at a later call"
ALONE = "with num_workers=0 the rank itself crashes, and its line is named"
# The defaults are those of init_process_group's documentation.
LONGER = (
    "if it waited for a file, a lock or another process, that is what to repair. If it only had to finish, let a rank "
    "prepare data in a run of its own before; or have the others wait longer: "
    "init_process_group(timeout=datetime.timedelta(hours=2)). By default it is 10 minutes with NCCL, 30 with gloo"
)
MESSAGES = (
    "Receive messages in the order in which they are sent, into tensors of the shape and dtype that are sent; a `tag` "
    "tells messages apart where the order is not known"
)
FIREWALL = "check that the network between them is up and that no firewall blocks it: ranks connect to any port"
DISK_FULL = re.compile(r"No space left on device|unexpected pos \d+ vs \d+")


def fragmented(memory: Mapping[str, float]) -> float:
    """Bytes that CUDA's allocator had reserved and could not use for the failed request, 0 if they matter little."""
    allocated, reserved, total = (memory.get(name) or 0.0 for name in ("allocated", "reserved", "total"))
    return idle if allocated and (idle := reserved - allocated) > FRAGMENTED * total else 0.0


def memory_advice(
    kind: str,
    script: Script,
    parameters: Mapping[str, object],
    facts: ScriptFacts | None = None,
    fragments: float = 0.0,
) -> str:
    """The changes that would make it fit, one a line, among the options that this script has and does not use yet.
    `facts` is what is known of the script; `fragments`: bytes that the allocator had reserved but could not use."""
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
        if facts and facts.shards is False:
            ways.append("shard the model: Script.load('fsdp')")
        if not ways:
            ways.append("a smaller batch")
            if facts and facts.checkpoints is False:
                ways.append("activation checkpointing")
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
