"""Defines what a rule is. docs/reference/witness.md is generated from the rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from labkit.witness.evidence import Evidence, Line
from labkit.witness.finding import Finding


class Rule:
    """One way in which a training can be wrong. A rule is made for each attempt and may keep what it has compared.

    `declared`: by what torch declares what must be so. `observed`: what violates it. `silent`: when it says nothing.
    `limits`: what it cannot see. `explains`: kinds of findings that are consequences of this one.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    declared: ClassVar[str]
    observed: ClassVar[str]
    silent: ClassVar[str]
    limits: ClassVar[str] = ""
    explains: ClassVar[tuple[str, ...]] = ()

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        """What is wrong according to all that has been witnessed so far."""
        raise NotImplementedError

    def found(self, line: Line, what: str, why: str = "", advice: str = "", **more: Any) -> Finding:
        """What the ranks of a line have found at its place."""
        return Finding(self.kind, what, why, advice, ranks=line.ranks, line=line.line, **more)
