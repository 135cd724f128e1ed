"""Splits the layers of blocks over tensor ranks, of which one is played. Runs in the planner's child process."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.planner.model.fakes import silence
from labkit.write import Script

__all__ = ["mesh_of", "split"]


def mesh_of(ranks: int) -> DeviceMesh:
    """Of tensor ranks between which nothing is sent. There is one at a time."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def split(script: Any, model: nn.Module, blocks: Sequence[nn.Module], mesh: DeviceMesh, sequence: bool) -> None:
    """As tensor_parallel does, by the script's own `tensor` cell or plan if it has one. Raises SystemExit when the
    layers do not split."""
    ours = ModuleType("tensor_parallel")
    cells = Script.load("tensor_parallel", "sequence_parallel").cells
    exec(cells["tensor"].text + cells["strategy"].text, vars(ours))
    if hasattr(script, "TENSOR_PLAN"):
        ours.TENSOR_PLAN = script.TENSOR_PLAN
        vars(ours).update({name: vars(script)[name] for name in ("split", "split_sequence") if hasattr(script, name)})
    with silence():
        if sequence:
            ours.split_sequence(blocks, mesh)
        else:
            ours.split(blocks, model, mesh)
