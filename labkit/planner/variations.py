"""Composes the same model, data and loss under every strategy of labkit, with the same extras where they are
compatible."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache

from labkit.arguments import Parameters, Value
from labkit.errors import ScriptError
from labkit.planner.strategies.known import STRATEGIES
from labkit.planner.strategies.strategy import Strategy
from labkit.write import (
    Cell,
    Option,
    Script,
    extra_options,
    fitted,
    library,
    options_of,
    options_of_strategy,
    originals,
    strategy_of,
    with_extra,
)


def variants(script: Script, divides: Collection[str] = (), *, every: bool = False) -> dict[str, Script]:
    """The script itself and its cells under every other strategy, by name; of those for some models only, the ones in
    `divides`; with `every`, also those that another one supersedes or that train otherwise.

    The script has its strategy's name as key; with the user's own strategy cell, it comes first under its own name, as
    "your fsdp" if labkit has that strategy. The others are ordered from the strategy that keeps most on each rank to
    the one that shards most.
    """
    own = strategy_of(script)

    def is_compared(strategy: Strategy) -> bool:
        return (strategy.is_usual or every) and (strategy.name in divides or not strategy.for_some)

    names = [name for name, strategy in STRATEGIES.items() if name == own or is_compared(strategy)]
    others = {name: script if name == own else under(script, name, extras_of(script)) for name in names}
    if own:
        return others
    return {f"your {script.name}" if script.name in STRATEGIES else script.name: script} | others


def under(script: Script, strategy: str, extras: tuple[str, ...] = ()) -> Script:
    """Another strategy's script with these extras, if compatible, the task and the user's own cells."""
    made = Script.load(strategy)
    for extra in extras:
        try:
            made = replace(made, parts=with_extra(made, extra))
        except ScriptError:  # not compatible with that strategy
            continue
    parts = list(originals(made))
    for cell in _cells_of_the_task(script):
        titles = [part.title for part in parts]
        if cell.title in library().titles_of(strategy):
            continue
        if cell.title in titles:
            parts[titles.index(cell.title)] = cell
        else:
            parts.insert(titles.index("strategy"), cell)
    return replace(made, parts=fitted(parts, strategy, script.parts))


def extras_of(script: Script) -> tuple[str, ...]:
    """The extras of the script, even if the user has replaced some of their cells, but not those that work with one
    strategy only."""
    extras = [owner for cell in script.parts for owner in library().owners(cell) if owner.kind == "extra"]
    return tuple(dict.fromkeys(extra.name for extra in extras if not extra.goes_with))


def _cells_of_the_task(script: Script) -> list[Cell]:
    """The task's and the user's own cells: all except those of train.py, of strategies and of extras. A cell with a
    title of the script's strategy is not included, even if the user wrote it."""
    own = library().titles_of(strategy_of(script)) | {"strategy"}
    return [
        cell
        for cell in originals(script)
        if cell.title and cell.title not in own and all(owner.kind == "task" for owner in library().owners(cell))
    ]


def own_parameters(script: Script, parameters: Parameters) -> dict[str, Value]:
    """The parameters that this script accepts, itself or with an extra."""
    return {name: value for name, value in parameters.items() if name in _accepted(script)}


def needed(script: Script, parameters: Parameters) -> dict[str, Value]:
    """The parameters without those that equal an extra's default, for which the extra need not be added."""
    declared, taken = options_of(script), _accepted(script)
    return {n: v for n, v in parameters.items() if n in declared or n not in taken or v != taken[n].default}


@lru_cache(maxsize=256)
def _accepted(script: Script) -> Mapping[str, Option]:
    groups = [*extra_options(script).values(), options_of_strategy(script), options_of(script)]
    return {name: option for options in groups for name, option in options.items()}
