"""The ranks of a run by the machine they are on."""

from __future__ import annotations

import os
from collections.abc import Iterable

from labkit.record import RankHistory, RunReader
from labkit.record.folder import slug
from labkit.record.hosts import HostHistory

__all__ = ["by_host", "names_of", "ranges", "watched"]


def by_host(histories: Iterable[RankHistory]) -> dict[str, list[RankHistory]]:
    """Hosts in the order of their lowest ranks. Ranks that have yet to say where they are stand under "", or with the
    others as long as those are on one host."""
    found: dict[str, list[RankHistory]] = {}
    for history in sorted(histories, key=lambda h: h.rank):
        found.setdefault(history.host, []).append(history)
    if len(found) == 2 and "" in found:
        only = next(filter(None, found))
        return {only: sorted(found[only] + found[""], key=lambda h: h.rank)}
    return found


def watched(reader: RunReader, host: str) -> HostHistory | None:
    """What was sampled of a host, whose file is called after it."""
    return reader.hosts.get(slug(host)) if host else None


def ranges(ranks: Iterable[int]) -> str:
    """`0-7, 9`; of two neighbours each."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def names_of(hosts: Iterable[str], longest: int = 20) -> dict[str, str]:
    """Names that fit: without what all of them begin with and their common domain, if they are too long."""
    names = list(hosts)
    shown = {name: name for name in names}
    if any(len(name) > longest for name in names):
        shown = {name: name.split(".")[0] for name in names}
    if len(set(shown.values())) < len(set(names)):  # it was the domains that told them apart
        shown = {name: name for name in names}
    if len(names) > 1 and any(len(name) > longest for name in shown.values()):
        common = len(os.path.commonprefix(list(shown.values())))
        shown = {name: f"…{short[common:]}" for name, short in shown.items()}
    return {name: short if len(short) <= longest else f"{short[: longest - 1]}…" for name, short in shown.items()}
