"""Groups the ranks of a run by host."""

from __future__ import annotations

import os
from collections.abc import Iterable

from labkit.record import HostHistory, RankHistory, RunReader, slug

__all__ = ["by_host", "names_of", "ranges", "watched"]


def by_host(histories: Iterable[RankHistory]) -> dict[str, list[RankHistory]]:
    """Hosts in the order of their lowest ranks, of histories in the order of ranks. Ranks whose host is not yet known
    are listed under "", or with the others while those are all on one host."""
    hosts: dict[str, list[RankHistory]] = {}
    for history in histories:
        hosts.setdefault(history.host, []).append(history)
    if len(hosts) == 2 and "" in hosts:
        only = next(filter(None, hosts))
        return {only: sorted(hosts[only] + hosts[""], key=lambda h: h.rank)}
    return hosts


def watched(reader: RunReader, host: str) -> HostHistory | None:
    """The samples of a host; their file is named after it."""
    return reader.hosts.get(slug(host)) if host else None


def ranges(ranks: Iterable[int]) -> str:
    """`0-7, 9`; a range of only two ranks is written as two numbers."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def names_of(hosts: Iterable[str], longest: int = 20) -> dict[str, str]:
    """Names that fit: if they are too long, without their common domain and common prefix."""
    names = list(hosts)
    shown = {name: name for name in names}
    if any(len(name) > longest for name in names):
        shown = {name: name.split(".")[0] for name in names}
    if len(set(shown.values())) < len(set(names)):  # they differ in the domain only
        shown = {name: name for name in names}
    if len(names) > 1 and any(len(name) > longest for name in shown.values()):
        common = len(os.path.commonprefix(list(shown.values())))
        shown = {name: f"…{short[common:]}" for name, short in shown.items()}
    return {name: short if len(short) <= longest else f"{short[: longest - 1]}…" for name, short in shown.items()}
