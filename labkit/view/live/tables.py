"""Tables of the ranks and of the machines they run on."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

from labkit.record import RankHistory, RunReader
from labkit.record.folder import slug
from labkit.record.hosts import HostHistory
from labkit.record.text import escaped, plain
from labkit.view import words
from labkit.view.charts.bands import MANY
from labkit.view.charts.svg import dot
from labkit.view.live.by_host import by_host, names_of, ranges, watched
from labkit.view.live.verdict import host_verdicts

__all__ = ["grid", "host_rows", "machine_table", "rank_rows", "rank_table"]

TABLE_ROWS = 16

CELL = "border:0;padding:1px 12px 1px 0"
HEAD = f"{CELL};white-space:nowrap;font-weight:500;opacity:.7"
ROW = '<tr style="background:none">'
TABLE = (
    '<table style="border-collapse:collapse;margin:6px 0;text-align:right;font-size:12px;'
    'font-variant-numeric:tabular-nums">'
)


def rank_table(reader: RunReader) -> str:
    rows = rank_rows(reader)
    marks = [f"{dot(h.rank)} " if len(reader.ranks) <= MANY else "" for h in _shown(reader)]
    hosts = by_host(reader.current.values())
    which = "the slowest" if len(hosts) > 1 else "the first and the slowest"
    which = f"{len(rows)} that stand out among" if reader.folds else f"{which} of"
    more = f"{which} {len(reader.rank_numbers)} ranks" if len(rows) < len(reader.rank_numbers) else ""
    return grid(rows, marks, sentences=("",) if len(hosts) > 1 else ()) + _remark(more)


def grid(
    rows: list[dict[str, str]],
    marks: list[str] | None = None,
    *,
    sentences: Collection[str] = (),
    narrow: bool = False,
) -> str:
    """A table of text with an SVG mark before each row. Only the columns that `sentences` names wrap, and the names of
    columns if it is to be `narrow`."""
    if not rows:
        return ""
    marks = marks or [""] * len(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))  # a rank that has not started has fewer
    text_cell, figure_cell = f"{CELL};text-align:left", f"{CELL};white-space:nowrap"
    head_cell = HEAD.replace("nowrap", "normal;vertical-align:bottom") if narrow else HEAD
    head = f'<th style="{head_cell};text-align:left">{escaped(names[0])}</th>'
    sides = {name: "left" if name in sentences else "right" for name in names}
    head += "".join(f'<th style="{head_cell};text-align:{sides[name]}">{escaped(name)}</th>' for name in names[1:])
    body = ""
    for row, mark in zip(rows, marks, strict=True):
        first, *others = (escaped(row.get(name, "")) for name in names)
        wrapped = "" if names[0] in sentences else ";white-space:nowrap"
        body += f'{ROW}<td style="{text_cell}{wrapped}">{mark}{first}</td>'
        styles = [text_cell if name in sentences else figure_cell for name in names[1:]]
        body += "".join(f'<td style="{s}">{text}</td>' for s, text in zip(styles, others, strict=True)) + "</tr>"
    return f'<div style="overflow-x:auto">{TABLE}{ROW}{head}</tr>{body}</table></div>'


def rank_rows(reader: RunReader) -> list[dict[str, str]]:
    names = names_of(by_host(reader.current.values()))
    return [_rank_row(history, names[history.host] if len(names) > 1 else "") for history in _shown(reader)]


def _shown(reader: RunReader) -> list[RankHistory]:
    """All ranks; if there are too many, the first and the slowest, or with several hosts the slowest only."""
    histories = list(reader.current.values())
    if len(histories) <= TABLE_ROWS:
        return histories
    if len(by_host(histories)) > 1:
        latest = sorted(histories, key=lambda h: h.own_seconds or h.recent_step_seconds, reverse=True)
        return sorted(latest[: TABLE_ROWS // 2], key=lambda h: h.rank)
    slowest = sorted(histories, key=lambda h: h.latest.get("step_seconds", 0.0), reverse=True)[: TABLE_ROWS // 2]
    rows = {h.rank: h for h in (*histories[: TABLE_ROWS // 2], *slowest)}
    return [rows[rank] for rank in sorted(rows)]


def _rank_row(history: RankHistory, host: str) -> dict[str, str]:
    latest = history.latest
    return {
        "rank": str(history.rank),
        **({"host": plain(host)} if host else {}),
        "device": history.device,
        "step": f"{history.step:,}",
        "loss": words.quantity(latest.get("loss"), 4),
        "samples/s": words.quantity(latest.get("throughput")),
        "step time": words.seconds(latest.get("step_seconds")),
        "input wait": words.percent(words.share(history, "input")),
        **({"communication": f"{waits:.1%}"} if (waits := words.share(history, "communication")) is not None else {}),
        **({} if host else {"state held": words.gib(history.held_bytes)}),
        f"peak {history.memory_name}": words.gib(history.memory_peak or None),
        **({"reserved": words.gib(latest["reserved"])} if "reserved" in latest and not host else {}),
    }


def host_rows(reader: RunReader) -> list[dict[str, str]]:
    """One row per host if there are several: its ranks combined, and the readings of its driver and system.

    `own work` is the median of its ranks' input, forward and optimizer: in backward all hosts wait for the slowest.
    """
    hosts = by_host(reader.ranks.values())
    if len(hosts) < 2:
        return []
    verdicts, names = host_verdicts(reader), names_of(hosts)
    shown = sorted(hosts, key=lambda host: not verdicts.get(host))[:TABLE_ROWS]  # sorted is stable
    return [
        _host_row(names[host], ranks, watched(reader, host), verdicts.get(host, ""))
        for host, ranks in hosts.items()
        if host in shown
    ]


def _host_row(host: str, ranks: list[RankHistory], samples: HostHistory | None, verdict: str) -> dict[str, str]:
    own = [h.own_seconds for h in ranks if h.own_seconds]
    waits = [share for h in ranks if (share := words.share(h, "input")) is not None]
    peak = max(h.memory_peak for h in ranks)
    devices = samples.used_by({h.uuid for h in ranks if h.uuid}) if samples else []
    busy = [d["utilisation"] for d in devices if d["utilisation"] is not None]
    return {
        "host": plain(host) or "not known yet",
        "ranks": ranges({rank for h in ranks for rank in h.node_ranks}),
        "own work": words.seconds(median(own) if own else None),
        "input wait": words.percent(max(waits, default=None)),
        f"peak {ranks[0].memory_name}": words.gib(peak or None),
        **({"GPUs busy": f"{sum(busy) / len(busy):.0f}%"} if busy else {}),
        "cores busy": "n/a" if samples is None or samples.cpu is None else f"{samples.cpu:.0f}%",
        "memory in use": _share(samples.memory_used, samples.memory_total) if samples else "n/a",
        "": plain(verdict),
    }


def _share(used: float | None, total: float | None) -> str:
    """`61 of 256 GiB`"""
    return "n/a" if used is None or not total else f"{used / 2**30:.0f} of {total / 2**30:.0f} GiB"


def machine_table(reader: RunReader) -> str:
    """Readings of the driver and the system, beside those of torch's allocator: a row for each machine and device.
    With several hosts, a row for each host, and the devices only if they are few."""
    hosts = by_host(reader.ranks.values())
    above = host_rows(reader)
    table = grid(above, sentences=("",)) if above else ""
    table += _remark(f"{len(above)} of {len(hosts)} hosts" if 0 < len(above) < len(hosts) else "")
    listed = {slug(host) for host in hosts} if above else set()
    machines = [reader.hosts[name] for name in sorted(reader.hosts)]
    rows = [row for host in machines if host.devices or host.name not in listed for row in _host_rows(host)]
    if above and len(rows) > TABLE_ROWS // 2:
        return table
    more = f"the first {TABLE_ROWS} of {len(rows)}" if len(rows) > TABLE_ROWS else ""
    return table + grid(rows[:TABLE_ROWS]) + _remark(more)


def _remark(text: str) -> str:
    return f'<div style="opacity:.75">{text}</div>' if text else ""


def _host_rows(host: HostHistory) -> list[dict[str, str]]:
    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.0f}%"

    def of(used: float | None, total: float | None) -> str:
        return f"{words.gib(used)} of {words.gib(total)}"

    def row(what: str, busy: float | None, memory: str, power: float | None, heat: float | None) -> dict[str, str]:
        watts, degrees = ("n/a" if power is None else f"{power:.0f} W"), ("n/a" if heat is None else f"{heat:.0f} °C")
        return {
            "machine": plain(what),
            "busy": percent(busy),
            "memory in use": memory,
            "power": watts,
            "temperature": degrees,
        }

    cores = f"{host.name}, {host.cores:.0f} cores" if host.cores else host.name
    machine = row(cores, host.cpu, of(host.memory_used, host.memory_total), None, None)
    devices = [
        row(
            f"GPU {i} {d['name']}",
            d["utilisation"],
            of(d["memory_used"], d["memory_total"]),
            d["power"],
            d["temperature"],
        )
        for i, d in enumerate(host.devices)
    ]
    return [machine, *devices]
