"""`left-running.json`: what the ranks of a run that succeeded had left running, and how it ended. The run's final state
names these processes, too, but it cannot say what became of them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from labkit.files import read_json, write_json
from labkit.record.folder import RunFolder
from labkit.record.measured.metrics_file import finite

__all__ = ["LeftRunning", "left_running", "write_left_running"]

MOST_NAMED = 4


@dataclass(frozen=True)
class LeftRunning:
    """`processes` are such as "`python upload.py` (pid 4242)"; `killed` are those that labkit had to end. `until` is
    when it does so, None if at once; `ended` is when none was left. Both are seconds since the epoch."""

    processes: tuple[str, ...]
    until: float | None
    ended: float | None = None
    killed: tuple[str, ...] = ()

    @property
    def notice(self) -> str:
        """For the final state of the run: it stays true."""
        were = f"{_listed(self.processes)} {'was' if len(self.processes) == 1 else 'were'}"
        fate = f"had until {_clock(self.until)} to end" if self.until else "ended with the job"
        return f"{were} still running when its ranks had ended, and {fate}"

    @property
    def outcome(self) -> str:
        """What labkit had to end; empty if nothing."""
        if not self.killed or self.ended is None:
            return ""
        return f"labkit ended {_listed(self.killed)} at {_clock(self.ended)}, which its ranks had left running"


def write_left_running(home: RunFolder, left: LeftRunning) -> None:
    """Raises OSError."""
    write_json(home.left_running, asdict(left))


def left_running(folder: RunFolder) -> dict[RunFolder, LeftRunning]:
    """What the supervisors of a run have written, by the folder of each: the run's own, or that of a node."""
    homes = [folder, *map(RunFolder, sorted(folder.latest.nodes.glob("*")))]
    return {home: left for home in homes if (left := _read(home)) is not None}


def _read(home: RunFolder) -> LeftRunning | None:
    record = read_json(home.left_running)
    if not isinstance(record, dict):
        return None
    until, ended = finite(record.get("until")), finite(record.get("ended"))
    return LeftRunning(_texts(record.get("processes")), until, ended, _texts(record.get("killed")))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _listed(names: tuple[str, ...]) -> str:
    *most, last = names if len(names) <= MOST_NAMED else (*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more")
    return f"{', '.join(most)} and {last}" if most else last


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a number that is no time
        return "an unknown time"
