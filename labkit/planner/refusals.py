"""What a script of labkit's refuses before it trains, said without starting it: the checks of its strategy and step
cells that depend on the model and the layout alone."""

from __future__ import annotations

import ast
from functools import lru_cache
from importlib.metadata import version

from labkit.launcher.checks import release_of
from labkit.planner.facts import Facts
from labkit.planner.layout import SCHEDULES_LOOPED, Layout
from labkit.planner.memory import variant_of
from labkit.write import Script

__all__ = ["refusal"]

PIPELINED = ("embed", "blocks", "unembed")


def refusal(script: Script, facts: Facts, layout: Layout) -> str:
    """Why the script would stop before its first step; "" when nothing speaks against it."""
    return _data(facts, layout) or _pipeline(script, facts, layout) or _uncounted(facts, layout)


def _data(facts: Facts, layout: Layout) -> str:
    if layout.global_batch > facts.samples:
        return f"global_batch_size={layout.global_batch:,} exceeds the {facts.samples:,} training samples"
    return ""


def _uncounted(facts: Facts, layout: Layout) -> str:
    variant = variant_of(layout)
    if variant in facts.profiles:
        return ""
    if layout.tensor in facts.unsplit:
        return facts.unsplit[layout.tensor]
    if layout.tensor > 1:
        how = " with sequence parallel" if layout.options.get("sequence_parallel") else ""
        return f"layers split over {layout.tensor} tensor ranks{how} are not counted yet"
    return "activation checkpointing recomputes model.blocks, and this model has no .blocks"


def _pipeline(script: Script, facts: Facts, layout: Layout) -> str:
    if layout.strategy != "pipeline" and layout.pipeline == 1:
        return ""
    if missing := [name for name in PIPELINED if name not in _attributes(_model(script))]:
        return f"a pipeline runs embed, blocks and unembed; this model has no {', '.join(missing)}"
    blocks = sum(unit.name.startswith("blocks.") for unit in facts.units)
    if blocks % layout.stages or not blocks:
        return f"{blocks} blocks do not split into {layout.stages} stages"
    schedule, ranks = layout.options["schedule"], layout.pipeline
    before_2_11 = release_of(version("torch")) < (2, 11)
    least = {"GPipe": before_2_11, "1F1B": 1, "DualPipeV": 2}.get(schedule, 0) * ranks
    if layout.accumulate < least:
        return f"{schedule} on {ranks} ranks needs {least} micro-batches or more; accumulate is {layout.accumulate}"
    if schedule.startswith("Interleaved") and layout.accumulate % ranks:
        return f"{schedule} needs a multiple of {ranks} micro-batches; accumulate is {layout.accumulate}"
    if schedule in SCHEDULES_LOOPED and layout.options["virtual_stages"] < 1:
        return f"virtual_stages must be at least 1, got {layout.options['virtual_stages']}"
    return ""


def _model(script: Script) -> str:
    return script.cells["model"].text if "model" in script.cells else ""


@lru_cache(maxsize=16)
def _attributes(model: str) -> set[str]:
    """Names that the classes of a model cell give to themselves: `self.blocks = …`, `def embed(self, …)`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(model)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found
