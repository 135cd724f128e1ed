"""Judges the platform: the system, the front end, and leftovers in the environment."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import MachineFacts

FRONT_ENDS = {
    "svg": "a notebook with live widgets",
    "display": "a notebook without widgets: redrawn output",
    "static": "headless (papermill, nbclient): static figures; launch waits until the run ends",
    "text": "a terminal",
}


@detection
def platform(facts: MachineFacts) -> Diagnosis:
    name = facts.hardware.platform
    if name == "windows":
        return Diagnosis(
            "platform",
            name,
            "torch.distributed has no NCCL on native Windows, and labkit does not run there",
            "use WSL2: https://aka.ms/wsl",
            "stop",
        )
    if name == "macos":
        return Diagnosis(
            "platform",
            name,
            "NCCL and CUDA are Linux only: ranks train on the CPU with gloo; Apple's GPU is not used",
            "learn and test here; measure on a machine with NVIDIA GPUs",
            "note",
        )
    release = f", kernel {facts.release}" if facts.release else ""
    return Diagnosis("platform", f"{name}{release}", "it determines the available backends and limits")


@detection
def front_end(facts: MachineFacts) -> Diagnosis:
    if facts.front_end is None:
        why = facts.problems.get("front_end", "")
        return Diagnosis("front end", "n/a", f"{why}; launch would fail, too", "correct or unset LABKIT_UI", "stop")
    return Diagnosis(
        "front end",
        FRONT_ENDS.get(facts.front_end, facts.front_end),
        f"runs {'end with' if facts.is_headless else 'outlive'} this process",
    )


@detection
def colab(facts: MachineFacts) -> Iterator[Diagnosis]:
    """A Colab session. Limits are from research.google.com/colaboratory/faq.html."""
    if facts.hardware.platform != "colab":
        return
    yield Diagnosis(
        "Colab",
        "a session without a known end",
        "it ends after at most 12 hours without payment, earlier if it is idle, and its files and runs with it",
        "save_every= with checkpoint_dir= on a mounted Google Drive; runs_dir= there keeps the runs",
        "note",
    )
    if facts.front_end == "display":
        yield Diagnosis(
            "widgets",
            "not used",
            f"Colab's widget manager is made for ipywidgets 7, this is {(facts.packages or {}).get('ipywidgets')}",
            "run.wait() redraws the view; LABKIT_UI=svg tries widgets anyway",
            "note",
        )


@detection
def refused(facts: MachineFacts) -> Iterator[Diagnosis]:
    for what, sentence in (facts.refusals or {}).items():
        yield Diagnosis(what, sentence, "launch would fail", "fix it first", "stop")


@detection
def environment(facts: MachineFacts) -> Diagnosis | None:
    if not facts.leftovers:
        return None
    return Diagnosis(
        "environment",
        ", ".join(facts.leftovers),
        "left over from another launcher; labkit does not pass them to ranks, but plain torchrun uses them",
    )


@detection
def undetermined(facts: MachineFacts) -> Diagnosis | None:
    """Facts that could not be determined, except the front end, which has its own detection."""
    failed = {name: why for name, why in facts.problems.items() if name not in ("front_end", "is_headless")}
    if not failed:
        return None
    reasons = "; ".join(f"{name.replace('_', ' ')}: {why}" for name, why in failed.items())
    todo = "nothing, or report it with the output of labkit doctor --json"
    return Diagnosis("undetermined", ", ".join(name.replace("_", " ") for name in failed), reasons, todo, "note")
