"""Finds errors that a run went on after, though part of it may never have happened: those that ended a thread, an
atexit handler or a child process of a rank, which Python reports on stderr before it goes on.

Only Python's own reports count, by the frame that they begin with, because a script may print similar text. Exceptions
in `__del__` are left out: libraries cause them while the interpreter ends, and nothing is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from labkit.files import in_parallel, opened
from labkit.launcher.causes.evidence import COLLATERAL, Evidence
from labkit.launcher.causes.sentences import at, ranks_in_words
from labkit.record import Place, RunFolder
from labkit.text import first_line

READ_BYTES = 4 << 20  # of the beginning and of the end of a log
READ_REPORTS, READ_LINES = 50, 5000  # of one rank, of one report
NAMED_ERRORS = 3
BEGIN = r"(?:^|\r[^\r\n]*)"  # of a line, or behind a progress bar
# The first line of a report, and the file and function of its outermost frame, if that is Python's.
REPORTS = (
    ("a thread", re.compile(BEGIN + r"Exception in thread .*:$", re.MULTILINE), ("threading.py", "_bootstrap_inner")),
    ("a thread", re.compile(BEGIN + r"Exception ignored in thread started by\b.*$", re.MULTILINE), None),
    ("an atexit handler", re.compile(BEGIN + r"Exception ignored in atexit callback\b.*$", re.MULTILINE), None),
    ("a process", re.compile(BEGIN + r"Process \S+:$", re.MULTILINE), ("process.py", "_bootstrap")),
)
TRACEBACK = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
IN_GROUP = "  | "  # before each line of the traceback of an exception group
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')
ERROR = re.compile(r"(\w+\.)*(?P<name>[A-Z]\w*)(?P<message>: .*)?$")
ENDINGS = ("SystemExit", "KeyboardInterrupt")  # exceptions that ask for an end


@dataclass(frozen=True)
class Report:
    """`error` is such as "ValueError: boom"; `frames` are (file, line), innermost first."""

    what: str
    error: str
    frames: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Beside:
    """What was raised beside the scripts of `ranks`, in one sentence, first of all at `where`."""

    sentence: str
    ranks: tuple[int, ...]
    where: Place | None


def raised_beside(evidence: Evidence, ranks: Iterable[int]) -> Beside | None:
    """What the threads, atexit handlers and child processes of these ranks raised; None if nothing."""
    numbers, attempt = list(ranks), evidence.folder
    raised: dict[Report, list[int]] = {}  # by which ranks
    for rank, reports in zip(numbers, in_parallel(lambda rank: _read(attempt, rank), numbers), strict=True):
        for report in dict.fromkeys(reports):
            raised.setdefault(report, []).append(rank)
    causes = [report for report in raised if not COLLATERAL.search(report.error)] or [*raised]
    if not causes:
        return None
    causes.sort(key=lambda report: [what for what, _, _ in REPORTS].index(report.what))
    shown = [(_whose(r.what, raised[r]), r.error, _place(r, evidence)) for r in causes[:NAMED_ERRORS]]
    sentences = [f"{whose} raised {error}{at(place)}" for whose, error, place in shown]
    more = len(causes) - len(sentences)
    sentence = "; ".join(sentences) + (f"; and {more} more" if more else "")
    return Beside(sentence, tuple(raised[causes[0]]), shown[0][2])


def _read(attempt: RunFolder, rank: int) -> list[Report]:
    """What the rank's stderr reports: its end, and its beginning if it is long."""
    try:
        with opened(attempt.log(rank, "stderr")) as file:
            size = file.seek(0, 2)
            file.seek(0)
            content = file.read(READ_BYTES)
            if size > len(content):
                file.seek(max(len(content), size - READ_BYTES))
                content += b"\n" + file.read(READ_BYTES)
    except OSError:
        return []
    return list(islice(_reports(content.decode("utf-8", "replace")), READ_REPORTS))


def _reports(text: str) -> Iterator[Report]:
    for what, first, outermost in REPORTS:
        for match in first.finditer(text):
            lines = text[match.end() + 1 : match.end() + READ_BYTES].split("\n", READ_LINES)
            report = _parsed(what, lines, outermost)
            if report is not None:
                yield report


def _parsed(what: str, lines: Sequence[str], outermost: tuple[str, str] | None) -> Report | None:
    """The report whose traceback these lines begin with; None if it is not Python's own."""
    if not lines or not (traceback := TRACEBACK.match(lines[0])):
        return None
    frames: list[tuple[str, int, str]] = []
    rest = iter(lines[1:])
    error = ""
    for whole in rest:
        line = whole.removeprefix(IN_GROUP) if traceback[1] else whole
        if frame := FRAME.match(line):
            frames.append((frame["file"], int(frame["line"]), frame["function"]))
        elif not line.startswith("  "):
            error = line
            break
    following = [*rest]
    for index, line in enumerate(following):
        if line.startswith(CHAINED):
            return _parsed(what, following[index + 2 :], outermost)
        if TRACEBACK.match(line) or any(first.search(line) for _, first, _ in REPORTS):
            break  # another traceback
    name = ERROR.match(error)
    if name is None or name["name"] in ENDINGS or not frames:
        return None
    if outermost and (Path(frames[0][0]).name, frames[0][2]) != outermost:
        return None
    places = tuple((file, number) for file, number, _ in reversed(frames))
    return Report(what, first_line(name["name"] + (name["message"] or "")), places)


def _whose(what: str, ranks: Sequence[int]) -> str:
    whose = ("each of " if len(ranks) > 1 else "") + ranks_in_words(ranks)
    return f"{what} that {whose} started" if what == "a process" else f"{what} of {whose}"


def _place(report: Report, evidence: Evidence) -> Place:
    """The innermost line of the script, or else of the traceback."""
    line = next((line for file, line in report.frames if file == evidence.path), None)
    file, number = report.frames[0]
    return evidence.locate(line) or Place(number, Path(file).name)
