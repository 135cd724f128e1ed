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
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from labkit.record.folder import RunFolder, read_json, write_json
from labkit.worker.measures.memory import resident_set
from labkit.worker.probe import Probe
from labkit.worker.reports import Reports
from labkit.worker.starting import doing_now

__all__ = ["Heartbeat", "record_collectives"]

BEAT_SECONDS = 1.0
LINE_BYTES = 512  # a fixed size, written in place, so that the file never grows and is never incomplete
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


class Heartbeat:
    """Writes a rank's `heartbeat.json`, its pending reports and, on request, `stacks.txt` and `collectives.json`."""

    def __init__(self, folder: RunFolder, rank: int, probe: Probe, reports: Reports):
        self._folder, self._rank, self._probe, self._reports = folder, rank, probe, reports
        self._file = os.open(folder.heartbeat(rank), os.O_WRONLY | os.O_CREAT, 0o600)
        self._stacks = folder.stacks(rank).open("a")
        self._answered = 0
        self._memory = resident_set()

    def start(self) -> None:
        threading.Thread(target=self._beat, name="labkit-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            for task in (self._answer, self._write, self._reports.flush):
                with suppress(Exception):  # a full disk, a deleted folder, another torch version
                    task()
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
