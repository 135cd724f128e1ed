"""Provides stand-ins for parts of torch that cannot run on fake tensors because they are C++ or communicate: DDP's
reducer and the pipeline's exchange. Each allocates the same memory as the original at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._flat_param
import torch.distributed.fsdp._fully_shard._fsdp_param
import torch.distributed.optim
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from labkit.text import listed

INT = torch.int64


def replace(owner: object, **replacements: object) -> None:
    """Replace attributes of torch's until the process ends."""
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)


def replace_parallel() -> None:
    """Let scripts that import from torch from now on get the stand-ins for its data parallelism."""
    replace(torch.nn.parallel.distributed, DistributedDataParallel=Replicated)
    replace(torch.nn.parallel, DistributedDataParallel=Replicated)
    replace(torch.distributed.optim, ZeroRedundancyOptimizer=SharedOptimizer)
    replace(torch.distributed.fsdp._fully_shard._fsdp_param, _chunk_with_empty=Shards)
    # All fake tensors are at address 0, which torch's own function takes to be freed.
    replace(torch.distributed.fsdp._flat_param, _data_ptr_allocated=lambda tensor: tensor.untyped_storage().size() > 0)


class Replicated(nn.Module):
    """DistributedDataParallel: buckets for all gradients, into which each gradient is copied when it is ready. It holds
    the sum of a sparse one, for which the rows of all ranks are taken to differ. Frameworks read and set its public
    attributes."""

    def __init__(
        self,
        module: nn.Module,
        *_: Any,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        **__: Any,
    ):
        super().__init__()
        self.module = module
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.require_backward_grad_sync = True
        self.reducer = SimpleNamespace(prepare_for_backward=lambda _: None, _set_forward_pass_work_handle=None)
        self.device_ids = None
        trained: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._reduced: set[torch.Tensor] = set()  # whose gradients were reduced since the last forward
        embeddings = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        sparse = {m.weight for m in embeddings}
        self._buckets = {p: torch.empty_like(p.detach()) for p in trained if p not in sparse}
        self._views = gradient_as_bucket_view
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: torch.Tensor) -> None:
        if self.require_backward_grad_sync:
            self._reduced.add(parameter)
        if not self.require_backward_grad_sync or parameter.grad is None:
            return
        if parameter.grad.is_sparse:
            parts, ranks = (parameter.grad._indices(), parameter.grad._values()), dist.get_world_size()
            indices, values = torch.cat([parts[0]] * ranks, 1), torch.cat([parts[1]] * ranks)
            self._buckets[parameter] = parameter.grad = torch.sparse_coo_tensor(
                indices, values, parameter.shape, check_invariants=False
            )
        elif parameter not in self._buckets:
            raise SystemExit(
                "DDP would stop in backward: the weight of a sparse embedding also gets a dense gradient; omit "
                "sparse=True, or do not share the weight"
            )
        else:
            self._buckets[parameter].copy_(parameter.grad)
            dist.all_reduce(self._buckets[parameter])
            if self._views:
                parameter.grad = self._buckets[parameter]

    def replaced(self) -> list[torch.Tensor]:
        """The buckets of the first step, which NCCL may hold until the second's backward: docs/evidence/memory.md."""
        rebuilds = self.static_graph or not self.find_unused_parameters
        return [torch.empty_like(bucket) for bucket in self._buckets.values()] if rebuilds else []

    def register_comm_hook(self, state: object, hook: object) -> None:
        raise NotImplementedError("what a communication hook of DDP holds cannot be rehearsed")

    def check(self) -> None:
        """Call it after backward: DDP's reducer waits for each gradient, and in the next step raises an error."""
        unused = [name for name, p in self.module.named_parameters() if p.requires_grad and p not in self._reduced]
        if self._reduced and unused and not (self.find_unused_parameters or self.static_graph):
            raise SystemExit(
                f"DDP would stop in the second step: the loss does not depend on {listed(unused)}. Use or freeze what "
                "is unused, or set find_unused_parameters=True"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        yield
        self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.check()
            self._reduced.clear()
        return self.module(*args, **kwargs)


class SharedOptimizer(torch.optim.Optimizer):
    """ZeroRedundancyOptimizer: each rank updates its own parameters; the largest go first, to the rank with least."""

    def __init__(
        self,
        parameters: Any,
        optimizer_class: Any,
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ):
        super().__init__(parameters, defaults)
        if len(types := {str(p.dtype) for group in self.param_groups for p in group["params"]}) > 1:
            raise SystemExit(
                f"ZeRO-1 needs parameters of one type, and these have {' and '.join(sorted(types))}: use ddp"
            )
        sizes = [0] * dist.get_world_size()
        groups = []
        for group in self.param_groups:
            mine = []
            for parameter in sorted(group["params"], key=torch.numel, reverse=True):
                rank = sizes.index(min(sizes))
                sizes[rank] += parameter.numel()
                if rank == dist.get_rank():
                    mine.append(parameter)
            groups.append({**group, "params": mine or [torch.empty(0)]})
        self.optim = optimizer_class(groups, **defaults)
        for group, own in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(own | {"params": group["params"]})  # schedulers read what the optimizer sets by default

    def step(self, closure: Any = None) -> Any:
        return self.optim.step(closure)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Nothing: what rank `to` would collect is in the host's memory."""


class InHostMemory(torch.autograd.graph.saved_tensors_hooks):
    """save_on_cpu: what is saved is not in the device's memory until backward needs it."""

    def __init__(self, *_: Any, **__: Any):
        def pack(tensor: torch.Tensor) -> Any:
            return tensor.shape, tensor.stride(), tensor.dtype

        super().__init__(pack, lambda packed: torch.empty_strided(packed[0], packed[1], dtype=packed[2]))


class KnownStage(PipelineStage):
    """PipelineStage receives shapes from the previous stage; here they are known: `between[i]` is block i's input."""

    between: list[torch.Tensor] = []

    def __init__(self, submodule: nn.Module, index: int, stages: int, device: Any, **options: Any):
        each = (len(self.between) - 2) // stages
        out = self.between[-1] if index == stages - 1 else self.between[1 + (index + 1) * each]
        into = self.between[0] if index == 0 else self.between[1 + index * each]
        super().__init__(submodule, index, stages, device, input_args=into, output_args=out, **options)

    # In torch 2.13 stages exchange messages on whether all shapes are known.
    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(item=lambda: 1)

    # Since torch 2.15 a stage drops outputs that have been sent, if they are plain tensors, which fake ones are not.
    def _output_slot_is_releasable(self, output: Any) -> tuple[bool, str]:
        return not self.is_last and isinstance(output, FakeTensor), ""


def replace_pipelines() -> None:
    """Let schedules run on tensors without data, with stages whose shapes are known."""
    replace(torch.distributed.pipelining, PipelineStage=KnownStage)
    _keep_numbers()
    _hold_sends()


def _keep_numbers() -> None:
    """Let targets which are micro-batch numbers, made by arange, keep their values: the loss needs them, and tensors
    without data have no values."""
    compute: Any = schedules._PipelineSchedule._maybe_compute_loss

    def known(self: Any, stage: Any, output: Any, targets: Any, *more: Any) -> None:
        numbers = targets and all(isinstance(t, FakeTensor) and t.shape == (1,) and t.dtype == INT for t in targets)
        compute(self, stage, output, [torch.tensor([n]) for n in range(len(targets))] if numbers else targets, *more)

    replace(schedules._PipelineSchedule, _maybe_compute_loss=known)


def _hold_sends() -> None:
    """Hold what is sent until its work is dropped, as gloo and NCCL do: interleaved schedules keep the works of a whole
    step."""
    exchange = schedules._batch_p2p

    def held(operations: Any, *args: Any, **kwargs: Any) -> list[Any]:
        sends = [operation for operation in operations if operation.op is dist.isend]
        works = [SimpleNamespace(tensor=send.tensor, wait=lambda: True) for send in sends]
        return [*exchange(operations, *args, **kwargs), *works]

    replace(schedules, _batch_p2p=held)


def refuse_double_backward() -> None:
    """Let torch.autograd.grad refuse what fully_shard does not survive, wherever the model asks for it."""
    differentiate = torch.autograd.grad

    def grad(*args: Any, create_graph: bool = False, **kwargs: Any) -> Any:
        if create_graph:
            raise SystemExit("fully_shard does not support a backward pass through a gradient: use ddp or zero1")
        return differentiate(*args, **kwargs)

    torch.autograd.grad = grad


def silence() -> AbstractContextManager[Any]:
    """A context in which collectives on fake tensors return immediately, as they do by default since torch 2.13."""
    major, minor = map(int, torch.__version__.split(".")[:2])
    return nullcontext() if (major, minor) >= (2, 13) else _Silence()  # type: ignore[no-untyped-call]


class _Silence(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or not any(isinstance(t, FakeTensor) for t in tree_iter((args, kwargs))):
            return func(*args, **(kwargs or {}))
        work = FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work  # the first argument is the output


class Shards(Sequence[torch.Tensor]):
    """The shards of a parameter under FSDP, made lazily: FSDP makes one per rank but uses two."""

    def __init__(self, tensor: torch.Tensor, ranks: int, dim: int):
        self.tensor, self.ranks, self.dim = tensor, ranks, dim
        self.size = max(1, -(-tensor.shape[dim] // ranks))

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, rank: Any) -> Any:
        start = rank * self.size
        length = min(self.size, self.tensor.shape[self.dim] - start)
        return self.tensor.narrow(self.dim, start, length) if length > 0 else self.tensor.new_empty(0)
