"""Where we are: the system, who looks at this process, what others have left in its environment."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.diagnosis.facts import Facts
from labkit.diagnosis.finding import Finding, detection

FRONT_ENDS = {
    "svg": "a notebook with live widgets",
    "display": "a notebook without widgets: redrawn output",
    "static": "headless (papermill, nbclient): static figures, launch waits for the end",
    "text": "a terminal",
}


@detection
def platform(facts: Facts) -> Finding:
    name = facts.hardware.platform
    if name == "windows":
        return Finding(
            "platform",
            name,
            "torch.distributed has no NCCL on native Windows, and labkit starts nothing there",
            "use WSL2: https://aka.ms/wsl",
            "stop",
        )
    if name == "macos":
        return Finding(
            "platform",
            name,
            "NCCL and CUDA are Linux only: ranks train on the CPU with gloo, Apple's GPU is not used",
            "learn and test here, measure on a machine with NVIDIA GPUs",
            "note",
        )
    release = f", kernel {facts.release}" if facts.release else ""
    return Finding("platform", f"{name}{release}", "it decides which backends and which limits there are")


@detection
def front_end(facts: Facts) -> Finding:
    if facts.front_end is None:
        why = facts.problems.get("front_end", "")
        return Finding("front end", "n/a", f"{why}; launch says the same", "correct or unset LABKIT_UI", "stop")
    return Finding(
        "front end",
        FRONT_ENDS.get(facts.front_end, facts.front_end),
        f"runs {'end with' if facts.is_headless else 'outlive'} this process",
    )


@detection
def refused(facts: Facts) -> Iterator[Finding]:
    for what, sentence in (facts.refusals or {}).items():
        yield Finding(what, sentence, "launch says the same, and starts nothing", "put it right first", "stop")


@detection
def environment(facts: Facts) -> Finding | None:
    if not facts.leftovers:
        return None
    return Finding(
        "environment",
        ", ".join(facts.leftovers),
        "left over from another launcher; not passed on to the ranks, but torchrun by itself obeys them",
    )


@detection
def not_asked(facts: Facts) -> Finding | None:
    """But for the front end, of which the detection above tells."""
    failed = {name: why for name, why in facts.problems.items() if name not in ("front_end", "is_headless")}
    if not failed:
        return None
    said = "; ".join(f"{name.replace('_', ' ')}: {why}" for name, why in failed.items())
    todo = "nothing, or tell us with the output of labkit doctor --json"
    return Finding("not asked", ", ".join(name.replace("_", " ") for name in failed), said, todo, "note")
