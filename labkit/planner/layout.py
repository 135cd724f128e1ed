"""Says how a script with its options divides training over the ranks, which is the input of the formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from labkit.arguments import Parameters
from labkit.errors import LaunchError
from labkit.write import (
    Cell,
    Script,
    command_line,
    completed,
    options_of,
    options_of_strategy,
    read_back,
    strategy_of,
)

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
    "blocks_of",
    "make_mesh",
    "parallelize",
    "make_optimizer",
    "half_of",
    "in_precision",
    "adapted",
    "change_layers",
    "forward_backward",
}

AFTER_BACKWARD = ("clip", "lr_schedule", "warmup_steps")
SCHEDULES_THERE_AND_BACK = ("ZBVZeroBubble", "DualPipeV")
SCHEDULES_LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`ranks` = `data` x `tensor` x `pipeline` x `context`. `micro_batch` is in samples. `options` are those of the
    strategy's cells and of extras that work with this strategy only, whether or not the script has them."""

    strategy: str  # the name of labkit's script; "" if the strategy cell is the user's own
    ranks: int
    micro_batch: int
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    accumulate: int = 1
    precision: str = "fp32"
    activation_checkpointing: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    selective: bool = False  # checkpointing that saves results that are expensive to recompute
    context: int = 1  # ranks that split each sequence
    offloads: bool = False  # activations of blocks are kept in host memory
    after_backward: tuple[str, ...] = field(default=(), compare=False)  # options that need all gradients then
    optimizer: str = "adamw"

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulate * self.data

    @property
    def shards(self) -> int:
        """Ranks over which a parameter's states are split, along the data axis."""
        if self.strategy in ("zero2", "hybrid"):
            return self.data
        if self.strategy in ("context_parallel", "expert_parallel"):
            return self.ranks
        if self.strategy == "fsdp":
            replicas: int = self.options["replicas"]
            return self.data // replicas
        if self.strategy == "fsdp1":
            return 1 if self.options["sharding_strategy"] == "NO_SHARD" else self.data
        return 1

    @property
    def expert_ranks(self) -> int:
        """Ranks that divide the experts; the others hold replicas of them."""
        if self.strategy != "expert_parallel":
            return 1
        own: int = self.options["expert_ranks"]
        return own or self.ranks

    @property
    def updates_singly(self) -> bool:
        """Whether the optimizer updates one parameter at a time: torch updates none of different meshes together."""
        return self.tensor > 1 or self.strategy in ("tensor_parallel", "expert_parallel")

    @property
    def is_fused(self) -> bool:
        """Whether one kernel updates all parameters of a mesh, without temporaries."""
        return self.optimizer == "adamw_fused"

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        if self.pipeline == 1 and self.strategy != "pipeline":
            return 1
        schedule = self.options["schedule"]
        if schedule in SCHEDULES_THERE_AND_BACK:
            return 2 * self.pipeline
        return self.pipeline * (self.options["virtual_stages"] if schedule in SCHEDULES_LOOPED else 1)

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        if self.strategy in ("pipeline", "hybrid") and self.options["schedule"] in SCHEDULES_THERE_AND_BACK:
            return [pipeline_rank, self.stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, self.stages, self.pipeline))


def layout_of(script: Script, ranks: int, parameters: Parameters) -> Layout:
    """The layout of the script with the extras that declare these parameters. Raises ScriptError for parameters that
    neither declares, LaunchError if the numbers do not divide."""
    check_contract(script)
    script = able_to(script, parameters)
    arguments = read_back(script, command_line(script, parameters))
    own, declared = options_of_strategy(script), options_of(script)
    values = {
        name: _typed(option.kind, arguments.get(name, option.default)) for name, option in {**own, **declared}.items()
    }
    strategy = strategy_of(script)
    tensor, pipeline = _axes(strategy, ranks, values)
    context = _context(strategy, ranks, values)
    expert_ranks = values.get("expert_ranks") or ranks
    if expert_ranks < 1 or ranks % expert_ranks:
        raise LaunchError(f"{ranks} ranks cannot be split into replicas of expert_ranks={expert_ranks}")
    data = ranks // (tensor * pipeline * context)
    batch, accumulate = values["global_batch_size"], values.get("accumulate", 1)
    if accumulate < 1 or batch < 1 or batch % (data * accumulate):
        pieces = data * max(1, accumulate)
        raise LaunchError(
            f"global_batch_size={batch} cannot be split evenly into {data} data ranks x {accumulate} micro-batches; "
            f"the nearest size is {max(1, round(batch / pieces)) * pieces}"
        )
    selective = values.get("selective_checkpointing", False)
    return Layout(
        strategy=strategy,
        ranks=ranks,
        micro_batch=batch // (data * accumulate),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        accumulate=accumulate,
        precision=values.get("precision", "fp32"),
        activation_checkpointing=values.get("activation_checkpointing", False) and not selective,
        selective=selective,
        offloads=values.get("offload_activations", False),
        options={name: values[name] for name in own},
        after_backward=tuple(name for name in AFTER_BACKWARD if values.get(name) not in (None, 0, "constant")),
        optimizer=values.get("optimizer", "adamw"),
    )


def check_contract(script: Script) -> None:
    """Raise LaunchError unless the script has the functions of labkit's cells, which a plan calls."""
    if _defined(script) >= CALLED and "global_batch_size" in options_of(script):
        return
    raise LaunchError(
        f"{script.name}.py cannot be planned: it lacks the cells of labkit's scripts. Put your model and data into "
        "one of them with labkit.Script.load('ddp').with_cells(model=…) and plan that script"
    )


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


def _axes(strategy: str, ranks: int, values: Mapping[str, Any]) -> tuple[int, int]:
    """Tensor and pipeline ranks of one replica."""
    if strategy == "single" and ranks != 1:
        raise LaunchError(f"single trains on one rank, got {ranks}; ddp is the simplest strategy for several ranks")
    tensor = {"tensor_parallel": ranks, "hybrid": values.get("tensor", 1)}.get(strategy, 1)
    pipeline = {"pipeline": ranks, "hybrid": values.get("pipeline", 1)}.get(strategy, 1)
    if tensor < 1 or pipeline < 1 or ranks % (tensor * pipeline):
        raise LaunchError(f"{ranks} ranks cannot be split into pipeline={pipeline} x tensor={tensor}")
    replicas = values.get("replicas", 1)
    if replicas < 1 or ranks % replicas:
        raise LaunchError(f"{ranks} ranks cannot be split into replicas={replicas}")
    return tensor, pipeline


def _context(strategy: str, ranks: int, values: Mapping[str, Any]) -> int:
    """Ranks that split each sequence."""
    context = (values["context_ranks"] or ranks) if strategy == "context_parallel" else 1
    if context < 1 or ranks % context:
        raise LaunchError(f"{ranks} ranks cannot be split into sequences of context_ranks={context}")
    return context


def _typed(kind: str, value: Any) -> Any:
    if kind == "flag":
        return value in (True, "True")
    return {"int": int, "float": float}.get(kind, lambda text: text)(value) if value is not None else None
