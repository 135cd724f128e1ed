"""One state from two accounts: what a run's folder says of it, and what Slurm says of its job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.cluster.slurm import Job
from labkit.record import State
from labkit.record.state import StateName

__all__ = ["with_job"]

# Why a job waits, for the words of Slurm's that do not explain themselves; the others are shown as they are.
REASONS = {
    "Resources": "for nodes to become free",
    "Priority": "behind jobs of higher priority",
    "BeginTime": "for the time at which it may begin",
    "PartitionConfig": "for more than this partition has: fewer nodes, less time or another partition would do",
    "PartitionNodeLimit": "for more nodes than this partition gives",
    "PartitionTimeLimit": "for more time than this partition gives",
    "ReqNodeNotAvail": "for nodes that are down or reserved",
    "Dependency": "for another job",
    "JobHeldUser": "because its owner holds it (scontrol release)",
    "JobHeldAdmin": "because an administrator holds it",
    "QOSMaxWallDurationPerJobLimit": "for more time than its QOS gives",
    "AssocGrpCPUMinutesLimit": "because the account's share of time is used up",
}
ENDS = {
    "TIMEOUT": "its time limit was over",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it had been given; ask for more with options=['--mem=…']",
    "BOOT_FAIL": "its nodes could not be booted",
    "PREEMPTED": "another job needed its nodes",
    "DEADLINE": "its deadline was over",
    "REVOKED": "it runs on another cluster of the federation",
}
# Kinds of causes that a node gives when all it knows is that something ended it, or another node.
COLLATERAL = ("agent", "host", "missing", "others", "parted", "torchrun")


def with_job(state: State, job: Job | None, last_line: str = "") -> State:
    """`state` is what the run's folder says, `job` what Slurm does, None where it cannot be asked; `last_line` is what
    the launch file printed last. A run that its job will begin again is not over."""
    if job is None:
        return state
    if job.is_over:
        return _ended(state, job, last_line)
    has_begun = state.attempt > job.restarts and state.state != "starting"  # whatever Slurm said some seconds ago
    if _goes_on(state) or not has_begun:
        return _between(state, job)
    if state.state == "lost" or (state.state == "stopped" and not _was_asked(state.cause or {})):
        # whatever ended its nodes, Slurm is about to say: it sends TERM to all that it ends
        return replace(state, state="running", ended=None, cause=None, notice=f"job {job.id} is being ended")
    if job.state == "SUSPENDED":
        return replace(state, notice=f"job {job.id} is suspended")
    return state


def _between(state: State, job: Job) -> State:
    """Before the first attempt, or the next one."""
    if job.is_waiting:
        why = REASONS.get(job.reason, f"({job.reason})" if job.reason else "")
        if job.restarts and job.reason == "BeginTime":  # Slurm keeps a job that was put back from starting at once
            why = "to be begun again"
        start = f"; Slurm expects to start it at {job.start.replace('T', ' ')}" if job.start else ""
        notice = f"job {job.id} waits in Slurm's queue {why}".rstrip() + start
    elif _goes_on(state) and state.attempt > job.restarts:
        notice = f"job {job.id} goes back into the queue"
    else:
        notice = f"job {job.id} has its nodes ({job.nodes}), which start"
    if state.attempt > job.restarts and not state.is_final:
        return replace(state, state="starting", notice=notice)
    over = {"ended": state.ended, "exit_code": state.exit_code, "cause": state.cause, "checkpoint": state.checkpoint}
    following = max(job.restarts, state.attempt if _goes_on(state) else 0) + 1
    return replace(
        state,
        state="starting",
        attempt=following,
        ended=None,
        exit_code=None,
        cause=None,
        notice=notice,
        earlier=[*state.earlier, over],
    )


def _goes_on(state: State) -> bool:
    """Whether its ranks saved because the launch file told them that time was nearly up."""
    return state.state == "stopped" and bool((state.cause or {}).get("goes_on"))


def _ended(state: State, job: Job, last_line: str) -> State:
    cause = state.cause or {}
    if state.state == "succeeded" or _goes_on(state) or (state.state == "stopped" and _was_asked(cause)):
        return state
    own_words = state.state == "failed" and cause.get("kind") not in COLLATERAL
    if job.state in ENDS:
        if own_words:
            return replace(
                state, cause=cause | {"sentence": f"{cause['sentence']}; Slurm says {job.state} of job {job.id}"}
            )
        saved = f"; the newest checkpoint is {state.checkpoint}" if state.checkpoint else ""
        return _final(state, "failed", job.state.lower(), f"Slurm ended job {job.id}: {ENDS[job.state]}{saved}")
    if job.state == "CANCELLED" and not own_words:
        return _final(state, "stopped", "stopped", f"job {job.id} was cancelled (scancel)")
    if own_words or (state.is_final and state.state not in ("lost", "stopped")):
        return state
    if job.state in ("GONE", "COMPLETED"):
        known = "Slurm no longer knows of it" if job.state == "GONE" else "it ended with code 0"
        return _final(state, "lost", "lost", f"job {job.id} left no result, and {known}")
    if last_line.startswith("labkit: "):  # what one of the nodes said, before what Slurm made of it
        return _final(state, "failed", "job", f"job {job.id} failed: {last_line.removeprefix('labkit: ')}")
    code = f" with code {job.exit_code}" if job.exit_code else ""
    why = f" ({job.reason})" if job.reason and job.reason != "NonZeroExitCode" else ""
    said = f"; its last line: {last_line}" if last_line else ""
    return _final(state, "failed", "job", f"job {job.id} failed{code}{why}{said}")


def _was_asked(cause: dict[str, Any]) -> bool:
    """Whether somebody asked for the stop, and not a TERM for it."""
    return "received SIG" not in str(cause.get("sentence"))


def _final(state: State, name: StateName, kind: str, sentence: str) -> State:
    return replace(state, state=name, cause={"kind": kind, "sentence": sentence}, notice=None)
