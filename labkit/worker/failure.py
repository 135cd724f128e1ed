"""A rank's last words: `error.json`, written by the rank that failed while it still knows why."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from labkit.record.folder import RunFolder, write_json
from labkit.worker.memory import resident_set
from labkit.worker.pulse import record_collectives

__all__ = ["exit_code", "write"]

# This package stands between the script and the interpreter; nobody needs to read about it.
OURS = str(Path(__file__).parent)
# A DataLoader worker's exception arrives as one of the same type whose message is the worker's whole traceback.
FROM_WORKER = "Original Traceback (most recent call last):"
HOST_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory")


def exit_code(error: SystemExit) -> int:
    """What the interpreter would exit with: None is 0, a number is itself, a message is printed and is 1."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr, flush=True)
    return 1


def write(folder: RunFolder, rank: int, error: BaseException, step: int) -> None:
    """Record the failure and print its traceback as Python would, less the frames that are not the user's."""
    now = time.time_ns()
    error.__traceback__ = _strip(error.__traceback__)
    record: dict[str, Any] = {
        "time_ns": now,
        "rank": rank,
        "pid": os.getpid(),
        "step": step,
        "kind": "exit" if isinstance(error, SystemExit) else "exception",
        "exception": _name(type(error)),
        "message": _message(error),
        "script_line": _line_in_script(error),
        "traceback": traceback.format_exception(error),
    } | _memory(error)
    try:
        write_json(folder.error(rank), record, reserve=folder.reserve)
    except OSError as problem:
        with suppress(OSError):  # stderr may be on the same full disk
            print(f"labkit: the failure of rank {rank} could not be kept: {problem!r}", file=sys.stderr)
    with suppress(Exception):  # evidence, where this torch has any
        record_collectives(folder, rank)
    if not isinstance(error, SystemExit):
        with suppress(OSError):
            traceback.print_exception(error)
            sys.stderr.flush()


def _memory(error: BaseException) -> dict[str, Any]:
    """Of an error for want of memory: which memory, and what of it this rank had in use. Sizes in bytes."""
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
        return {"out_of_memory": "device", "memory": _device_memory()}
    if isinstance(error, MemoryError) or HOST_MEMORY.search(str(error)):
        return {"out_of_memory": "host", "memory": resident_set()()}
    return {}


def _device_memory() -> dict[str, float]:
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
        used = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    except Exception:  # the device may be beyond answering
        return {}
    return used | {"free": free, "total": total}


def _name(kind: type[BaseException]) -> str:
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _message(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return str(error.code)
    if FROM_WORKER in str(error):
        last = str(error).strip().splitlines()[-1]
        return f"{last.removeprefix(type(error).__name__ + ': ')} (in a DataLoader worker)"
    # DCP's CheckpointException keeps what happened in `failures`, its text says only on which ranks.
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        inner = next(iter(failures.values()))[0]
        return f"on rank {', '.join(map(str, failures))}: {type(inner).__name__}: {inner}"
    return str(error)


def _line_in_script(error: BaseException) -> int | None:
    """The deepest line of the script itself on the way to the error."""
    in_worker = (
        re.findall(rf'File "{re.escape(sys.argv[0])}", line (\d+)', str(error)) if FROM_WORKER in str(error) else []
    )
    if in_worker:
        return int(in_worker[-1])
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == sys.argv[0]]
    if isinstance(error, SyntaxError) and error.filename == sys.argv[0]:
        lines.append(error.lineno)
    return lines[-1] if lines else None


def _strip(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    return trace
