"""Reads how much of the machine's memory this process's container allows it to use (control groups, versions 1 and
2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit() -> int | None:
    """The smallest limit of the groups that this process is in, in bytes; None if there is none."""
    return min((limit for limit, _ in _groups()), default=None)


def memory_left() -> int | None:
    """Bytes until the first of these groups is full; None if none has a limit."""
    return min((max(0, limit - used) for limit, used in _groups()), default=None)


def _groups() -> Iterator[tuple[int, int]]:
    """`(limit, in use)` in bytes of each group that has a limit; reclaimable file cache does not count as in use."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            root, most, now, cached = GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, most, now = GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        for part in (PurePosixPath(group), *PurePosixPath(group).parents):  # the limits of parent groups apply, too
            folder = root / str(part).lstrip("/")
            if (limit := _number(folder / most)) is not None:
                yield limit, max(0, (_number(folder / now) or 0) - _cached(folder / "memory.stat", cached))


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max", or a group that is not visible in this container
        return None


def _cached(stat: Path, name: str) -> int:
    try:
        pairs = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(pairs.get(name, 0))
    except (OSError, ValueError):
        return 0
