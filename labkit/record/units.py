"""Human-readable sizes."""

from __future__ import annotations

__all__ = ["gib"]


def gib(size: float | None) -> str:
    """Bytes as GiB, smaller sizes as MiB, KiB or bytes."""
    if size is None:
        return "n/a"
    if size == 0:
        return "0"
    for unit, digits, name in ((2**30, 2, "GiB"), (2**20, 1, "MiB"), (2**10, 1, "KiB")):
        if size >= unit:
            return f"{size / unit:,.{digits}f} {name}"
    return f"{size:.0f} B"
