"""Combines the state in a run's folder with Slurm's state of its job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from labkit.cluster.slurm import Job
from labkit.record import State, StateName

__all__ = ["with_job"]

# Why a job waits, for Slurm's reasons that are not self-explanatory; others are shown unchanged.
REASONS = {
    "Resources": "for nodes to become free",
    "Priority": "behind jobs of higher priority",
    "BeginTime": "for its start time",
    "PartitionConfig": "for more than this partition has: use fewer nodes, less time or another partition",
    "PartitionNodeLimit": "for more nodes than this partition allows",
    "PartitionTimeLimit": "for more time than this partition allows",
    "ReqNodeNotAvail": "for nodes that are down or reserved",
    "Dependency": "for another job",
    "JobHeldUser": "because its owner holds it (scontrol release)",
    "JobHeldAdmin": "because an administrator holds it",
    "QOSMaxWallDurationPerJobLimit": "for more time than its QOS allows",
    "AssocGrpCPUMinutesLimit": "because the account's share of time is used up",
}
ENDS = {
    "TIMEOUT": "it reached its time limit",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it had been allocated; request more with options=['--mem=…']",
    "BOOT_FAIL": "its nodes could not boot",
    "PREEMPTED": "another job needed its nodes",
    "DEADLINE": "it reached its deadline",
    "REVOKED": "it runs on another cluster of the federation",
}
# Kinds of causes of a node that was ended by something else or by another node.
COLLATERAL = ("agent", "host", "missing", "others", "parted", "torchrun")


def with_job(state: State, job: Job | None, last_line: str = "") -> State:
    """The combined state. `state` is from the run's folder, `job` from Slurm (None if it cannot be queried);
    `last_line` is the last line printed by the launch file. A run that its job will restart has not ended."""
    if job is None:
        return state
    if job.is_over:
        return _ended(state, job, last_line)
    has_begun = state.attempt > job.restarts and state.state != "starting"  # Slurm's answer may be older
    if _goes_on(state) or not has_begun:
        return _between(state, job)
    if state.state == "lost" or (state.state == "stopped" and not _was_requested(state.cause or {})):
        # Slurm sends TERM to nodes that it ends, and will report the reason soon
        return replace(state, state="running", ended=None, cause=None, notice=f"Slurm is ending job {job.id}")
    if job.state == "SUSPENDED":
        return replace(state, notice=f"job {job.id} is suspended")
    return state


def _between(state: State, job: Job) -> State:
    """Before the first attempt, or the next one."""
    if job.is_waiting:
        why = REASONS.get(job.reason, f"({job.reason})" if job.reason else "")
        if job.restarts and job.reason == "BeginTime":  # Slurm delays the start of a requeued job
            why = "to be restarted"
        start = f"; Slurm expects to start it at {job.start.replace('T', ' ')}" if job.start else ""
        notice = f"job {job.id} is waiting in Slurm's queue {why}".rstrip() + start
    elif _goes_on(state) and state.attempt > job.restarts:
        notice = f"job {job.id} is being requeued"
    else:
        notice = f"job {job.id} has been allocated nodes ({job.nodes}), which are starting"
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
    """Whether its ranks saved and stopped because the time limit was near."""
    return state.state == "stopped" and bool((state.cause or {}).get("goes_on"))


def _ended(state: State, job: Job, last_line: str) -> State:
    cause = state.cause or {}
    if state.state == "succeeded" or _goes_on(state) or (state.state == "stopped" and _was_requested(cause)):
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
        known = "Slurm no longer knows it" if job.state == "GONE" else "it ended with code 0"
        return _final(state, "lost", "lost", f"job {job.id} left no result, and {known}")
    if last_line.startswith("labkit: "):  # the message of a node takes precedence over Slurm's
        return _final(state, "failed", "job", f"job {job.id} failed: {last_line.removeprefix('labkit: ')}")
    code = f" with code {job.exit_code}" if job.exit_code else ""
    why = f" ({job.reason})" if job.reason and job.reason != "NonZeroExitCode" else ""
    output = f"; its last line: {last_line}" if last_line else ""
    return _final(state, "failed", "job", f"job {job.id} failed{code}{why}{output}")


def _was_requested(cause: dict[str, Any]) -> bool:
    """Whether a user requested the stop, rather than a TERM."""
    return "received SIG" not in str(cause.get("sentence"))


def _final(state: State, name: StateName, kind: str, sentence: str) -> State:
    return replace(state, state=name, cause={"kind": kind, "sentence": sentence}, notice=None)
