"""The same model, data and loss under every strategy of labkit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from labkit.planner.layout import strategy_of
from labkit.write import Script, options_of, script_names

__all__ = ["SUPERSEDED", "own_parameters", "simplicity", "variants"]

# The simplest first
ORDER = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp1", "tensor_parallel", "pipeline", "hybrid")
# fsdp1 by fsdp: PyTorch's tutorials call FullyShardedDataParallel deprecated (pytorch/tutorials #3358)
SUPERSEDED = {"fsdp1": "fsdp"}
# These make a script the strategy it is; every other cell may be the user's own.
STRATEGY_CELLS = ("strategy", "step")


def variants(script: Script) -> dict[str, Script]:
    """By name: the script as it is, and every other strategy's script with the cells that differ from labkit's own.

    The script is under its strategy's name, or first under its own where the strategy cell is the user's. The others
    go from what keeps most on each rank to what divides most.
    """
    own = strategy_of(script)
    labkits = {name: Script.load(name) for name in script_names()}
    base = labkits.get(own) or labkits["ddp"]
    changed = {
        cell.title: cell
        for cell in script.parts
        if cell.title in base.cells and cell.title not in STRATEGY_CELLS and cell != base.cells[cell.title]
    }
    others = {
        name: replace(other, parts=tuple(changed.get(cell.title, cell) for cell in other.parts))
        for name in (*(name for name in ORDER if name in labkits), *(name for name in labkits if name not in ORDER))
        for other in [labkits[name]]
    }
    return others | {own: script} if own else {script.name: script} | others


def own_parameters(script: Script, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the parameters that this script takes."""
    known = options_of(script)
    return {name: value for name, value in parameters.items() if name in known}


def simplicity(strategy: str) -> int:
    """The less, the simpler a strategy is; a user's own comes last."""
    return ORDER.index(strategy) if strategy in ORDER else len(ORDER)
