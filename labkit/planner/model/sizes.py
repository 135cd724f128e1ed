"""Computes the memory of parameters, gradients and optimizer state, for a model that cannot be run without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.planner.layout import Layout, able_to
from labkit.planner.model.child import ask
from labkit.write import Script, command_line

__all__ = ["sizes_of", "states_alone"]

MOMENTS = 2  # of AdamW


def states_alone(script: Script, layout: Layout, parameters: Mapping[str, Any], *, path: str = "") -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state on a rank: 4, 4 and 8 per fp32 parameter, divided as in ZeRO
    (arXiv 1910.02054, section 5), assuming that layers split evenly over tensor and pipeline ranks.

    Raises LaunchError if the script refuses its options, Unplannable if its model cannot be built.
    """
    script = script if path else able_to(script, parameters)
    sizes = ask("sizes.sizes_of", {"text": str(script), "argv": command_line(script, parameters), "path": path})
    in_blocks = sizes["blocks"] // (layout.tensor * layout.pipeline)
    trained = in_blocks + sizes["rest"]
    itemsize = 8 if layout.precision == "fp64" else 4
    shards = {"zero1": layout.data}.get(layout.strategy, layout.shards)
    kept = trained if layout.strategy == "zero1" else trained // layout.shards
    return {
        "parameters": itemsize * (kept + sizes["frozen"]),
        "gradients": itemsize * kept,
        "optimizer": MOMENTS * itemsize * (trained // shards),
    }


def sizes_of(text: str, argv: Sequence[str], path: str) -> dict[str, int]:
    from labkit.planner.model.fake.fake_run import FakeRun

    fake_run = FakeRun(text, argv, path)
    model = fake_run.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    in_blocks = {p for block in fake_run.script.blocks_of(model) for p in block.parameters()}
    blocks = sum(p.numel() for p in trained if p in in_blocks)
    return {
        "blocks": blocks,
        "rest": sum(p.numel() for p in trained) - blocks,
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
    }
