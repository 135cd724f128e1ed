"""Describes the network between hosts, and which communication uses it.

Ranks are numbered host by host. A ring over n ranks sends wire(n) x bytes (speed/collectives.py) over each edge,
including the few between hosts, so the slowest edge bounds it: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009), section 3. Groups whose ranks are `stride` apart are interleaved:
`stride` of them leave a host at the same time and share its network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from labkit.errors import LaunchError, did_you_mean
from labkit.planner.data_sheets import Device
from labkit.planner.strategies.strategy import Layout

# Fraction of a network's line rate that collectives reach: about 0.9 over InfiniBand, less over sockets. Assumed.
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
    """`each` ranks per host share its `network`, in bytes/s one way."""

    each: int
    network: float

    def cross(self, group: int, stride: int, ranks: int) -> bool:
        """Whether groups of `group` ranks, `stride` apart, span several hosts; `ranks` is the total."""
        span = group * stride
        return ranks > self.each and group > 1 and (span > self.each or self.each % span != 0)

    def share(self, stride: int) -> float:
        """Bytes/s of one group: interleaved groups share the network."""
        return NETWORK_SHARE * self.network / min(stride, self.each)

    def exchanged(self, group: int, stride: int) -> float:
        """Seconds per byte of what a rank of the group has for the whole group: the part for ranks of other hosts. All
        ranks of a host share its network."""
        here = max(1, min(group, self.each // stride))
        return (group - here) / group * min(self.each, group * stride) / (NETWORK_SHARE * self.network)


def bandwidth_of(network: str | float) -> float:
    """Bytes/s, one way, of a host's network: "100GbE", "InfiniBand NDR", "8 x InfiniBand HDR", or bits/s.

    Raises LaunchError for anything else.
    """
    if isinstance(network, str):
        match = re.fullmatch(r"(?:(\d+)\s*[x×*]\s*)?(.+)", network.strip())
        known = {_plain(name): rate for name, rate in PRESETS.items()}
        known |= {name.removeprefix("infiniband"): rate for name, rate in known.items()}
        name = _plain(match[2]) if match else ""
        if match and name in known and int(match[1] or 1):
            return int(match[1] or 1) * known[name] * 1e9 / 8
        raise LaunchError(f"unknown network {network!r}{did_you_mean(name, PRESETS)}")
    if isinstance(network, bool) or not isinstance(network, int | float) or not isfinite(network) or network < 1e6:
        raise LaunchError(f"network must be a name such as '100GbE' or bits per second such as 100e9, got {network!r}")
    return network / 8


def _plain(name: str) -> str:
    """ "InfiniBand-NDR" is "infinibandndr", "100 GbE" is "100gbe"."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def between_hosts(layout: Layout, device: Device) -> Iterator[str]:
    """Sentences about the communication between hosts; none for one host."""
    if device.nodes < 2:
        return
    hosts, axes = Hosts(device.box, device.network), layout.groups
    groups: dict[bool, list[str]] = {False: [], True: []}
    for name, (size, stride) in axes.items():
        groups[hosts.cross(size, stride, layout.ranks)].append(f"{name} ({size})")
    parts = [
        f"{', '.join(names)} {'span hosts' if crosses else 'stay within a host'}"
        for crosses, names in groups.items()
        if names
    ]
    if parts:
        yield f"Process groups: {'; '.join(parts)} ({device.network * 8 / 1e9:,.0f} Gbit/s per host)."
    if "tensor" in axes and hosts.cross(*axes["tensor"], layout.ranks):
        yield (
            "Tensor ranks communicate in every layer: keep them within a host, using hybrid and a tensor axis that "
            f"divides its {device.box} ranks."
        )
    yield from layout.strategy.across_hosts(layout, device)
