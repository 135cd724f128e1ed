"""Writes the launch file of a Slurm job from the job's options, which are defined only here.

Comments in the file explain lines that are not obvious.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labkit.arguments import AtLeastOne, ZeroOrMore
from labkit.errors import LaunchError
from labkit.launch_options import CallOptions, flag, whole_number
from labkit.launcher import node_torchrun_command
from labkit.record import Nodes

# A job is notified this long before its time limit to finish its step and save.
NOTICE_SECONDS = 120
# sbatch(1): minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")
SHORT = re.compile(r"(?:(?:(\d+):)?(\d+):(\d+)|(\d+))")
# Placeholders for words that only the job knows. They cannot clash with user input, which has no control characters.
NODE, HEAD, PORT = "\1", "\2", "\3"
VARIABLES = {NODE: '"$SLURM_NODEID"', HEAD: '"$HEAD"', PORT: '"$PORT"'}
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
# Linux uses ports from 32768 on as ephemeral ports.
FIRST_PORT, PORTS = 20_000, 12_000
KEPT_SECONDS = 15  # part of the time to save, reserved for the end of the job after the ranks


@dataclass(frozen=True, kw_only=True)
class JobOptions(CallOptions):
    """How a script is run as a Slurm job, independent of the script; `submit` explains the options."""

    time: str | int = field(
        metadata=flag(
            "time limit: 02:00:00, 1-12:00:00, or minutes", expected="'02:00:00', '1-12:00:00' or a number of minutes"
        )
    )
    nodes: AtLeastOne = field(default=1, metadata=flag(type=int, metavar="N"))
    nproc_per_node: int | str = field(
        default="auto",
        metadata=flag(
            "ranks per node (default: one per GPU)", type=whole_number, metavar="N", expected="an integer or 'auto'"
        ),
    )
    partition: str | None = field(default=None, metadata=flag())
    account: str | None = field(default=None, metadata=flag())
    gpus_per_node: ZeroOrMore | None = field(
        default=None, metadata=flag("default: one per rank, if the nodes have them", type=int, metavar="N")
    )
    cpus_per_task: AtLeastOne | None = field(
        default=None, metadata=flag("cores of each node (default: two per rank)", type=int, metavar="N")
    )
    options: Sequence[str] = field(
        default=(),
        metadata=flag(
            "any other sbatch option, such as --option=--qos=high; may be repeated",
            flag="--option",
            action="append",
            default=[],
            metavar="OPTION",
            expected="a list such as ['--qos=high', '--mem=64G']",
        ),
    )
    setup: str = field(default="", metadata=flag("commands to run first, such as 'module load cuda'", metavar="SHELL"))
    saving_seconds: ZeroOrMore = field(
        default=NOTICE_SECONDS,
        metadata=flag("save this long before the time limit (default: %(default)s)", type=int, metavar="S"),
    )

    @property
    def counts(self) -> Nodes:
        """The nodes and their ranks, once `nproc_per_node` is a number."""
        return Nodes(self.nodes, int(self.nproc_per_node))


@dataclass(frozen=True)
class LaunchFile:
    """The resources requested from Slurm, and the program to run on every node.

    `program` is what torchrun starts: the script and its arguments, preceded by labkit's guest if `folder` is set.
    `python` is the interpreter, at the same path on every node. `folder` is the run's, on a shared file system; without
    it, the file does not use labkit. `checkpoints` is where the script saves: a job at its time limit is requeued if
    there is a new checkpoint; without `checkpoints` it ends. In `job` the counts of ranks, GPUs and cores are numbers.
    `task`: the file is run by one task of a job array, which has the id `<array>_<task>`.
    """

    job: JobOptions
    name: str
    output: str
    program: Sequence[str] = ()
    cwd: str = field(default_factory=lambda: str(Path.cwd()))
    python: str = sys.executable
    folder: str | None = None
    checkpoints: str | None = None
    task: bool = False


def array_text(file: LaunchFile, tasks: str, launch_files: Sequence[str]) -> str:
    """A launch file that runs others, one in each task of a job array: `tasks` is sbatch's `--array`, such as "0-5%2",
    and `launch_files[i]` that of task i. The resources are those of every task; the ids of the array and of the task
    follow the name of its output."""
    return "\n".join(
        [
            _options(file, tasks),
            "",
            "# each array task is a separate run with its own launch file",
            "files=(",
            *(f"    {_quoted(path)}" for path in launch_files),
            ")",
            'exec bash "${files[$SLURM_ARRAY_TASK_ID]}"  # exec: signals go to the launch file',
            "",
        ]
    )


def sbatch_text(file: LaunchFile) -> str:
    """The text for `sbatch`. Raises LaunchError for values that cannot be quoted or would not work."""
    job = file.job
    limit = seconds_of(job.time)
    if file.checkpoints and limit is not None and limit <= job.saving_seconds:
        raise LaunchError(
            f"time={job.time!r} is too short to save: the job is notified {job.saving_seconds} s before its end, and "
            "Slurm may do so up to a minute earlier. Increase time, or reduce saving_seconds"
        )
    parts = [_options(file), _setup(file), _meeting(file), _task(file)]
    parts += [_saving(file), _requeueing(file)] if file.checkpoints else ["\n".join(_step(file))]
    return "\n\n".join(parts) + "\n"


def seconds_of(time: str | int) -> int | None:
    """A time limit in seconds; None for UNLIMITED. Raises LaunchError for what sbatch would refuse."""
    text = str(time)
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    if match := DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    elif match := SHORT.fullmatch(text):
        hours, minutes, seconds, alone = (int(part or 0) for part in match.groups())
        days, minutes = 0, minutes + alone
    else:
        raise LaunchError(
            f"time={time!r} is not a Slurm time limit: expected '02:00:00' (hours:minutes:seconds), '1-12:00:00' "
            "(with days) or '90' (minutes)"
        )
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total < 1:
        raise LaunchError(f"time={time!r} must be greater than zero, for example '02:00:00'")
    return total


def _options(file: LaunchFile, tasks: str = "") -> str:
    output = file.output.replace("%", "%%") + ("-%A-%a.out" if tasks else "")
    job, nodes = file.job, file.job.counts
    lines = [
        "#!/bin/bash",
        f"# {nodes.count} x {nodes.nproc_per_node} ranks; generated by labkit; feel free to edit it.",
        _option("job-name", file.name),
        _option("nodes", nodes.count),
        "# one torchrun on each node, which starts the ranks",
        _option("ntasks-per-node", 1),
        _option("cpus-per-task", job.cpus_per_task),
        *([_option("gpus-per-node", job.gpus_per_node)] if job.gpus_per_node else []),
        *([_option("partition", job.partition)] if job.partition else []),
        *([_option("account", job.account)] if job.account else []),
        _option("time", job.time),
    ]
    if file.checkpoints:
        lines += [
            f"# USR1 to this script alone (B:) {job.saving_seconds} s before the time is up; Slurm may be 60 s early",
            _option("signal", f"B:USR1@{job.saving_seconds}"),
            "# requeue at the time limit or after preemption: the ranks resume",
            _option("requeue"),
        ]
    else:
        lines += ["# after a restart it could not resume", _option("no-requeue")]
    return "\n".join(
        [
            *lines,
            "# append the output of later attempts",
            _option("open-mode", "append"),
            _option("output", output),
            *([_option("array", tasks)] if tasks else []),
            _option("chdir", file.cwd),
            *(_directive(option) for option in job.options),
        ]
    )


def _setup(file: LaunchFile) -> str:
    lines = ["# any failure ends the job instead of training partially"]
    if own := file.job.setup.strip():  # user code often uses unset variables
        lines += ["set -e", own]
    return "\n".join([*lines, "set -euo pipefail"])


def _meeting(file: LaunchFile) -> str:
    job = f"{file.folder}/slurm.json"
    own = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if file.task else "$SLURM_JOB_ID"
    folder = [
        "# One job per folder: a second job of the same file would be mistaken for the first.",
        f'if [ -e {_quoted(job)} ] && ! grep -q "\\"{own}\\"" {_quoted(job)}; then',
        '    echo "labkit: this run already has or had a job; submit a new run" >&2',
        "    exit 1",
        "fi",
        "# Record the job's id in the folder. A stop request to an earlier attempt does not apply to this one.",
        *_replaced(job, f"""printf '{{"job": "%s"}}\\n' "{own}\""""),
        f"rm -f {_quoted(f'{file.folder}/stop.json')}",
        "",
    ]
    return "\n".join(
        [
            *(folder if file.folder else []),
            "# Static rendezvous: all nodes know the address before they start. If scontrol fails, so does the job;",
            "# nodes that fell back to localhost would not find each other.",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "export HEAD=${hosts%%$'\\n'*} LAST=${hosts##*$'\\n'}",
            "# derived from the job's id, because jobs may share a node; below Linux's ephemeral ports from 32768",
            f"export PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            "# counted from 1; Slurm counts the restarts",
            "export ATTEMPT=$((${SLURM_RESTART_COUNT:-0} + 1))",
        ]
    )


def _task(file: LaunchFile) -> str:
    nodes = file.job.counts
    lines = [
        "# Runs on every node, because only the node knows its index and its interface to the others.",
        "# shellcheck disable=SC2317  # srun calls it",
        "task() {",
        "    set -euo pipefail",
    ]
    if nodes.count > 1:
        lines += [
            "    # The interface towards another node. A host's own name often resolves to its loopback.",
            '    if [ "$SLURM_NODEID" = 0 ]; then other=$LAST; else other=$HEAD; fi',
            "    address=$(getent ahosts \"$other\" | awk 'NR == 1 {print $1}')",
            '    route=$(ip -o route get "$address")',
            "    interface=$(sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' <<<\"$route\")",
            '    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"',
            '    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"',
        ]
    threads = max(1, (file.job.cpus_per_task or 1) // nodes.nproc_per_node)
    lines += [
        "    # a rank using all cores for its threads would slow down the others",
        f'    export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"',
        "    # record each rank's last collectives to diagnose hangs",
        '    export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_NCCL_DUMP_ON_TIMEOUT=1',
    ]
    # torchrun's restarts are unreliable in torch 2.13; a restart is a requeue
    command = node_torchrun_command([], nodes, NODE, HEAD, PORT, *file.program)
    torchrun = _wrapped([_quoted(file.python), "-m torch.distributed.run", *_grouped(command)])
    if file.folder:
        lines += [
            f"    export TORCH_FR_DUMP_TEMP_FILE={_quoted(file.folder + '/ranks/fr_')}",
            '    export LABKIT_HOST="$SLURMD_NODENAME"',
            "    # labkit's supervisor of this node, and after `--` torchrun with labkit's guest in each rank",
            "    trap : TERM  # TERM is for the supervisor",
            "    code=0",
            f"    {_quoted(file.python)} -m labkit.launcher.node {_quoted(file.folder)} "
            '"$SLURM_NODEID" --attempt "$ATTEMPT" -- \\',
            f"        {torchrun} || code=$?",
            "    # a node that could not start has reported why; the others need not wait for it",
            '    if [ "$code" -gt 1 ] && [ "$code" -lt 128 ]; then',
            '        scancel --signal=TERM "$SLURM_JOB_ID.$SLURM_STEP_ID"',
            "    fi",
            '    exit "$code"',
        ]
    elif file.checkpoints:
        lines += [
            "    trap 'signaled=yes' TERM",
            "    code=0",
            f"    {torchrun} || code=$?",
            "    # torchrun exits with 1 on TERM, which would end nodes that are still saving",
            '    if [ "${signaled-}" ]; then code=0; fi',
            '    exit "$code"',
        ]
    else:
        lines += [f"    exec {torchrun}"]
    return "\n".join([*lines, "}", "export -f task"])


def _step(file: LaunchFile) -> list[str]:
    """The only step of the job."""
    lines = ["# --cpus-per-task: since Slurm 22.05 a step does not inherit it, and all ranks would share one core"]
    if file.folder:
        lines += [
            "# --kill-on-bad-exit=0: when a node fails, labkit ends the others after all of them have recorded why",
            "# --wait: Slurm ends what is left after 90 s (a node waits 60 s for the others to start)",
        ]
    else:
        lines += ["# --kill-on-bad-exit, --wait: when a node ends, end the others, which would wait for hours"]
    ending = "--kill-on-bad-exit=0 --wait=90" if file.folder else "--kill-on-bad-exit=1 --wait=60"
    return [*lines, f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {ending} --label bash -c task']


def _saving(file: LaunchFile) -> str:
    lines = [
        "# Near the time limit the ranks finish their step, save and exit.",
        "saving=",
        "# shellcheck disable=SC2317  # the trap calls it",
        "request_save() {",
        "    saving=yes",
        "    echo \"$(date '+%F %T') the time limit is near: asking the ranks to save\"",
    ]
    if file.folder:
        grace = max(5, file.job.saving_seconds - KEPT_SECONDS)
        request = f'{{"grace": {grace}, "goes_on": true}}'
        lines += [
            "    # like a user's stop request: each node's supervisor sends exactly one TERM; several would kill ranks",
            *(f"    {line}" for line in _replaced(f"{file.folder}/stop.json", f"echo '{request}'")),
        ]
    else:
        lines += [
            "    # to all processes of the job's steps, not to this script; ranks get a second TERM from torchrun,",
            "    # which waits 30 s for them",
            '    scancel --signal=TERM "$SLURM_JOB_ID"',
        ]
    return "\n".join([*lines, "}", "trap request_save USR1"])


def _requeueing(file: LaunchFile) -> str:
    before = [
        f"committed() {{ ls -d {_quoted(str(file.checkpoints))}/step-*/COMMIT.json 2>/dev/null || true; }}",
        "before=$(committed)",
    ]
    step = _step(file)
    unfinished = ' && [ "$code" != 0 ]' if file.folder else ""
    return "\n".join(
        [
            *before,
            "",
            *step[:-1],
            f"{step[-1]} &",
            "step=$! code=0",
            'wait "$step" || code=$?',
            "# a signal ends `wait`, not the step",
            'while [ "$saving" ] && kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done',
            "",
            *(["# code 0: training has finished in the meantime"] if file.folder else []),
            "# without a new checkpoint it would make no progress",
            f'if [ "$saving" ]{unfinished} && [ "$(committed)" != "$before" ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
        ]
    )


def _replaced(path: str, command: str) -> list[str]:
    """Lines that write the output of `command` into a file atomically, because others may read it."""
    return [f"{command} >{_quoted(f'{path}.new')}", f"mv {_quoted(f'{path}.new')} {_quoted(path)}"]


def _grouped(command: Sequence[str]) -> list[str]:
    """A command as shell text, with an option and its value in one piece."""
    pieces: list[str] = []
    for word in map(_expanded, command):
        if pieces and pieces[-1].startswith("-") and " " not in pieces[-1] and not word.startswith("-"):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    return pieces


def _wrapped(pieces: Sequence[str], width: int = 110) -> str:
    """The pieces, wrapped into lines."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += f" {piece}" if lines[-1] else piece
    return " \\\n        ".join(lines)


def _expanded(word: str) -> str:
    """A word for the shell, with placeholders replaced by variables."""
    pieces = re.split(f"([{''.join(VARIABLES)}])", word)
    return "".join(VARIABLES.get(piece) or _quoted(piece) for piece in pieces if piece) or "''"


def _quoted(text: str) -> str:
    """Text quoted for the shell; in double quotes if single ones would be hard to read or alarm shellcheck."""
    if not re.search("['$`]", _checked(text)):
        return shlex.quote(text)
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"'


def _option(name: str, value: object = None) -> str:
    return _directive(f"--{name}" if value is None else f"--{name}={value}")


def _directive(option: str) -> str:
    """A directive for sbatch, which interprets quotes and backslashes like a shell, but no variables."""
    return f"#SBATCH {shlex.quote(_checked(str(option)))}"


def _checked(word: str) -> str:
    if CONTROL.search(word):
        raise LaunchError(f"{word!r} cannot be used in a launch file: it has a line break or other control character")
    return word
