"""A script on a stage set: its own code, tensors without data, and as many ranks as it likes, of which one is played.

Runs in a process of its own (see child.py), which it changes for good.
"""

from __future__ import annotations

import gc
import linecache
import sys
import types
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._flat_param
import torch.distributed.fsdp._fully_shard._fsdp_param
import torch.distributed.optim
import torch.distributed.pipelining
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import default_collate

from labkit.planner.child import DEPENDS_ON_DATA, SCRIPT_FILE
from labkit.planner.stand_ins import KnownStage, Replicated, Shards, SharedOptimizer

__all__ = ["Scene"]


class Scene:
    """The script's names in `script`, its options in `args`; `fake` is the mode in which new tensors have no data."""

    def __init__(self, text: str, argv: Sequence[str], path: str = ""):
        _set_the_stage()
        gc.freeze()  # a big model on fake tensors is millions of Python objects; torch's own need not be looked at
        self.script = _loaded(text, path)
        sys.argv = [SCRIPT_FILE, *argv]
        self.args = self.script.parse_args()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.half = self.script.DTYPES.get(self.args.precision)

    def dtype(self) -> torch.dtype:
        """Of the parameters, and of inputs that are not whole numbers."""
        return torch.float64 if self.args.precision == "fp64" else torch.float32

    def autocast(self) -> Any:
        return torch.autocast("cpu", self.half) if self.half else nullcontext()

    def join_group(self, ranks: int, rank: int = 0) -> Any:
        """The script's mesh, on a process group in which every collective is over at once and nothing is sent."""
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        return self.script.make_mesh("cpu", self.args)

    def model(self) -> nn.Module:
        """The script's model, before anything is wrapped around it."""
        torch.set_default_dtype(self.dtype())  # tensors without data cannot be converted in place
        try:
            with self.fake:
                return self.script.Model()
        except Exception as error:
            if type(error).__name__ not in DEPENDS_ON_DATA:
                raise
            # It looks at its own weights while it is built.
            return self._without_data(self.script.Model())
        finally:
            torch.set_default_dtype(torch.float32)

    def _without_data(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    tensors[name] = None if tensor is None else self.fake.from_tensor(tensor)
        return model

    def sample(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """x and y of one sample as a batch of one, with its data, and how many there are to train on."""
        train, _ = self.script.load_datasets(self.args.data_dir)
        x, y = default_collate([train[0]])
        return x, y, len(train)

    def batch(self, sample: tuple[torch.Tensor, torch.Tensor, int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As many like the sample, without data."""
        x, y, _ = sample
        with self.fake:
            x_dtype = self.dtype() if x.is_floating_point() else x.dtype
            return torch.zeros((size, *x.shape[1:]), dtype=x_dtype), torch.zeros((size, *y.shape[1:]), dtype=y.dtype)

    def prepare(self, model: nn.Module) -> nn.Module:
        """What main() does to a model before it is parallelized. Not compiled: that memory cannot be foreseen."""
        if self.args.activation_checkpointing:
            self.script.recompute_blocks(model)
        if self.half:
            model.forward = self.autocast()(model.forward)
        return model

    def tell_stages(self, model: nn.Module, x: torch.Tensor) -> None:
        """Stages cannot ask their neighbours for shapes: let them know what goes from block to block."""
        with self.fake, torch.no_grad(), self.autocast():
            between = [x, model.embed(x)]
            for block in model.blocks:
                between.append(block(between[-1]))
            between.append(model.unembed(between[-1]))
        KnownStage.between = [x, *(out.requires_grad_() for out in between[1:])]

    def tell_types(self, model: nn.Module) -> None:
        """Of stages under FSDP, which send 16 bits where autocast alone leaves sums in 32."""
        if self.half and KnownStage.between and any(isinstance(module, FSDPModule) for module in model.modules()):
            x, *between = KnownStage.between
            with self.fake:
                KnownStage.between = [x, *(out.detach().to(self.half).requires_grad_() for out in between)]


def _set_the_stage() -> None:
    """Before the script imports them."""
    torch.nn.parallel.DistributedDataParallel = Replicated  # type: ignore[misc]
    torch.distributed.optim.ZeroRedundancyOptimizer = SharedOptimizer  # type: ignore[misc]
    torch.distributed.pipelining.PipelineStage = KnownStage  # type: ignore[misc]
    torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty = Shards  # type: ignore[assignment]
    # All fake tensors are at address 0, which this takes for freed.
    torch.distributed.fsdp._flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().size() > 0
    # Nothing moves: there are no devices.
    nn.Module.to = lambda module, *args, **kwargs: module  # type: ignore[method-assign]


def _loaded(text: str, path: str) -> Any:
    """The script as a module. It is not `__main__`, so it does not begin to train."""
    module = types.ModuleType("script")
    module.__file__ = path or SCRIPT_FILE
    sys.modules["script"] = module
    sys.path.insert(0, str(Path(path).parent if path else Path.cwd()))  # only now: what torch imports is loaded
    linecache.cache[SCRIPT_FILE] = (len(text), None, text.splitlines(keepends=True), SCRIPT_FILE)
    exec(compile(text, SCRIPT_FILE, "exec", dont_inherit=True), module.__dict__)
    return module
