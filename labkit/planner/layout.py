"""How a script with its options divides the training over the ranks: all that a formula needs to know of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from labkit.errors import LaunchError
from labkit.write import Cell, Option, Script, command_line, completed, options_of, own_options, read_back, strategy_of
from labkit.write.compose import library
from labkit.write.options import options_of_part

__all__ = ["Layout", "able_to", "check_contract", "layout_of", "options_of_strategy"]

# What the planner calls of a script.
CALLED = {
    "parse_args",
    "Model",
    "load_datasets",
    "collate",
    "outputs_of",
    "count_of",
    "loss_of",
    "map_tensors",
    "blocks_of",
    "make_mesh",
    "parallelize",
    "make_optimizer",
    "half_of",
    "in_precision",
    "change_layers",
    "forward_backward",
}

SCHEDULES_THERE_AND_BACK = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Layout:
    """`ranks` = `data` x `tensor` x `pipeline`. `micro_batch` in samples. `options` are those of the strategy's cells,
    also of the extras that go with this strategy alone, whether or not the script has them."""

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
    selective: bool = False  # checkpointing that keeps what is expensive to compute again

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
    """Of the script with the extras that declare these parameters. Raises ScriptError for parameters that none takes,
    LaunchError when they do not multiply up."""
    check_contract(script)
    script = able_to(script, parameters)
    given = read_back(script, command_line(script, parameters))
    own, declared = options_of_strategy(script), options_of(script)
    values = {
        name: _typed(option.kind, given.get(name, option.default)) for name, option in {**own, **declared}.items()
    }
    strategy = strategy_of(script)
    tensor, pipeline = _axes(strategy, ranks, values)
    data = ranks // (tensor * pipeline)
    batch, accumulate = values["global_batch_size"], values.get("accumulate", 1)
    if accumulate < 1 or batch < 1 or batch % (data * accumulate):
        pieces = data * max(1, accumulate)
        raise LaunchError(
            f"global_batch_size={batch} does not split into {data} data ranks x {accumulate} micro-batches; "
            f"the nearest size that does is {max(1, round(batch / pieces)) * pieces}"
        )
    selective = values.get("selective_checkpointing", False)
    return Layout(
        strategy,
        ranks,
        batch // (data * accumulate),
        data,
        tensor,
        pipeline,
        accumulate,
        values.get("precision", "fp32"),
        values.get("activation_checkpointing", False) and not selective,
        {name: values[name] for name in own},
        selective,
    )


def check_contract(script: Script) -> None:
    """Raise LaunchError unless the script has the functions of labkit's cells, which a plan calls."""
    defined = _defined(script)
    if defined >= CALLED and "global_batch_size" in options_of(script):
        return
    if {"losses_of", "load_datasets"} <= defined:
        raise LaunchError(
            f"{script.name}.py was written by an older labkit, whose cells were others: compose it anew, "
            "labkit.Script.load('ddp').with_cells(model=…, data=…), and plan that"
        )
    raise LaunchError(
        f"{script.name}.py cannot be planned: it has none of the cells of labkit's scripts. Put your model and "
        "data into one of them, labkit.Script.load('ddp').with_cells(model=…), and plan that"
    )


@lru_cache(maxsize=256)
def _defined(script: Script) -> frozenset[str]:
    return Cell("head", script.head).defines.union(*(cell.defines for cell in script.parts))


def able_to(script: Script, parameters: Mapping[str, Any]) -> Script:
    """With the extras that declare those of the parameters that the script does not, as launch adds them.

    Raises ScriptError when one cannot be added.
    """
    declared = options_of(script)
    missing = tuple(name for name, value in parameters.items() if value is not None and name not in declared)
    return _able_to(script, script.name, missing) if missing else script


@lru_cache(maxsize=1024)
def _able_to(script: Script, name: str, missing: tuple[str, ...]) -> Script:
    """`name` is the script's, by which scripts do not differ."""
    return completed(script, missing)


@lru_cache(maxsize=256)
def options_of_strategy(script: Script) -> Mapping[str, Option]:
    """Those that the strategy's cells declare, and the extras that go with this strategy alone; but for `accumulate`,
    which all have."""
    strategy = strategy_of(script)
    extras = [options_of_part(extra) for extra in library().extras.values() if strategy in extra.goes_with]
    every = {name: option for options in (*extras, own_options(script)) for name, option in options.items()}
    return {name: option for name, option in every.items() if name != "accumulate"}


def _axes(strategy: str, ranks: int, values: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline ranks of one replica."""
    if strategy == "single" and ranks != 1:
        raise LaunchError(f"single trains on one rank, not on {ranks}; ddp is the nearest that uses them all")
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
