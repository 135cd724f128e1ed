"""What of a layout stays inside a host, what goes between hosts, and what had better stay inside."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.planner.devices import Device
from labkit.planner.layout import Layout
from labkit.planner.networks import Hosts

__all__ = ["between_hosts"]


def between_hosts(layout: Layout, device: Device) -> Iterator[str]:
    """Sentences; none for one host."""
    if device.nodes < 2:
        return
    hosts, axes = Hosts(device.box, device.network), _axes(layout)
    found: dict[bool, list[str]] = {False: [], True: []}
    for name, (size, stride) in axes.items():
        found[hosts.cross(size, stride, layout.ranks)].append(f"{name} ({size})")
    said = [f"{', '.join(names)} {'go between hosts' if crosses else 'stay inside a host'}"
            for crosses, names in found.items() if names]  # fmt: skip
    if said:
        yield f"Groups of ranks: {'; '.join(said)} ({device.network * 8 / 1e9:,.0f} Gbit/s a host)."
    if "tensor" in axes and hosts.cross(*axes["tensor"], layout.ranks):
        yield (
            "Tensor ranks talk in every layer: keep them inside a host, with hybrid and a tensor axis that divides "
            f"its {device.box} ranks."
        )
    if layout.strategy == "fsdp" and "copies" not in axes and device.box > 1:
        yield (
            f"replicas={device.nodes} keeps the gathers inside a host: between hosts go only gradients, of which each "
            f"rank has a share; a rank then holds 1/{device.box} of the states, not 1/{layout.ranks}."
        )


def _axes(layout: Layout) -> dict[str, tuple[int, int]]:
    """(ranks of a group, how far apart they are) by the mesh's axis, those that are in use."""
    copies = layout.data // layout.shards if layout.strategy == "fsdp" else 1
    axes = {
        "tensor": (layout.tensor, 1),
        "shards" if layout.shards > 1 else "data": (layout.data // copies, layout.tensor),
        "copies": (copies, layout.data // copies * layout.tensor),
        "pipeline": (layout.pipeline, layout.data * layout.tensor),
    }
    return {name: axis for name, axis in axes.items() if axis[0] > 1}
