"""Makes this process one rank of a planned launch: its environment, its process groups, which send nothing, and a GPU
that only seems to be there.

Runs in a child process, whose torch it patches until the process ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed import device_mesh, distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader

from labkit.planner.model.fake.fake_run import here
from labkit.planner.model.fake.fakes import replace


def be_rank(ranks: int) -> None:
    """Be rank 0 of a torchrun launch with so many ranks on this host."""
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(ranks)),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "WANDB_MODE": "disabled",
    }
    join, make_group = dist.init_process_group, dist.new_group

    def joined(*args: Any, world_size: int = -1, rank: int = -1, **_: Any) -> None:
        many = world_size if world_size > 0 else ranks
        join("fake", rank=max(rank, 0), world_size=many, store=FakeStore())

    def grouped(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return make_group(ranks)

    for module in (dist, distributed_c10d, device_mesh):
        replace(module, init_process_group=joined, new_group=grouped)


def simplify(note: Callable[[str], object]) -> None:
    """Load data in this process, compile nothing, and keep in memory what is saved. Calls `note` with what a plan
    leaves out."""
    iterate = DataLoader._get_iterator

    def load_here(loader: Any) -> Any:
        loader.num_workers = loader.timeout = 0
        return iterate(loader)

    def eager(model: Any = None, **_: Any) -> Any:
        note("compile is not planned: figures are for eager mode; a compiled model often holds less")
        return model if model is not None else lambda function: function

    def spawned(function: Callable[..., Any], args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        note(f"it starts {nprocs} ranks itself, with spawn: the plan is of the first of them")
        function(0, *args)

    saved: dict[str, Any] = {}
    read = torch.load

    def save(value: Any, file: Any, *_: Any, **__: Any) -> None:
        if isinstance(file, str | os.PathLike):
            saved[os.path.abspath(file)] = value  # noqa: PTH100
            Path(file).open("wb").close()

    def load(file: Any, *args: Any, **options: Any) -> Any:
        name = os.path.abspath(file) if isinstance(file, str | os.PathLike) else ""  # noqa: PTH100
        return saved[name] if name in saved else read(file, *args, **options)

    replace(DataLoader, _get_iterator=load_here)
    replace(torch, compile=eager, save=save, load=load)
    replace(nn.Module, compile=lambda module, *_, **__: eager(module) and None)
    replace(torch.multiprocessing, spawn=spawned)


class _Nothing:
    """A stream, an event or a device guard."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = 0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: 0.0 if name == "elapsed_time" else None


def seem_to_have_gpus(name: str, count: int, memory: int, capability: tuple[int, int]) -> None:
    """Make torch.cuda tell of so many GPUs. Tensors stay on the CPU: see OnCpu."""
    properties = SimpleNamespace(
        name=name, total_memory=memory, major=capability[0], minor=capability[1], multi_processor_count=100
    )
    fsdp, mesh = torch.distributed.fsdp.FullyShardedDataParallel, device_mesh.init_device_mesh
    shard = fsdp.__init__

    def sharded(wrapper: Any, *args: Any, **options: Any) -> None:
        shard(wrapper, *args, **{**options, "device_id": torch.device("cpu")})

    def on_mesh(device_type: str, *args: Any, **options: Any) -> Any:
        return mesh(here(device_type), *args, **options)

    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "device_count": count,
        "current_device": 0,
        "get_device_name": name,
        "get_device_capability": capability,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (memory, memory),
        "memory_stats": {},
        "memory_summary": "",
        "utilization": 0,
        "current_stream": _Nothing(),
        "default_stream": _Nothing(),
    }
    for each in ("set_device", "synchronize", "empty_cache", "init", "reset_peak_memory_stats", "ipc_collect"):
        values[each] = None
    for each, value in values.items():
        replace(torch.cuda, **{each: lambda *_, value=value, **__: value})
    replace(torch.cuda, Stream=_Nothing, Event=_Nothing, device=_Nothing, stream=_Nothing)
    replace(fsdp, __init__=sharded)
    for module in (device_mesh, dist):
        replace(module, init_device_mesh=on_mesh)
