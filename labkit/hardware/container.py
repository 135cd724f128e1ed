"""Reads how much of the machine's memory and of its cores this process's container allows it to use (control groups,
versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def memory_limit() -> int | None:
    """The smallest limit of the groups that this process is in, in bytes; None if there is none."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_left() -> int | None:
    """Bytes until the first of these groups is full; None if none has a limit."""
    return min((max(0, limit - used) for limit, used in _memory()), default=None)


def cpu_limit() -> float | None:
    """How many cores' time these groups may use, the smallest limit; None if there is none."""
    limits = []
    for folder, is_newest in _groups("cpu"):
        if is_newest:
            most, _, period = _read(folder / "cpu.max").partition(" ")
        else:
            most, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if most.isdecimal() and period.isdecimal() and int(period):  # neither "max" nor -1
            limits.append(int(most) / int(period))
    return min(limits, default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """`(limit, in use)` in bytes of each group that has a limit; reclaimable file cache does not count as in use."""
    for folder, is_newest in _groups("memory"):
        if is_newest:
            most, now, cached = "memory.max", "memory.current", "inactive_file"
        else:
            most, now, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        if (limit := _number(folder / most)) is not None:
            yield limit, max(0, (_number(folder / now) or 0) - _cached(folder / "memory.stat", cached))


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of the groups that this process is in, and whether they are of version 2. The limits of parent groups
    apply, too."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        for part in (PurePosixPath(group), *PurePosixPath(group).parents):
            yield root / str(part).lstrip("/"), not controllers


def _number(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.isdecimal() else None


def _read(file: Path) -> str:
    """Empty for a group that is not visible in this container."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _cached(stat: Path, name: str) -> int:
    try:
        pairs = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines())
        return int(pairs.get(name, 0))
    except (OSError, ValueError):
        return 0
