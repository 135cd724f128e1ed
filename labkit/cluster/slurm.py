"""Talks to Slurm through its commands, which every site has, and combines a run's state with that of its job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.errors import LabError, LaunchError
from labkit.record import Cause, State, StateName

# Slurm's states of a job, as printed by `scontrol show job` and `sacct`.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
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
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "GONE", *ENDS)
# Kinds of causes of a node that was ended by something else or by another node.
COLLATERAL = ("agent", "host", "missing", "others", "parted", "torchrun")
ANSWER_SECONDS = 15.0
# Lifetime of a cached answer, because a scheduler has thousands of jobs to serve.
FRESH_SECONDS = 3.0
RETRY_SECONDS = 30.0  # wait after a query without an answer
FIELD = re.compile(r" (ArrayTaskId|JobState|Reason|Restarts|ExitCode|StartTime|NodeList)=(\S*)")
# The only variables of Slurm that sbatch may inherit when it is called from within another job.
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")


@dataclass(frozen=True)
class Job:
    """A job according to Slurm. `state` is Slurm's, or GONE if Slurm has forgotten the job and keeps no accounts;
    `start` is the expected or actual start in local time; `exit_code` is that of the launch file."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    start: str = ""
    exit_code: int | None = None
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in FINAL

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING


_answers: dict[str, tuple[float, Job | None]] = {}  # by id: (valid until, answer)
ANY = ""  # the key of the time until which Slurm is not asked about any job, because it did not answer


def is_installed() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def submit(file: Path, environment: Mapping[str, str]) -> str:
    """Submit a file and return the job's id. Raises LaunchError with Slurm's message if it is refused."""
    if not is_installed():
        raise LaunchError(
            "sbatch was not found. Submit from a machine of the cluster, such as its login node; "
            "`labkit slurm print` writes the file to submit there"
        )
    passed = {k: v for k, v in environment.items() if k in KEPT or not k.startswith(("SLURM_", "SBATCH_"))}
    try:
        done = _run("sbatch", "--parsable", str(file), env=passed)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch did not answer within {ANSWER_SECONDS:g} s; check with squeue for the job") from None
    if done.returncode:
        errors = [line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines() if "error" in line]
        raise LaunchError(f"sbatch rejected the job: {'; '.join(errors) or done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1].split(";")[0]  # a cluster's name may follow


def ask_slurm(job_id: str, *, output: Path | None = None, refresh: bool = False) -> Job | None:
    """The job's current state; None if Slurm cannot be queried. Answers are cached for some seconds, unless `refresh`.

    `output` is the job's output file, to exclude a job with the same id on another cluster.
    """
    until, answer = _answers.get(job_id, (0.0, None))
    until = max(until, _answers.get(ANY, (0.0, None))[0])
    if (until > time.monotonic() and not refresh) or not shutil.which("scontrol"):
        return answer
    try:
        job, serves = _from_controller(job_id, output) or _from_accounts(job_id), FRESH_SECONDS
    except LookupError:
        job, serves = None, RETRY_SECONDS
    except (OSError, subprocess.TimeoutExpired):
        job, serves = answer, RETRY_SECONDS  # the last answer
        _answers[ANY] = (time.monotonic() + RETRY_SECONDS, None)
    _answers[job_id] = (time.monotonic() + serves, job)
    return job


def ask_array(array: str) -> None:
    """Query all tasks of an array by one call, for the `ask` of each."""
    until, _ = _answers.get(array, (0.0, None))
    if until > time.monotonic() or not shutil.which("scontrol"):
        return
    _answers[array] = (time.monotonic() + FRESH_SECONDS, None)
    try:
        done = _run("scontrol", "show", "job", "--oneliner", array)
    except (OSError, subprocess.TimeoutExpired):
        return
    for line in done.stdout.splitlines():
        for task in tasks_in(dict(FIELD.findall(line)).get("ArrayTaskId", "")):
            _answers[f"{array}_{task}"] = (time.monotonic() + 2 * FRESH_SECONDS, _parsed(f"{array}_{task}", line))


def tasks_in(text: str) -> list[int]:
    """The tasks that Slurm's `0,3-5%2` stands for."""
    ranges = re.findall(r"(\d+)(?:-(\d+)(?::(\d+))?)?", text.partition("%")[0])
    return [n for low, high, step in ranges for n in range(int(low), int(high or low) + 1, int(step or 1))]


def cancel(job_id: str) -> None:
    """Cancel a job. Raises LabError with Slurm's message if that fails."""
    try:
        done = _run("scancel", job_id)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"job {job_id} could not be cancelled: {error}; try scancel {job_id}") from None
    if done.returncode and "Invalid job id" not in done.stderr and "already completed" not in done.stderr:
        raise LabError(f"job {job_id} could not be cancelled: {done.stderr.strip()}")


def gpus_per_node(partition: str | None = None) -> int | None:
    """The maximum number of GPUs per node in the partition, or in all; None if Slurm cannot be queried."""
    try:
        done = _run("sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] if partition else []))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return most_gpus(done.stdout) if done.returncode == 0 else None


def most_gpus(gres: str) -> int:
    """The maximum number of GPUs in lines such as "gpu:a100:4(S:0-1),nvme:1" or "(null)"."""
    lines = ([int(n) for n in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", line)] for line in gres.splitlines())
    return max((sum(counts) for counts in lines), default=0)


def _from_controller(job_id: str, output: Path | None) -> Job | None:
    """A job that exists or ended within the last minutes; None if the controller has forgotten it. Raises LookupError
    if the id belongs to another job."""
    done = _run("scontrol", "show", "job", "--oneliner", job_id)
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return None
        raise OSError(done.stderr.strip())
    # it may be the last field of the line
    if output is not None and not re.search(rf" StdOut={re.escape(str(output))}(?=\s)", done.stdout):
        raise LookupError(job_id)
    return _parsed(job_id, done.stdout)


def _parsed(job_id: str, line: str) -> Job:
    """A job from its line of `scontrol show job --oneliner`."""
    fields = dict(FIELD.findall(line))
    code = fields.get("ExitCode", "").partition(":")[0]
    return Job(
        id=job_id,
        state=fields.get("JobState", ""),
        reason=_known(fields.get("Reason")),
        nodes=_known(fields.get("NodeList")),
        start=_known(fields.get("StartTime")),
        exit_code=int(code) if code.isdecimal() else None,
        restarts=int(fields.get("Restarts", "0")),
    )


def _from_accounts(job_id: str) -> Job:
    """The job according to the site's accounts; GONE if there are none."""
    fields = "--format=State,ExitCode,NodeList,Reason"
    try:
        done = _run("sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", fields)
    except FileNotFoundError:
        return Job(job_id, "GONE")
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return Job(job_id, "GONE")
    state, code, nodes, reason = (lines[-1].split("|") + [""] * 4)[:4]
    code = code.partition(":")[0]
    # "CANCELLED by 1000"
    return Job(job_id, state.split()[0], _known(reason), _known(nodes), "", int(code) if code.isdecimal() else None)


def _known(value: str | None) -> str:
    return "" if value in (None, "None", "(null)", "Unknown", "N/A") else value


def _run(*command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=ANSWER_SECONDS,
        stdin=subprocess.DEVNULL,
        env={**(os.environ if env is None else env), "SLURM_TIME_FORMAT": "standard"},
    )


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
    if state.state == "lost" or (state.state == "stopped" and not _was_requested(state.cause)):
        # Slurm sends TERM to nodes that it ends, and will report the reason soon
        return replace(state, state="running", ended=None, cause=None, notice=f"Slurm is ending job {job.id}")
    if job.state == "SUSPENDED":
        return replace(state, notice=f"job {job.id} is suspended")
    return state


def _between(state: State, job: Job) -> State:
    """The state before the first attempt, or before the next one."""
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
    following = max(job.restarts, state.attempt if _goes_on(state) else 0) + 1
    return replace(
        state,
        state="starting",
        attempt=following,
        ended=None,
        exit_code=None,
        cause=None,
        notice=notice,
        earlier=[*state.earlier, state.as_earlier()],
    )


def _goes_on(state: State) -> bool:
    """Whether its ranks saved and stopped because the time limit was near."""
    return state.state == "stopped" and bool(state.cause and state.cause.goes_on)


def _ended(state: State, job: Job, last_line: str) -> State:
    cause = state.cause
    if state.state == "succeeded" or _goes_on(state) or (state.state == "stopped" and _was_requested(cause)):
        return state
    own_words = cause is not None and state.state == "failed" and cause.kind not in COLLATERAL
    if job.state in ENDS:
        if cause and own_words:
            sentence = f"{cause.sentence}; Slurm says {job.state} of job {job.id}"
            return replace(state, cause=replace(cause, sentence=sentence))
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


def _was_requested(cause: Cause | None) -> bool:
    """Whether a user requested the stop, rather than a TERM."""
    return cause is None or cause.signal is None


def _final(state: State, name: StateName, kind: str, sentence: str) -> State:
    return replace(state, state=name, cause=Cause(kind, sentence), notice=None)
