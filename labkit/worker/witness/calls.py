"""Writes down every collective that Python calls, before it is called, so that it is known even of a rank that its
collective kills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.ring import DTYPES, OPERATIONS
from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around

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


class Calls(Area):
    """The collectives that Python calls, each in the ring, and each group, once, in a line."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._groups: dict[str, tuple[int, Sequence[Any]]] = {}  # by name: its number, and devices of its backends
        self._tensors = (self._torch.Tensor, self._torch.nn.Parameter)
        self._functions = self._torch._C._len_torch_function_stack
        self._dtypes = {getattr(self._torch, name, None): place for place, name in enumerate(DTYPES) if name}

    def hook(self) -> None:
        if self._torch.distributed.is_available():
            group = self._torch.distributed.ProcessGroup
            for name, (operation, place) in METHODS.items():
                if hasattr(group, name):
                    self._observe(group, name, OPERATIONS.index(operation), place)

    def _observe(self, owner: Any, name: str, operation: int, place: int | None) -> None:
        def observe(group: Any, *arguments: Any, **_: Any) -> None:
            name = group.group_name
            number, devices = self._groups.get(name) or self._declare(group, name)
            tensor: Any = arguments[place] if place is not None else None
            while type(tensor) in (list, tuple):
                tensor = tensor[0] if tensor else None
            elements = dtype = 0
            if type(tensor) in self._tensors and not self._functions():  # modes of the script see nothing
                elements, dtype = tensor.numel(), self._dtypes.get(tensor.dtype, 0)
            witness, called = self._witness, self._called(group, devices)
            witness.ring.before_call(number, operation, called + 1, elements, dtype, witness.passes, witness.line())

        call_around(owner, name, observe, self._witness.recorder)

    def _declare(self, group: Any, name: str) -> tuple[int, Sequence[Any]]:
        """The number of a group that has not been seen before, and one device of each of its backends."""
        devices = {group._get_backend(device).name(): device for device in group._device_types}
        known = self._groups[name] = len(self._groups), [*devices.values()]
        ranks = self._torch.distributed.get_process_group_ranks(group)
        self._witness.write("group", n=known[0], name=name, called=group.group_desc, ranks=ranks)
        return known

    def _called(self, group: Any, devices: Sequence[Any]) -> int:
        """How many collectives the backends of a group have called. Raises if one does not count them."""
        if len(devices) == 1:
            called = group._get_sequence_number_for_group()
        else:
            called = sum(group._get_backend(device)._get_sequence_number_for_group() for device in devices)
        return int(called) - self._witness.messages(group)
