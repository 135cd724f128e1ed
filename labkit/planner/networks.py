"""The network between the hosts of a training, and what of its talk has to go over it.

Ranks are numbered host by host. A ring over n ranks sends wire(n) x bytes over each of its edges (volume.wire), also
over those few that lead from one host to the next, so the slowest edge bounds it: Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations" (2009), section 3. Groups whose ranks are `stride` apart
lie side by side: as many of them leave a host at the same time, and share its network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite

from labkit.errors import LaunchError
from labkit.planner.devices import Device
from labkit.planner.layout import Layout

__all__ = ["NETWORK_SHARE", "PRESETS", "Hosts", "bandwidth_of", "between_hosts"]

# Of a network's line rate that collectives reach: about 0.9 over InfiniBand and less over sockets. Assumed.
NETWORK_SHARE = 0.8
# Gbit/s of one adapter, one way: IEEE 802.3, and the InfiniBand Trade Association's road map for four lanes
PRESETS = {
    "1GbE": 1,
    "10GbE": 10,
    "25GbE": 25,
    "40GbE": 40,
    "100GbE": 100,
    "200GbE": 200,
    "400GbE": 400,
    "InfiniBand EDR": 100,
    "InfiniBand HDR": 200,
    "InfiniBand NDR": 400,
    "InfiniBand XDR": 800,
}


@dataclass(frozen=True)
class Hosts:
    """`each` ranks on a host, which share its `network`: bytes/s one way."""

    each: int
    network: float

    def cross(self, group: int, stride: int, ranks: int) -> bool:
        """Whether groups of so many ranks, `stride` apart, of `ranks` in all, lie on more than one host."""
        span = group * stride
        return ranks > self.each and group > 1 and (span > self.each or self.each % span != 0)

    def share(self, stride: int) -> float:
        """Bytes/s of one group: those that lie side by side share what the network gives."""
        return NETWORK_SHARE * self.network / min(stride, self.each)


def bandwidth_of(network: str | float) -> float:
    """Bytes/s, one way, of a host's network: "100GbE", "InfiniBand NDR", "8 x InfiniBand HDR", or bits/s.

    Raises LaunchError for what is none of these.
    """
    if isinstance(network, str):
        found = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.+)", network.strip())
        known = {_plain(name): rate for name, rate in PRESETS.items()}
        known |= {name.removeprefix("infiniband"): rate for name, rate in known.items()}
        name = _plain(found[2]) if found else ""
        if name in known and int(found[1] or 1):
            return int(found[1] or 1) * known[name] * 1e9 / 8
        near = get_close_matches(name, [_plain(each) for each in PRESETS], n=1, cutoff=0.0)[0]
        meant = next(each for each in PRESETS if _plain(each) == near)
        raise LaunchError(
            f"no network is known as {network!r}; the nearest is {meant!r}. There are: {', '.join(PRESETS)}"
        )
    if isinstance(network, bool) or not isinstance(network, int | float) or not isfinite(network) or network < 1e6:
        raise LaunchError(f"network must be a name such as '100GbE' or bits per second such as 100e9, got {network!r}")
    return network / 8


def _plain(name: str) -> str:
    """ "InfiniBand-NDR" is "infinibandndr", "100 GbE" is "100gbe"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def between_hosts(layout: Layout, device: Device) -> Iterator[str]:
    """Sentences; none for one host."""
    if device.nodes < 2:
        return
    hosts, axes = Hosts(device.box, device.network), _axes(layout)
    found: dict[bool, list[str]] = {False: [], True: []}
    for name, (size, stride) in axes.items():
        found[hosts.cross(size, stride, layout.ranks)].append(f"{name} ({size})")
    said = [
        f"{', '.join(names)} {'go between hosts' if crosses else 'stay inside a host'}"
        for crosses, names in found.items()
        if names
    ]
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
