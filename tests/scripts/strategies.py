# %% main
# ruff: noqa: F821 (the other cells are put before this one)
"""Stands in for the main cell of a script: saves a model that is spread over the ranks in many ways, and loads it.

    strategies.py FOLDER SAVED,SAVED LOADED,LOADED

One line `SAVED -> LOADED` for each pair whose every value came back as it was.
"""

import sys
import warnings
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

FSDP1 = {
    "fsdp1": ShardingStrategy.FULL_SHARD,
    "fsdp1_grad": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp1_none": ShardingStrategy.NO_SHARD,
}


def spread(model, how, rank, ranks):
    """The model as one rank of a strategy holds it."""
    mesh = init_device_mesh("cpu", (ranks,))
    if how == "ddp":
        return DistributedDataParallel(model)
    if how in FSDP1:
        return FullyShardedDataParallel(
            model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=FSDP1[how]
        )
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("replicate", "shard"))
    tensor_mesh = mesh
    if how == "fsdp_tensor":
        both = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
        mesh, tensor_mesh = both["data"], both["tensor"]
    if how in ("tensor", "fsdp_tensor"):
        for block in model.blocks:
            parallelize_module(block, tensor_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if how in ("fsdp", "hsdp", "fsdp_tensor"):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if how == "stages":  # some of the blocks on each rank; the embeddings on the first, the head on the last
        owners = {f"blocks.{i}": i * ranks // len(model.blocks) for i in range(len(model.blocks))}
        owners |= {"tokens": 0, "positions": 0, "norm": ranks - 1, "head": ranks - 1}
        for name in [name for name, owner in owners.items() if owner != rank]:
            model.set_submodule(name, nn.Identity())
    return model


def trained(how, steps, seed):
    """Its gradients are a function of each parameter alone, and so the same whoever holds it."""
    torch.manual_seed(seed)
    model = spread(Model(width=16, heads=2, layers=4).double(), how, dist.get_rank(), dist.get_world_size())
    kind, options = torch.optim.AdamW, {"lr": 1, "weight_decay": 0.01 + seed / 100}
    zero1 = partial(ZeroRedundancyOptimizer, optimizer_class=kind)
    optimizer = (zero1 if how == "zero1" else kind)(model.parameters(), **options)
    optimizer.param_groups[0]["steps_taken"] = steps  # as some optimizers count theirs
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        for p in model.parameters():
            p.grad = (p * p + p).detach()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_equal(found, expected):
    """Found may lack names, which are then another rank's."""
    for name, value in found.items():
        if isinstance(value, dict):
            assert_equal(value, expected[name])
        else:
            assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, expected[name]), name


def main():
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    folder, saved, loaded = Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3].split(",")

    def checkpoints(name, model, optimizer, full=False):
        options = {"checkpoint_dir": folder / name, "save_every": 0, "deadline_seconds": 0}
        args = SimpleNamespace(full_checkpoints=full, async_save=full, **options)
        device = torch.device("cpu")
        return Checkpoints(model, optimizer, device, args)

    for how in filter(None, saved):
        for full in (False, True):
            kept = checkpoints(f"{how}_full" if full else how, *trained(how, steps=2, seed=0), full)
            kept.save(7)
            kept.finish()
    weights, moments = get_state_dict(*trained("single", steps=2, seed=0))
    for name in sorted(path.name for path in folder.iterdir()):
        for how in loaded:
            model, optimizer = trained(how, steps=1, seed=1)
            restored = checkpoints(name, model, optimizer)
            assert restored.start == 7
            found, found_moments = get_state_dict(model, restored.local)
            assert_equal(found, weights)
            assert_equal(found_moments["state"], moments["state"])
            group = optimizer.param_groups[0]  # the command line's own, and what the optimizer keeps
            assert (group["lr"], group["weight_decay"], group["steps_taken"]) == (0.01, 0.02, 2)
            held = restored.gather([*found])
            assert {key for part in held for key in part} == weights.keys()
            print(f"{name} -> {how}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
