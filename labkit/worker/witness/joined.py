"""Sees which collectives a script calls within Join, which answers only those of its joinables for ranks whose inputs
have ended."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class Joins(Area):
    """The Joins of a rank, counted by `number`. While one is open, torch.distributed's collectives are observed."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._distributed = witness.torch.distributed
        self._torch = str(Path(witness.torch.__file__).parent)
        self._number = 0
        self._open: Any = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._written: set[tuple[str, int]] = set()  # the collectives of this Join, with their lines
        self._is_pending = False  # whether one was called since the newest step, at `_after`
        self._after = 0

    def hook(self) -> None:
        if not self._distributed.is_available():
            return
        from torch.distributed.algorithms.join import Join

        call_around(Join, "__enter__", self._entered, self._witness.recorder)
        call_around(Join, "__exit__", self._left, self._witness.recorder)

    def _entered(self, join: Any) -> None:
        # A joinable of the script's own may answer further collectives.
        are_torchs = all(type(one).__module__.startswith("torch.") for one in join._joinables)
        if self._open is not None or not join._enable or join._throw_on_early_termination or not are_torchs:
            return
        self._open, self._number = join, self._number + 1
        self._written.clear()
        self._is_pending = False
        self._witness.write("join", n=self._number)
        ranks = self._ranks(join._process_group)
        for name in COLLECTIVES:
            self._originals[name] = original = getattr(self._distributed, name)
            observe = functools.partial(self._called, name, inspect.signature(original), ranks)
            call_around(self._distributed, name, observe, self._witness.recorder)

    def _left(self, join: Any, *_: Any) -> None:
        if self._open is not join:
            return
        self._open = None
        for name, original in self._originals.items():
            setattr(self._distributed, name, original)
        is_pending = self._is_pending and self._after == self._witness.number
        self._witness.write("join_end", n=self._number, pending=is_pending)

    def _called(self, name: str, signature: inspect.Signature, ranks: list[int], *args: Any, **kwargs: Any) -> None:
        if sys._getframe(1).f_code.co_filename.startswith(self._torch):  # the caller, because wrappers are invisible
            return
        if (name, line := self._witness.line()) not in self._written:
            group = signature.bind(*args, **kwargs).arguments.get("group")
            if self._ranks(group or self._distributed.group.WORLD) != ranks:
                return  # ranks of another group may have equally many inputs
            self._written.add((name, line))
            self._witness.write("join_call", n=self._number, name=name)
        self._is_pending, self._after = True, self._witness.number
        self._witness.called_in_join()

    def _ranks(self, group: Any) -> list[int]:
        return [*self._distributed.get_process_group_ranks(group)]
