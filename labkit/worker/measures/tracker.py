"""Tracks what a training step holds in memory, by category, from each storage that torch allocates and frees.

It works the same on real and on fake tensors, so that a rehearsed step can be compared with a measured one. It sees
only what goes through torch's dispatcher on the training thread, not the internal memory of gloo, NCCL or CUDA kernels.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.record import Peak
from labkit.worker.measures.step_loss import unpacked

COMMUNICATION, TEMPORARY = Peak.CATEGORIES.index("communication"), Peak.CATEGORIES.index("temporary")
COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")


class Tracker(TorchDispatchMode):
    """Enter it for one step. Earlier storages count only if they are marked, or if a collective or FSDP's resizing uses
    them, so that the data set does not count. With `device_type`, only tensors on that type of device count. `missed`
    counts tensors without a storage to trace, such as MKL-DNN's: tracing never fails a step.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.phase = "forward"
        self.missed = 0
        self._operation: Any = ""
        self._number = 0
        self._numbers: dict[int, int] = {}  # of live storages, by address
        self._references: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._categories: dict[int, int] = {}
        self._passed_over: set[int] = set()  # earlier storages that are not marked
        self._before: list[tuple[int, int]] = []  # storage, bytes
        self._events: list[tuple[int, int, str, Any]] = []  # storage, bytes more or less, phase, operation
        self._undo: list[Any] = []

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Set the category of storages; new ones are taken to exist since the start."""
        index = Peak.CATEGORIES.index(category)
        for storage in self._storages_in(list(tensors)):
            number = self._number_of(storage, before=True)
            self._categories[number] = min(self._categories[number], index)

    def mark_training(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Mark parameters, gradients and optimizer state. Call it before the step, and again in the step before the
        gradients are freed: only then is it known which of backward's allocations are gradients.
        """
        for module in modules:
            attributes = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
            scales = [tensor for layer in module.modules() for tensor in _scales_of(layer)]
            self._mark_parameters([*module.parameters(), *module.buffers(), *attributes, *scales])
        for optimizer in optimizers:
            self._mark_parameters([p for group in optimizer.param_groups for p in group["params"]])
            state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer has its shard in .optim
            self.mark((value for values in state.values() for value in values.values()), "optimizer")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call this before the optimizer's step and `after_step` after it: what runs in between is of that phase."""
        self.mark_training([], [optimizer])
        self.phase = "optimizer"

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.mark_training([], [optimizer])
        self.phase = "forward"

    def _mark_parameters(self, parameters: list[torch.Tensor]) -> None:
        self.mark(parameters, "parameters")
        self.mark((p.grad for p in parameters if _is_leaf(p)), "gradients")

    def peak(self, elsewhere: Iterable[Any] = ()) -> Peak:
        """The first moment with the highest total, without the tensors that would be `elsewhere`, in other memory."""
        left_out = {self._number_of(storage, before=True) for storage in self._storages_in(list(elsewhere))}
        held: dict[int, int] = defaultdict(int)
        for number, size in self._before:
            held[self._categories[number]] += size if number not in left_out else 0
        total = most = sum(held.values())
        phase, operation, at_peak = "forward", "", dict(held)
        for number, size, when, what in (event for event in self._events if event[0] not in left_out):
            held[self._categories[number]] += size
            total += size
            if total > most:
                most, phase, operation, at_peak = total, when, what, dict(held)
        named = {Peak.CATEGORIES[c]: size for c, size in sorted(at_peak.items()) if size}
        return Peak(most, phase, str(operation), named)

    def __enter__(self) -> Tracker:
        resize, backward, grad = torch.UntypedStorage.resize_, torch.autograd.backward, torch.autograd.grad

        def resized(storage: Any, size: int) -> Any:
            number = self._number_of(storage, before=True)
            # FSDP frees and reallocates gathered parameters by resizing
            self._categories[number] = min(self._categories[number], COMMUNICATION)
            result = resize(storage, size)
            if not self._is_elsewhere(storage):
                self._change(number, storage.nbytes())
            return result

        def in_backward(differentiate: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                before, self.phase = self.phase, "backward"
                try:
                    return differentiate(*args, **kwargs)
                finally:
                    self.phase = before

            return call

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        torch.autograd.backward, torch.autograd.grad = in_backward(backward), in_backward(grad)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, unpacked)
        hooks.__enter__()
        self._undo = [
            lambda: setattr(torch.UntypedStorage, "resize_", resize),
            lambda: setattr(torch.autograd, "backward", backward),
            lambda: setattr(torch.autograd, "grad", grad),
            lambda: hooks.__exit__(None, None, None),
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for undo in self._undo:
            undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asks a tensor for its device, tens of thousands of times in a rehearsal
            device = getattr(args[0], "fake_device", None)
            return func(*args, **(kwargs or {})) if device is None else device
        self._operation = func
        category = COMMUNICATION if func.namespace in COLLECTIVES else TEMPORARY
        counts = category == COMMUNICATION
        for storage in self._storages_in([*args, *(kwargs or {}).values()]):
            self._number_of(storage, before=True, counts=counts)
        if func.namespace == "fsdp" and "chunk_cat" in func.__name__:  # before FSDP's reduce-scatter
            self.mark(_tensors_in(args), "gradients")
            self.mark(_tensors_in([*kwargs.values()]), "communication")
        out = func(*args, **(kwargs or {}))
        for storage in self._storages_in(out):
            number = self._number_of(storage, before=False, counts=counts)
            self._categories[number] = min(self._categories[number], category)
        return out

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.mark([tensor], "activations")
        return tensor.detach()  # an output that its own operation saved would keep that operation, and itself, alive

    def _storages_in(self, values: Any) -> Iterator[Any]:
        for tensor in _tensors_in(values):
            try:
                yield from _storages(tensor)
            except (NotImplementedError, RuntimeError):
                self.missed += 1

    def _number_of(self, storage: Any, *, before: bool, counts: bool = True) -> int:
        address = storage._cdata
        if address in self._numbers:
            number = self._numbers[address]
            if counts and number in self._passed_over:
                self._passed_over.discard(number)
                self._count_from_start(number, storage)
            return number
        self._number = number = self._number + 1
        self._numbers[address] = number
        self._categories[number] = TEMPORARY
        self._references[address] = weakref.ref(storage, lambda _: self._forget(address, number))
        if before and not counts:
            self._passed_over.add(number)
        elif before:
            self._count_from_start(number, storage)
        elif not self._is_elsewhere(storage):
            self._change(number, storage.nbytes())
        return number

    def _count_from_start(self, number: int, storage: Any) -> None:
        if not self._is_elsewhere(storage):
            self._sizes[number] = storage.nbytes()
            self._before.append((number, storage.nbytes()))

    def _is_elsewhere(self, storage: Any) -> bool:
        return self.device_type is not None and storage.device.type != self.device_type

    def _forget(self, address: int, number: int) -> None:
        self._references.pop(address, None)
        self._numbers.pop(address, None)
        self._change(number, 0)

    def _change(self, number: int, size: int) -> None:
        more = size - self._sizes.get(number, 0)
        if more:
            self._sizes[number] = size
            self._events.append((number, more, self.phase, self._operation))


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view whose base was modified, as FSDP1 leaves behind
        return False


def _scales_of(layer: torch.nn.Module) -> list[torch.Tensor]:
    """What a layer in 4 bits (bitsandbytes) has beside its weight, which are neither parameters nor buffers."""
    state, tensors = vars(layer).get("quant_state"), list[torch.Tensor]()
    while state is not None:
        tensors += [value for value in vars(state).values() if isinstance(value, torch.Tensor)]
        state = vars(state).get("state2")
    return tensors


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, including those in lists and tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors_in(value)] if isinstance(values, (list, tuple)) else []


def _storages(tensor: torch.Tensor) -> list[Any]:
    """The storages of this rank's part of a tensor; for a wrapper subclass, those of its inner tensors."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in _storages(part)]
    if tensor.layout is torch.sparse_coo:
        return [part.untyped_storage() for part in (tensor._indices(), tensor._values())]
    return [tensor.untyped_storage()]
