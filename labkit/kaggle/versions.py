"""Says whether the packages of a session are those that labkit needs."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires, version

from labkit.version import __version__

SPECIFIER = re.compile(r"(>=|!=|<=|==|<|>)\s*([\d.]+)")


def what_is_missing() -> str:
    """One sentence: that this interpreter has all packages that labkit needs, or which are missing or of a version that
    does not fit, and how to get them. It is of the files on the disk, not of what a kernel has already imported."""
    lacking = []
    for requirement in requires("labkit") or ():
        if "extra ==" in requirement:
            continue
        needed = requirement.partition(";")[0].strip()
        name, specifiers = re.split(r"(?=[<>=!~\s])", needed, maxsplit=1)[0], SPECIFIER.findall(needed)
        try:
            installed = version(name)
        except PackageNotFoundError:
            lacking.append((needed, "not installed"))
            continue
        if not all(_fits(installed, operator, bound) for operator, bound in specifiers):
            lacking.append((needed, f"{installed} is installed"))
    if not lacking:
        return f"labkit {__version__} has all packages that it needs here."
    told = ", ".join(f"{needed} ({state})" for needed, state in lacking)
    wanted = " ".join(f"'{needed}'" for needed, _ in lacking)
    return (
        f"labkit {__version__} needs {told}. What uses them will fail. With the internet on (Kaggle: Settings > "
        f"Internet), run %pip install {wanted} and restart the session."
    )


def _fits(installed: str, operator: str, bound: str) -> bool:
    have, limit = _numbers(installed), _numbers(bound)
    length = max(len(have), len(limit))
    left, right = (numbers + (0,) * (length - len(numbers)) for numbers in (have, limit))
    return {
        ">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right, "==": left == right,
        "!=": left != right,
    }[operator]  # fmt: skip


def _numbers(release: str) -> tuple[int, ...]:
    """(8, 1, 5) of "8.1.5" or of "8.1.5+cu128"."""
    found = re.match(r"[\d.]+", release)
    return tuple(int(part) for part in found[0].split(".") if part) if found else ()
