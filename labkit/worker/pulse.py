"""A rank's sign of life: once a second, from a thread of its own, whatever the script is doing.

It also answers when somebody asks where the rank is, which needs no signal, no root and no debugger. A rank whose
script holds the GIL or that is stopped gives no sign: that, too, is an answer.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from labkit.record.folder import RunFolder, read_json, write_json
from labkit.worker.memory import resident_set
from labkit.worker.probe import Probe
from labkit.worker.reports import Reports

__all__ = ["Pulse", "record_collectives"]

BEAT_SECONDS = 1.0
LINE_BYTES = 512  # always the same, written in place: the file never grows and is never half written
KEPT_COLLECTIVES = 64  # before the oldest that has not completed
DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # gloo's, and NCCL's; private
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


class Pulse:
    """Writes `heartbeat.json` and, on request, `stacks.txt` and `collectives.json` of one rank, and
    the reports that wait."""

    def __init__(self, folder: RunFolder, rank: int, probe: Probe, reports: Reports):
        self._folder, self._rank, self._probe, self._reports = folder, rank, probe, reports
        self._file = os.open(folder.heartbeat(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        self._stacks = folder.stacks(rank).open("a")
        self._answered = 0
        self._memory = resident_set()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="labkit-pulse", daemon=True).start()

    def _beat(self) -> None:
        while True:
            for duty in (self._answer, self._write, self._reports.flush):
                with suppress(Exception):  # a full disk, a deleted folder, another torch: the training goes on
                    duty()
            time.sleep(BEAT_SECONDS)

    def _write(self) -> None:
        beat = {
            "t": time.monotonic(),
            "pid": os.getpid(),
            "thread": threading.get_native_id(),
            "step": self._probe.step,
            "doing": self._probe.doing,
            "passes": self._probe.passes,
            "moved": self._probe.moved,
            "step_seconds": self._probe.latest_step_seconds,
            "rss": self._memory()["rss"],
            "answered": self._answered,
            # Whether SIGUSR1 still shows the stacks: a script may have taken the signal for itself.
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
        with suppress(Exception):  # the stacks are an answer without them
            record_collectives(self._folder, self._rank)
        self._answered = number  # the next beat says so: all is written by then


def record_collectives(folder: RunFolder, rank: int) -> None:
    """Keep the newest collectives of this rank, from torch's flight recorders, where it has any."""
    entries = sorted(_recorded(), key=lambda entry: entry.get("time_created_ns", 0))
    waiting = (place for place, entry in enumerate(entries) if entry.get("retired") is False)
    oldest = next(waiting, len(entries))
    kept = [
        {name: entry[name] for name in COLLECTIVE_FIELDS if name in entry}
        for entry in entries[max(0, oldest - KEPT_COLLECTIVES) :]
    ]
    write_json(folder.collectives(rank), {"collectives": kept})


def _recorded() -> Iterator[dict[str, Any]]:
    """The entries of every backend's recorder, each with the ranks of its process group where they are known: groups
    that were split off one another share a name."""
    dist = sys.modules.get("torch.distributed")  # never imported from here: the script may just be about to
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return
    for name in DUMPS:
        dump = getattr(sys.modules["torch._C._distributed_c10d"], name, None)
        record = json.loads(dump()) if dump else {}
        for entry in record.get("entries", []):  # absent before the first one
            group = record.get("pg_config", {}).get(entry["process_group"][0], {})
            yield entry | {"ranks": group.get("ranks", "")}
