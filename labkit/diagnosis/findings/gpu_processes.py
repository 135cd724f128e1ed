"""Finds other processes on the GPUs."""

from __future__ import annotations

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import Card, MachineFacts, Process
from labkit.diagnosis.findings.wsl import is_wsl
from labkit.text import gib

MOSTLY_FREE = 0.9
SHOWN = 4


@detection
def others(facts: MachineFacts) -> Diagnosis | None:
    """GPUs that are less than 90 % free or used by another process."""
    if is_wsl(facts):  # the desktop uses memory there, and NVML cannot list processes
        return None
    busy = [(card, processes) for card in facts.cards if (processes := _others(card)) or _unexplained(card)]
    if not busy:
        return None
    value = "; ".join(_described(card, processes) for card, processes in busy)
    runs = sorted({process.run for _, processes in busy for process in processes if process.run})
    ours = f"labkit stop {runs[0]}; " if runs else ""
    hidden = "; this kernel is one of them" if _is_hidden(facts) else ""
    full = any(card.memory and card.free is not None and card.free < MOSTLY_FREE * card.memory for card, _ in busy)
    return Diagnosis(
        "GPUs in use",
        value,
        f"ranks share the GPUs with these processes and may run out of memory{hidden}",
        f"{ours}wait, end them, or select other GPUs: CUDA_VISIBLE_DEVICES",
        "warning" if full else "note",
    )


def _is_hidden(facts: MachineFacts) -> bool:
    """Whether this process uses CUDA but NVML does not list it: in a container its pid differs."""
    mine = any(process.mine for card in facts.cards for process in card.processes or ())
    return facts.kernel is not None and facts.kernel.cuda and not mine


def _others(card: Card) -> list[Process]:
    return [process for process in card.processes or () if not process.mine]


def _unexplained(card: Card) -> bool:
    """Whether much memory is in use without any listed process: a container hides the processes of others."""
    mine = any(process.mine for process in card.processes or ())
    return not mine and bool(card.memory) and card.free is not None and card.free < MOSTLY_FREE * (card.memory or 0)


def _described(card: Card, processes: list[Process]) -> str:
    free = f" ({gib(card.free)} free of {gib(card.memory)})" if card.free is not None else ""
    who = ", ".join(_named(process) for process in processes[:SHOWN]) or "processes that are not visible from here"
    more = f" and {len(processes) - SHOWN} more" if len(processes) > SHOWN else ""
    return f"GPU {card.index}{free}: {who}{more}"


def _named(process: Process) -> str:
    who = f"run {process.run}" if process.run else f"{process.name or 'another container’s process'} {process.pid}"
    return f"{who} {gib(process.memory)}" if process.memory is not None else who
