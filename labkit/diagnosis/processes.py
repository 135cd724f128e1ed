"""Who else is on the GPUs."""

from __future__ import annotations

from labkit.diagnosis.detections import Diagnosis, detection
from labkit.diagnosis.facts import Card, MachineFacts, Process
from labkit.diagnosis.wsl import is_wsl
from labkit.record.units import gib

MOSTLY_FREE = 0.9
SHOWN = 4


@detection
def others(facts: MachineFacts) -> Diagnosis | None:
    """On a GPU that is less than nine tenths free, or that another process computes on."""
    if is_wsl(facts):  # there it is the desktop's share, and NVML cannot tell whose
        return None
    busy = [(card, found) for card in facts.cards if (found := _others(card)) or _unexplained(card)]
    if not busy:
        return None
    value = "; ".join(_told(card, found) for card, found in busy)
    runs = sorted({process.run for _, found in busy for process in found if process.run})
    ours = f"labkit stop {runs[0]}; " if runs else ""
    hidden = "; this kernel is one of them" if _is_hidden(facts) else ""
    full = any(card.memory and card.free is not None and card.free < MOSTLY_FREE * card.memory for card, _ in busy)
    return Diagnosis(
        "GPUs in use",
        value,
        f"ranks share their memory and their time with these, and may run out of memory{hidden}",
        f"{ours}wait, end them, or take other GPUs: CUDA_VISIBLE_DEVICES",
        "warning" if full else "note",
    )


def _is_hidden(facts: MachineFacts) -> bool:
    """Whether this process holds CUDA and NVML does not name it: in a container its pid is another one."""
    mine = any(process.mine for card in facts.cards for process in card.processes or ())
    return facts.kernel is not None and facts.kernel.cuda and not mine


def _others(card: Card) -> list[Process]:
    return [process for process in card.processes or () if not process.mine]


def _unexplained(card: Card) -> bool:
    """Much is in use and nobody is named: from inside a container, others' processes are not seen."""
    mine = any(process.mine for process in card.processes or ())
    return not mine and bool(card.memory) and card.free is not None and card.free < MOSTLY_FREE * (card.memory or 0)


def _told(card: Card, found: list[Process]) -> str:
    free = f" ({gib(card.free)} free of {gib(card.memory)})" if card.free is not None else ""
    who = ", ".join(_named(process) for process in found[:SHOWN]) or "processes that cannot be seen from here"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"GPU {card.index}{free}: {who}{more}"


def _named(process: Process) -> str:
    who = f"run {process.run}" if process.run else f"{process.name or 'another container’s process'} {process.pid}"
    return f"{who} {gib(process.memory)}" if process.memory is not None else who
