"""What a training step holds in memory, by category, from each storage that torch allocates and frees.

The same on real tensors and on fake ones, which have no memory: a rehearsed step can be compared with a measured one.
Seen is what goes through torch's dispatcher, on the thread that trains: not what gloo, NCCL or a CUDA kernel takes for
itself.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.record.peak import CATEGORIES, Peak

__all__ = ["Tracker"]

COMMUNICATION, TEMPORARY = CATEGORIES.index("communication"), CATEGORIES.index("temporary")
COLLECTIVES = ("c10d", "_c10d_functional", "fsdp")


class Tracker(TorchDispatchMode):
    """Enter it for one step. What was there before counts if it is marked, or if a collective or FSDP's resizing uses
    it: not the data set. Of tensors on other types of device than `device_type` nothing counts, if one is given.
    `missed` counts what has no storage that could be followed, such as sparse tensors: following never fails a step.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.phase = "forward"
        self.missed = 0
        self._operation: Any = ""
        self._number = 0
        self._numbers: dict[int, int] = {}  # of living storages, by their address
        self._references: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._categories: dict[int, int] = {}
        self._passed_over: set[int] = set()  # storages from before of which nobody has said what they are
        self._before: list[tuple[int, int]] = []  # storage, bytes
        self._events: list[tuple[int, int, str, Any]] = []  # storage, bytes more or less, phase, operation
        self._undo: list[Any] = []

    def mark(self, tensors: Iterable[Any], category: str) -> None:
        """Say what storages are; those not seen before were there from the beginning."""
        wanted = CATEGORIES.index(category)
        for storage in self._storages_in(list(tensors)):
            number = self._number_of(storage, before=True)
            self._categories[number] = min(self._categories[number], wanted)

    def mark_training(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Parameters, gradients and optimizer state as they are now. Once before the step and once in it before
        the gradients go: only then is it known which of what backward allocated were gradients.
        """
        for module in modules:
            attributes = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
            self._mark_parameters([*module.parameters(), *module.buffers(), *attributes])
        for optimizer in optimizers:
            self._mark_parameters([p for group in optimizer.param_groups for p in group["params"]])
            state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer steps its share in .optim
            self.mark((value for values in state.values() for value in values.values()), "optimizer")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """To be called before the optimizer's, and the next after it: what then goes through is of that phase."""
        self.mark_training([], [optimizer])
        self.phase = "optimizer"

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.mark_training([], [optimizer])
        self.phase = "forward"

    def _mark_parameters(self, parameters: list[torch.Tensor]) -> None:
        self.mark(parameters, "parameters")
        self.mark((p.grad for p in parameters if p.is_leaf), "gradients")

    def peak(self) -> Peak:
        """Of all moments; of equal ones the first."""
        held: dict[int, int] = defaultdict(int)
        for number, size in self._before:
            held[self._categories[number]] += size
        total = most = sum(held.values())
        phase, operation, at_peak = "forward", "", dict(held)
        for number, size, when, what in self._events:
            held[self._categories[number]] += size
            total += size
            if total > most:
                most, phase, operation, at_peak = total, when, what, dict(held)
        named = {CATEGORIES[c]: size for c, size in sorted(at_peak.items()) if size}
        return Peak(most, phase, str(operation), named)

    def __enter__(self) -> Tracker:
        resize, backward, grad = torch.UntypedStorage.resize_, torch.autograd.backward, torch.autograd.grad

        def resized(storage: Any, size: int) -> Any:
            number = self._number_of(storage, before=True)
            # FSDP frees what it gathered, and takes it again, by resizing
            self._categories[number] = min(self._categories[number], COMMUNICATION)
            done = resize(storage, size)
            if not self._is_elsewhere(storage):
                self._change(number, storage.nbytes())
            return done

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
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
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
        return tensor

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
                self._count_from_the_beginning(number, storage)
            return number
        self._number = number = self._number + 1
        self._numbers[address] = number
        self._categories[number] = TEMPORARY
        self._references[address] = weakref.ref(storage, lambda _: self._forget(address, number))
        if before and not counts:
            self._passed_over.add(number)
        elif before:
            self._count_from_the_beginning(number, storage)
        elif not self._is_elsewhere(storage):
            self._change(number, storage.nbytes())
        return number

    def _count_from_the_beginning(self, number: int, storage: Any) -> None:
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


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """What operators take and give are tensors, and lists and tuples of them."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [tensor for value in values for tensor in _tensors_in(value)] if isinstance(values, (list, tuple)) else []


def _storages(tensor: torch.Tensor) -> list[Any]:
    """Of what this rank holds of a tensor; of the tensors a wrapper subclass is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in _storages(part)]
    return [tensor.untyped_storage()]
