"""Draws a run as one HTML fragment, with the end of a rank's log, and as plain text. All text from a log, a script or a
file name is escaped here."""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from labkit import words
from labkit.charts import Palette
from labkit.files import read_json, read_object, tail_text
from labkit.record import LeftRunning, RunFolder, RunReader, State
from labkit.text import escaped, first_line, framed, in_lines, pill, plain, with_code
from labkit.view.live.hosts import by_host, heat_strips
from labkit.view.live.offers import in_log
from labkit.view.live.run_charts import Look, charts_svg
from labkit.view.live.tables import host_rows, machine_table, rank_rows, rank_table
from labkit.view.live.verdict import SENTENCES, verdict, weighed

TRACE = "max-height:260px;overflow:auto;white-space:pre-wrap;margin:4px 0;font-size:12px"
SHOWN_FAILURES = 8
STRIPS_SECONDS = 4.0
LOG_BYTES = 16_000
SEARCHED_BYTES = 1 << 20
LOG_LINES = 10


def run_html(
    folder: RunFolder,
    reader: RunReader,
    state: State,
    *,
    with_log: bool = True,
    with_charts: bool = True,
    watched: bool = True,
    log_rank: int | None = None,
    search: str = "",
    look: Look | None = None,
) -> str:
    """State, cause of a failure, notices, headline, verdict, charts, tables of ranks and machines, end of a log.

    The log is that of `log_rank`, by default the rank that failed or rank 0; `search` selects lines that contain
    that text.
    Pass `watched=False` for a snapshot of a run that continues unwatched. `look` is how the charts are drawn.
    """
    drawn = with_charts and any(history.step for history in reader.ranks.values())
    if log_rank is None:
        log_rank = (state.cause and state.cause.rank) or 0
    return framed(
        f"{_pill(folder, reader, state, watched)}{_cause(state)}{_tracebacks(folder, state)}{_notices(folder, state)}"
        f"{_progress(reader, state)}{_earlier(state)}"
        f"{charts_svg(reader, look or Look(), _stall(folder, state)) if drawn else ''}{_strips(reader)}"
        f"{_tables(reader, state)}{_unread(reader)}"
        f"{log_html(reader.attempt, log_rank, search) if with_log else ''}"
    )


def run_text(folder: RunFolder, reader: RunReader, state: State) -> str:
    """The run as plain text, for terminals, diffs and front ends that do not render HTML."""
    first, warnings = [words.headline(reader, state)], [text for text in _warnings(folder, state) if text]
    if state.wrong:
        first, warnings = [*warnings, *first], []
    loss = words.mean_latest(reader, "loss")
    name = state.state if state.cause or state.stuck_since is not None else words.status(state, loss)
    lines = [f"{folder.id}: {name} after {words.seconds(state.seconds)}", *first]
    lines += ["  ".join(f"{name} {value}" for name, value in values)] if (values := words.reported(reader)) else []
    lines += [words.attempt_ended(number, ended) for number, ended in enumerate(state.earlier, 1)]
    lines += [text for text in (*warnings, *_explanation(state), *verdict(reader, state)) if text]
    for row in (*host_rows(reader), *rank_rows(reader)) if _recorded(reader, state) else ():
        lines.append("  " + "  ".join(f"{name} {value}".strip() for name, value in row.items() if value))
    lines += [offer] if (offer := in_log(reader)) else []
    return plain("\n".join(lines))


def _tables(reader: RunReader, state: State) -> str:
    """The ranks, then the machine; with several hosts, the hosts first, because there are fewer of them."""
    ranks = rank_table(reader) if _recorded(reader, state) else ""
    machines = machine_table(reader, has_ended=state.is_final)
    return machines + ranks if len(by_host(reader.ranks.values())) > 1 else ranks + machines


def _recorded(reader: RunReader, state: State) -> bool:
    """Whether there are records to show: there are none after a script without a model has ended."""
    return not state.is_final or any(history.held or history.step for history in reader.ranks.values())


def _unread(reader: RunReader) -> str:
    remarks = [f"{reader.undecodable} lines of metrics could not be read"] if reader.undecodable else []
    remarks += [f"{reader.dropped} measurements were dropped"] if reader.dropped else []
    untracked = next((history.untracked for history in reader.reporting if history.untracked), "")
    remarks += (
        [f"{escaped(untracked)} and what the script logs under further names is not recorded"] if untracked else []
    )
    remarks += [with_code(offer)] if (offer := in_log(reader)) else []
    return f'<div style="opacity:.75">{"; ".join(remarks)}</div>' if remarks else ""


def _pill(folder: RunFolder, reader: RunReader, state: State, watched: bool) -> str:
    suffix = "" if watched else " when last seen"
    return (
        '<div style="display:flex;gap:12px;flex-wrap:wrap;align-items:baseline">'
        f"{state_pill(state, words.mean_latest(reader, 'loss'), suffix)}<code>{escaped(folder.id)}</code>"
        f"<span>{words.seconds(state.seconds)}</span></div>"
    )


def state_pill(state: State, loss: float | None, suffix: str = "") -> str:
    """The state of a run in words, with its mark and in its colour; `loss` is the newest."""
    is_doubtful = words.is_doubtful(state, loss)
    mark = "▲" if is_doubtful else "‖" if state.is_paused else Palette.MARKS[state.state]
    return pill(f"{mark} {words.status(state, loss)}{suffix}", _colour(state, is_doubtful or state.is_paused))


def _colour(state: State, is_unusual: bool) -> str:
    return Palette.AMBER if is_unusual else Palette.STATES[state.state]


def _tint(reader: RunReader, state: State) -> str:
    return _colour(state, words.is_doubtful(state, words.mean_latest(reader, "loss")))


def _progress(reader: RunReader, state: State) -> str:
    return (
        f"{_bar(words.fraction(reader), _tint(reader, state))}<div>{escaped(words.headline(reader, state))}</div>"
        f"{_reported(reader)}{_verdict(reader, state)}"
    )


def _stall(folder: RunFolder, state: State) -> tuple[float, float] | None:
    """From when to when no rank made progress, in seconds since the launch."""
    if state.stuck_since is None or (launched := folder.glimpsed_manifest().launched) is None:
        return None
    return state.stuck_since - launched, (state.ended or time.time()) - launched


def _reported(reader: RunReader) -> str:
    """The script's own metrics, as a row that wraps."""
    pairs = "".join(
        f'<span><span style="opacity:.7">{escaped(name)}</span> <b>{escaped(value)}</b></span>'
        for name, value in words.reported(reader)
    )
    style = "display:flex;flex-wrap:wrap;gap:0 18px;font-variant-numeric:tabular-nums"
    return f'<div style="{style}">{pairs}</div>' if pairs else ""


def _bar(fraction: float | None, tint: str) -> str:
    """The progress bar of a run of known length; the headline has the same in words."""
    if fraction is None:
        return ""
    done = f'<div style="width:{fraction:.1%};height:4px;border-radius:2px;background:{tint}"></div>'
    return f'<div aria-hidden="true" style="margin:5px 0 3px;border-radius:2px;background:#8b949e40">{done}</div>'


def _verdict(reader: RunReader, state: State) -> str:
    """The verdict, its first sentence in bold if it matters; below a cause or a finding, which are bold, it is not."""
    matters, others = weighed(reader, state)
    sentences = [escaped(sentence) for sentence in [*matters, *others][:SENTENCES]]
    if sentences and (state.cause or state.stuck_seconds is not None):
        return f"<div>last recorded: {'; '.join(sentences)}</div>"
    leads = 1 if matters and not state.wrong else 0
    most_urgent = [f"<b>{sentence}</b>" for sentence in sentences[:leads]]
    return "".join(f"<div>{sentence}</div>" for sentence in most_urgent + sentences[leads:])


def _strips(reader: RunReader) -> str:
    """When each rank was late; only for many ranks or several hosts."""
    if reader.folds:
        return _folded_strips(reader, round(reader.folds.seen / STRIPS_SECONDS))
    histories = reader.ranks.values()
    hosts = {h.rank: h.host for h in histories} if len(by_host(histories)) > 1 else {}
    if len(reader.ranks) <= Palette.MOST_LINES and not hosts:
        return ""
    own = all(h.series["own_seconds"].last for h in histories)
    series = {h.rank: h.series["own_seconds" if own else "step_seconds"] for h in histories}
    return heat_strips("own work (input, forward, optimizer)" if own else "step time", series, hosts)


@lru_cache(maxsize=8)
def _folded_strips(reader: RunReader, time: int) -> str:
    """The strips, drawn again only after STRIPS_SECONDS, because with many ranks they are the most expensive part of
    the page."""
    folds = reader.folds
    assert folds is not None
    return heat_strips("own work (input, forward, optimizer)", folds.own, folds.hosts, folds.shown)


def _explanation(state: State) -> list[str]:
    """Why the run ended and what to do about it."""
    return [state.cause.sentence, state.cause.advised] if state.cause else []


def _notices(folder: RunFolder, state: State) -> str:
    return "".join(
        f'<div style="border-left:4px solid {Palette.AMBER};padding:2px 10px;margin:6px 0">{in_lines(text)}</div>'
        for text in _warnings(folder, state)
        if text
    )


def _warnings(folder: RunFolder, state: State) -> list[str | None]:
    ended = [left.outcome for left in LeftRunning.read(folder).values()] if state.is_final else []
    failed = [f"an alert was not sent: {why}" for why in read_object(folder.alerts).get("failed") or ()]
    return [state.notice, *ended, *_failed_exports(folder), *failed]


def _failed_exports(folder: RunFolder) -> list[str]:
    """The live exports that stopped; the run goes on without them."""
    exports = read_json(folder.exports)
    failures = exports.items() if isinstance(exports, dict) else ()
    return [f"not exported to {to}: {e['error']}" for to, e in failures if isinstance(e, dict) and e.get("error")]


def _earlier(state: State) -> str:
    return "".join(f"<div>↻ {escaped(words.attempt_ended(n, e))}</div>" for n, e in enumerate(state.earlier, 1))


def _tracebacks(folder: RunFolder, state: State) -> str:
    """The other ranks' exceptions, folded: consequences of the first, or separate failures."""
    if state.state != "failed":
        return ""
    latest, first = folder.latest, state.cause.rank if state.cause else None
    failures = {rank: read_json(latest.error(rank)) for rank in latest.started_ranks() if rank != first}
    return "".join(
        f"<details><summary>rank {rank}: {escaped(str(failure.get('exception')))}: "
        f"{escaped(first_line(str(failure.get('message'))))}</summary>"
        f'<pre style="{TRACE}">{escaped("".join(map(str, trace)))}</pre></details>'
        for rank, failure in list(failures.items())[:SHOWN_FAILURES]
        if isinstance(failure, dict) and isinstance(trace := failure.get("traceback"), list)
    )


def _cause(state: State) -> str:
    if not state.cause:
        return ""
    sentence, advice = (with_code(text) for text in _explanation(state))
    trace = escaped("".join(state.cause.traceback))
    more = f'<details open><summary>traceback</summary><pre style="{TRACE}">{trace}</pre></details>' if trace else ""
    text = f"<b>{sentence}</b>" + (f'<div style="white-space:pre-line">{advice}</div>' if advice else "")
    style = f"border-left:4px solid {Palette.STATES[state.state]};padding:2px 10px;margin:6px 0"
    return f'<div style="{style}">{text}{more}</div>'


def log_html(folder: RunFolder, rank: int, search: str = "") -> str:
    lines = tail_of_log(folder, rank, LOG_LINES, search)
    if not lines:
        return f'<div style="font-size:11px;opacity:.75">rank {rank}: no line with that text</div>' if search else ""
    text = escaped("\n".join(line[:300] for line in lines))
    style = "margin:4px 0;padding:4px 8px;font:11px monospace;overflow:auto;max-height:170px;border:1px solid #8886"
    return f'<div style="font-size:11px;opacity:.75">rank {rank}, end of its log</div><pre style="{style}">{text}</pre>'


def tail_of_log(folder: RunFolder, rank: int, lines: int, search: str = "") -> list[str]:
    """The last lines of a rank's stdout and stderr that contain `search`, without terminal codes. It reads only the
    end of the files; a search reads more."""
    size, most = (SEARCHED_BYTES, None) if search else (LOG_BYTES, lines)
    streams = [
        [line for line in _end_of(folder.log(rank, stream), size, most) if search.lower() in line.lower()]
        for stream in ("stdout", "stderr")
    ]
    non_empty = [stream[-lines:] for stream in streams if stream]
    share = lines // max(1, len(non_empty))  # neither stream crowds out the other
    return [line for stream in non_empty for line in stream[-share:]]


def _end_of(path: Path, size: int, most: int | None) -> list[str]:
    """The lines in the last `size` bytes; of more than `most`, at least the last `most`."""
    text = tail_text(path, size)
    return plain(text if most is None else "\n".join(text.rsplit("\n", most + 1)[-most - 1 :])).splitlines()
