"""The content of `run.json`: what was launched. It is written once, before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from typing import Any, ClassVar, TypeGuard

from labkit.files import Json, finite

MOST_RANKS = 1_000_000
FOLDED_RANKS = 16  # with more, the ranks of each node are folded


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run on several. `hosts` are the names from the launch; None if a scheduler chooses them."""

    count: int
    nproc_per_node: int
    hosts: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.count * self.nproc_per_node

    @classmethod
    def decode(cls, value: Any) -> Nodes | None:
        """The nodes in run.json; None for a run on one machine."""
        if not isinstance(value, dict):
            return None
        count, ranks, hosts = value.get("count"), value.get("nproc_per_node"), value.get("hosts")
        if not _is_count(count) or not _is_count(ranks):
            return None
        if not isinstance(hosts, list) or len(hosts) != count or not all(isinstance(h, str) for h in hosts):
            hosts = None
        return cls(count, ranks, tuple(hosts) if hosts else None)

    def as_dict(self) -> dict[str, Json]:
        return {**asdict(self)}

    @property
    def are_folded(self) -> bool:
        """Whether the ranks of such a run are folded by their nodes (see fold.py)."""
        return self.count > 1 and self.world_size > FOLDED_RANKS

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


@dataclass(frozen=True)
class ManifestScript:
    """The script: its digest, and its own file, None for one that labkit composed."""

    sha256: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class SweepPoint:
    """The place of a run in a sweep."""

    id: str
    point: int
    rung: int | None = None


@dataclass(frozen=True)
class ScriptFacts:
    """`wraps` are the strategies and frameworks in the text, such as "ddp", "fsdp2" or "accelerate". The others say
    whether the model is divided among the ranks, activations are checkpointed, and torch's autocast and compiler are
    used."""

    wraps: tuple[str, ...] = ()
    shards: bool | None = None
    checkpoints: bool | None = None
    autocasts: bool | None = None
    compiles: bool | None = None

    @classmethod
    def decode(cls, value: Any) -> ScriptFacts | None:
        """The facts in a run's manifest; None if it has none."""
        if not isinstance(value, dict):
            return None
        known = {f.name: value[f.name] for f in fields(cls) if isinstance(value.get(f.name), bool)}
        return cls(_texts(value.get("wraps")), **known)


@dataclass(frozen=True)
class Manifest:
    """What was launched. `torchrun` is the whole command, of which `program` and `args` are the script's; `gpus` as
    CUDA_VISIBLE_DEVICES names them; `new_processes` says why the ranks are no forks; `cells` are the titles of the
    script's cells with the notebook cells that they came from."""

    name: str = ""
    id: str = ""
    folder: str = ""
    created: str = ""
    world_size: int = 0
    script: ManifestScript = ManifestScript()
    program: tuple[str, ...] = ()
    cells: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Json] = field(default_factory=dict)
    facts: ScriptFacts | None = None
    args: tuple[str, ...] = ()
    cwd: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    git: str | None = None
    torchrun: tuple[str, ...] = ()
    backend: str | None = None
    devices: tuple[str, ...] = ()
    platform: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    env_dropped: tuple[str, ...] = ()
    new_processes: str | None = None
    retries: int = 0
    fewer_ranks: tuple[int, ...] = ()
    watchdog: float | None = None
    gpus: tuple[str, ...] = ()
    nodes: Nodes | None = None
    sweep: SweepPoint | None = None
    Script: ClassVar = ManifestScript

    @classmethod
    def decode(cls, content: Any) -> Manifest:
        """From what a file holds: what is missing or of another type is left out."""
        made = content if isinstance(content, dict) else {}
        script, cells, sweep = _mapping(made.get("script")), _mapping(made.get("cells")), _mapping(made.get("sweep"))
        origins = {title: _text(cell.get("origin")) for title, cell in cells.items() if isinstance(cell, dict)}
        ranks, point, rung = made.get("world_size"), sweep.get("point"), sweep.get("rung")
        return cls(
            name=_text(made.get("name")),
            id=_text(made.get("id")),
            folder=_text(made.get("folder")),
            created=_text(made.get("created")),
            world_size=ranks if _is_count(ranks) else 0,
            script=ManifestScript(_text(script.get("sha256")) or None, _text(script.get("path")) or None),
            program=_texts(made.get("program")),
            cells=origins,
            parameters=_mapping(made.get("parameters")),
            facts=ScriptFacts.decode(made.get("facts")),
            args=_texts(made.get("args")),
            cwd=_text(made.get("cwd")),
            versions=_mapping_of_texts(made.get("versions")),
            git=_text(made.get("git")) or None,
            torchrun=_texts(made.get("torchrun")),
            backend=_text(made.get("backend")) or None,
            devices=_texts(made.get("devices")),
            platform=_text(made.get("platform")),
            env=_mapping_of_texts(made.get("env")),
            env_dropped=_texts(made.get("env_dropped")),
            new_processes=_text(made.get("new_processes")) or None,
            retries=int(finite(made.get("retries")) or 0),
            fewer_ranks=tuple(n for n in _items(made.get("fewer_ranks")) if _is_count(n)),
            watchdog=finite(made.get("watchdog")),
            gpus=_texts(made.get("gpus")),
            nodes=Nodes.decode(made.get("nodes")),
            sweep=SweepPoint(_text(sweep.get("id")), point, rung if type(rung) is int else None)
            if type(point) is int
            else None,
        )

    def to_json(self) -> dict[str, Json]:
        """The content of run.json."""
        content = {"format": 1, **asdict(self), "cells": {title: {"origin": o} for title, o in self.cells.items()}}
        return {name: value for name, value in content.items() if value is not None or name not in ("nodes", "sweep")}

    @property
    def launched(self) -> float | None:
        """When the run was launched, in seconds since the epoch; None if the file does not say."""
        try:
            return datetime.fromisoformat(self.created).timestamp()
        except ValueError:
            return None


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value <= MOST_RANKS


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(item for item in _items(value) if isinstance(item, str))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _mapping_of_texts(value: Any) -> dict[str, str]:
    return {name: item for name, item in _mapping(value).items() if isinstance(item, str)}
