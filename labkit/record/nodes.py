"""A run on several nodes: its nodes, and which of them send heartbeats.

A node is one torchrun agent with its ranks, usually one per host. Only its supervisor writes `nodes/<k>/`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

from labkit.files import finite, read_json
from labkit.host import Identity, boot_id
from labkit.record.folder import RunFolder
from labkit.record.manifest import Nodes

__all__ = [
    "beat",
    "heard_nodes",
    "is_heard",
    "is_on_this_host",
    "last_beat",
    "name_of",
    "record_starting_supervisor",
    "supervisor_is_starting",
    "supervisor_of",
]

# Generous, because a reader on another machine compares clocks, and a shared file system shows changes late.
LOST_SECONDS = 60.0
BEAT_BYTES = 512  # a fixed size, because it is written in place


def name_of(nodes: Nodes, node: int, attempt: RunFolder) -> str:
    """The name of a node in messages."""
    newest = last_beat(attempt.node(node))
    return str((newest or {}).get("host") or nodes.name(node) or f"node {node}")


def beat(node: RunFolder, name: str, address: str | None = None, **news: bool) -> None:
    """Write a node's heartbeat, with its address towards the first node, and that node's `news` for the others. Raises
    OSError.

    It is written in place and closed, because NFS sends a file when it is closed and revalidates it when it is opened.
    """
    text = json.dumps({"time": time.time(), "host": name, "address": address, **news}).ljust(BEAT_BYTES - 1) + "\n"
    file = os.open(node.node_heartbeat, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(file, text.encode(), 0)
    finally:
        os.close(file)


def last_beat(node: RunFolder) -> dict[str, Any] | None:
    """`time` (seconds since the epoch, on that node's clock), `host` and `address`; None before a node has started."""
    newest = read_json(node.node_heartbeat)
    return newest if isinstance(newest, dict) and finite(newest.get("time")) is not None else None


def supervisor_of(node: RunFolder) -> Identity | None:
    """The supervisor of a node, or of a run on one machine, by `agent.json`."""
    agent = read_json(node.agent)
    return Identity.read(agent.get("supervisor")) if isinstance(agent, dict) else None


def record_starting_supervisor(folder: RunFolder, pid: int) -> None:
    """Record the identity of a run's new supervisor, which may take a minute to start on a busy machine. The supervisor
    replaces this file with its own."""
    exited = Identity(pid, 0.0, boot_id(), socket.gethostname())
    identity = Identity.of(pid) or exited
    with suppress(OSError), folder.agent.open("x", encoding="ascii") as file:
        json.dump({"supervisor": identity.as_dict(), "is_starting": True}, file)


def supervisor_is_starting(folder: RunFolder) -> bool:
    """Whether a run's supervisor has a process but has not written its own `agent.json`."""
    agent = read_json(folder.agent)
    return isinstance(agent, dict) and "is_starting" in agent


def is_on_this_host(node: RunFolder) -> bool:
    """Whether a node's processes run on this host."""
    identity = supervisor_of(node)
    return identity is not None and identity.boot == boot_id()


def is_heard(node: RunFolder) -> bool:
    """Whether a node that has started is still alive, as far as this host can tell."""
    identity = supervisor_of(node)
    if identity is not None and identity.boot == boot_id():
        return identity.is_alive()
    newest = last_beat(node)
    return newest is not None and time.time() - newest["time"] < LOST_SECONDS


def heard_nodes(folder: RunFolder) -> list[str]:
    """The names of a run's nodes that have not ended and are still alive."""
    nodes, attempt = folder.glimpsed_manifest().nodes, folder.latest
    if nodes is None:
        return []
    each = [(node, attempt.node(node)) for node in range(nodes.count)]
    return [name_of(nodes, node, attempt) for node, own in each if is_heard(own) and not read_json(own.outcome)]
