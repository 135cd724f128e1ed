"""The content of `run.json`: what was launched. It is written once, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Annotated, Any, ClassVar

from labkit.dataclass_json import from_json
from labkit.files import Json
from labkit.metric_names import Better

Count = Annotated[int, range(1, 1_000_001)]  # of ranks or nodes
BEST_IS: dict[str, Better] = {"lowest": "lower", "highest": "higher"}  # an option of the extra `validate`
OPTIONAL = ("nodes", "stop_if", "sweep")  # left out of run.json if there is none
FOLDED_RANKS = 16  # with more, the ranks of each node are folded


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run on several. `hosts` are the names from the launch; None if a scheduler chooses them."""

    count: Count
    nproc_per_node: Count
    hosts: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.count * self.nproc_per_node

    @classmethod
    def decode(cls, value: Any) -> Nodes | None:
        """The nodes in run.json; None for a run on one machine."""
        nodes = from_json(cls, value)
        return replace(nodes, hosts=None) if nodes and len(nodes.hosts or ()) != nodes.count else nodes

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
    """The place of a run in a sweep, and what the sweep says of its metric."""

    id: str
    point: int
    rung: int | None = None
    better: Mapping[str, Better] = field(default_factory=dict)


@dataclass(frozen=True)
class ScriptFacts:
    """`wraps` are the strategies and frameworks in the text, such as "ddp", "fsdp2" or "accelerate". The others say
    whether the model is divided among the ranks, activations are checkpointed, and torch's autocast and compiler are
    used, and which values of its metrics it calls better."""

    wraps: tuple[str, ...] = ()
    shards: bool | None = None
    checkpoints: bool | None = None
    autocasts: bool | None = None
    compiles: bool | None = None
    better: Mapping[str, Better] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """What was launched. `torchrun` is the whole command, of which `program` and `args` are the script's; `gpus` as
    CUDA_VISIBLE_DEVICES names them; `new_processes` says why the ranks are not forks; `cells` are the titles of the
    script's cells with the notebook cells that they came from."""

    name: str = ""
    id: str = ""
    folder: str = ""
    created: str = ""
    world_size: Count = 0
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
    fewer_ranks: tuple[Count, ...] = ()
    watchdog: float | None = None
    stop_if: str | None = None
    gpus: tuple[str, ...] = ()
    nodes: Nodes | None = None
    sweep: SweepPoint | None = None
    Script: ClassVar = ManifestScript

    @classmethod
    def decode(cls, content: Any) -> Manifest:
        """The manifest in the content of a file; what is missing or of another type is left out."""
        made = content if isinstance(content, dict) else {}
        cells = made.get("cells")
        given = cells.items() if isinstance(cells, dict) else ()
        origins = {title: cell.get("origin", "") for title, cell in given if isinstance(cell, dict)}
        return from_json(cls, {**made, "cells": origins}) or cls()

    def to_json(self) -> dict[str, Json]:
        """The content of run.json."""
        content = {"format": 1, **asdict(self), "cells": {title: {"origin": o} for title, o in self.cells.items()}}
        return {name: value for name, value in content.items() if value is not None or name not in OPTIONAL}

    @property
    def directions(self) -> dict[str, Better]:
        """Whether lower or higher values of a metric are better, as the sweep, the options of a script of labkit's, or
        the text of the script say."""
        chosen = BEST_IS.get(str(self.parameters.get("best_is"))) if self.script.path is None else None
        option: dict[str, Better] = {str(self.parameters.get("best", "loss")): chosen} if chosen else {}
        return {**(self.facts.better if self.facts else {}), **option, **(self.sweep.better if self.sweep else {})}

    @property
    def launched(self) -> float | None:
        """When the run was launched, in seconds since the epoch; None if the file does not say."""
        try:
            return datetime.fromisoformat(self.created).timestamp()
        except ValueError:
            return None
