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
from typing import Any

from labkit.dataclass_json import from_json
from labkit.files import read_json
from labkit.host import Identity, boot_id
from labkit.record.folder import RunFolder
from labkit.record.manifest import Nodes

# Generous, because a reader on another machine compares clocks, and a shared file system shows changes late.
LOST_SECONDS = 60.0
BEAT_BYTES = 512  # a fixed size, because it is written in place


@dataclass(frozen=True)
class NodeBeat:
    """A node's heartbeat: the `time` in seconds since the epoch, on that node's clock, its name and its address towards
    the first node, and its `news` for the others."""

    time: float
    host: str = ""
    address: str | None = None
    news: frozenset[str] = frozenset()

    @classmethod
    def decode(cls, content: Any) -> NodeBeat | None:
        """The heartbeat in a file; None if it has no time."""
        if not isinstance(content, dict):
            return None
        return from_json(cls, {**content, "news": [name for name, value in content.items() if value is True]})


class Node:
    """What the supervisor of a node writes into its folder, or that of a run on one machine into the run's."""

    def __init__(self, home: RunFolder):
        self._home = home

    def beat(self, name: str, address: str | None = None, **news: bool) -> None:
        """Write a heartbeat. Raises OSError.

        It is written in place and closed, because NFS sends a file when it is closed and revalidates it when it is
        opened.
        """
        text = json.dumps({"time": time.time(), "host": name, "address": address, **news}).ljust(BEAT_BYTES - 1) + "\n"
        file = os.open(self._home.node_heartbeat, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, text.encode(), 0)
        finally:
            os.close(file)

    def last_beat(self) -> NodeBeat | None:
        """The newest heartbeat; None before the node has started."""
        return NodeBeat.decode(read_json(self._home.node_heartbeat))

    def supervisor(self) -> Identity | None:
        """Its supervisor, by `agent.json`."""
        agent = read_json(self._home.agent)
        return Identity.read(agent.get("supervisor")) if isinstance(agent, dict) else None

    def record_starting_supervisor(self, pid: int) -> None:
        """Record the identity of a new supervisor, which may take a minute to start on a busy machine. The supervisor
        replaces this file with its own."""
        exited = Identity(pid, 0.0, boot_id(), socket.gethostname())
        identity = Identity.of(pid) or exited
        with suppress(OSError), self._home.agent.open("x", encoding="ascii") as file:
            json.dump({"supervisor": identity.as_dict(), "is_starting": True}, file)

    def supervisor_is_starting(self) -> bool:
        """Whether the supervisor has a process but has not written its own `agent.json`."""
        agent = read_json(self._home.agent)
        return isinstance(agent, dict) and "is_starting" in agent

    def supervisor_is_elsewhere(self) -> bool:
        """Whether it belongs to another machine, so that the state can be read here but not checked."""
        supervisor = self.supervisor()
        return supervisor is not None and supervisor.is_elsewhere

    def is_on_this_host(self) -> bool:
        """Whether its processes run on this host."""
        supervisor = self.supervisor()
        return supervisor is not None and supervisor.boot == boot_id()

    def is_heard(self) -> bool:
        """Whether a node that has started is still alive, as far as this host can tell."""
        supervisor = self.supervisor()
        if supervisor is not None and supervisor.boot == boot_id():
            return supervisor.is_alive()
        newest = self.last_beat()
        return newest is not None and time.time() - newest.time < LOST_SECONDS

    @classmethod
    def name(cls, nodes: Nodes, node: int, attempt: RunFolder) -> str:
        """The name of a node in messages."""
        newest = cls(attempt.node(node)).last_beat()
        return (newest.host if newest else "") or nodes.name(node) or f"node {node}"

    @classmethod
    def heard(cls, folder: RunFolder) -> list[str]:
        """The names of a run's nodes that have not ended and are still alive."""
        nodes, attempt = folder.glimpsed_manifest().nodes, folder.latest
        if nodes is None:
            return []
        each = [(node, attempt.node(node)) for node in range(nodes.count)]
        return [
            cls.name(nodes, node, attempt) for node, own in each if cls(own).is_heard() and not read_json(own.outcome)
        ]
