"""Run folders as several hosts leave them, without the hosts: for what is drawn of many ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from labkit.record import Nodes, RunFolder
from labkit.record.fold import NodeFold

GIB = 2**30
LAUNCHED = 1767323045.0  # 2026-01-02T03:04:05Z
PHASES = {"input": 0.004, "forward": 0.030, "backward": 0.055, "optimizer": 0.006}  # seconds of an undisturbed step


def many_hosts(
    root: Path,
    hosts: list[str],
    ranks_each: int,
    *,
    steps: int = 300,
    late: Mapping[str | int, tuple[str, float]] | None = None,
    memory_used: Mapping[str, float] | None = None,
    cuda: bool = True,
    folded: bool = False,
) -> RunFolder:
    """A run of synchronous training. `late`: a host, or a rank, whose `(phase, seconds)` are added to every step of the
    second half; all others wait for it in backward, so that steps take equally long everywhere. `memory_used`: GiB of
    256 in use, by host. `folded`: each host is a node, whose supervisor has folded its ranks."""
    late, chance = dict(late or {}), random.Random(0)
    folder = RunFolder(root / "20260102T030405Z-many-0a1b")
    folder.ranks.mkdir(parents=True)
    folder.hosts.mkdir()
    world = len(hosts) * ranks_each
    folder.manifest.write_text(
        json.dumps({"format": 1, "name": "many", "created": "2026-01-02T03:04:05+00:00", "world_size": world})
    )
    records = {rank: _begin(hosts[rank // ranks_each], rank % ranks_each, steps, cuda) for rank in range(world)}
    now = 4.0
    for step in range(1, steps + 1):
        spent = {}
        for rank in range(world):
            spent[rank] = {phase: seconds * (1 + 0.04 * chance.random()) for phase, seconds in PHASES.items()}
            for who in (hosts[rank // ranks_each], rank):
                phase, more = late.get(who, ("input", 0.0))
                spent[rank][phase] += more if step > steps // 2 else 0.0
        longest = max(sum(phases.values()) for phases in spent.values())
        now += longest
        for rank, phases in spent.items():
            waits = longest - sum(phases.values())
            phases["backward"] += waits + 0.001 * chance.random()
            records[rank].append(_step(step, now, phases, waits, chance, cuda))
    for rank, lines in records.items():
        folder.rank(rank).mkdir()
        folder.metrics(rank).write_text("".join(json.dumps(record) + "\n" for record in lines))
        folder.log(rank).write_text(f"rank {rank} on {hosts[rank // ranks_each]}\n")
    for host in hosts:
        folder.host(host).write_text(
            "".join(json.dumps(r) + "\n" for r in _samples(host, ranks_each, (memory_used or {}).get(host, 61), cuda))
        )
    if folded:
        nodes = Nodes(len(hosts), ranks_each)
        manifest = json.loads(folder.manifest.read_text())
        folder.manifest.write_text(json.dumps(manifest | {"nodes": nodes.as_dict()}))
        for node in range(nodes.count):
            folder.node(node).path.mkdir(parents=True)
            NodeFold(folder, folder, folder.node(node), nodes.ranks_of(node)).update()
    return folder


def _begin(host: str, local: int, steps: int, cuda: bool) -> list[dict]:
    held = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "limit": 39 * GIB}
    return [
        {"k": "meta", "t": 0, "time": LAUNCHED, "host": host},
        {"k": "report", "t": 1, "total_steps": 2 * steps},
        {"k": "model", "t": 3, "device": f"cuda:{local}" if cuda else "cpu"} | held,
    ]


def _step(step: int, now: float, phases: dict, waits: float, chance: random.Random, cuda: bool) -> dict:
    seconds = sum(phases.values())
    record = {"k": "step", "t": now, "step": step, "n": 1, "seconds": [seconds] * 3, "samples": 32, **phases}
    record |= {"loss": 9 / (3 + step / 20) + 0.05 * chance.random(), "communication": 0.008 + waits}
    if cuda:
        return record | {"allocated": 21.5 * GIB, "reserved": 27 * GIB, "peak": 24.4 * GIB, "retries": 0}
    return record | {"rss": 0.6 * GIB}


def _samples(host: str, devices: int, used: float, cuda: bool) -> list[dict]:
    card = {"name": "NVIDIA A100-SXM4-40GB", "memory_total": 40 * GIB}
    seen = {"utilisation": 96, "memory_used": 28 * GIB, "power": 352, "temperature": 61}
    count = devices if cuda else 0
    return [
        {"k": "meta", "t": 0, "host": host, "cores": 128, "memory_total": 256 * GIB, "devices": [card] * count},
        {"k": "host", "t": 1, "cpu": 22, "memory_used": used * GIB, "devices": [seen] * count},
    ]
