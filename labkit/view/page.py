"""A run as one piece of HTML, and as plain text. Everything from a log, a script or a file name is escaped here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.record import RankHistory, RunFolder, RunReader, State
from labkit.record.files import opened
from labkit.record.folder import read_json
from labkit.record.hosts import HostHistory
from labkit.record.text import escaped, plain
from labkit.view import words
from labkit.view.bands import MANY, heat_strips
from labkit.view.svg import Chart, charts, dot
from labkit.view.verdict import verdict

__all__ = ["attempt_ended", "rank_rows", "run_charts", "run_html", "run_text", "tail_of_log"]

MARKS = {"starting": "◌", "running": "●", "succeeded": "✔", "failed": "✖", "stopped": "■", "lost": "?"}
TINTS = {"succeeded": "#2da44e", "failed": "#e5534b", "stopped": "#c9a227", "lost": "#e5534b"}
LOG_BYTES = 16_000
SEARCHED_BYTES = 1 << 20
LOG_LINES = 10
TABLE_ROWS = 16
SHOWN_FAILURES = 8

CELL = 'style="text-align:right;padding:1px 10px 1px 0;border:0"'
ROW = '<tr style="background:none">'
TABLE = '<table style="border-collapse:collapse;margin:4px 0;font-size:12px;font-variant-numeric:tabular-nums">'


def run_html(
    folder: RunFolder,
    reader: RunReader,
    state: State,
    *,
    with_log: bool = True,
    watched: bool = True,
    log_rank: int | None = None,
    search: str = "",
) -> str:
    """Headline, verdict, the cause of a failure, charts, tables of ranks and machines, and the end of a log.

    The log is `log_rank`'s, by default rank 0's or the culprit's; with `search`, its newest lines that hold that text.
    `watched` is False for a picture of a run that goes on unseen.
    """
    drawn = not state.is_final or any(history.step for history in reader.ranks.values())
    if log_rank is None:
        log_rank = int((state.cause or {}).get("rank") or 0)
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;max-width:760px">'
        f"{_head(folder, reader, state, watched)}{_notice(state)}{_earlier(state)}"
        f"{_cause(state)}{_tracebacks(folder, state)}"
        f"{charts(run_charts(reader)) if drawn else ''}{_strips(reader)}"
        f"{_table(reader)}{_hosts(reader)}{_unread(reader)}"
        f"{_log(folder.latest, log_rank, search) if with_log else ''}</div>"
    )


def run_text(folder: RunFolder, reader: RunReader, state: State) -> str:
    """The same in plain text, for terminals, diffs and front ends that show no HTML."""
    lines = [f"{folder.id}: {state.state} after {words.seconds(state.seconds)}", words.headline(reader, state)]
    lines += [attempt_ended(number, ended) for number, ended in enumerate(state.earlier, 1)]
    lines += [text for text in (state.notice, *_explanation(state), *verdict(reader)) if text]
    for values in rank_rows(reader):
        lines.append("  " + "  ".join(f"{name} {value}" for name, value in values.items()))
    return plain("\n".join(lines))


def run_charts(reader: RunReader) -> list[Chart]:
    """The four charts every run has."""
    first = next(iter(reader.ranks.values()), None)
    memory = first.memory_name if first else "allocated"

    def of(name: str) -> dict[int, Any]:
        return {rank: history.series[name] for rank, history in reader.ranks.items()}

    largest = max((history.memory_peak for history in reader.ranks.values()), default=0.0)
    limit = min((h.memory_limit for h in reader.ranks.values() if h.memory_limit), default=None)
    unit, restarts = 2**30 if largest >= 2**30 else 2**20, tuple(reader.restarts)
    return [
        Chart("loss", of("loss"), words.quantity, restarts=restarts),
        Chart("throughput per rank, samples/s", of("throughput"), words.quantity, restarts=restarts),
        Chart(f"step time{words.skew(reader)}", of("step_seconds"), words.seconds, restarts=restarts),
        Chart(f"memory per rank ({memory})", of("memory"), words.gib, unit, restarts, limit),
    ]


def _unread(reader: RunReader) -> str:
    dropped = sum(int(history.end.get("dropped") or 0) for history in reader.ranks.values())
    said = [f"{reader.undecodable} lines of metrics could not be read"] if reader.undecodable else []
    said += [f"{dropped} measurements were left out"] if dropped else []
    return f'<div style="opacity:.75">{"; ".join(said)}</div>' if said else ""


def _head(folder: RunFolder, reader: RunReader, state: State, watched: bool) -> str:
    tint = f"color:{TINTS[state.state]}" if state.state in TINTS else ""
    seen = "" if watched else " when last seen"
    mark = f'<b style="{tint}">{MARKS[state.state]} {state.state}{seen}</b>'
    time = words.seconds(state.seconds)
    name = escaped(folder.id)
    return (
        f'<div style="display:flex;gap:12px;flex-wrap:wrap">{mark}<code>{name}</code><span>{time}</span></div>'
        f"<div>{escaped(words.headline(reader, state))}</div>{_verdict(reader)}"
    )


def _verdict(reader: RunReader) -> str:
    said = "; ".join(verdict(reader))
    return f'<div style="opacity:.85">{escaped(said)}</div>' if said else ""


def _strips(reader: RunReader) -> str:
    """Which of many ranks were slow, and when; grouped by host."""
    if len(reader.ranks) <= MANY:
        return ""
    series = {rank: history.series["step_seconds"] for rank, history in reader.ranks.items()}
    hosts = {rank: str(history.meta.get("host", "")) for rank, history in reader.ranks.items()}
    several = len(set(hosts.values())) > 1
    return heat_strips("step time by rank", series, hosts if several else {})


def _hosts(reader: RunReader) -> str:
    """What the driver and the system say, beside what torch's allocator says above."""
    rows = [row for name in sorted(reader.hosts) for row in _host_rows(reader.hosts[name])][:TABLE_ROWS]
    return _grid(rows, [""] * len(rows))


def _host_rows(host: HostHistory) -> list[dict[str, str]]:
    def percent(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.0f}%"

    def of(used: float | None, total: float | None) -> str:
        return f"{words.gib(used)} of {words.gib(total)}"

    def row(what: str, busy: float | None, memory: str, power: float | None, heat: float | None) -> dict[str, str]:
        watts, degrees = ("n/a" if power is None else f"{power:.0f} W"), ("n/a" if heat is None else f"{heat:.0f} °C")
        return {"machine": plain(what), "busy": percent(busy), "memory in use": memory, "power": watts, "heat": degrees}

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


def attempt_ended(number: int, ended: dict[str, Any]) -> str:
    """`attempt 1 failed: rank 1 was killed (SIGKILL)…; begun again from step-40`"""
    cause = ended.get("cause")
    why = str(cause.get("sentence", "")) if isinstance(cause, dict) else ""
    checkpoint = ended.get("checkpoint")
    return f"attempt {number} failed: {why}; begun again from {checkpoint or 'the start'}"


def _explanation(state: State) -> list[str]:
    """The cause of the end and what to do about it."""
    return [str(state.cause.get(name) or "") for name in ("sentence", "advice")] if state.cause else []


def _notice(state: State) -> str:
    if not state.notice:
        return ""
    text = escaped(state.notice)
    return f'<div style="border-left:4px solid #c9a227;padding:2px 10px;margin:6px 0"><b>{text}</b></div>'


def _earlier(state: State) -> str:
    return "".join(f"<div>↻ {escaped(attempt_ended(n, e))}</div>" for n, e in enumerate(state.earlier, 1))


def _tracebacks(folder: RunFolder, state: State) -> str:
    """The other ranks' last words, folded: those that failed as a consequence, or in another way."""
    if state.state != "failed":
        return ""
    latest, first = folder.latest, (state.cause or {}).get("rank")
    last_words = {rank: read_json(latest.error(rank)) for rank in latest.started_ranks() if rank != first}
    return "".join(
        f"<details><summary>rank {rank}: {escaped(str(said.get('exception')))}: "
        f"{escaped(str(said.get('message'))[:200])}</summary>"
        f"<pre>{escaped(''.join(map(str, trace)))}</pre></details>"
        for rank, said in list(last_words.items())[:SHOWN_FAILURES]
        if isinstance(said, dict) and isinstance(trace := said.get("traceback"), list)
    )


def _cause(state: State) -> str:
    if not state.cause:
        return ""
    sentence, advice = (escaped(text) for text in _explanation(state))
    trace = escaped("".join(state.cause.get("traceback") or []))
    more = f"<details><summary>traceback</summary><pre>{trace}</pre></details>" if trace else ""
    tint = TINTS.get(state.state, "#8b949e")
    said = f"<b>{sentence}</b>" + (f"<div>{advice}</div>" if advice else "")
    return f'<div style="border-left:4px solid {tint};padding:2px 10px;margin:6px 0">{said}{more}</div>'


def _table(reader: RunReader) -> str:
    rows = rank_rows(reader)
    marks = [f"{dot(h.rank)} " if len(reader.ranks) <= MANY else "" for h in _shown(reader)]
    more = f"the first and the slowest of {len(reader.ranks)} ranks" if len(rows) < len(reader.ranks) else ""
    return _grid(rows, marks) + (f'<div style="opacity:.75">{more}</div>' if more else "")


def _grid(rows: list[dict[str, str]], marks: list[str]) -> str:
    """A table of text, with a mark of SVG before each row."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))  # a rank that has yet to begin has fewer
    head = "".join(f"<th {CELL}>{escaped(name)}</th>" for name in names)
    body = ""
    for row, mark in zip(rows, marks, strict=True):
        first, *others = (escaped(row.get(name, "")) for name in names)
        body += f"{ROW}<td {CELL}>{mark}{first}</td>" + "".join(f"<td {CELL}>{text}</td>" for text in others) + "</tr>"
    return f"{TABLE}{ROW}{head}</tr>{body}</table>"


def rank_rows(reader: RunReader) -> list[dict[str, str]]:
    return [_rank_row(history) for history in _shown(reader)]


def _shown(reader: RunReader) -> list[RankHistory]:
    """All ranks, of very many the first and the slowest."""
    histories = list(reader.ranks.values())
    if len(histories) <= TABLE_ROWS:
        return histories
    slowest = sorted(histories, key=lambda h: h.latest.get("step_seconds", 0.0), reverse=True)[: TABLE_ROWS // 2]
    kept = {h.rank: h for h in (*histories[: TABLE_ROWS // 2], *slowest)}
    return [kept[rank] for rank in sorted(kept)]


def _rank_row(history: RankHistory) -> dict[str, str]:
    latest = history.latest
    return {
        "rank": str(history.rank),
        "device": history.device,
        "step": f"{history.step:,}",
        "loss": words.quantity(latest.get("loss"), 4),
        "samples/s": words.quantity(latest.get("throughput")),
        "step time": words.seconds(latest.get("step_seconds")),
        "input wait": words.percent(words.share(history, "input")),
        "communication": words.percent(words.share(history, "communication")),
        "state held": words.gib(history.held_bytes),
        f"peak {history.memory_name}": words.gib(history.memory_peak or None),
        **({"reserved": words.gib(latest["reserved"])} if "reserved" in latest else {}),
    }


def _log(folder: RunFolder, rank: int, search: str = "") -> str:
    lines = tail_of_log(folder, rank, LOG_LINES, search)
    if not lines:
        return f'<div style="font-size:11px;opacity:.75">rank {rank}: no line with that text</div>' if search else ""
    text = escaped("\n".join(line[:300] for line in lines))
    style = "margin:4px 0;padding:4px 8px;font:11px monospace;overflow:auto;max-height:170px;border:1px solid #8886"
    return f'<div style="font-size:11px;opacity:.75">rank {rank}, end of its log</div><pre style="{style}">{text}</pre>'


def tail_of_log(folder: RunFolder, rank: int, lines: int, search: str = "") -> list[str]:
    """The last lines of a rank's output that hold `search`, both streams, without terminal codes. Reads the end of the
    files only, some more of it for a search."""
    size = SEARCHED_BYTES if search else LOG_BYTES
    streams = [
        [line for line in _end_of(folder.log(rank, stream), size) if search.lower() in line.lower()]
        for stream in ("stdout", "stderr")
    ]
    spoken = [stream[-lines:] for stream in streams if stream]
    share = lines // max(1, len(spoken))  # neither stream hides the other
    return [line for stream in spoken for line in stream[-share:]]


def _end_of(path: Path, size: int) -> list[str]:
    try:
        with opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return plain(file.read().decode("utf-8", "replace")).splitlines()
    except OSError:
        return []
