"""Versions, and which are known not to work."""

from __future__ import annotations

from labkit.diagnosis.facts import Facts
from labkit.diagnosis.finding import Finding, detection
from labkit.launcher.checks import TORCH_FLOOR, release_of
from labkit.view.frontend import BROKEN_KERNELS


@detection
def versions(facts: Facts) -> Finding:
    named = [f"{name} {found or 'missing'}" for name, found in (facts.packages or {}).items()]
    return Finding("versions", ", ".join([f"Python {facts.python}", *named]), "of this process, and so of the ranks")


@detection
def torch(facts: Facts) -> Finding | None:
    if facts.packages is None:
        return None
    found = facts.packages.get("torch")
    if found is None:
        return Finding("torch", "missing", "nothing can be trained", "python -m pip install torch", "stop")
    if release_of(found) >= TORCH_FLOOR:
        return None
    floor = ".".join(map(str, TORCH_FLOOR))
    why = "launch refuses it: older ones hang or sum wrongly on gloo"
    return Finding("torch", found, why, f"python -m pip install 'torch>={floor}'", "stop")


@detection
def ipykernel(facts: Facts) -> Finding | None:
    found = (facts.packages or {}).get("ipykernel")
    if found not in BROKEN_KERNELS:
        return None
    return Finding(
        "ipykernel",
        found,
        "it raises LookupError when a thread updates a widget: no live view",
        "python -m pip install 'ipykernel!=7.0.0,!=7.0.1' and restart the kernel, or LABKIT_UI=static",
        "warning",
    )
