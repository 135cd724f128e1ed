"""Writes down when a rank saves its part of a sharded model: by torch.save, a mapping with tensors that say which part
of the whole they are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.worker.witness.area import Observed

DEPTH, MOST = 3, 20  # mappings within each other that are looked into, and lines


class Parts:
    """Is called before each torch.save of a rank."""

    def __init__(self, witness: Observed):
        self._witness = witness
        self._has_saved, self._written = False, 0

    def before_saving(self, thing: Any, file: Any) -> None:
        if not self._has_saved:
            self._has_saved = True
            self._witness.write("saves")
        if self._written >= MOST or not isinstance(file, str | os.PathLike):
            return
        states = [(state, parted) for state in _mappings(thing) if (parted := _parted(state))]
        if states:
            state, parted = max(states, key=lambda each: len(each[1]))
            # Two states of the same names may be those of two ranks.
            if sum(state.keys() == other.keys() for other, _ in states) == 1:
                self._written += 1
                name, (part, of, ranks) = next(iter(parted.items()))
                values = {"name": name, "parted": len(parted), "part": part, "of": of, "ranks": ranks}
                self._witness.write("part", file=Path(file).name, **values)


def _mappings(thing: Any, depth: int = DEPTH) -> Iterator[Mapping[str, Any]]:
    if isinstance(thing, Mapping) and depth and all(isinstance(key, str) for key in thing):
        yield thing
        for value in thing.values():
            yield from _mappings(value, depth - 1)


def _parted(state: Mapping[str, Any]) -> dict[str, tuple[list[int], int, list[int]]]:
    """The tensors of which a rank has a part: which one, of how many, and the ranks that have them all."""
    parts = {}
    for name, tensor in state.items():
        if hasattr(tensor, "placements") and (place := tensor.device_mesh.get_coordinate()) is not None:
            mesh = tensor.device_mesh
            split = [i for i, how in enumerate(tensor.placements) if how.is_shard() and mesh.size(i) > 1]
            if split:
                of = math.prod(mesh.size(i) for i in split)
                parts[name] = [place[i] for i in split], of, mesh.mesh.flatten().tolist()
    return parts
