"""Draws the tables of the ranks and of the machines they run on."""

from __future__ import annotations

from statistics import median

from labkit import words
from labkit.charts import Palette, dot
from labkit.record import HostHistory, RankHistory, RunReader
from labkit.text import plain, slug
from labkit.view.live.hosts import by_host, host_memory, names_of, rank_ranges, watched
from labkit.view.live.verdict import host_verdicts
from labkit.view.tables import grid

TABLE_ROWS = 16


def rank_table(reader: RunReader) -> str:
    rows = rank_rows(reader)
    marks = [f"{dot(int(row['rank']))} " if len(reader.ranks) <= Palette.MOST_LINES else "" for row in rows]
    hosts = {history.host for history in reader.current.values() if history.host}
    which = "the slowest" if len(hosts) > 1 else "the first and the slowest"
    which = f"{len(rows)} that stand out among" if reader.folds else f"{which} of"
    more = f"{which} {len(reader.rank_numbers)} ranks" if len(rows) < len(reader.rank_numbers) else ""
    remarks = [more, _window(list(reader.current.values()))]
    return grid(rows, marks, sentences=("",) if len(hosts) > 1 else ()) + _remark("; ".join(filter(None, remarks)))


def _window(histories: list[RankHistory]) -> str:
    """The steps over which the figures in the table, and the shares in the verdict, are means."""
    if not any(h.recent_step_seconds for h in histories):
        return ""
    steps = max(h.recent_steps for h in histories)
    if steps == 1:
        return "samples/s, step times and shares: of the last step"
    last = f"last {words.quantity(steps)} steps" if steps else "last steps"
    return f"samples/s, step times and shares: means of the {last}"


def rank_rows(reader: RunReader) -> list[dict[str, str]]:
    """All ranks; if there are too many, the first and those with the most work of their own, in which they do not wait
    for others; with several hosts only the latter."""
    histories = list(reader.current.values())
    names = names_of(by_host(histories))
    if len(histories) > TABLE_ROWS:
        slowest = sorted(histories, key=lambda h: h.own_seconds or h.recent_step_seconds, reverse=True)
        first = histories[: TABLE_ROWS // 2] if len(names) < 2 else []
        shown = {h.rank: h for h in (*first, *slowest[: TABLE_ROWS // 2])}
        histories = [shown[rank] for rank in sorted(shown)]
    return [
        _rank_row(history, names[history.host] if len(names) > 1 else "")
        | ({"peak host memory (PSS)": memory} if (memory := host_memory(reader, history)) else {})
        for history in histories
    ]


def _rank_row(history: RankHistory, host: str) -> dict[str, str]:
    latest = history.latest
    return {
        "rank": str(history.rank),
        **({"host": plain(host)} if host else {}),
        "device": history.device,
        "step": f"{history.step:,}",
        "loss": words.quantity(latest.get("loss"), 4),
        "samples/s": words.quantity(history.recent_throughput),
        "step time": words.seconds(history.recent_step_seconds or latest.get("step_seconds")),
        "input wait": words.percent(history.recent_share("input") if history.recent_step_seconds else None),
        **({"communication": words.percent(history.recent_share("communication"))} if history.communicates else {}),
        **({} if host else {"state held": words.gib(history.held_bytes)}),
        f"peak {history.memory_name}": words.gib(history.memory_peak or None),
        **({"reserved": words.gib(latest["reserved"])} if "reserved" in latest and not host else {}),
    }


def host_rows(reader: RunReader) -> list[dict[str, str]]:
    """One row per host if there are several: its ranks combined, and the readings of its driver and system.

    `own work` is the median of its ranks' input, forward and optimizer: in backward all hosts wait for the slowest.
    """
    return _rows_of_hosts(reader, by_host(reader.ranks.values()))


def _rows_of_hosts(reader: RunReader, hosts: dict[str, list[RankHistory]]) -> list[dict[str, str]]:
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
    waits = [h.recent_share("input") for h in ranks if h.recent_step_seconds]
    peak = max(h.memory_peak for h in ranks)
    devices = samples.used_by({h.uuid for h in ranks if h.uuid}) if samples else []
    busy = [d.utilisation for d in devices if d.utilisation is not None]
    return {
        "host": plain(host) or "not known yet",
        "ranks": rank_ranges({rank for h in ranks for rank in h.node_ranks}),
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


def machine_table(reader: RunReader, *, has_ended: bool) -> str:
    """Readings of the driver and the system, beside those of torch's allocator: a row for each machine and device.
    With several hosts, a row for each host, and the devices only if they are few."""
    table = _machines(reader)
    return table + (_remark("the last reading before the run ended") if table and has_ended else "")


def _machines(reader: RunReader) -> str:
    hosts = by_host(reader.ranks.values())
    above = _rows_of_hosts(reader, hosts)
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
    return f'<div style="opacity:.75;font-size:12px">{text}</div>' if text else ""


def _host_rows(host: HostHistory) -> list[dict[str, str]]:
    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.0f}%"

    def of(used: float | None, total: float | None) -> str:
        return "n/a" if used is None else f"{words.gib(used)} of {words.gib(total)}"

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
        row(f"GPU {i} {d.name}", d.utilisation, of(d.memory_used, d.memory_total), d.power, d.temperature)
        for i, d in enumerate(host.devices)
    ]
    return [machine, *devices]
