"""Makes a package's `__init__` its face: the list of the names that it offers, each imported on its first use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

OFFERED = re.compile(r"^    from (labkit\S*) import \(?\s*(\w+) as \2\b", re.MULTILINE)


def face(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose `__init__` names what it offers where types are checked:

    TYPE_CHECKING = False
    if TYPE_CHECKING:
        from labkit.record.state import State as State
    else:
        __getattr__, __dir__ = face(__name__)
    """

    @cache
    def modules() -> dict[str, str]:
        return {name: module for module, name in OFFERED.findall(_source_of(package))}

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(modules())
        if name.startswith("__") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(modules()))}")
        return getattr(import_module(modules()[name]), name)

    return get, lambda: sorted(modules())


def _source_of(package: str) -> str:
    loader: Any = sys.modules[package].__loader__
    source: str = loader.get_source(package)
    return source
