"""A rank's heartbeat: written once a second by a separate thread, whatever the script is doing.

The thread also answers inquiries about where the rank is, without a signal, root or a debugger. A rank whose script
holds the GIL, or that is suspended, does not answer, which is evidence, too.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from labkit.record.files import read_json
from labkit.record.folder import RunFolder
from labkit.worker.flight_recorder import record_collectives
from labkit.worker.measures.memory import resident_set
from labkit.worker.metrics_logger import Reports
from labkit.worker.probe import Probe

__all__ = ["Heartbeat", "doing_now"]

BEAT_SECONDS = 1.0
LINE_BYTES = 512  # a fixed size, written in place, so that the file never grows and is never incomplete
LONGEST_DOING = 80
# What a rank is doing while one of these functions, or a function of these modules, is running
STARTING_CALLS = {
    "init_process_group": "joining the process group",
    "fully_shard": "sharding the model",
    "from_pretrained": "loading pretrained weights",
    "load_state_dict": "loading weights",
}
STARTING_MODULES = {
    "torch.nn.parallel.distributed": "wrapping the model in DDP",
    "torch.distributed.fsdp": "sharding the model",
    "torch._dynamo": "compiling the model",
    "torch._inductor": "compiling the model",
}


class Heartbeat:
    """Writes a rank's `heartbeat.json`, pending steps and reports and, on request, `stacks.txt`, `collectives.json`."""

    def __init__(self, folder: RunFolder, rank: int, probe: Probe, reports: Reports):
        self._folder, self._rank, self._probe, self._reports = folder, rank, probe, reports
        self._file = os.open(folder.heartbeat(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        self._stacks = folder.stacks(rank).open("a")
        self._answered = 0
        self._begun = threading.Event()
        self._memory = resident_set()

    def start(self) -> None:
        """Returns after the first heartbeat, which a script that holds the GIL from its start would not let through."""
        threading.Thread(target=self._beat, name="labkit-heartbeat", daemon=True).start()
        self._begun.wait(BEAT_SECONDS)

    def _beat(self) -> None:
        while True:
            for task in (self._answer, self._write, self._reports.flush, self._probe.tick):
                with suppress(Exception):  # a full disk, a deleted folder, another torch version
                    task()
            self._begun.set()
            time.sleep(BEAT_SECONDS)

    def _write(self) -> None:
        reach = self._probe.reach
        hit = reach.hit if reach is not None else None
        beat = {
            "t": time.monotonic(),
            "pid": os.getpid(),
            "thread": threading.get_native_id(),
            "step": self._probe.step,
            "doing": self._probe.doing,
            "starting": "" if self._probe.step else doing_now(),
            "passes": self._probe.passes,
            "paused": reach is not None and reach.paused,
            "hit": hit and hit.encode("ascii", "replace").decode()[:100],
            "moved": self._probe.moved,
            "step_seconds": self._probe.latest_step_seconds,
            "rss": self._memory()["rss"],
            "answered": self._answered,
            # Whether SIGUSR1 still dumps the stacks: a script may handle the signal itself.
            "usr1": signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL,
        }
        os.pwrite(self._file, json.dumps(beat).ljust(LINE_BYTES - 1).encode() + b"\n", 0)

    def _answer(self) -> None:
        request = read_json(self._folder.inquiry)
        number = request.get("number") if isinstance(request, dict) else None
        if not isinstance(number, int) or number == self._answered:
            return
        print(f"\n# {time.strftime('%H:%M:%S')}, step {self._probe.step}", file=self._stacks, flush=True)
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        with suppress(Exception):  # the stacks alone are an answer, too
            record_collectives(self._folder, self._rank)
        self._answered = number  # reported by the next beat, when everything is written


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
    return words.encode("ascii", "replace").decode()[:LONGEST_DOING]


def _words(frame: FrameType) -> str:
    module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module == "importlib._bootstrap" and name == "_find_and_load":
        return f"importing {frame.f_locals.get('name', '')}"
    return STARTING_CALLS.get(name, "") or next(
        (text for prefix, text in STARTING_MODULES.items() if module.startswith(prefix)), ""
    )
