"""Holds what is wrong with a training, as data; `findings.json` of an attempt has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from labkit.dataclass_json import from_json, to_json
from labkit.files import Json, read_object, write_json
from labkit.record import RunFolder
from labkit.text import escaped


@dataclass(frozen=True)
class Finding:
    """`what` is wrong, without its place and time, and `why`, the likely cause, empty if it is not known.

    It is so `since` a step of the training, or since one after `since` and up to `until`, if the steps between were not
    compared. `ranks` are those that differ from the others, `line` is the script's, 0 if unknown. `parameters` and
    `values` are what differs: names, and by rank what was seen there, as text. `ask` is an expression that shows it on
    every rank while the run goes on: `run.ask(finding.ask)`; empty if there is none. If not `certain` it is a note:
    somebody may have meant it so.
    """

    kind: str
    what: str
    why: str = ""
    advice: str = ""
    certain: bool = True
    since: int = 0
    until: int = 0
    ranks: tuple[int, ...] = ()
    line: int = 0
    parameters: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    ask: str = ""

    @property
    def sentence(self) -> str:
        """All of it in one sentence, without the advice."""
        return f"{self._when}{self.claim}"

    @property
    def claim(self) -> str:
        """What is wrong and why, without the time."""
        return self.what + (f": {self.why}" if self.why else "")

    @property
    def _when(self) -> str:
        when = f"since step {self.since}: " if self.since else ""
        if self.until > self.since:
            when = f"since a step between {self.since} and {self.until}: " if self.since else f"by step {self.until}: "
        return when


class Findings(tuple[Finding, ...]):
    """What is wrong with a training, the finding that explains most first. `witnessed` is False if none of its steps
    was looked at, so that it is not known whether something is wrong. `beside` are sentences about what went wrong and
    is no finding: why the run failed, that its loss is NaN."""

    witnessed = True
    beside: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join(_in_words(finding) for finding in self) or self._none

    def _repr_html_(self) -> str:
        return "".join(map(_in_html, self)) or '<div style="white-space:pre-line">' + escaped(self._none) + "</div>"

    def to_dict(self) -> dict[str, Json]:
        """The findings for a program, as `labkit findings --json` prints them (docs/reference/json.md)."""
        findings = [to_json({"sentence": each.sentence, **asdict(each)}) for each in self]
        known = bool(self) or self.witnessed
        beside = to_json(self.beside)
        return {"schema": "labkit.findings/1", "witnessed": known, "findings": findings, "beside": beside}

    @property
    def _none(self) -> str:
        if self.witnessed:
            none = f"{'beside that, ' if self.beside else ''}nothing was found to be wrong"
        else:
            anything = f"anything {'else ' if self.beside else ''}is wrong"
            none = f"it is not known whether {anything}: no optimizer step was witnessed yet, or the witness was off"
        return "\n".join((*self.beside, none))

    @property
    def certain(self) -> Findings:
        certain = Findings(finding for finding in self if finding.certain)
        certain.witnessed, certain.beside = self.witnessed, self.beside
        return certain

    @classmethod
    def read(cls, attempt: RunFolder) -> Findings:
        """What the supervisor has written so far. It writes nothing before a step was witnessed."""
        written = read_object(attempt.findings).get("findings")
        found = [from_json(Finding, each) for each in written] if isinstance(written, list) else [None]
        findings = cls(filter(None, found))
        findings.witnessed = None not in found
        return findings

    def write(self, attempt: RunFolder) -> None:
        """Write findings.json. Raises OSError."""
        write_json(attempt.findings, {"format": 1, "findings": [asdict(finding) for finding in self]})


def _in_words(finding: Finding) -> str:
    note = "" if finding.certain else "note: "
    below = "".join(f"\n  {text}" for text in _below(finding))
    return f"{note}{finding.sentence}{below}"


def _below(finding: Finding) -> list[str]:
    """What is said of a finding in further lines."""
    ask = f"To see it while it runs, ask every rank: {finding.ask}" if finding.ask else ""
    return [text for text in (finding.advice, " · ".join(finding.values), ask) if text]


def _in_html(finding: Finding) -> str:
    weight = "600" if finding.certain else "400"
    note = "" if finding.certain else "note: "
    below = "".join(f'<div style="opacity:.75">{escaped(text)}</div>' for text in _below(finding))
    sentence = f'<div style="font-weight:{weight}">{note}{escaped(finding.sentence)}</div>'
    return f'<div style="margin:4px 0;max-width:80em">{sentence}{below}</div>'


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0, 1, 2 and 5 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:3]]
    last = [f"{len(ranks) - 3} more"] if len(ranks) > 3 else []
    *most, final = [*shown, *last]
    return f"ranks {', '.join(most)} and {final}"
