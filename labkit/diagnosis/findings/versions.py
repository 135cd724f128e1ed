"""Judges versions, and finds those that are known not to work."""

from __future__ import annotations

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import MachineFacts
from labkit.frontend import BROKEN_KERNELS, WORKING_KERNELS
from labkit.install import pip_install
from labkit.version import TORCH_FLOOR, release_of


@detection
def versions(facts: MachineFacts) -> Diagnosis:
    named = [f"{name} {installed or 'missing'}" for name, installed in (facts.packages or {}).items()]
    return Diagnosis("versions", ", ".join([f"Python {facts.python}", *named]), "of this process, and so of the ranks")


@detection
def torch(facts: MachineFacts) -> Diagnosis | None:
    if facts.packages is None:
        return None
    installed = facts.packages.get("torch")
    if installed is None:
        return Diagnosis("torch", "missing", "nothing can be trained", pip_install("torch"), "stop")
    if release_of(installed) >= TORCH_FLOOR:
        return None
    floor = ".".join(map(str, TORCH_FLOOR))
    why = "launch would fail: older versions hang or compute wrong sums with gloo"
    return Diagnosis("torch", installed, why, pip_install(f"torch>={floor}"), "stop")


@detection
def ipykernel(facts: MachineFacts) -> Diagnosis | None:
    installed = (facts.packages or {}).get("ipykernel")
    if installed not in BROKEN_KERNELS:
        return None
    return Diagnosis(
        "ipykernel",
        installed,
        "it raises LookupError when a thread updates a widget: no live view",
        f"{pip_install(WORKING_KERNELS)} and restart the kernel, or LABKIT_UI=static",
        "warning",
    )
