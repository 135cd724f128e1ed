"""What the planner asks of a strategy, with the answers of one whose ranks hold the whole model; and a layout: a
strategy with the sizes of its mesh and the options that bear on a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from labkit.errors import LaunchError
from labkit.planner.data_sheets import Device
from labkit.planner.memory.ledger import Keeper, Ledger, backward, forward, loss
from labkit.planner.memory.whole import Whole, adamw_state
from labkit.planner.model.facts import ModelFacts, Profile, Variant
from labkit.planner.speed.collectives import COUNT, SCALAR, Collective
from labkit.write import Script

HALF = {"fp16": 2, "bf16": 2}  # bytes per element of the precisions of 16 bits
Way = tuple[dict[str, Any], tuple[str, ...]]  # options, and their descriptions


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`ranks` = `data` x `tensor` x `pipeline` x `context`. `micro_batch` is in samples. `options` are those of the
    strategy's cells and of extras that work with this strategy only, whether or not the script has them."""

    strategy: Strategy
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
        return self.strategy.shards(self)

    @property
    def replicas(self) -> int:
        """Replicas of the shards, along the data axis."""
        return int(self.options.get("replicas", 1))

    @property
    def updates_singly(self) -> bool:
        """Whether the optimizer updates one parameter at a time: torch updates none of different meshes together."""
        return self.tensor > 1 or self.strategy.updates_singly

    @property
    def is_fused(self) -> bool:
        """Whether one kernel updates all parameters of a mesh, without temporaries."""
        return self.optimizer == "adamw_fused"

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.strategy.stages(self)

    def keeps_states_on_host(self, *, on_gpu: bool) -> bool:
        """Whether shards, their gradients and the optimizer's state are in the host's memory instead of a GPU's."""
        return on_gpu and bool(self.options.get("cpu_offload"))

    @property
    def itemsize(self) -> int:
        """Bytes per element of a parameter."""
        return 8 if self.precision == "fp64" else 4

    @property
    def computed_itemsize(self) -> int:
        """Bytes per element of results in forward."""
        return HALF.get(self.precision, self.itemsize)

    @property
    def variant(self) -> Variant:
        """How units are computed."""
        half = self.precision in HALF
        return Variant(
            "16" if half else self.precision,
            half and self.strategy.halves_parameters,
            self.activation_checkpointing,
            self.tensor,
            bool(self.options.get("sequence_parallel", False)),
        )

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """(ranks, how far apart they are) of the process groups along each axis in use; the first varies fastest."""
        if self.context > 1:  # its ranks share the shards, too
            return {"context": (self.context, 1), "shards": (self.shards, 1)}
        shards, inner = self.data // self.replicas, self.tensor
        sizes = {
            "tensor": (self.tensor, 1),
            "shards" if self.shards > 1 else "data": (shards, inner),
            "copies": (self.replicas, shards * inner),
            "pipeline": (self.pipeline, self.data * inner),
        }
        return {axis: group for axis, group in sizes.items() if group[0] > 1}


class Axes(NamedTuple):
    """The ranks along the axes of a mesh besides the data axis."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1


class Divided(NamedTuple):
    """By how much the states that a rank holds are less than the model's."""

    parameters: int
    gradients: int
    optimizer: int


class Strategy:
    """One way to train on several ranks. Methods are pure; those that take a layout get one of this strategy."""

    name: ClassVar[str] = ""  # of its script; "" for a user's own
    simplicity: ClassVar[int] = 99  # the smaller, the simpler
    for_some: ClassVar[bool] = False  # its cells accept models of one kind only
    trains_alike: ClassVar[bool] = True  # as one rank does
    superseded_by: ClassVar[str] = ""
    unknown: ClassVar[str] = ""  # why formulas do not tell its memory
    halves_parameters: ClassVar[bool] = False  # in 16 bits it computes with such parameters, others under autocast
    has_buckets: ClassVar[bool] = False  # of DDP, from which a thread sends
    has_dtensors: ClassVar[bool] = False  # which the optimizer updates
    deals_parameters: ClassVar[bool] = False  # each rank updates some of them, whole
    updates_singly: ClassVar[bool] = False
    for_any_script: ClassVar[bool] = False  # it divides states only, so any script could use it
    blocks_at_once: ClassVar[int] = 0  # whose parameters or gradients are whole
    frees_later: ClassVar[str] = ""  # whose buffers torch frees earlier since 2.15

    @property
    def is_usual(self) -> bool:
        """Whether it is compared with others without being asked for."""
        return self.trains_alike and not self.superseded_by

    @classmethod
    def cells(cls, *titles: str, extra: str = "") -> Any:
        """The names that cells of its script define, as a module."""
        module, cells = ModuleType(cls.name), Script.load(cls.name, *filter(None, [extra])).cells
        exec("\n".join(cells[title].text for title in titles), vars(module))
        return module

    def is_in(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        """Whether a script that labkit did not write uses it. Runs in the planner's child process."""
        return False

    def ranks_of(self, ranks: int) -> int:
        """How many of these ranks it can use."""
        return ranks

    def axes(self, ranks: int, values: Mapping[str, Any]) -> Axes:
        """The axes of its mesh, with the script's options `values`. Raises LaunchError if the ranks do not divide."""
        return Axes()

    def shards(self, layout: Layout) -> int:
        """Ranks over which a parameter's states are split, along the data axis."""
        return 1

    def stages(self, layout: Layout) -> int:
        """Pipeline stages over all ranks."""
        return 1

    def stages_of(self, layout: Layout, pipeline_rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [0]

    def divided(self, layout: Layout) -> Divided:
        """How it divides the states."""
        every = layout.shards * layout.tensor * layout.pipeline
        return Divided(every, every, every)

    def ways(self, ranks: int, accumulate: int, samples: int, box: int) -> Iterator[Way]:
        """Values of its own options that are worth considering for `samples` in a step over all ranks, if `box` ranks
        share a host; the first is what it does by default."""
        yield {}, ()

    def refusal(self, facts: ModelFacts, layout: Layout) -> str:
        """Why its script would stop before the first step; "" if it would start."""
        return ""

    def unfit(self, layout: Layout, device: Device) -> str:
        """Why it cannot train on this device; "" if it can."""
        return ""

    def stretched(self, facts: ModelFacts, layout: Layout, ranks: int) -> Layout | None:
        """The layout on `ranks` ranks with the same micro-batch on each; None if it cannot use them."""
        own = layout.tensor * layout.pipeline * layout.context
        if ranks % own or ranks % layout.replicas:
            return None
        return replace(layout, ranks=ranks, data=ranks // own)

    def profiles(self, facts: ModelFacts, layout: Layout) -> Sequence[Profile]:
        """The profiles of a rank's part of each unit, and of the loss."""
        return facts.profiles[layout.variant]

    def inputs(self, facts: ModelFacts, layout: Layout) -> int:
        """Bytes of a step's inputs and targets, which a rank holds for the whole step."""
        return facts.inputs_at(layout.variant, layout.micro_batch * layout.accumulate)

    def keep(
        self, ledger: Ledger, facts: ModelFacts, layout: Layout, units: Sequence[int], rank: int, *, on_gpu: bool
    ) -> tuple[Keeper, list[int]]:
        """Add the parameters of some units to the ledger. Returns their keeper and the sizes that are updated.

        `rank` is along the data axis.
        """
        every, size = self.profiles(facts, layout), layout.itemsize
        each = [sum(every[unit].parameters) for unit in units]
        ledger.held["parameters"] += sum(facts.units[unit].buffers for unit in units)
        frozen = (facts.units[unit].frozen_bytes(size, layout.computed_itemsize) for unit in units)
        ledger.held["parameters"] += size * sum(each) + sum(frozen)
        views = layout.options.get("gradient_as_bucket_view", True)
        keeper = Whole(ledger, [size * n for n in each], buckets=self.has_buckets, views=views)
        return keeper, [n for unit in units for n in every[unit].parameters]

    def optimizer_state(self, updated: Sequence[int], layout: Layout) -> int:
        """Bytes of the state for parameters of these sizes."""
        return adamw_state(updated, layout.itemsize)

    def record_step(self, ledger: Ledger, facts: ModelFacts, layout: Layout, rank: int, *, on_gpu: bool) -> list[int]:
        """Record the moments of a step's forward and backward passes. Returns the sizes that the optimizer updates.

        Raises UnknownToFormulas for what the formulas do not cover.
        """
        names, profiles = [unit.name for unit in facts.units], self.profiles(facts, layout)
        keeper, updated = self.keep(ledger, facts, layout, range(len(names)), rank, on_gpu=on_gpu)
        if not layout.keeps_states_on_host(on_gpu=on_gpu):
            ledger.held["optimizer"] = self.optimizer_state(updated, layout)
        # all micro-batches in the middle are equal
        for number in sorted({0, min(1, layout.accumulate - 1), layout.accumulate - 1}):
            keeper.begin(first=number == 0, last=number == layout.accumulate - 1)
            forward(ledger, keeper, names, profiles[:-1], layout.micro_batch)
            loss(ledger, profiles[-1], layout.micro_batch)
            backward(ledger, keeper, names, profiles[:-1], layout.micro_batch)
        return updated

    def traffic(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """The collectives of one optimizer step; some may have no bytes, or be of one rank."""
        # the number of predictions of the whole batch
        yield Collective("all_reduce", layout.data, COUNT, 1, "forward", False, layout.tensor * layout.context)
        yield from self.exchanged(facts, layout, rank)
        if layout.precision == "fp16" and layout.ranks > 1:  # the overflow flag
            yield Collective("all_reduce", layout.ranks, SCALAR, 1, "optimizer", False)

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterable[Collective]:
        """The collectives of parameters, gradients and activations."""
        return ()

    def passed_on(self, facts: ModelFacts, layout: Layout) -> int:
        """Bytes of an element between blocks: autocast alone keeps sums in the parameters' type."""
        return facts.itemsize

    def assumed(self, layout: Layout) -> Iterator[str]:
        """What its predicted step time takes for granted."""
        yield from ()

    def across_hosts(self, layout: Layout, device: Device) -> Iterator[str]:
        """Sentences on what would keep more of its communication within a host."""
        yield from ()

    def hint(self, facts: ModelFacts) -> str:
        """What this strategy would change for a model that its cells do not accept; "" if nothing."""
        return ""

    def difference(self, layout: Layout) -> str:
        """How its training differs from that of one rank: `which communicates every 10 steps`; "" if it does not."""
        return ""


def divided_evenly(ranks: int, pieces: int, what: str) -> int:
    """The number of pieces, into which the ranks are split. Raises LaunchError if they do not divide."""
    if pieces < 1 or ranks % pieces:
        raise LaunchError(f"{ranks} ranks cannot be split into {what}")
    return pieces


def volume(facts: ModelFacts, layout: Layout, rank: int = 0) -> list[Collective]:
    """The collectives of one optimizer step; `rank` matters in a pipeline only.

    Verified with torch's flight recorder (tests/planner/test_volume_recorded.py).
    """
    return [each for each in layout.strategy.traffic(facts, layout, rank) if each.group > 1 and each.count]
