"""Judges how ranks communicate: backend, paths between the GPUs, and earlier measurements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import GpuLink, MachineFacts
from labkit.hardware import SYMMETRIC_MEMORY


@detection
def backend(facts: MachineFacts) -> Diagnosis:
    here = facts.hardware
    why = "one rank per GPU; more ranks than GPUs share them over gloo" if here.gpus else "NCCL is for GPUs"
    return Diagnosis("backend", here.backend, why)


@detection
def ranks(facts: MachineFacts) -> Diagnosis:
    return Diagnosis("ranks", str(facts.ranks), "the number that nproc_per_node='auto' starts")


@detection
def preflight(facts: MachineFacts) -> Diagnosis:
    result = facts.preflight
    if result is None:
        return Diagnosis(
            "preflight",
            "not done yet",
            "whether the ranks can communicate is unknown until it is tested",
            "labkit doctor --preflight tests it",
        )
    tested = f"tested on {result.when}; valid until the GPUs or torch change"
    if result.env is None:
        todo = "use nproc_per_node=1, or check the driver; labkit doctor --preflight tests again"
        then = (
            "a launch on all of them tests again, and is refused if that fails"
            if facts.hardware.backend == "nccl"
            else "a launch would fail the same way"
        )
        return Diagnosis("preflight", result.said, f"{tested}; {then}", todo, "stop")
    if result.env:
        why = f"{tested}; without these variables ranks cannot communicate; with them communication is slower"
        todo = "nothing: launch sets these variables automatically"
        return Diagnosis("preflight", result.said, why, todo, "note")
    return Diagnosis("preflight", result.said, tested)


@detection
def bandwidth(facts: MachineFacts) -> Iterator[Diagnosis]:
    if not facts.bandwidth:
        todo = "labkit doctor --bandwidth measures collectives between the ranks"
        yield Diagnosis("bandwidth", "not measured yet", "labkit.plan uses it for predictions", todo)
    for kind, line in (facts.bandwidth or {}).items():
        yield Diagnosis(kind, line, "latency + bytes / bandwidth")


@detection
def links(facts: MachineFacts) -> Diagnosis | None:
    """The links between pairs of GPUs, according to NVML."""
    used = {card.index for card in facts.cards}
    pairs = [pair for pair in (facts.nvml.links if facts.nvml else ()) if {pair.first, pair.second} <= used]
    if not pairs:
        return None
    if all(pair.path is None and pair.peer is None for pair in pairs):
        return Diagnosis(
            "links", "n/a", "NVML does not report the links of these GPUs", "labkit doctor --bandwidth measures them"
        )
    kinds: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        kinds[_kind(pair)].append(f"{pair.first}-{pair.second}")
    value = "; ".join(
        f"{kind}: {'all pairs' if len(between) == len(pairs) > 1 else ', '.join(between)}"
        for kind, between in kinds.items()
    )
    if not any(pair.peer is False for pair in pairs):
        why = "paths as named by nvidia-smi topo -m"
        if list(kinds) == ["NVLink"] and all(gpu.capability >= SYMMETRIC_MEMORY for gpu in facts.hardware.gpus):
            why += "; symmetric memory and async tensor parallelism would work; labkit's scripts do not use them"
        return Diagnosis("links", value, why)
    return Diagnosis(
        "links",
        value,
        "without peer access NCCL copies through the host's memory and /dev/shm, which is slower",
        "labkit doctor --bandwidth measures the speed; NCCL selects this path automatically",
        "note",
    )


def _kind(pair: GpuLink) -> str:
    path = "NVLink" if pair.nvlink else pair.path or "n/a"
    return path + {True: "", False: " without peer access", None: " (peer access: n/a)"}[pair.peer]


@detection
def nccl_settings(facts: MachineFacts) -> Diagnosis | None:
    """Many scripts set NCCL_P2P_DISABLE=1 unnecessarily, which disables the fastest path."""
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if (facts.nccl_settings or {}).get(name) == "1"]
    if not off or facts.ranks < 2 or not facts.hardware.gpus:
        return None
    return Diagnosis(
        "NCCL settings",
        ", ".join(f"{name}=1" for name in off),
        "set in this process and passed to all ranks: they disable NCCL's faster paths between GPUs",
        "unset them, then run labkit doctor --preflight: it reports which of them are needed here",
        "note",
    )
