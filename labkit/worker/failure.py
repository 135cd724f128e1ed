"""A rank's last words: `error.json`, written by the rank that failed while it still knows why."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from labkit.record.folder import RunFolder, write_json
from labkit.record.text import first_line, shortened
from labkit.worker.memory import resident_set
from labkit.worker.pulse import record_collectives

__all__ = ["exit_code", "show", "write"]

# This package stands between the script and the interpreter; nobody needs to read about it.
OURS = str(Path(__file__).parent)
# A DataLoader worker's exception arrives as one of the same type whose message is the worker's whole traceback.
FROM_WORKER = "Original Traceback (most recent call last):"
LONGEST_TRACEBACK = 100_000  # characters
NAMED_CAUSES = 3
DEVICE_MEMORY = re.compile(r"CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|Cuda failure (2\b|'out of)")
HOST_MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory")


def exit_code(error: SystemExit) -> int:
    """What the interpreter would exit with: None is 0, a number is itself, a message is printed and is 1."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    with suppress(Exception):
        print(_text(error.code), file=sys.stderr, flush=True)
    return 1


def write(folder: RunFolder, rank: int, error: BaseException, step: int) -> None:
    """Record the failure, whatever the exception does when it is looked at; labkit's own frames are left out."""
    record: dict[str, Any] = {
        "time_ns": time.time_ns(),
        "rank": rank,
        "pid": os.getpid(),
        "step": step,
        "kind": "exit" if isinstance(error, SystemExit) else "exception",
        "exception": type(error).__name__,
        "message": shortened(_text(error)),
    }
    error.__traceback__ = _strip(error.__traceback__)
    for look in (_name, _message, _causes, _line_in_script, _traceback, _memory):
        with suppress(Exception):
            record |= look(error)
    try:
        write_json(folder.error(rank), record, reserve=folder.reserve)
    except OSError as problem:
        with suppress(Exception):  # stderr may be on the same full disk
            print(f"labkit: the failure of rank {rank} could not be kept: {problem!r}", file=sys.stderr)
    with suppress(Exception):  # evidence, where this torch has any
        record_collectives(folder, rank)


def show(error: BaseException) -> None:
    """Tell of an uncaught exception as Python would: by the script's own `sys.excepthook`, or else its traceback."""
    with suppress(BaseException):
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, error.__traceback__)
            return
    with suppress(BaseException):
        traceback.print_exception(error)
        sys.stderr.flush()


def _memory(error: BaseException) -> dict[str, Any]:
    """Of an error for want of memory: which memory, and what of it this rank had in use. Sizes in bytes."""
    is_torchs = type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch")
    is_devices = is_torchs or DEVICE_MEMORY.search(_text(error))
    if is_devices and not any("pin_memory" in entry for entry in traceback.format_tb(error.__traceback__)[-1:]):
        return {"out_of_memory": "device", "memory": _device_memory()}
    if is_devices or isinstance(error, MemoryError) or HOST_MEMORY.search(_text(error)):  # pages are the host's
        return {"out_of_memory": "host", "memory": resident_set()()}
    return {}


def _device_memory() -> dict[str, int]:
    import torch

    try:
        free, total = torch.cuda.mem_get_info()
        used = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    except Exception:  # the device may be beyond answering
        return {}
    return used | {"free": free, "total": total}


def _text(value: object) -> str:
    try:
        return str(value)
    except BaseException:  # the traceback module's words, and its patience
        return "<exception str() failed>"


def _name(error: BaseException) -> dict[str, Any]:
    return {"exception": _class_name(error)}


def _class_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _message(error: BaseException) -> dict[str, Any]:
    text = _text(error.code if isinstance(error, SystemExit) else error)
    if FROM_WORKER in text:
        last = text.strip().splitlines()[-1]
        text = f"{last.removeprefix(type(error).__name__ + ': ')} (in a DataLoader worker)"
    # DCP's CheckpointException keeps what happened in `failures`, its text says only on which ranks.
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        with suppress(TypeError, LookupError):  # another class of that attribute
            inner = next(iter(failures.values()))[0]
            text = f"on rank {', '.join(map(str, failures))}: {type(inner).__name__}: {_text(inner)}"
    return {"message": shortened(text)}


def _causes(error: BaseException) -> dict[str, Any]:
    """The first line of each exception that a chain of causes, or a group, began with."""
    origins = (one for one in _origins(error) if _text(one) not in _text(error))
    return {"causes": [f"{_class_name(one)}: {first_line(_text(one))}" for one in islice(origins, NAMED_CAUSES)]}


def _origins(error: BaseException) -> Iterator[BaseException]:
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop(0)
        behind = [*one.exceptions] if isinstance(one, BaseExceptionGroup) else [one.__cause__] if one.__cause__ else []
        if id(one) not in seen:
            seen.add(id(one))
            waiting += behind
            if not behind:
                yield one


def _traceback(error: BaseException) -> dict[str, Any]:
    lines = "".join(map(shortened, traceback.format_exception(error)))
    return {"traceback": shortened(lines, LONGEST_TRACEBACK).splitlines(keepends=True)}


def _line_in_script(error: BaseException) -> dict[str, Any]:
    """The deepest line of the script itself on the way to the error."""
    text = _text(error)
    in_worker = re.findall(rf'File "{re.escape(sys.argv[0])}", line (\d+)', text) if FROM_WORKER in text else []
    if in_worker:
        return {"script_line": int(in_worker[-1])}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == sys.argv[0]]
    if isinstance(error, SyntaxError) and error.filename == sys.argv[0]:
        lines.append(error.lineno)
    return {"script_line": lines[-1]} if lines else {}


def _strip(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(OURS):
        trace = trace.tb_next
    return trace
