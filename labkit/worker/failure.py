"""Writes `error.json`, the error report of a rank, from the failing rank itself, before the interpreter reports it, and
`collectives.json`, its newest collectives from torch's flight recorders."""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from labkit.files import write_json
from labkit.record import RunFolder
from labkit.text import first_line, last_line, shortened
from labkit.worker.measures.memory import resident_set

KEPT_COLLECTIVES = 64  # calls before the oldest that has not completed
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of gloo and NCCL; private functions
COLLECTIVE_FIELDS = (
    "process_group",
    "ranks",
    "collective_seq_id",
    "p2p_seq_id",
    "is_p2p",
    "profiling_name",
    "input_sizes",
    "input_dtypes",
    "retired",
    "state",
    "time_created_ns",
)

# The frames of labkit's hooks in torch are left out of tracebacks.
OURS = str(Path(__file__).parent)
# A DataLoader worker's exception is re-raised with the worker's whole traceback as its message; a pool of processes has
# it as the text of the cause.
FROM_WORKER = "Original Traceback (most recent call last):"
FROM_POOL = ("RemoteTraceback", "_RemoteTraceback")
# torch's dispatcher ends its message with a table of all backends, of some 60 lines.
BACKENDS = re.compile(r" This could be because the operator doesn't exist for this backend.*", re.DOTALL)
WITHOUT_GRADIENT = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
SHOWN_NAMES = 4
LONGEST_TRACEBACK = 100_000  # characters
NAMED_CAUSES = 3
DYING_SECONDS = 0.5  # a DataLoader's worker closes its connections before it has exited
DEVICE_MEMORY = re.compile(
    r"(CUDA (driver )?error|Triton Error \[CUDA\]): out of memory|CU[A-Z]+_STATUS_(\w+_DEVICE_)?ALLOC(ATION)?_FAILED"
    r"|NOT_INITIALIZED when calling .cublasCreate"
    r"|Cuda failure (2\b|'out of)|Failed to CUDA [cm]alloc"
)
# cuDNN reports these also when it finds no memory for its handle or its workspace, without saying so.
PERHAPS_DEVICE_MEMORY = re.compile(
    r"CUDNN_STATUS_NOT_INITIALIZED|CUDNN_STATUS_INTERNAL_ERROR\b|(?i:unable to find an engine to execute)"
    r"|Unable to find a valid cuDNN algorithm"
)
WHICH_DEVICE = re.compile(r"GPU (\d+) has a total capacity")
HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|Failed to CUDA host alloc"
    r"|HOST_ALLOCATION_FAILED"
)


def record_collectives(folder: RunFolder, rank: int) -> None:
    """Write this rank's newest collectives from torch's flight recorders, if there are any."""
    entries = sorted(_recorded(), key=lambda entry: entry.get("time_created_ns", 0))
    waiting = (place for place, entry in enumerate(entries) if entry.get("retired") is False)
    oldest = next(waiting, len(entries))
    collectives = [
        {name: entry[name] for name in COLLECTIVE_FIELDS if name in entry}
        for entry in entries[max(0, oldest - KEPT_COLLECTIVES) :]
    ]
    write_json(folder.collectives(rank), {"collectives": collectives})


def _recorded() -> Iterator[dict[str, Any]]:
    """The entries of every backend's recorder, each with the ranks of its process group if they are known, because
    groups that were split from each other share a name."""
    dist = sys.modules.get("torch.distributed")  # not imported here, because the script may be importing it
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return
    for name in DUMPS:
        dump = getattr(sys.modules["torch._C._distributed_c10d"], name, None)
        record = json.loads(dump()) if dump else {}
        for entry in record.get("entries", []):  # absent before the first entry
            group = record.get("pg_config", {}).get(entry["process_group"][0], {})
            yield entry | {"ranks": group.get("ranks", "")}


def write(known: Mapping[str, Any], error: BaseException, attempt: str, script: str) -> None:
    """Record the failure of a rank: what its guest knows, and what the exception tells, even if inspecting it raises.
    `attempt` is the attempt's folder. Raises OSError if it cannot be written."""
    folder, rank, record = RunFolder(attempt), known["rank"], {**known, "message": shortened(known["message"])}
    described = (_name, _message, _unused_parameters, _dead_workers, _causes)
    for inspect in (*described, partial(_line_in_script, script), partial(_handled, script), _traceback, _memory):
        with suppress(Exception):
            record |= inspect(error)
    write_json(folder.error(rank), record, reserve=folder.reserve)
    with suppress(Exception):  # evidence, if this torch version provides it
        record_collectives(folder, rank)


def _memory(error: BaseException) -> dict[str, Any]:
    """For an error that is, was caused or may be caused by running out of memory: which memory, and how many bytes of
    it this rank used.

    torch's pipelines and compiler raise another error from the original one."""
    return next(filter(None, map(_out_of_memory, (error, *_origins(error)))), {})


def _out_of_memory(error: BaseException) -> dict[str, Any]:
    is_torch_error = type(error).__name__ == "OutOfMemoryError" and type(error).__module__.startswith("torch")
    text, innermost = _text(error), traceback.format_tb(error.__traceback__)[-1:]
    on_device = is_torch_error or DEVICE_MEMORY.search(text)
    # a DataLoader's thread raises its error again elsewhere
    is_pinned = "in pin memory thread" in text or any("pin_memory" in frame for frame in innermost)
    if on_device and not is_pinned:
        return {"out_of_memory": "device", "memory": _device_memory(text)}
    if on_device or isinstance(error, MemoryError) or HOST_MEMORY.search(text):  # pinned memory is the host's
        return {"out_of_memory": "host", "memory": resident_set()()}
    if PERHAPS_DEVICE_MEMORY.search(text):
        return {"perhaps_out_of_memory": True, "memory": _device_memory(text)}
    return {}


def _device_memory(message: str) -> dict[str, int]:
    """The memory of the GPU that torch names, or else of the current one: on any other, asking would open a context."""
    import torch

    if not torch.cuda.is_initialized():  # the error is another process's
        return {}
    named = WHICH_DEVICE.search(message)
    try:
        device = int(named[1]) if named else torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        used = {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device)}
    except Exception:  # the device may no longer respond
        return {}
    return used | {"free": free, "total": total}


def _text(value: object) -> str:
    try:
        return str(value)
    except BaseException:  # the same text as the traceback module's
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
    if type(error.__cause__).__name__ in FROM_POOL:
        text = f"{text} (in a process of a pool)"
    if isinstance(printed := getattr(error, "stderr", None), str | bytes) and printed.strip():  # of a subprocess
        words = printed if isinstance(printed, str) else printed.decode("utf-8", "replace")
        text = f"{text} It printed: {last_line(words)}"
    # DCP's CheckpointException has the errors in `failures`; its text only names the ranks.
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        with suppress(TypeError, LookupError):  # another class with this attribute
            inner = next(iter(failures.values()))[0]
            text = f"on rank {', '.join(map(str, failures))}: {type(inner).__name__}: {_text(inner)}"
    return {"message": shortened(BACKENDS.sub("", text))}


def _unused_parameters(error: BaseException) -> dict[str, Any]:
    """DDP's error numbers the parameters that have no gradient; this message names them."""
    numbers = WITHOUT_GRADIENT.search(_text(error))
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    ddp = next((caller for caller in callers if hasattr(caller, "find_unused_parameters")), None)
    if not numbers or ddp is None:
        return {}
    parameters = [(n, p) for n, p in ddp.module.named_parameters() if n not in ddp.parameters_to_ignore]
    names = [name for name, parameter in parameters if parameter.requires_grad]
    unused = [names[int(number)] for number in numbers[1].split()]
    more = f" and {len(unused) - SHOWN_NAMES} more" if len(unused) > SHOWN_NAMES else ""
    return {
        "message": f"the loss does not depend on {', '.join(unused[:SHOWN_NAMES])}{more}, for which DDP therefore has "
        "no gradient. Use or freeze (requires_grad_(False)) what is unused, or pass find_unused_parameters=True to DDP"
    }


def _dead_workers(error: BaseException) -> dict[str, Any]:
    """The exit codes by pid of the workers that had failed when their DataLoader raised: it may only say that a
    connection was closed."""
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    loader = next((each for each in callers if type(each).__name__.endswith("MultiProcessingDataLoaderIter")), None)
    if loader is None or FROM_WORKER in _text(error):
        return {}
    with suppress(RuntimeError):  # torch's handler of SIGCHLD raises wherever the main thread is
        closed = wait([worker.sentinel for worker in loader._workers], DYING_SECONDS)
        for worker in loader._workers:
            if worker.sentinel in closed:  # it has its exit code a moment later
                worker.join(DYING_SECONDS)
    codes = {worker.pid: worker.exitcode for worker in loader._workers}
    return {"workers": {pid: code for pid, code in codes.items() if code}}


def _causes(error: BaseException) -> dict[str, Any]:
    """The first line of each original exception of a chain of causes or a group."""
    origins = (one for one in _origins(error) if _text(one) not in _text(error) and type(one).__name__ not in FROM_POOL)
    return {"causes": [f"{_class_name(one)}: {first_line(_text(one))}" for one in islice(origins, NAMED_CAUSES)]}


def _origins(error: BaseException) -> Iterator[BaseException]:
    pending, visited = [error], set[int]()
    while pending:
        one = pending.pop(0)
        origins = [*one.exceptions] if isinstance(one, BaseExceptionGroup) else [one.__cause__] if one.__cause__ else []
        if id(one) not in visited:
            visited.add(id(one))
            pending += origins
            if not origins:
                yield one


def _handled(script: str, error: BaseException) -> dict[str, Any]:
    """The exception that was being handled when this one was raised: in a `finally` that waits for other ranks, say."""
    handled = error.__context__ if error.__cause__ is None and not error.__suppress_context__ else None
    if handled is None:
        return {}
    return {"handled": _name(handled) | _message(handled) | _line_in_script(script, handled)}


def _traceback(error: BaseException) -> dict[str, Any]:
    report = traceback.TracebackException.from_exception(error, compact=True)
    link: traceback.TracebackException | None = report
    while link is not None:
        link.stack[:] = [frame for frame in link.stack if not frame.filename.startswith(OURS)]
        link = link.__cause__ or link.__context__
    lines = "".join(shortened(BACKENDS.sub("\n", text)) for text in report.format())
    return {"traceback": shortened(lines, LONGEST_TRACEBACK).splitlines(keepends=True)}


def _line_in_script(script: str, error: BaseException) -> dict[str, Any]:
    """The innermost line of the script in the traceback."""
    text = _text(error) if FROM_WORKER in _text(error) else ""
    text = _text(error.__cause__) if type(error.__cause__).__name__ in FROM_POOL else text
    in_worker = re.findall(rf'File "{re.escape(script)}", line (\d+)', text)
    if in_worker:
        return {"script_line": int(in_worker[-1])}
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == script]
    if isinstance(error, SyntaxError) and error.filename == script:
        lines.append(error.lineno)
    return {"script_line": lines[-1]} if lines else {}
