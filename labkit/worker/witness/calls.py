"""Writes down every collective that Python calls, before it is called, so that it is known even of a rank that its
collective kills."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.ring import DTYPES, OPERATIONS, UNKNOWN
from labkit.worker.frames import invisible
from labkit.worker.witness.area import Area, Observed

# The methods of a process group, as the versions of torch name them: the operation, and which argument has equally many
# elements on all ranks, if one has.
METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "alltoall": ("all_to_all", None),
    "alltoall_base": ("all_to_all_single", None),
    "all_to_all_single": ("all_to_all_single", None),
    "gather": ("gather", None),
    "scatter": ("scatter", None),
    "barrier": ("barrier", None),
}
UNEVEN = {OPERATIONS.index("all_gather"), OPERATIONS.index("reduce_scatter")}


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A group, its number in the ring, and a device of each of its backends if it has several."""

    number: int
    group: Callable[[], Any]
    devices: tuple[Any, ...]
    is_gloo: bool


class Calls(Area):
    """The collectives that Python calls, each in the ring, and each group, once, in a line."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._tensors = (self._torch.Tensor, self._torch.nn.Parameter)
        self._functions = self._torch._C._len_torch_function_stack
        self._groups: dict[str, KnownGroup] = {}  # by name, which a later group may have again
        self._made = 0
        self._dtypes = {getattr(self._torch, name, None): place for place, name in enumerate(DTYPES) if name}

    def hook(self) -> None:
        if self._torch.distributed.is_available():
            group = self._torch.distributed.ProcessGroup
            for name, (operation, place) in METHODS.items():
                if hasattr(group, name):
                    setattr(group, name, self._observed(getattr(group, name), OPERATIONS.index(operation), place))

    def _observed(self, method: Any, operation: int, place: int | None) -> Any:
        recorder, before_call = self._witness.recorder, self._before_call

        @functools.wraps(method)
        @invisible
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            # The name `self` matters: by it pybind knows that an override of this method has called it by super().
            try:
                before_call(self, operation, args[place] if place is not None and place < len(args) else None)
            except Exception as error:
                recorder.drop(error)
            return method(self, *args, **kwargs)

        return call

    def _before_call(self, group: Any, operation: int, tensor: Any) -> None:
        known = self._groups.get(name := group.group_name)
        if known is None or known.group() is not group:
            known = self._groups[name] = self._declare(group, name)
        while type(tensor) in (list, tuple):
            tensor = tensor[0] if tensor else None
        elements, dtype = UNKNOWN, 0
        is_even = known.is_gloo or operation not in UNEVEN  # NCCL allows other sizes
        if is_even and type(tensor) in self._tensors and not self._functions():  # modes of the script see nothing
            elements, dtype = tensor.numel(), self._dtypes.get(tensor.dtype, 0)
        witness = self._witness
        if known.devices:
            called = sum(group._get_backend(device)._get_sequence_number_for_group() for device in known.devices)
        else:
            called = group._get_sequence_number_for_group()
        number = called - witness.messages(group) + 1
        witness.ring.before_call(known.number, operation, number, elements, dtype, witness.passes, witness.line())

    def _declare(self, group: Any, name: str) -> KnownGroup:
        """Write a group that has not been seen before. Raises if a backend does not count its calls."""
        backends = {group._get_backend(device).name(): device for device in group._device_types}
        is_one = len(backends) == 1 and group.name() in backends  # and counts for the group
        devices = () if is_one else tuple(backends.values())
        known = KnownGroup(self._made, weakref.ref(group), devices, [*backends] == ["gloo"])
        self._made += 1
        distributed = self._torch.distributed
        is_default, ranks = group is distributed.group.WORLD, distributed.get_process_group_ranks(group)
        self._witness.write("group", n=known.number, name=name, default=is_default, ranks=ranks)
        return known
