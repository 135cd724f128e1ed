"""Finds why a run failed: the first rank with a failure of its own, or else what records, nodes and torchrun show.

torchrun blames the rank that exited first, which for hangs, early returns and mismatched collectives is a victim.
Here every rank writes its own record, and a rank that only lost its peer counts for less than the others. With several
nodes, each writes its own outcome, and the first live node reads them all: every host would come to the same answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from labkit.launcher.causes import sentences
from labkit.launcher.causes.background_errors import raised_beside
from labkit.launcher.causes.evidence import Evidence
from labkit.launcher.causes.failure_advice import LONGER
from labkit.launcher.causes.killed import killed
from labkit.launcher.causes.nodes import agent_killed, lost, lost_contact, missing, unexplained
from labkit.launcher.causes.own_failures import exited, failed, own_failures
from labkit.launcher.causes.waits import disagreed, hung, left_early, never_joined, slipped, vanished
from labkit.record import Cause, RunFolder, StateName

LINES = re.compile(r"\bline (\d+)")
DECIDED_ALONE = ("slip", "disagree", "early", "hang")  # causes that may rest on what one rank decides
# Why a node was stopped when the reason lies with another node.
FOLLOWS = ("others", "missing")


def find_cause(run: RunFolder, folder: RunFolder, exit_code: int, notice: str | None = None) -> Cause:
    """The cause of an attempt that ended with torchrun's `exit_code`. `folder` is the attempt's. `notice` is what the
    supervisor last reported about stalled ranks."""
    return explained(Evidence.gather(run, folder), exit_code, notice)


def conclusion(run: RunFolder, attempt: RunFolder) -> tuple[StateName, Cause | None]:
    """`(state, cause)` of an attempt whose nodes have all ended or are gone. A rank's own failure counts before the
    silence of others, and an earlier decision to stop before its consequences."""
    evidence = Evidence.gather(run, attempt)
    outcomes = [outcome for _, outcome in sorted(evidence.outcomes.items())]
    stopped = [(end.decided, end.why) for end in outcomes if end.why and end.why.kind not in FOLLOWS]
    decided, why = min(stopped, key=lambda each: each[0], default=(0.0, None))
    own = own_failures(evidence)
    if why and not (own and own[0].time_ns / 1e9 < decided):
        return ("stopped" if why.is_stop else "failed"), why
    if evidence.nodes and len(outcomes) == evidence.nodes.count and all(end.exit_code == 0 for end in outcomes):
        return "succeeded", None
    code = next((end.exit_code for end in outcomes if not end.why and end.exit_code), 1)
    notice = evidence.outcomes[0].notice if 0 in evidence.outcomes else None
    return "failed", missing(evidence) or explained(evidence, code, notice)


def survived_errors(run: RunFolder, attempt: RunFolder, ranks: Sequence[int]) -> str | None:
    """What ranks, their threads, atexit handlers and child processes raised, although they went on or exited with 0;
    None if nothing."""
    evidence = Evidence.gather(run, attempt)
    if any(attempt.error(rank).exists() for rank in ranks):
        return f"{explained(evidence, 0, None).sentence}, and then exited with 0"
    beside = raised_beside(evidence, ranks)
    return beside.sentence if beside else None


def explained(evidence: Evidence, exit_code: int, notice: str | None) -> Cause:
    """The cause that this evidence shows."""
    if own := failed(own_failures(evidence), evidence):
        return own
    cause, beside = _of_no_error(evidence, exit_code, notice), raised_beside(evidence, evidence.ranks)
    if cause.kind in DECIDED_ALONE and LONGER not in cause.advice:
        cause = with_text(cause, evidence, {failure.line for failure in evidence.failures if failure.line})
    if not beside:
        return cause
    if cause.kind not in (*DECIDED_ALONE, "torchrun"):
        return replace(cause, sentence=f"{cause.sentence}. Besides, {beside.sentence}")
    sentence = f"{beside.sentence}. {sentences.capitalized(cause.sentence)}"
    return replace(cause, sentence=sentence, ranks=beside.ranks, where=beside.where, advice=())


def with_text(cause: Cause, evidence: Evidence, lines: set[int]) -> Cause:
    """The cause, with what the script's text shows: why not all ranks get to one of these lines, where they were."""
    from labkit.checking import check  # only a failure needs it, and most supervisors see none

    lines |= {cause.where.line} if cause.where else set()
    with suppress(Exception):  # the cause matters more
        for finding in check(evidence.script):
            told = {finding.line, *map(int, LINES.findall(finding.message))}
            if finding.kind == "hangs" and told & lines:
                return replace(cause, sentence=f"{cause.sentence}. {sentences.in_text(finding.line, finding.message)}")
    return cause


def _of_no_error(evidence: Evidence, exit_code: int, notice: str | None) -> Cause:
    return (
        killed(evidence)
        or agent_killed(evidence)
        or lost(evidence)
        or failed(exited(evidence), evidence)
        or never_joined(evidence)
        or slipped(evidence)
        or disagreed(evidence)
        or left_early(evidence)
        or lost_contact(evidence)
        or hung(evidence, notice)
        or vanished(evidence)
        or failed(evidence.failures, evidence)
        or unexplained(evidence, exit_code)
    )
