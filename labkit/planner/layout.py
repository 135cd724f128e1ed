"""Says how a script with its options divides training over the ranks, which is the input of the formulas."""

from __future__ import annotations

from typing import Any

from labkit.arguments import Parameters
from labkit.errors import LaunchError
from labkit.planner.contract import able_to, has_cells
from labkit.planner.strategies.known import strategy_named
from labkit.planner.strategies.strategy import Layout
from labkit.write import Script, check_split, command_line, options_of, options_of_strategy, read_back, strategy_of

AFTER_BACKWARD = ("clip", "lr_schedule", "warmup_steps")


def layout_of(script: Script, ranks: int, parameters: Parameters) -> Layout:
    """The layout of the script with the extras that declare these parameters. Raises ScriptError for parameters that
    neither declares, LaunchError for other scripts than labkit's and if the numbers do not divide."""
    if not has_cells(script):
        raise LaunchError(
            f"{script.name}.py cannot be planned: it lacks the cells of labkit's scripts. Put your model and data into "
            "one of them with labkit.Script.load('ddp').with_cells(model=…) and plan that script"
        )
    script = able_to(script, parameters)
    arguments = read_back(script, command_line(script, parameters))
    own, declared = options_of_strategy(script), options_of(script)
    values = {
        name: _typed(option.kind, arguments.get(name, option.default)) for name, option in {**own, **declared}.items()
    }
    strategy = strategy_named(strategy_of(script))
    axes = strategy.axes(ranks, values)
    data = ranks // (axes.tensor * axes.pipeline * axes.context)
    batch, accumulate = values["global_batch_size"], values.get("accumulate", 1)
    if batch is None or accumulate is None:
        raise LaunchError("the script computes the default of its batch size: pass global_batch_size and accumulate")
    check_split(batch, data, accumulate)
    selective = values.get("selective_checkpointing", False)
    return Layout(
        strategy=strategy,
        ranks=ranks,
        micro_batch=batch // (data * accumulate),
        data=data,
        **axes._asdict(),
        accumulate=accumulate,
        precision=values.get("precision", "fp32"),
        activation_checkpointing=values.get("activation_checkpointing", False) and not selective,
        selective=selective,
        offloads=values.get("offload_activations", False),
        options={name: values[name] for name in own},
        after_backward=tuple(name for name in AFTER_BACKWARD if values.get(name) not in (None, 0, "constant")),
        optimizer=values.get("optimizer", "adamw"),
    )


def _typed(kind: str, value: Any) -> Any:
    if kind == "flag":
        return value in (True, "True")
    return {"int": int, "float": float}.get(kind, lambda text: text)(value) if value is not None else None
