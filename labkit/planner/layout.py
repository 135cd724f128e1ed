"""How a script with its options divides the training over the ranks: all that a formula needs to know of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from labkit.errors import LaunchError
from labkit.write import Script, command_line, options_of, read_back, script_names

__all__ = ["Layout", "layout_of", "strategy_of"]

SCHEDULES_THERE_AND_BACK = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Layout:
    """`ranks` = `data` x `tensor` x `pipeline`. `micro_batch` in samples. `options` are those of the strategy cell."""

    strategy: str  # the name of labkit's script; "" when the strategy cell is the user's own
    ranks: int
    micro_batch: int
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    accumulate: int = 1
    precision: str = "fp32"
    activation_checkpointing: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulate * self.data

    @property
    def shards(self) -> int:
        """Ranks over which a parameter's states are split, along the data axis."""
        if self.strategy in ("zero2", "hybrid"):
            return self.data
        if self.strategy == "fsdp":
            return self.data // self.options["replicas"]
        if self.strategy == "fsdp1":
            return 1 if self.options["sharding_strategy"] == "NO_SHARD" else self.data
        return 1

    @property
    def stages(self) -> int:
        """Of the pipeline, over all ranks."""
        if self.pipeline == 1 and self.strategy != "pipeline":
            return 1
        schedule = self.options["schedule"]
        if schedule in SCHEDULES_THERE_AND_BACK:
            return 2 * self.pipeline
        return self.pipeline * (self.options["virtual_stages"] if schedule in SCHEDULES_LOOPED else 1)

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """Which of the stages a pipeline rank has."""
        if self.strategy in ("pipeline", "hybrid") and self.options["schedule"] in SCHEDULES_THERE_AND_BACK:
            return [pipeline_rank, self.stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.stages, self.pipeline))


def layout_of(script: Script, ranks: int, parameters: Mapping[str, Any]) -> Layout:
    """Raises ScriptError for parameters the script does not take, LaunchError when they do not multiply up."""
    options = options_of(script)
    if not {"global_batch_size", "accumulate", "precision"} <= set(options):
        raise LaunchError(
            f"{script.name}.py cannot be planned: it has none of the cells of labkit's scripts. Put your model and "
            "data into one of them, labkit.Script.load('ddp').with_cells(model=…), and plan that"
        )
    given = read_back(script, command_line(script, parameters))
    values = {name: _typed(option.kind, given.get(name, option.default)) for name, option in options.items()}
    strategy = strategy_of(script)
    tensor, pipeline = _axes(strategy, ranks, values)
    data = ranks // (tensor * pipeline)
    batch, accumulate = values["global_batch_size"], values["accumulate"]
    if accumulate < 1 or batch < 1 or batch % (data * accumulate):
        pieces = data * max(1, accumulate)
        raise LaunchError(
            f"global_batch_size={batch} does not split into {data} data ranks x {accumulate} micro-batches; "
            f"the nearest size that does is {max(1, round(batch / pieces)) * pieces}"
        )
    own = {name: values[name] for name in values if f'"--{name.replace("_", "-")}"' in script.cells["strategy"].text}
    return Layout(
        strategy,
        ranks,
        batch // (data * accumulate),
        data,
        tensor,
        pipeline,
        accumulate,
        values["precision"],
        values["activation_checkpointing"],
        own,
    )


def strategy_of(script: Script) -> str:
    """Which of labkit's strategies a script has, whatever its model; "" when its strategy cell is another."""
    cell = script.cells.get("strategy")
    return _strategies().get(cell.text, "") if cell else ""


@cache
def _strategies() -> dict[str, str]:
    return {Script.load(name).cells["strategy"].text: name for name in script_names()}


def _axes(strategy: str, ranks: int, values: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline ranks of one replica."""
    if strategy == "single" and ranks != 1:
        raise LaunchError(f"single.py trains on one rank, not on {ranks}; ddp is the nearest that uses them all")
    tensor = {"tensor_parallel": ranks, "hybrid": values.get("tensor", 1)}.get(strategy, 1)
    pipeline = {"pipeline": ranks, "hybrid": values.get("pipeline", 1)}.get(strategy, 1)
    if tensor < 1 or pipeline < 1 or ranks % (tensor * pipeline):
        raise LaunchError(f"{ranks} ranks do not split into replicas of pipeline={pipeline} x tensor={tensor}")
    replicas = values.get("replicas", 1)
    if replicas < 1 or ranks % replicas:
        raise LaunchError(f"{ranks} ranks do not split into replicas={replicas} copies of the model")
    return tensor, pipeline


def _typed(kind: str, value: Any) -> Any:
    if kind == "flag":
        return value in (True, "True")
    return {"int": int, "float": float}.get(kind, lambda text: text)(value) if value is not None else None
