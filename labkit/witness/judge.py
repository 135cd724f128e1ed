"""Judges an attempt while it runs and when it has ended: reads what is new, asks every rule, and keeps one story."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from labkit.files import log
from labkit.record import Place, RunFolder
from labkit.witness.checkpoints import FileRace, LonePart, Unloaded
from labkit.witness.data import DATA_RULES
from labkit.witness.evidence import Evidence
from labkit.witness.finding import Finding, Findings
from labkit.witness.gradients import Discarded, ScaledClip, Scalers, ShardClip, Uncleared
from labkit.witness.replicas import Replicas, Settings
from labkit.witness.resumes import LostMoments, Reseeded, RestartedOrder, RestartedSchedule
from labkit.witness.rule import Rule
from labkit.witness.schedules import Schedules
from labkit.witness.slips import JoinedCalls, Slips
from labkit.witness.updates import (
    LeftInEvalMode,
    LeftWindow,
    LostUpdates,
    NoOptimizer,
    OtherTensors,
    PartedTies,
    Unfrozen,
)

# A finding of an earlier one may explain those of later ones.
RULES: tuple[type[Rule], ...] = (
    JoinedCalls,
    Slips,
    Replicas,
    Settings,
    Unloaded,
    FileRace,
    LonePart,
    LostMoments,
    RestartedSchedule,
    RestartedOrder,
    Reseeded,
    OtherTensors,
    PartedTies,
    NoOptimizer,
    LostUpdates,
    Uncleared,
    Discarded,
    LeftWindow,
    LeftInEvalMode,
    Unfrozen,
    ScaledClip,
    ShardClip,
    Scalers,
    Schedules,
    *DATA_RULES,
)
LOOK_SECONDS = 2.0
RANKS_PER_SECOND = 128  # looking at them takes less than 1 % of a core: benchmarks/witness_ranks.py


class Judge:
    """Judges one attempt. `findings` are those of the newest look, which are also in findings.json."""

    def __init__(
        self,
        attempt: RunFolder,
        ranks: Sequence[int],
        script: str,
        locate: Callable[[int], Place | None] | None = None,
    ):
        self.findings = Findings()
        self._attempt, self._evidence = attempt, Evidence(attempt, ranks, script, locate)
        self._rules = [rule() for rule in RULES]
        self.every = max(LOOK_SECONDS, len(ranks) / RANKS_PER_SECOND)
        self._failed: set[Rule] = set()
        self._is_written = False
        self._looked = time.monotonic()

    def look_again(self, *, is_stuck: bool = False) -> None:
        """Look if it is time to, or if now no rank makes progress, which is what `is_stuck` means."""
        has_stopped = is_stuck and not self._evidence.is_stuck
        self._evidence.is_stuck = is_stuck
        if has_stopped or time.monotonic() >= self._looked + self.every:
            self._looked = time.monotonic()  # a look that fails is not repeated at once
            self.look()

    def look(self, outcome: str = "", cause: str = "") -> Findings:
        """Judge what has been witnessed so far; `outcome` is the name of the state in which the attempt has ended, and
        `cause` the kind of its cause, if that is known: it may itself rest on what is found."""
        self._evidence.outcome, self._evidence.cause = outcome, cause
        self._evidence.read()
        found: list[Finding] = []
        for rule in self._rules:
            if not any(rule.kind in explained for explained in self._explained(found)):
                found += self._found_by(rule)
        findings = Findings(sorted(found, key=lambda finding: not finding.certain))
        self._is_written = self._is_written and findings == self.findings
        self.findings = findings
        if not self._is_written and (findings or self._evidence.has_steps()):
            findings.write(self._attempt)
            self._is_written = True
        return findings

    def _found_by(self, rule: Rule) -> list[Finding]:
        """What a rule finds: nothing if it fails, which must not keep the others from judging."""
        try:
            return list(rule.judge(self._evidence))
        except Exception as error:
            if rule not in self._failed:
                self._failed.add(rule)
                log(f"the training could not be judged by {type(rule).__name__}: {error!r}")
            return []

    def _explained(self, found: Sequence[Finding]) -> list[tuple[str, ...]]:
        kinds = {finding.kind for finding in found if finding.certain}
        return [rule.explains for rule in self._rules if rule.kind in kinds]

    def notice(self, cause: str = "") -> str | None:
        """The most important finding that the sentence of the run's cause does not tell, a note if none is certain, for
        the run's state."""
        findings = [finding for finding in self.findings if finding.claim not in cause]
        first, more = next(iter(findings), None), len(findings) - 1
        if first is None:
            return None
        note, others = "" if first.certain else "note: ", f" (and {more} more: run.findings())" if more else ""
        return f"{note}{first.sentence}{others}"

    @property
    def is_certain(self) -> bool:
        """Whether the training is certainly wrong."""
        return bool(self.findings.certain)
