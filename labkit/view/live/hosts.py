"""Groups the ranks of a run by host, and draws a heat strip per rank: dark cells are times at which it was slower than
the others. The strips show at a glance whether one rank or one host is late."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from statistics import median

from labkit.charts import Column, Picture, columns
from labkit.record import HostHistory, RankHistory, RunReader
from labkit.series import Series
from labkit.text import escaped, gib, slug

SHADES = {0.10: 0.3, 0.25: 0.5, 0.5: 0.75, 1.0: 1.0}  # fraction slower than the median of all ranks: opacity
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 116, 58, 20, 16
STANDS_OUT, SERIOUS = 2.0, 1.0  # times as late as is usual on its host, and in all cells at least this late
MOST_STRIPS = 128  # with more ranks, each host has one strip: that of its slowest rank
HEIGHT, LOWEST, HIGHEST, GAP = 256, 3, 10, 4  # pixels: all strips together, one strip, between hosts
MOST_NAMED, LINE_HEIGHT = 40, 11  # with more hosts, only those that are late are named
MOST_BYTES = 9_000  # a larger drawing is redone with fewer, wider cells
INK = "#e5534b"
Row = tuple[str, list[int]]  # a host, and the ranks whose slowest is drawn
CELLS = 60  # along the time axis


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


def host_memory(reader: RunReader, history: RankHistory) -> str:
    """`3.10 GiB + 4 workers 2.40 GiB`, the most that a rank and the workers of its DataLoaders took; empty if it has
    had none, or if that is unknown."""
    samples = watched(reader, history.host)
    if samples is None or history.rank not in samples.loaders:
        return ""
    memory = samples.loaders[history.rank]
    workers = f"{memory.workers} worker{'s' * (memory.workers != 1)}"
    return f"{gib(memory.rank)} + {workers} {gib(memory.workers_pss)}"


def rank_ranges(ranks: Iterable[int]) -> str:
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


def heat_strips(
    title: str, series: Mapping[int, Series], hosts: Mapping[int, str], shown: Mapping[int, range] | None = None
) -> str:
    """Strips as SVG on one time axis, relative to the median of all ranks at each time. `hosts` names them by rank;
    `shown` lists the ranks whose slowest a series shows."""
    grid = columns(series)
    if not grid:
        return ""
    groups: dict[str, list[int]] = {}
    for rank in sorted(series):
        groups.setdefault(hosts.get(rank, ""), []).append(rank)
    shown = shown or {rank: range(rank, rank + 1) for rank in series}
    ranks_shown = sum(len(shown[rank]) for rank in series)
    single = ranks_shown > MOST_STRIPS
    rows: list[Row] = [
        (host, ranks if single else [rank])
        for host, ranks in groups.items()
        for rank in (ranks[:1] if single else ranks)
    ]
    height = max(LOWEST, min(HIGHEST, HEIGHT // len(rows)))
    tops, top, before = [], TOP, rows[0][0]
    crowded = len(groups) > MOST_NAMED
    for host, _ in rows:
        top += GAP if host != before and not crowded else 0
        tops.append(top)
        top, before = top + height, host
    bottom, wide = top, WIDTH - LEFT - RIGHT
    named = {host: [each for rank in ranks for each in shown[rank]] for host, ranks in groups.items()}
    start, end = grid[0][0], grid[-1][0]
    fewer = 1
    while len(drawn := _cells(late := _slower(grid, rows, start, end, fewer), tops, height, wide)) > MOST_BYTES:
        if fewer >= 8:
            break
        fewer *= 2
    marks, frames = _late_marks(named, rows, tops, late, bottom) if crowded else _marks(named, rows, tops, height)
    marks += "" if single else _latest(rows, tops, late, height)
    what = "of each host's slowest rank" if single else "of each rank"
    axis = (
        f'<text x="{LEFT}" y="{bottom + 12}" opacity=".75">{start:.3g} s</text>'
        f'<text x="{WIDTH - RIGHT}" y="{bottom + 12}" text-anchor="end" opacity=".75">{end:.3g} s after launch</text>'
    )
    body = (
        f'<text x="0" y="12" font-weight="600">{escaped(title)}'
        f'<tspan font-weight="400" fill-opacity=".75"> {what}</tspan></text>{_key()}{frames}{marks}{drawn}{axis}'
    )
    label = f"{title}, {ranks_shown} ranks: darker is slower than the median"
    return Picture(body, WIDTH, bottom + BOTTOM, label).svg


def _slower(
    grid: list[tuple[float, Column]], rows: list[Row], start: float, end: float, fewer: int
) -> dict[float, set[tuple[int, int]]]:
    """Pairs (row, cell) by shade, with `CELLS / fewer` cells in a row; a cell has its darkest shade."""
    width = (end - start) / (CELLS - 1) or 1.0
    shades: dict[tuple[int, int], float] = {}
    for x, column in grid:
        centre = median(last for *_, last in column.values())
        cell = round((x - start) / width) // fewer * fewer
        for row, (_, ranks) in enumerate(rows):
            slowest = max((column[rank][2] for rank in ranks if rank in column), default=0.0)
            extra = slowest / centre - 1 if centre > 0 else 0.0
            shade = max((s for s in SHADES if extra >= s), default=0.0)
            if shade > shades.get((row, cell), 0.0):
                shades[row, cell] = shade
    by_shade: dict[float, set[tuple[int, int]]] = {}
    for (row, cell), shade in shades.items():
        by_shade.setdefault(shade, set()).update((row, cell + i) for i in range(fewer))
    return by_shade


def _cells(shades: Mapping[float, set[tuple[int, int]]], tops: list[int], height: int, wide: int) -> str:
    """One path per shade; adjacent cells of a strip are one stroke."""
    drawn = ""
    for shade, cells in sorted(shades.items()):
        strokes: list[list[float]] = []
        last = (-1, -1)
        for row, cell in sorted(cells):
            x, after = (LEFT + wide * min(CELLS, c) // CELLS for c in (cell, cell + 1))
            if (row, cell - 1) == last:
                strokes[-1][1] = after
            else:
                strokes.append([x, after, tops[row] + height / 2])
            last = (row, cell)
        path = "".join(f"M{x} {y:g}H{after}" for x, after, y in strokes)
        drawn += f'<path d="{path}" stroke="{INK}" stroke-opacity="{SHADES[shade]:g}" stroke-width="{height - 1}"/>'
    return drawn


def _marks(groups: Mapping[str, list[int]], rows: list[Row], tops: list[int], height: int) -> tuple[str, str]:
    """The names of hosts with their ranks, and a pale background behind each host's strips."""
    names = names_of(groups, 17)
    marks = frames = ""
    for host, ranks in groups.items():
        own = [top for top, (name, _) in zip(tops, rows, strict=True) if name == host]
        top, high = own[0], len(own) * height
        ground = f'y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{high}" fill="#8b949e" fill-opacity=".13"'
        frames += f'<rect x="{LEFT}" {ground}/>'
        numbers = f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks)}"
        lines = [names[host], numbers] if host else [numbers]
        if high < 10 * len(lines):  # room for one line only
            lines = [f"{lines[0]} · {rank_ranges(ranks)}" if host else numbers]
        middle = top + high / 2 - 5.5 * (len(lines) - 1) + 3.5
        for i, line in enumerate(lines):
            faint = ' opacity=".7"' if i else ""
            marks += (
                f'<text x="{LEFT - 6}" y="{middle + 11 * i:g}" text-anchor="end"{faint}>{escaped(line[:22])}</text>'
            )
    return marks, frames


def _latest(rows: list[Row], tops: list[int], late: Mapping[float, set[tuple[int, int]]], height: int) -> str:
    """The number of the rank that was late most, among those late more than is usual on their hosts."""
    weight, own = _lateness(rows, late), dict[str, list[float]]()
    for row, (host, _) in enumerate(rows):
        own.setdefault(host, []).append(weight[row])
    usual = {host: max(SERIOUS, STANDS_OUT * median(weights)) for host, weights in own.items()}
    alone = [row for row, (host, _) in enumerate(rows) if weight[row] > usual[host]]
    if not alone:
        return ""
    row = max(alone, key=lambda row: weight[row])
    y = tops[row] + height / 2 + 3.5
    return f'<text x="{WIDTH - RIGHT + 4}" y="{y:g}" font-weight="600">◂ rank {rows[row][1][0]}</text>'


def _lateness(rows: list[Row], late: Mapping[float, set[tuple[int, int]]]) -> dict[int, float]:
    """The cells of each row, weighted by how late they were."""
    weight = dict.fromkeys(range(len(rows)), 0.0)
    for shade, cells in late.items():
        for row, _ in cells:
            weight[row] += shade
    return weight


def _late_marks(
    groups: Mapping[str, list[int]],
    rows: list[Row],
    tops: list[int],
    late: Mapping[float, set[tuple[int, int]]],
    bottom: int,
) -> tuple[str, str]:
    """For very many hosts: the names of those that were late most, as far as there is room, and one background."""
    weight = _lateness(rows, late)
    names, marks = names_of(groups, 17), ""
    named: list[int] = []
    for row in sorted(weight, key=lambda row: -weight[row]):
        if weight[row] and all(abs(tops[row] - other) >= LINE_HEIGHT for other in named):
            host = rows[row][0]
            text = escaped(f"{names[host]} · {rank_ranges(groups[host])}"[:22])
            marks += f'<text x="{LEFT - 6}" y="{tops[row] + 5}" text-anchor="end">{text}</text>'
            named.append(tops[row])
    ground = f'y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{bottom - TOP}" fill="#8b949e" fill-opacity=".13"'
    return marks, f'<rect x="{LEFT}" {ground}/>'


def _key() -> str:
    """How much slower than the median each shade is."""
    drawn, x = "", WIDTH - 8 - 58 * len(SHADES) - 128
    drawn += f'<text x="{x + 122}" y="12" text-anchor="end" opacity=".75">slower than the median:</text>'
    for i, (shade, opacity) in enumerate(SHADES.items()):
        left = x + 128 + 58 * i
        drawn += f'<rect x="{left}" y="4" width="12" height="9" fill="{INK}" fill-opacity="{opacity:g}"/>'
        drawn += f'<text x="{left + 16}" y="12" opacity=".75">{shade:.0%}</text>'
    return drawn
