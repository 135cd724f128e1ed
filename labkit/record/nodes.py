"""A run on several nodes: its nodes, and which of them send heartbeats.

A node is one torchrun agent with its ranks, usually one per host. Only its supervisor writes `nodes/<k>/`.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from labkit.files import read_json
from labkit.host import Identity, boot_id
from labkit.record.folder import MOST_RANKS, RunFolder
from labkit.record.measured.metrics_file import finite

__all__ = [
    "Nodes",
    "beat",
    "heard_nodes",
    "is_heard",
    "is_on_this_host",
    "last_beat",
    "record_starting_supervisor",
    "supervisor_is_starting",
    "supervisor_of",
]

# Generous, because a reader on another machine compares clocks, and a shared file system shows changes late.
LOST_SECONDS = 60.0
BEAT_BYTES = 512  # a fixed size, because it is written in place


@dataclass(frozen=True)
class Nodes:
    """`hosts` are the names from the launch; None if a scheduler chooses them."""

    count: int
    nproc_per_node: int
    hosts: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.count * self.nproc_per_node

    @classmethod
    def read(cls, manifest: Any) -> Nodes | None:
        """The nodes in run.json; None for a run on one machine."""
        value = manifest.get("nodes") if isinstance(manifest, dict) else None
        if not isinstance(value, dict):
            return None
        count, ranks, hosts = value.get("count"), value.get("nproc_per_node"), value.get("hosts")
        if not _is_count(count) or not _is_count(ranks):
            return None
        if not isinstance(hosts, list) or len(hosts) != count or not all(isinstance(h, str) for h in hosts):
            hosts = None
        return cls(count, ranks, tuple(hosts) if hosts else None)

    def as_dict(self) -> dict[str, Any]:
        hosts = list(self.hosts) if self.hosts else None
        return {"count": self.count, "nproc_per_node": self.nproc_per_node, "hosts": hosts}

    def of_rank(self, rank: int) -> int:
        """The node that a global rank is on."""
        return rank // self.nproc_per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.nproc_per_node, (node + 1) * self.nproc_per_node)

    def sharing(self, node: int) -> int:
        """How many nodes are on this node's host, including itself."""
        return self.hosts.count(self.hosts[node]) if self.hosts else 1

    def name(self, node: int) -> str | None:
        """A node's name before its first heartbeat; nodes on the same host are numbered."""
        if self.hosts is None:
            return None
        host = self.hosts[node]
        return host if self.sharing(node) == 1 else f"{host}-{self.hosts[: node + 1].count(host) - 1}"

    def shown(self, node: int, folder: RunFolder) -> str:
        """Its name in messages. `folder` is the attempt's."""
        newest = last_beat(folder.node(node))
        return str((newest or {}).get("host") or self.name(node) or f"node {node}")


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


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MOST_RANKS


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
    nodes, attempt = Nodes.read(folder.manifest_content), folder.latest
    if nodes is None:
        return []
    each = [(node, attempt.node(node)) for node in range(nodes.count)]
    return [nodes.shown(node, attempt) for node, own in each if is_heard(own) and not read_json(own.outcome)]
