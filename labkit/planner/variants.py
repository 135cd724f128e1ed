"""The same model, data and loss under every strategy of labkit, with the same extras where they go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from labkit.errors import ScriptError
from labkit.planner.layout import options_of_strategy
from labkit.write import Cell, Option, Script, extra_options, options_of, script_names, strategy_of
from labkit.write.compose import library, with_extra

__all__ = ["SUPERSEDED", "extras_of", "needed", "own_parameters", "simplicity", "under", "variants"]

# The simplest first
ORDER = ("single", "ddp", "zero1", "zero2", "fsdp", "fsdp1", "tensor_parallel", "pipeline", "hybrid")
# fsdp1 by fsdp: PyTorch's tutorials call FullyShardedDataParallel deprecated (pytorch/tutorials #3358)
SUPERSEDED = {"fsdp1": "fsdp"}


def variants(script: Script) -> dict[str, Script]:
    """By name: the script as it is, and its cells under every other strategy.

    The script is under its strategy's name, or first under its own where the strategy cell is the user's. The others
    go from what keeps most on each rank to what divides most.
    """
    own, names = strategy_of(script), script_names()
    ordered = (*(name for name in ORDER if name in names), *(name for name in names if name not in ORDER))
    others = {name: script if name == own else under(script, name, extras_of(script)) for name in ordered}
    return others if own else {script.name: script} | others


def under(script: Script, strategy: str, extras: tuple[str, ...] = ()) -> Script:
    """Another strategy's script with these extras, as far as they go together, the task and the user's own cells."""
    made = Script.load(strategy)
    for extra in extras:
        try:
            made = replace(made, parts=with_extra(made, extra))
        except ScriptError:  # it has what does not go with that strategy
            continue
    brought = {cell.title for cell in library().strategies[strategy].cells} if strategy != "single" else {"strategy"}
    parts = list(made.parts)
    for cell in _cells_of_the_task(script):
        titles = [part.title for part in parts]
        if cell.title in brought:
            continue
        if cell.title in titles:
            parts[titles.index(cell.title)] = cell
        else:
            parts.insert(titles.index("strategy"), cell)
    used = frozenset().union(*(cell.uses for cell in parts)) - frozenset().union(*(cell.defines for cell in parts))
    for cell in library().strategies[strategy].cells:  # left out because nothing of labkit's used it
        if cell.defines & used:
            parts.insert([part.title for part in parts].index("strategy"), cell)
    return replace(made, parts=tuple(parts))


def extras_of(script: Script) -> tuple[str, ...]:
    """Those the script was composed with, whatever cells of theirs the user has replaced; but not those that go with
    one strategy alone."""
    found = [owner for cell in script.parts for owner in library().owners(cell) if owner.kind == "extra"]
    return tuple(dict.fromkeys(extra.name for extra in found if not extra.goes_with))


def _cells_of_the_task(script: Script) -> list[Cell]:
    """And the user's own: all but train.py's, a strategy's and an extra's. What makes the script the strategy it is
    stays with it, whoever wrote it."""
    strategy = strategy_of(script)
    own = {cell.title for cell in library().strategies[strategy].cells} if strategy not in ("", "single") else set()
    return [
        cell
        for cell in script.parts
        if cell.title
        and cell.title not in own | {"strategy"}
        and all(owner.kind == "task" for owner in library().owners(cell))
    ]


def own_parameters(script: Script, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the parameters that this script takes, itself or with an extra."""
    return {name: value for name, value in parameters.items() if name in _taken(script)}


def needed(script: Script, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are an extra's default: the extra need not be added for them."""
    declared, taken = options_of(script), _taken(script)
    return {n: v for n, v in parameters.items() if n in declared or n not in taken or v != taken[n].default}


@lru_cache(maxsize=256)
def _taken(script: Script) -> Mapping[str, Option]:
    every = [*extra_options(script).values(), options_of_strategy(script), options_of(script)]
    return {name: option for options in every for name, option in options.items()}


def simplicity(strategy: str) -> int:
    """The less, the simpler a strategy is; a user's own comes last."""
    return ORDER.index(strategy) if strategy in ORDER else len(ORDER)
