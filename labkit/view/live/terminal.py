"""Shows a live run in a terminal: one line that is rewritten in place, or the whole view drawn with rich."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import signal
import sys
from types import TracebackType
from typing import Any

from labkit import words
from labkit.charts import spark_text
from labkit.record import RunReader, State
from labkit.text import plain, without_nan
from labkit.view.live.page import tail_of_log
from labkit.view.live.tables import host_rows, rank_rows
from labkit.view.live.verdict import SENTENCES, weighed
from labkit.view.run_facts import progress_facts

LOG_LINES = 6
STYLES = {"running": "blue", "succeeded": "green", "failed": "bold red", "stopped": "yellow", "lost": "red"}
CURVES = {"loss": "loss", "throughput": "samples/s", "memory": "memory"}
LINE = re.compile(r"labkit: (?P<text>.*) (?P<facts>\{.*\})\s*$")


class StatusLine:
    """One terminal line, rewritten in place; if stdout is not a terminal, one line after another, which a program can
    also read if they are `for_programs`."""

    def __init__(self, *, for_programs: bool = True) -> None:
        self.is_live = sys.stdout.isatty()
        self._for_programs = for_programs and not self.is_live
        self._width = 0

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, reader: RunReader, state: State) -> None:
        self.write((progress_line if self._for_programs else words.headline)(reader, state))

    def write(self, text: str) -> None:
        if not self.is_live:
            print(text, flush=True)
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:<{self._width}}", end="", flush=True)
        self._width = len(text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, flush=True)

    def relay(self, text: str) -> None:
        """Show a line that another process printed: one for programs is rewritten in place, any other stays."""
        progress = read_progress_line(text)
        if progress is None or not self.is_live:
            self.say(plain(text))
            return
        text_of_run, facts = progress
        if facts.get("state") in State.FINAL:
            self.say(plain(f"{facts['run']}: {facts['state']}, {text_of_run}"))
        else:
            self.write(plain(f"{facts['run']}: {text_of_run}"))

    def clear(self) -> None:
        if self.is_live and self._width:
            print(f"\r{'':<{self._width}}\r", end="", flush=True)


class Screen:
    """The notebook's live view as text, drawn with rich. It disappears when the run ends."""

    is_live = True

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(auto_refresh=False, transient=True, vertical_overflow="crop")

    def __enter__(self) -> Screen:
        if self._live.console.is_terminal:
            atexit.register(_show_cursor)  # a second Ctrl-C may end `__exit__` before it has shown the cursor again
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
        atexit.unregister(_show_cursor)

    def show(self, reader: RunReader, state: State) -> None:
        self._live.update(picture(reader, state), refresh=True)

    def say(self, text: str) -> None:
        """Do nothing: `show` draws it from the state."""


def _show_cursor() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third interrupt is ignored
    print("\x1b[?25h", end="", flush=True)


def picture(reader: RunReader, state: State) -> Any:
    """A run as a rich renderable. Text from ranks is printed literally: no markup, no terminal codes."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    loss = words.mean_latest(reader, "loss")
    style = "bold yellow" if words.is_doubtful(state, loss) else STYLES.get(state.state, "")
    head = Text(f"● {plain(words.status(state, loss))}", style)
    head.append(f"  {reader.folder.id}  {words.seconds(state.seconds)}", "default")
    parts: list[Any] = [head, *([Text(plain(state.notice), "bold yellow")] if state.notice else [])]
    parts += [Text(words.headline(reader, state))]
    values = words.reported(reader)
    parts += [Text(plain("  ".join(f"{name} {value}" for name, value in values)))] if values else []
    matters, others = weighed(reader, state)
    parts += [Text(sentence, "" if sentence in matters else "dim") for sentence in [*matters, *others][:SENTENCES]]
    parts += [Text(f"↻ {plain(words.attempt_ended(n, e))}") for n, e in enumerate(state.earlier, 1)]
    curves = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name, title in CURVES.items():
        lines = [line for line in reader.lines(name).values() if line.last][:1]
        for series in lines:
            curves.add_row(title, Text(spark_text([last for *_, last in series.points()]), "blue"))
    tables = [_table(rows) for rows in (host_rows(reader), rank_rows(reader)) if rows]
    log = tail_of_log(reader.attempt, 0, LOG_LINES)
    parts += [curves, *tables, *([Rule(Text("log of rank 0"), style="dim"), Text("\n".join(log))] if log else [])]
    return Group(*parts)


def _table(rows: list[dict[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="right", vertical="bottom")
    for row in rows:
        table.add_row(*(Text(row.get(name, "")) for name in names))
    return table


def progress_line(reader: RunReader, state: State) -> str:
    """`labkit: step 30 of 60 (50%) · loss 1.2 · … {"run": …, "state": "running", "step": 30, "loss": 1.2, …}`"""
    facts = progress_facts(reader, state)
    known = without_nan({name: value for name, value in facts.items() if value is not None})
    # one line, including the notice: a queued run has nothing else to show
    text = " · ".join(filter(None, [words.headline(reader, state), " ".join((state.notice or "").split())]))
    return f"labkit: {plain(text)} {json.dumps(known)}"


def read_progress_line(line: str) -> tuple[str, dict[str, Any]] | None:
    """`(text, facts)` of a progress line, ignoring anything before it; None if it is not one."""
    match = LINE.search(line)
    try:
        facts = json.loads(match["facts"]) if match else None
    except ValueError:
        return None
    if match and isinstance(facts, dict) and isinstance(facts.get("run"), str):
        return match["text"], facts
    return None
