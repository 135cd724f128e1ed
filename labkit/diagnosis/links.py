"""How ranks reach each other: backend, paths between the GPUs, and what was asked of them before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import GpuLink, MachineFacts


@detection
def backend(facts: MachineFacts) -> Diagnosis:
    here = facts.hardware
    why = "one rank per GPU; more ranks than GPUs share them over gloo" if here.gpus else "NCCL is for GPUs"
    return Diagnosis("backend", here.backend, why)


@detection
def ranks(facts: MachineFacts) -> Diagnosis:
    return Diagnosis("ranks", str(facts.ranks), "what nproc_per_node='auto' starts")


@detection
def preflight(facts: MachineFacts) -> Diagnosis:
    found = facts.preflight
    if found is None:
        return Diagnosis(
            "preflight",
            "not done yet",
            "whether the ranks reach each other is known once they have tried",
            "labkit doctor --preflight lets them meet and sum a number",
        )
    asked = f"asked on {found['when']}; kept until the GPUs or torch change"
    if found["env"] is None:
        todo = "nproc_per_node=1, or look at the driver; labkit doctor --preflight asks again"
        then = (
            "a launch on all of them is refused"
            if facts.hardware.backend == "nccl"
            else "a launch would fail the same way"
        )
        return Diagnosis("preflight", found["said"], f"{asked}; {then}", todo, "stop")
    if found["env"]:
        why = f"{asked}; as it is they do not reach each other, and the way round is slower"
        todo = "nothing: launch sets these variables by itself"
        return Diagnosis("preflight", found["said"], why, todo, "note")
    return Diagnosis("preflight", found["said"], asked)


@detection
def bandwidth(facts: MachineFacts) -> Iterator[Diagnosis]:
    if not facts.bandwidth:
        todo = "labkit doctor --bandwidth measures the collectives of the ranks"
        yield Diagnosis("bandwidth", "not measured yet", "labkit.plan predicts with it", todo)
    for kind, line in (facts.bandwidth or {}).items():
        yield Diagnosis(kind, line, "latency + bytes / bandwidth")


@detection
def links(facts: MachineFacts) -> Diagnosis | None:
    """Which pairs of GPUs are joined how, by NVML."""
    used = {card.index for card in facts.cards}
    pairs = [pair for pair in (facts.nvml.links if facts.nvml else ()) if {pair.first, pair.second} <= used]
    if not pairs:
        return None
    if all(pair.path is None and pair.peer is None for pair in pairs):
        return Diagnosis(
            "links", "n/a", "NVML does not tell how these GPUs are joined", "labkit doctor --bandwidth measures"
        )
    kinds: dict[str, list[str]] = defaultdict(list)
    for pair in pairs:
        kinds[_kind(pair)].append(f"{pair.first}-{pair.second}")
    value = "; ".join(
        f"{kind}: {'all pairs' if len(between) == len(pairs) > 1 else ', '.join(between)}"
        for kind, between in kinds.items()
    )
    if not any(pair.peer is False for pair in pairs):
        return Diagnosis("links", value, "NVIDIA's names of the paths: nvidia-smi topo -m")
    return Diagnosis(
        "links",
        value,
        "without peer access NCCL copies through the host's memory and /dev/shm, which is slower",
        "labkit doctor --bandwidth says how fast; NCCL finds this way by itself",
        "note",
    )


def _kind(pair: GpuLink) -> str:
    path = "NVLink" if pair.nvlink else pair.path or "n/a"
    return path + {True: "", False: " without peer access", None: " (peer access: n/a)"}[pair.peer]


@detection
def nccl_settings(facts: MachineFacts) -> Diagnosis | None:
    """Many scripts set NCCL_P2P_DISABLE=1 blindly, which costs a healthy machine its fastest path."""
    off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if (facts.nccl_settings or {}).get(name) == "1"]
    if not off or facts.ranks < 2 or not facts.hardware.gpus:
        return None
    return Diagnosis(
        "NCCL settings",
        ", ".join(f"{name}=1" for name in off),
        "set in this process and passed on to all ranks: they turn off NCCL's faster ways between GPUs",
        "unset them, then labkit doctor --preflight: it says which of them are needed here",
        "note",
    )
