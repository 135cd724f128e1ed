"""Writes down what a script loads into its modules, and which files it saves and loads when.

A module into which nothing was loaded is written down at the next optimizer step, because a script may see it and load
again.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around
from labkit.worker.witness.parts import Parts
from labkit.worker.witness.resumes import Resumes

MOST_FILES = 1000  # reads and writes of a rank that are written
WRAPPERS = {
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
}  # torch's names for a wrapped one


class Checkpoints(Area):
    """Hooks `Module.load_state_dict`, `torch.save` and `torch.load`."""

    def __init__(self, witness: Observed, resumes: Resumes):
        super().__init__(witness)
        self._resumes, self._parts = resumes, Parts(witness)
        self._is_loading = False
        self._unloaded: list[tuple[Callable[[], Any], dict[str, Any]]] = []  # modules, and what was tried
        boot = Path("/proc/sys/kernel/random/boot_id")  # labkit.host would import psutil
        self._files, self._host = 0, f"{os.uname().nodename} {boot.read_text().strip() if boot.exists() else ''}"

    def hook(self) -> None:
        torch, recorder = self._torch, self._witness.recorder
        call_around(torch.nn.Module, "load_state_dict", self._before_loading, recorder)
        for name in ("save", "load"):
            call_around(torch, name, self._at_file(name), recorder)
            setattr(torch.serialization, name, getattr(torch, name))  # pickle finds a function where it was defined

    def after_step(self, *_: Any) -> None:
        """Write which modules that are still there had nothing loaded into them."""
        self._witness.leave(self)
        for module, tried in self._unloaded:
            if module() is not None:
                self._witness.write("unloaded", **tried)
        self._unloaded.clear()

    finish = after_step

    def _before_loading(
        self, module: Any, state: Any, strict: bool = True, *_: Any, **__: Any
    ) -> Callable[[Any], None] | None:
        if self._is_loading:
            return None
        self._is_loading = True
        given = list(state)

        def after(result: Any) -> None:
            self._is_loading = False
            if result is not None:
                self._loaded(module, given, result, strict)

        return after

    def _loaded(self, module: Any, given: list[str], result: Any, strict: bool) -> None:
        parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        own = {*parameters, *(name for name, _ in module.named_buffers(remove_duplicate=False))}
        missing = set() if strict else set(result.missing_keys)
        wanted = [name for name in parameters if name in missing]
        unexpected = set(given) - own
        is_nothing = len(wanted) == len(parameters) and len(unexpected) == len(given)
        change = _common_change(wanted, unexpected) if wanted else ""
        is_wrapped = WRAPPERS.issuperset(change[1:].strip(".").split("."))
        if given and wanted and (is_nothing or is_wrapped):
            tried = {"wanted": len(wanted), "of": len(parameters), "key": min(unexpected), "own": wanted[0]}
            place = {"line": self._witness.line(), "step": self._witness.step}
            self._unloaded.append((weakref.ref(module), tried | place | {"change": change}))
            self._witness.follow(self)
        elif parameters and not is_nothing:  # modules that this one is in, or that are in it, may be loaded in parts
            inside = set(module.modules())
            self._unloaded = [
                (other, tried)
                for other, tried in self._unloaded
                if (it := other()) is not None and it not in inside and module not in set(it.modules())
            ]

    def _at_file(self, kind: str) -> Callable[..., Callable[[Any], None] | None]:
        def before(*args: Any, **kwargs: Any) -> Callable[[Any], None] | None:
            place = 1 if kind == "save" else 0
            file = args[place] if len(args) > place else kwargs.get("f")
            saved = (args[0] if args else kwargs.get("obj")) if kind == "save" else None
            if kind == "save":
                self._parts.before_saving(saved, file)
            if not isinstance(file, str | os.PathLike) or self._files >= MOST_FILES:
                return None
            self._files += 1
            path, line, calls = os.path.realpath(file), self._witness.line(), self._calls()
            began = time.monotonic()

            def after(result: Any) -> None:
                if Path(path).is_file():
                    values = {"path": path, "began": began, "calls": calls, "host": self._host}
                    self._witness.write(kind, **values, line=line)
                    if kind == "load":
                        self._resumes.loaded_file(result, path, line)
                    else:
                        self._resumes.saved_file(saved, path)

            return after

        return before

    def _calls(self) -> dict[str, int]:
        """How many collectives this rank has called in each of its groups."""
        distributed = self._torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return {}
        world, calls = distributed.distributed_c10d._world, {}
        for group in world.pg_map:
            try:
                calls[world.pg_names[group]] = group._get_sequence_number_for_group()
            except Exception:  # a backend that does not count
                continue
        return calls


def _common_change(wanted: Sequence[str], given: set[str]) -> str:
    """By which prefix all wanted keys would be given: `+p.` if the given ones have it, `-p.` if they lack it. Wrappers'
    names may be anywhere. Empty if there is none."""
    first = wanted[0]
    for key in given:
        if key.endswith(f".{first}") and given.issuperset(f"{key.removesuffix(first)}{name}" for name in wanted):
            return f"+{key.removesuffix(first)}"
        if first.endswith(f".{key}"):
            prefix = first.removesuffix(key)
            if all(name.startswith(prefix) and name.removeprefix(prefix) in given for name in wanted):
                return f"-{prefix}"
    bare = {_without_wrappers(key): key for key in given}
    keys = [bare.get(_without_wrappers(name)) for name in wanted]
    if keys[0] is not None and None not in keys:
        more = [part for part in keys[0].split(".") if part in WRAPPERS]
        return f"+{more[0]}." if more else f"-{next(part for part in first.split('.') if part in WRAPPERS)}."
    return ""


def _without_wrappers(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)
