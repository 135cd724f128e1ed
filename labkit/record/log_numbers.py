"""Reads numbers that rank 0 only prints or logs: `epoch 3 val_acc: 0.93`, `{'val_acc': 0.93}`, `val_acc=93%`.

A log does not say when its lines were written. So the sampler of rank 0's machine notes in `ranks/0/log_sizes.jsonl`
how long both logs are, once a second if they have grown, by the clock of the rank's records:

    {"t": …, "stdout": 5120, "stderr": 0}

The time of a line is that at which the log was first seen to have it, at most about a second late.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

from labkit import rank_files
from labkit.files import number, opened, tail_text
from labkit.metric_names import EVALUATED, TRAINED
from labkit.record.records import Record, Report, Scalar, Step
from labkit.tail import CHUNK_BYTES, Tail

STREAMS = ("stdout", "stderr")
LAST_SECONDS = 1.0  # after the last look at the log, for what was written later
LONGEST_LINE = 2000  # a longer one is no line about a metric
GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+"  # 1,234,567; any other comma between digits may be a decimal one or part of a list
NUMBER = rf"([-+]?(?:{GROUPED}(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|[-+]?inf)"
VALUE = rf"""["']?(?:\s*[:=]\s*|\s+)["']?(?:\w+\()?{NUMBER}(?!\.?\w|,\d)"""
DATA = "|".join((*EVALUATED, *TRAINED))
PAIR = re.compile(rf"(?<![\w.@/-])((?:(?:{DATA}) )?[a-z][\w.@/-]*?){VALUE}", re.IGNORECASE)
STEP = re.compile(
    rf"""\b(?:global[_ ])?(?:step|iter|iteration)s?["']?\s*[:=#]?\s*\[?({GROUPED}|\d{{1,15}})\b(?!,\d)""", re.IGNORECASE
)


class Line(NamedTuple):
    """The value of a metric in a line that was written between `since` and `t`, and the step that the line names."""

    t: float
    since: float
    step: int | None
    value: float


class LogNumbers:
    """The lines with one metric in the logs in the folder of a rank, as they are written."""

    def __init__(self, home: Path, name: str):
        self._streams = {stream: _Stream(home / f"{stream}.log", name) for stream in STREAMS}
        self._sizes = Tail(home / rank_files.LOG_SIZES, self._take_sizes)

    def poll(self, *, everything: bool = False) -> list[Line]:
        """The new lines whose time is known; with `everything` all lines so far, if the log was ever looked at."""
        while self._sizes.poll():
            pass
        lines = [line for stream in self._streams.values() for line in stream.poll(everything)]
        return sorted(lines, key=attrgetter("t"))

    def _take_sizes(self, record: dict[str, object]) -> bool:
        for name, stream in self._streams.items():
            size, t = number(record[name]), number(record["t"])
            if size is not None and t is not None:
                stream.sizes.append((t, size))
        return True


class _Stream:
    def __init__(self, path: Path, name: str):
        self._path = path
        self._name = name.lower().encode()
        self._pattern = _pattern(name)
        self.sizes: deque[tuple[float, float]] = deque()
        self._since = 0.0  # when it was last seen to be shorter
        self._offset = 0
        self._rest = b""
        self._found: deque[tuple[int, int | None, float]] = deque()  # where the line ends, its step, its value

    def poll(self, everything: bool) -> Iterator[Line]:
        while self._read() and everything:
            pass
        while self._found:
            end, step, value = self._found[0]
            while self.sizes and self.sizes[0][1] < end:
                self._since, _ = self.sizes.popleft()
            if not self.sizes and not (everything and self._since):
                return
            t = self.sizes[0][0] if self.sizes else self._since + LAST_SECONDS
            self._found.popleft()
            yield Line(t, self._since, step, value)
        while self.sizes and self.sizes[0][1] <= self._offset - len(self._rest):  # there is no line of that time
            self._since, _ = self.sizes.popleft()

    def _read(self) -> bool:
        """Find the metric in the next part of the log; returns whether there was one."""
        try:
            with opened(self._path) as file:
                file.seek(self._offset)
                new = file.read(CHUNK_BYTES)
        except OSError:
            return False
        start = self._offset - len(self._rest)
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-CHUNK_BYTES:]
        for line in lines:
            start += len(line) + 1
            if self._name in line[:LONGEST_LINE].lower():
                text = line[:LONGEST_LINE].decode("utf-8", "replace")
                if found := self._pattern.search(text):
                    step = STEP.search(text)
                    self._found.append((start, int(_plain(step[1])) if step else None, float(_plain(found[1]))))
        return bool(new)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.@/-]){re.escape(name)}{VALUE}", re.IGNORECASE)


def _plain(number: str) -> str:
    """The number without the commas between its thousands."""
    return number.replace(",", "")


class Printed(Report):
    """A number in the log of a rank."""

    __slots__ = ()


def with_log(records: Sequence[Record], home: Path, names: Iterable[str]) -> list[Record]:
    """The records of a rank, and the values of these metrics in its log, in the order of their times. The step of a
    value is the one that its line names, if the rank made it between the looks at its log. Otherwise it has none, and
    the values between two looks are spread over the steps recorded meanwhile, the last one at the last."""
    steps = [(each.t, each.step) for each in records if isinstance(each, Step) and each.step is not None]
    times = [t for t, _ in steps]
    reports = []
    for name in names:
        for t, group in groupby(LogNumbers(home, name).poll(everything=True), attrgetter("t")):
            lines = [*group]
            meanwhile = times[bisect_right(times, lines[0].since) : bisect_right(times, t)] or [t]
            for count, line in enumerate(lines, 1):
                spread = meanwhile[max(0, count * len(meanwhile) // len(lines) - 1)]
                step = named_step(line, steps)
                values: dict[str, Scalar] = {name: line.value}
                reports.append(Printed(spread if step is None else t, step, values, is_tracked=True))
    return sorted([*records, *reports], key=attrgetter("t")) if reports else list(records)


def named_step(line: Line, steps: Sequence[tuple[float, int]]) -> int | None:
    """The step that a line names, if it was made between the looks at the log. `steps` are the recorded ones with their
    times."""
    if line.step is None or not steps:
        return None
    before = bisect_right(steps, line.since, key=itemgetter(0)) - 1
    after = min(bisect_left(steps, line.t, key=itemgetter(0)), len(steps) - 1)
    least, most = steps[before][1] if before >= 0 else 0, steps[after][1]
    return line.step if least - 1 <= line.step <= most + 1 else None


def at_end_of_log(home: Path, names: Iterable[str], size: int) -> list[Report]:
    """The values of these metrics in the last `size` bytes of both logs, in order, if the log was ever looked at."""
    if not (home / rank_files.LOG_SIZES).exists():
        return []
    logs = [tail_text(home / f"{stream}.log", size).replace("\r", "\n").split("\n")[:-1] for stream in STREAMS]
    return [
        Printed(0.0, None, {name: float(_plain(found[1]))}, is_tracked=True)
        for name, pattern in ((name, _pattern(name)) for name in names)
        for lines in logs
        for line in lines
        if (found := pattern.search(line[:LONGEST_LINE]))
    ]


def numbers_in(text: str, times: int) -> dict[str, list[Decimal]]:
    """The numbers, one of a line and as precise as printed, by the name before them, if that is in at least so many
    lines of a log."""
    numbers: defaultdict[str, list[Decimal]] = defaultdict(list)
    for line in text.replace("\r", "\n").split("\n"):
        first: dict[str, str] = {}
        for found in PAIR.finditer(line[:LONGEST_LINE]):
            first.setdefault(found[1], found[2])
        for name, text_of_number in first.items():
            numbers[name].append(Decimal(_plain(text_of_number)))
    return {name: each for name, each in numbers.items() if len(each) >= times}
