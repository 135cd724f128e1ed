"""What Slurm is asked and told: submit a file, what has become of a job, cancel it. Through its own commands, because
they are what every site has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabError, LaunchError

__all__ = ["FINAL", "WAITING", "Job", "ask", "cancel", "gpus_per_node", "is_installed", "submit"]

# Words of Slurm's for a job, as `scontrol show job` and `sacct` write them.
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
FINAL = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "PREEMPTED",
    "DEADLINE",
    "REVOKED",
    "GONE",
)
ANSWER_SECONDS = 15.0
# One answer serves so long, however often it is asked for: a scheduler has thousands of jobs to think of.
FRESH_SECONDS = 3.0
RETRY_SECONDS = 30.0  # until one that did not answer is asked again
FIELD = re.compile(r" (JobState|Reason|Restarts|ExitCode|StartTime|NodeList)=(\S*)")
# What of a job's environment sbatch must not hand on when it is called from within another job.
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")


@dataclass(frozen=True)
class Job:
    """What Slurm says of a job. `state` is one of its words, or GONE when it has forgotten the job and keeps no
    accounts; `start` is when it is expected to start, or did, in local time; `exit_code` that of the launch file."""

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


_answers: dict[str, tuple[float, Job | None]] = {}  # by id: until when it serves, and the answer
ANY = ""  # its id: until when no job is asked for, because Slurm did not answer


def is_installed() -> bool:
    """Whether this machine can submit jobs."""
    return shutil.which("sbatch") is not None


def submit(file: Path, environment: Mapping[str, str]) -> str:
    """Hand a file to sbatch; returns the job's id. Raises LaunchError with Slurm's own words when it is refused."""
    if not is_installed():
        raise LaunchError(
            "there is no sbatch here. Submit from a machine of the cluster, its login node for one; "
            "`labkit slurm print` writes the file to submit there"
        )
    passed = {k: v for k, v in environment.items() if k in KEPT or not k.startswith(("SLURM_", "SBATCH_"))}
    try:
        done = _run("sbatch", "--parsable", str(file), env=passed)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch did not answer within {ANSWER_SECONDS:g} s; is the job there? See squeue") from None
    if done.returncode:
        said = [line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines() if "error" in line]
        raise LaunchError(f"sbatch refused the job: {'; '.join(said) or done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1].split(";")[0]  # a cluster's name may follow


def ask(job_id: str, *, output: Path | None = None, anew: bool = False) -> Job | None:
    """What has become of a job; None where Slurm cannot be asked. An answer serves for some seconds, unless `anew`.

    `output` is where it prints to: another cluster may have a job of the same number, of which nothing is told.
    """
    until, answer = _answers.get(job_id, (0.0, None))
    until = max(until, _answers.get(ANY, (0.0, None))[0])
    if (until > time.monotonic() and not anew) or not shutil.which("scontrol"):
        return answer
    try:
        job, serves = _from_controller(job_id, output) or _from_accounts(job_id), FRESH_SECONDS
    except LookupError:
        job, serves = None, RETRY_SECONDS
    except (OSError, subprocess.TimeoutExpired):
        job, serves = answer, RETRY_SECONDS  # what it said last
        _answers[ANY] = (time.monotonic() + RETRY_SECONDS, None)
    _answers[job_id] = (time.monotonic() + serves, job)
    return job


def cancel(job_id: str) -> None:
    """Raises LabError with Slurm's own words when it will not."""
    try:
        done = _run("scancel", job_id)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"job {job_id} could not be cancelled: {error}; try scancel {job_id}") from None
    if done.returncode and "Invalid job id" not in done.stderr and "already completed" not in done.stderr:
        raise LabError(f"job {job_id} could not be cancelled: {done.stderr.strip()}")


def gpus_per_node(partition: str | None = None) -> int | None:
    """The most GPUs that a node of the partition has, of all when none is named; None where Slurm cannot be asked."""
    try:
        done = _run("sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] if partition else []))
    except (OSError, subprocess.TimeoutExpired):
        return None
    return most_gpus(done.stdout) if done.returncode == 0 else None


def most_gpus(gres: str) -> int:
    """Of lines such as "gpu:a100:4(S:0-1),nvme:1" or "(null)"."""
    lines = ([int(n) for n in re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", line)] for line in gres.splitlines())
    return max((sum(counts) for counts in lines), default=0)


def _from_controller(job_id: str, output: Path | None) -> Job | None:
    """Of a job that is there, or ended within the last minutes. None when the controller has forgotten it; LookupError
    when it knows another one by this number."""
    done = _run("scontrol", "show", "job", "--oneliner", job_id)
    if done.returncode:
        if "Invalid job id" in done.stderr:
            return None
        raise OSError(done.stderr.strip())
    # it may be the last field of the line
    if output is not None and not re.search(rf" StdOut={re.escape(str(output))}(?=\s)", done.stdout):
        raise LookupError(job_id)
    said = dict(FIELD.findall(done.stdout))
    code = said.get("ExitCode", "").partition(":")[0]
    return Job(
        id=job_id,
        state=said.get("JobState", ""),
        reason=_told(said.get("Reason")),
        nodes=_told(said.get("NodeList")),
        start=_told(said.get("StartTime")),
        exit_code=int(code) if code.isdecimal() else None,
        restarts=int(said.get("Restarts", "0")),
    )


def _from_accounts(job_id: str) -> Job:
    """What the site's accounts say, GONE when it keeps none."""
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
    return Job(job_id, state.split()[0], _told(reason), _told(nodes), "", int(code) if code.isdecimal() else None)


def _told(value: str | None) -> str:
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
