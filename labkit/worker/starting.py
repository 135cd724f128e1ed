"""What a rank is doing before its first step, from where its main thread is."""

from __future__ import annotations

import sys
import threading
from types import FrameType

__all__ = ["doing_now"]

LONGEST = 80
CALLS = {
    "init_process_group": "joining the process group",
    "fully_shard": "sharding the model",
    "from_pretrained": "loading pretrained weights",
    "load_state_dict": "loading weights",
}
MODULES = {
    "torch.nn.parallel.distributed": "wrapping the model in DDP",
    "torch.distributed.fsdp": "sharding the model",
    "torch._dynamo": "compiling the model",
    "torch._inductor": "compiling the model",
}


def doing_now() -> str:
    """`importing transformers` · `joining the process group` · `line 40, in build`; at most 80 ASCII characters, empty
    if unknown. The outermost call that says something is taken: what it calls in turn is a detail."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack: list[FrameType] = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    own = getattr(main, "__file__", "") if getattr(main, "__spec__", None) is None else ""  # not yet the worker
    script = [frame for frame in stack if frame.f_code.co_filename == own]
    words = next(filter(None, map(_words, reversed(stack))), "")
    if not words and script:
        name = script[0].f_code.co_name
        words = f"line {script[0].f_lineno}" + ("" if name == "<module>" else f", in {name}")
    return words.encode("ascii", "replace").decode()[:LONGEST]


def _words(frame: FrameType) -> str:
    module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module == "importlib._bootstrap" and name == "_find_and_load":
        return f"importing {frame.f_locals.get('name', '')}"
    return CALLS.get(name, "") or next((text for prefix, text in MODULES.items() if module.startswith(prefix)), "")
