"""Finds the network interface that leads to another host, for gloo and NCCL where host names are wrong.

Linux installers write `127.0.1.1 <own name>` into /etc/hosts. gloo, which looks up its own name, then listens on the
loopback and refuses connections from other hosts.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from labkit.errors import LaunchError

ANY_PORT = 9  # nothing is sent: connecting a datagram socket only looks up the route


def resolved(host: str) -> str:
    """The address that a host name or address resolves to on this host. Raises LaunchError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(f"{socket.gethostname()} cannot resolve the host {host!r}: {error.strerror}") from None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def own_address_towards(address: str) -> str:
    """The source address of packets to `address`. Raises LaunchError when there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
        except OSError as error:
            raise LaunchError(f"{socket.gethostname()} has no route to {address}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def interface_of(own: str) -> str:
    """The name of the interface that has this address of the host. Raises LaunchError."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == own for address in addresses):
            return name
    raise LaunchError(f"no network interface on {socket.gethostname()} has the address {own}")


def check_interface(names: str) -> None:
    """Check that the network interfaces that gloo is told to use exist; torch's own message is "ifa != nullptr"."""
    here = psutil.net_if_addrs()
    for name in filter(None, names.split(",")):
        if name not in here:
            raise LaunchError(
                f"GLOO_SOCKET_IFNAME={names!r}, but there is no interface {name}; this host has: {', '.join(here)}. "
                "On a single machine, unset it"
            )
