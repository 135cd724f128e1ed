"""Which network interface leads to another host: what gloo and NCCL must be told where host names are wrong.

Installers write `127.0.1.1 <own name>` into /etc/hosts; gloo, which asks for the address of its own name, then listens
on the loopback, and the other host is refused.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from labkit.errors import LaunchError

__all__ = ["interface_of", "is_loopback", "own_address_towards", "resolved"]

ANY_PORT = 9  # nothing is sent: connecting a datagram socket only asks the kernel for the route


def resolved(host: str) -> str:
    """The address that a name or an address stands for on this host. Raises LaunchError."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(f"{socket.gethostname()} does not know the host {host!r}: {error.strerror}") from None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def own_address_towards(address: str) -> str:
    """The address that packets to `address` leave from. Raises LaunchError when there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, ANY_PORT))
        except OSError as error:
            raise LaunchError(f"{socket.gethostname()} has no route to {address}: {error.strerror}") from None
        return str(probe.getsockname()[0])


def interface_of(own: str) -> str:
    """The name of the interface that has an address of this host's. Raises LaunchError."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] == own for address in addresses):
            return name
    raise LaunchError(f"no network interface of {socket.gethostname()} has the address {own}")
