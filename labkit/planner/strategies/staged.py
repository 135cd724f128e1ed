"""What strategies have in common that cut the model into stages, through which micro-batches pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version

from labkit.errors import LaunchError
from labkit.planner.memory.ledger import Ledger, UnknownToFormulas
from labkit.planner.memory.pipeline import (
    SCHEDULES_LOOPED,
    SCHEDULES_THERE_AND_BACK,
    SCHEDULES_ZERO_BUBBLE,
    Stage,
    actions,
    pipelined,
)
from labkit.planner.model.facts import ModelFacts, Unit
from labkit.planner.speed.collectives import SCALAR, SUM, Collective
from labkit.planner.strategies.strategy import Layout, Strategy, Way
from labkit.version import release_of

PIPELINE_AXIS = "pipeline"  # of the mesh of the scripts
MICRO_BATCHES_A_STAGE = (4, 2, 1)  # 4 keep the bubble of GPipe and 1F1B below a fifth: (p-1)/(4p+p-1)


class Staged(Strategy):
    """Its mesh has the axes pipeline, data, tensor; the last varies fastest."""

    def stages(self, layout: Layout) -> int:
        schedule = layout.options["schedule"]
        if schedule in SCHEDULES_THERE_AND_BACK:
            return 2 * layout.pipeline
        return layout.pipeline * (layout.options["virtual_stages"] if schedule in SCHEDULES_LOOPED else 1)

    def stages_of(self, layout: Layout, pipeline_rank: int) -> list[int]:
        if layout.options["schedule"] in SCHEDULES_THERE_AND_BACK:
            return [pipeline_rank, layout.stages - 1 - pipeline_rank]
        return list(range(pipeline_rank, layout.stages, layout.pipeline))

    def refusal(self, facts: ModelFacts, layout: Layout) -> str:
        if facts.uncut:
            return facts.uncut
        schedule, ranks, blocks = layout.options["schedule"], layout.pipeline, facts.layers or len(facts.blocks)
        if schedule in SCHEDULES_LOOPED and layout.options["virtual_stages"] < 1:
            return f"virtual_stages must be at least 1, got {layout.options['virtual_stages']}"
        if blocks % layout.stages or not blocks:
            return f"{blocks} blocks cannot be split into {layout.stages} pipeline stages"
        before_2_11 = release_of(version("torch")) < (2, 11)
        least = {"GPipe": before_2_11, "1F1B": 1, "DualPipeV": 2}.get(schedule, 0) * ranks
        if layout.accumulate < least:
            why = f"{least} micro-batches" + (" before torch 2.11" if schedule == "GPipe" else "")
            return f"{schedule} on {ranks} ranks needs at least {why}; accumulate is {layout.accumulate}"
        if schedule.startswith("Interleaved") and layout.accumulate % ranks:
            return f"{schedule} needs a multiple of {ranks} micro-batches; accumulate is {layout.accumulate}"
        return ""

    def record_step(self, ledger: Ledger, facts: ModelFacts, layout: Layout, rank: int, *, on_gpu: bool) -> list[int]:
        if facts.layers:
            raise UnknownToFormulas("they cover pipelines only for models of embed, blocks and unembed")
        if reason := self.refusal(facts, layout):
            raise LaunchError(reason)
        if (schedule := layout.options["schedule"]) in SCHEDULES_ZERO_BUBBLE:
            raise UnknownToFormulas(f"they do not cover {schedule}")
        pipeline_rank, inner = divmod(rank, layout.data * layout.tensor)
        mine = sorted(self.stages_of(layout, pipeline_rank))
        profiles = self.profiles(facts, layout)
        stages, updated = {}, []
        for stage in mine:
            units = _units_of(facts, layout, stage)
            keeper, sizes = self.keep(ledger, facts, layout, units, inner // layout.tensor, on_gpu=on_gpu)
            updated += sizes
            stages[stage] = Stage(
                [facts.units[unit].name for unit in units],
                [profiles[unit] for unit in units],
                keeper,
                stage == 0,
                profiles[-1] if stage == layout.stages - 1 else None,
                layout.precision in ("fp32", "fp64"),
            )
        ledger.held["optimizer"] = self.optimizer_state(updated, layout)
        order = actions(schedule, layout.pipeline, pipeline_rank, mine, layout.accumulate)
        pipelined(ledger, stages, order, layout.micro_batch, layout.accumulate, schedule)
        return updated

    def exchanged(self, facts: ModelFacts, layout: Layout, rank: int) -> Iterator[Collective]:
        """Activations are sent to the next stage and their gradients back for every micro-batch, and the loss at the
        end of a step."""
        apart = layout.data * layout.tensor
        owners = {stage: r for r in range(layout.pipeline) for stage in self.stages_of(layout, r)}
        me, each = rank // apart, len(facts.blocks) // layout.stages
        samples, width = layout.micro_batch * layout.accumulate, self.passed_on(facts, layout)
        for stage in self.stages_of(layout, me):
            if stage + 1 in owners and owners[stage + 1] != me:
                handed_on = facts.blocks[each * (stage + 1) - 1].output * width * samples
                yield Collective("send", 2, handed_on, layout.accumulate, "forward", True, apart)
            if stage and owners[stage - 1] != me:
                before = facts.blocks[each * stage - 1].output * width * samples
                yield Collective("send", 2, before, layout.accumulate, "backward", True, apart)
            yield from self.exchanged_in_stage(facts, [facts.units[i] for i in _units_of(facts, layout, stage)], layout)
        yield Collective("all_reduce", layout.data, SCALAR, 1, "forward", False, layout.tensor)  # of a changed shape
        yield Collective("broadcast", layout.pipeline, SUM, 1, "backward", False, apart)

    def exchanged_in_stage(self, facts: ModelFacts, units: Sequence[Unit], layout: Layout) -> Iterator[Collective]:
        """The collectives of the parameters of a stage."""
        yield from ()


def blocks_of_rank(facts: ModelFacts, layout: Layout, rank: int) -> tuple[Unit, ...]:
    """The blocks of all stages of a rank."""
    each, me = len(facts.blocks) // layout.stages, rank // (layout.data * layout.tensor)
    return tuple(b for s in layout.strategy.stages_of(layout, me) for b in facts.blocks[each * s : each * (s + 1)])


def filling(stages: int, accumulate: int, samples: int) -> int:
    """A number of micro-batches that keeps a pipeline of this many stages busy and divides its samples, at least
    `accumulate`; `accumulate` if there is none."""
    counts = (times * stages for times in MICRO_BATCHES_A_STAGE)
    return max(accumulate, next((count for count in counts if samples % count == 0), accumulate))


def micro_batches(count: int, accumulate: int) -> Way:
    """The option for so many micro-batches, if it is another number."""
    return ({}, ()) if count == accumulate else ({"accumulate": count}, (f"accumulate={count}",))


def _units_of(facts: ModelFacts, layout: Layout, stage: int) -> range:
    """The numbers of the units of a stage: its blocks, and at an end what comes before or after all blocks."""
    blocks = [i for i, unit in enumerate(facts.units) if unit.is_block]
    each = len(blocks) // layout.stages
    first = 0 if stage == 0 else blocks[each * stage]
    return range(first, len(facts.units) if stage == layout.stages - 1 else blocks[each * (stage + 1)])
