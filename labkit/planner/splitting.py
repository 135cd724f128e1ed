"""Splits the layers of blocks over tensor ranks, of which one is played. Runs in the planner's child process."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.write import Script

__all__ = ["mesh_of", "split"]


def mesh_of(ranks: int) -> DeviceMesh:
    """Of tensor ranks between which nothing is sent. There is one at a time."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tensor",))


def split(script: Any, blocks: nn.ModuleList, mesh: DeviceMesh, sequence: bool) -> None:
    """As tensor_parallel.py does, by the plan of the script if it has one. Raises SystemExit when it does not fit."""
    ours = ModuleType("tensor_parallel")
    exec(Script.load("tensor_parallel").cells["strategy"].text, ours.__dict__)
    layout = Shard(1) if sequence else Replicate()
    plan = getattr(script, "TENSOR_PLAN", None) or getattr(script, "tensor_plan", ours.tensor_plan)(layout)
    ours.check_blocks(SimpleNamespace(blocks=blocks), mesh.size(), plan)
    for block in blocks:
        parallelize_module(block, mesh, plan, src_data_rank=None)  # there is nothing to send
    if sequence:
        whole = {"input_layouts": Replicate(), "desired_input_layouts": layout, "use_local_output": True}
        parallelize_module(blocks[0], mesh, PrepareModuleInput(**whole))
        parts = {"output_layouts": layout, "desired_output_layouts": Replicate()}
        parallelize_module(blocks[-1], mesh, PrepareModuleOutput(**parts))
