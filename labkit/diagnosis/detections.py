"""Defines the doctor's findings, lists the functions that produce them, and shows them: problems first, then facts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from labkit.diagnosis.facts import MachineFacts
from labkit.hardware import GpusUnknownError
from labkit.text import escaped, framed, plain

Level = Literal["stop", "warning", "note", "fine"]
LEVELS: tuple[Level, ...] = ("stop", "warning", "note", "fine")
_detections: list[Detection] = []
COLUMNS = 100
NAMES: dict[Level, str] = {
    "stop": "a launch would fail",
    "warning": "will go wrong or be slow",
    "note": "good to know",
    "fine": "facts",
}
MARKS: dict[Level, str] = {"stop": "✖", "warning": "▲", "note": "●", "fine": "✔"}
TINTS: dict[Level, str] = {"stop": "#e5534b", "warning": "#b08d1c", "note": "#2f81f7", "fine": "#2da44e"}


@dataclass(frozen=True)
class Diagnosis:
    """`what` was checked, its `value`, `why` it matters, and what `todo`.

    `level`: "stop", `labkit.launch` with its defaults would be refused or fail; "warning", something will go wrong or
    be slow; "note", good to know; "fine", a fact.
    """

    what: str
    value: str
    why: str = ""
    todo: str = ""
    level: Level = "fine"


Detection = Callable[[MachineFacts], Diagnosis | Iterable[Diagnosis] | None]


def detection(function: Detection) -> Detection:
    """Register a detection: a pure function of facts that returns None, a Diagnosis or several."""
    _detections.append(function)
    return function


def diagnose(facts: MachineFacts) -> tuple[Diagnosis, ...]:
    """All findings, the most urgent first."""
    findings = [finding for function in _detections for finding in _findings_of(function, facts)]
    if facts.hardware.platform == "windows":  # labkit does not run there, so nothing else matters
        findings = [finding for finding in findings if finding.level == "stop"]
    return tuple(sorted(findings, key=lambda finding: LEVELS.index(finding.level)))


def _findings_of(function: Detection, facts: MachineFacts) -> tuple[Diagnosis, ...]:
    try:
        result = function(facts)
        return () if result is None else (result,) if isinstance(result, Diagnosis) else tuple(result)
    except GpusUnknownError:  # the detection `devices` says why
        return ()
    except Exception as error:  # one failing detection must not hide the others
        name = function.__name__.replace("_", " ")
        return (Diagnosis(name, "n/a", f"the detection failed: {error!r}", "report this", "note"),)


def headline(findings: Sequence[Diagnosis]) -> str:
    """`1 stop, 2 warnings, 1 note`, or `nothing to do`."""
    counts = [(level, sum(finding.level == level for finding in findings)) for level in LEVELS[:-1]]
    parts = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts if count]
    return ", ".join(parts) or "nothing to do"


def as_text(machine: str, findings: Sequence[Diagnosis]) -> str:
    """Text with lines of at most COLUMNS, except for longer words."""
    width = max(len(finding.what) for finding in findings)
    lines = [*_wrapped(f"{machine}: ", headline(findings), 2)]
    for level, group in groupby(findings, key=lambda finding: finding.level):
        lines += ["", f"{MARKS[level]} {NAMES[level]}"]
        for finding in group:
            lines += _rows(finding, width)
    return plain("\n".join(lines))


def _rows(finding: Diagnosis, width: int) -> Iterator[str]:
    """The lines of a finding; unless it is a fact, reason and remedy start on separate lines."""
    start, indent = f"  {finding.what:<{width}}  ", width + 4
    if finding.level == "fine":
        more = _more(finding)
        yield from _wrapped(start, finding.value + (f"  ({more})" if more else ""), indent)
        return
    yield from _wrapped(start, finding.value, indent)
    if finding.why:
        yield from _wrapped(" " * indent, finding.why, indent)
    if finding.todo:
        yield from _wrapped(f"{' ' * indent}→ ", finding.todo, indent + 2)


def _more(finding: Diagnosis) -> str:
    return " → ".join(filter(None, (finding.why, finding.todo)))


def _wrapped(start: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]


def as_html(machine: str, findings: Sequence[Diagnosis]) -> str:
    """HTML without scripts and links; colour is never the only mark. Facts are folded."""
    problems = "".join(_problem(finding) for finding in findings if finding.level != "fine")
    facts = _facts([finding for finding in findings if finding.level == "fine"])
    return framed(
        f"<div><b>{escaped(machine)}</b></div>"
        f'<div style="opacity:.75;margin-bottom:6px">{escaped(headline(findings))}</div>{problems}{facts}'
    )


def _problem(finding: Diagnosis) -> str:
    tint, level = TINTS[finding.level], finding.level
    todo = f"<div>→ {escaped(finding.todo)}</div>" if finding.todo else ""
    why = f'<div style="opacity:.75">{escaped(finding.why)}</div>' if finding.why else ""
    return (
        f'<div style="border-left:4px solid {tint};padding:1px 10px;margin:6px 0">'
        f'<span style="border-bottom:2px solid {tint};font-weight:600">{MARKS[level]} {level}</span> '
        f"<b>{escaped(finding.what)}</b>: {escaped(finding.value)}{why}{todo}</div>"
    )


def _facts(findings: Sequence[Diagnosis]) -> str:
    cell = "border:0;padding:1px 14px 1px 0;text-align:left;vertical-align:top"
    rows = "".join(
        f'<tr style="background:none"><td style="{cell};white-space:nowrap;opacity:.75">{escaped(finding.what)}</td>'
        f'<td style="{cell}">{escaped(finding.value)}</td><td style="{cell};opacity:.75">'
        f"{escaped(_more(finding))}</td></tr>"
        for finding in findings
    )
    style = f"border-bottom:2px solid {TINTS['fine']};font-weight:600"
    summary = f'<span style="{style}">{MARKS["fine"]}</span> {len(findings)} facts'
    table = f'<table style="border-collapse:collapse;margin:4px 0;font-size:12px">{rows}</table>'
    return f'<details style="margin:6px 0"><summary style="cursor:pointer">{summary}</summary>{table}</details>'
