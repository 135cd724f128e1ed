"""Sends JSON and descriptors over a Unix socket, to a process that becomes what the message asks for."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["receive", "send"]

MOST_DESCRIPTORS = 8


def send(control: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    text = json.dumps(message).encode()
    socket.send_fds(control, [len(text).to_bytes(8, "big")], descriptors)
    control.sendall(text)


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; no message when the other end was closed."""
    try:
        size, descriptors, *_ = socket.recv_fds(control, 8, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # it was closed before what this end had sent was read
        size, descriptors = b"", []
    if not size:
        return None, descriptors
    return json.loads(control.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)), descriptors
