"""Says whether a script has the functions that a plan calls, and adds the extras that its parameters need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from labkit.arguments import Parameters, Value
from labkit.write import Cell, Script, completed, options_of, read_back

# The functions of a script that the planner calls.
CALLED = {
    "parse_args",
    "Model",
    "load_datasets",
    "collate",
    "outputs_of",
    "count_of",
    "loss_of",
    "map_tensors",
    "make_mesh",
    "parallelize",
    "make_optimizer",
    "forward_backward",
}


def has_cells(script: Script) -> bool:
    """Whether the script has the functions of labkit's cells, which a plan calls."""
    return _defined(script) >= CALLED and "global_batch_size" in options_of(script)


@lru_cache(maxsize=256)
def _defined(script: Script) -> frozenset[str]:
    return Cell("head", script.head).defines.union(*(cell.defines for cell in script.parts))


def able_to(script: Script, parameters: Parameters) -> Script:
    """The script with the extras for parameters that it does not declare itself, as launch adds them.

    Raises ScriptError if one cannot be added.
    """
    declared = options_of(script)
    missing = tuple(name for name, value in parameters.items() if value is not None and name not in declared)
    return _able_to(script, script.name, missing) if missing else script


@lru_cache(maxsize=1024)
def _able_to(script: Script, name: str, missing: tuple[str, ...]) -> Script:
    """As `able_to`; `name` is part of the cache key, because the equality of scripts ignores it."""
    return completed(script, missing)


def prepared(names: Mapping[str, Any], device: Any, args: Any) -> Any:
    """The model as main() has it before it is parallelized; `names` are those of the script."""
    model = names["Model"]()
    if "adapted" in names:
        model = names["adapted"](model, args)
    if "in_precision" in names:
        model = names["in_precision"](model, device, args)
    if "change_layers" in names:
        names["change_layers"](model, args)
    return model.train()


def parameters_in(script: Script, argv: Sequence[str]) -> dict[str, Value]:
    """The parameters that these arguments set; of a script's own options that are computed, none."""
    options = options_of(script)
    return {
        name: value == "True" if options[name].kind == "flag" else value
        for name, value in read_back(script, argv).items()
        if name in options
    }
