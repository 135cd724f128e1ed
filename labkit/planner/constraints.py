"""Makes the checks of labkit's scripts before training, without starting the script: those of the strategy and step
cells that depend only on the model and the layout."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version

from labkit.checking import check
from labkit.launcher import release_of
from labkit.planner.layout import SCHEDULES_LOOPED, Layout
from labkit.planner.memory.peak import variant_of
from labkit.planner.model.facts import ModelFacts
from labkit.write import Script

__all__ = ["refusal", "unsupported"]


def refusal(facts: ModelFacts, layout: Layout) -> str:
    """Why the script would stop before its first step; "" if it would start."""
    checks = (_in_backward, _data, _divided, _pipeline, _uncounted)
    return next(filter(None, (check(facts, layout) for check in checks)), "")


@lru_cache(maxsize=256)
def unsupported(script: Script) -> str:
    """Why a script that calculates gradients of gradients fails in its first step; "" if it does not."""
    if "create_graph" not in str(script):  # parsing the scripts of all strategies would take 0.2 s
        return ""
    findings = (finding for finding in check(script) if finding.rule == "double-backward-sharded")
    return next((f"{finding.message} (create_graph=True). {finding.fix}" for finding in findings), "")


def _in_backward(facts: ModelFacts, layout: Layout) -> str:
    if not layout.options.get("optimizer_in_backward"):
        return ""
    others = {
        "accumulate": layout.accumulate > 1,
        "precision='fp16'": layout.precision == "fp16",
        "cpu_offload": layout.options.get("cpu_offload"),
    }
    names = ", ".join((*layout.after_backward, *(name for name, applies in others.items() if applies)))
    return f"optimizer_in_backward leaves no gradients for {names}: leave one of them out" if names else ""


def _data(facts: ModelFacts, layout: Layout) -> str:
    if layout.global_batch > facts.samples:
        return f"global_batch_size={layout.global_batch:,} exceeds the {facts.samples:,} training samples"
    return ""


def _divided(facts: ModelFacts, layout: Layout) -> str:
    if layout.shards > 1 and facts.scalar:
        return f"FSDP does not shard scalar parameters: give {facts.scalar} the shape (1,)"
    if layout.context > 1 and facts.positions % (2 * layout.context):
        return f"{facts.positions:,} positions cannot be split into 2 chunks for each of {layout.context} context ranks"
    if layout.strategy == "expert_parallel":
        if facts.undivided:
            return facts.undivided
        replicas = layout.ranks // layout.expert_ranks
        for number, features in (size for unit in facts.units for size in unit.expert_sizes):
            if number % layout.expert_ranks:
                return f"{number} experts cannot be split across {layout.expert_ranks} expert ranks"
            if features % replicas:
                return f"{features:,} features of the experts cannot be split across {replicas} replicas"
    return ""


def _uncounted(facts: ModelFacts, layout: Layout) -> str:
    variant = variant_of(layout)
    if variant in facts.profiles or (variant.precision, variant.half_parameters) in facts.uncounted:
        return ""
    if layout.tensor in facts.unsplit:
        return facts.unsplit[layout.tensor]
    if layout.tensor > 1:
        how = " with sequence parallel" if layout.options.get("sequence_parallel") else ""
        return f"layers split over {layout.tensor} tensor ranks{how} have not been counted yet"
    return "activation checkpointing needs repeated layers such as .blocks; this model has none"


def _pipeline(facts: ModelFacts, layout: Layout) -> str:
    if layout.strategy not in ("pipeline", "hybrid"):
        return ""
    if facts.uncut:
        return facts.uncut
    blocks = facts.layers or sum(unit.name.startswith("blocks.") for unit in facts.units)
    if blocks % layout.stages or not blocks:
        return f"{blocks} blocks cannot be split into {layout.stages} pipeline stages"
    schedule, ranks = layout.options["schedule"], layout.pipeline
    before_2_11 = release_of(version("torch")) < (2, 11)
    least = {"GPipe": before_2_11, "1F1B": 1, "DualPipeV": 2}.get(schedule, 0) * ranks
    if layout.accumulate < least:
        why = f"{least} micro-batches" + (" before torch 2.11" if schedule == "GPipe" else "")
        return f"{schedule} on {ranks} ranks needs at least {why}; accumulate is {layout.accumulate}"
    if schedule.startswith("Interleaved") and layout.accumulate % ranks:
        return f"{schedule} needs a multiple of {ranks} micro-batches; accumulate is {layout.accumulate}"
    if schedule in SCHEDULES_LOOPED and layout.options["virtual_stages"] < 1:
        return f"virtual_stages must be at least 1, got {layout.options['virtual_stages']}"
    return ""
