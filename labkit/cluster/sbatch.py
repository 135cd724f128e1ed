"""The launch file of a Slurm job, as a pure function. Each line of it that is not obvious says why it is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.cluster.timelimit import NOTICE_SECONDS, seconds_of
from labkit.errors import LaunchError
from labkit.launcher.torchrun import node_torchrun_command
from labkit.record import Nodes

__all__ = ["HEAD", "NODE", "PORT", "LaunchFile", "sbatch_text"]

# Words of a command that only the job knows. They cannot be in a word of anybody's: control characters are refused.
NODE, HEAD, PORT = "\1", "\2", "\3"
VARIABLES = {NODE: '"$SLURM_NODEID"', HEAD: '"$HEAD"', PORT: '"$PORT"'}
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
# Linux gives ports from 32768 on to whoever asks for any.
FIRST_PORT, PORTS = 20_000, 12_000
KEPT_SECONDS = 15  # of the time to save, for what follows the ranks' end


@dataclass(frozen=True)
class LaunchFile:
    """What is asked of Slurm, and what is to run on every node.

    `program` is what torchrun starts: the script and its arguments, or labkit's worker before them. `python` is the
    interpreter, at the same path on every node. `folder` is the run's, on a file system that all nodes share; without
    one the file does without labkit. `checkpoints` is where the script saves: a job whose time is up goes back into
    the queue if something new is there; without, it ends. `options` are more options of sbatch, `setup` lines of shell
    that come before everything else.
    """

    name: str
    nodes: Nodes
    time: str
    cwd: str
    output: str
    python: str
    program: Sequence[str]
    folder: str | None = None
    checkpoints: str | None = None
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    options: Sequence[str] = ()
    setup: str = ""
    saving_seconds: int = NOTICE_SECONDS


def sbatch_text(file: LaunchFile) -> str:
    """The text for `sbatch`. Raises LaunchError for what cannot be told to Slurm or a shell, or would not work."""
    limit = seconds_of(file.time)
    if file.checkpoints and limit is not None and limit <= file.saving_seconds:
        raise LaunchError(
            f"time={file.time!r} is over before the job could save: it is told to {file.saving_seconds} s before its "
            "end, and Slurm may tell it up to a minute earlier. Give more time, or a smaller saving_seconds"
        )
    parts = [_options(file), _setup(file), _meeting(file), _task(file)]
    parts += [_saving(file), _requeueing(file)] if file.checkpoints else ["\n".join(_step(file))]
    return "\n\n".join(parts) + "\n"


def _options(file: LaunchFile) -> str:
    nodes = file.nodes
    lines = [
        "#!/bin/bash",
        f"# {nodes.count} x {nodes.nproc_per_node} ranks; written by labkit, to be read and changed.",
        _option("job-name", file.name),
        _option("nodes", nodes.count),
        "# one torchrun on each node, which starts the ranks",
        _option("ntasks-per-node", 1),
        _option("cpus-per-task", file.cpus_per_task),
        *([_option("gpus-per-node", file.gpus_per_node)] if file.gpus_per_node else []),
        *([_option("partition", file.partition)] if file.partition else []),
        *([_option("account", file.account)] if file.account else []),
        _option("time", file.time),
    ]
    if file.checkpoints:
        lines += [
            f"# USR1 to this script alone (B:) {file.saving_seconds} s before the time is up; Slurm may be 60 s early",
            _option("signal", f"B:USR1@{file.saving_seconds}"),
            "# back into the queue when its time is up, or when Slurm takes its nodes away: the ranks resume",
            _option("requeue"),
        ]
    else:
        lines += ["# begun again it would have nothing to go on from", _option("no-requeue")]
    return "\n".join(
        [
            *lines,
            "# what later attempts print follows what the earlier ones did",
            _option("open-mode", "append"),
            _option("output", file.output.replace("%", "%%")),
            _option("chdir", file.cwd),
            *(_directive(option) for option in file.options),
        ]
    )


def _setup(file: LaunchFile) -> str:
    lines = ["# what fails ends the job: better than to train on by halves"]
    if own := file.setup.strip():  # shell code of others often asks for variables that are not set
        lines += ["set -e", own]
    return "\n".join([*lines, "set -euo pipefail"])


def _meeting(file: LaunchFile) -> str:
    job = f"{file.folder}/slurm.json"
    folder = [
        "# One job to a folder: a second one, of the same file, would be taken for the first.",
        f'if [ -e {_quoted(job)} ] && ! grep -q "\\"$SLURM_JOB_ID\\"" {_quoted(job)}; then',
        '    echo "labkit: this run has a job already, or had one; launch it anew" >&2',
        "    exit 1",
        "fi",
        "# Which job this is, for whoever looks into the folder. What one attempt was told does not hold for the next.",
        *_replaced(job, """printf '{"job": "%s"}\\n' "$SLURM_JOB_ID\""""),
        f"rm -f {_quoted(f'{file.folder}/stop.json')}",
        "",
    ]
    return "\n".join(
        [
            *(folder if file.folder else []),
            "# Where the nodes meet, known to all before any of them starts: static rendezvous. Should scontrol fail,",
            "# so does the job; nodes that fell back to localhost would each train alone.",
            'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            "export HEAD=${hosts%%$'\\n'*} LAST=${hosts##*$'\\n'}",
            "# by the job's number, for jobs may share a node; below 32768, from where Linux gives ports away",
            f"export PORT=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))",
            "# counted from 1; Slurm counts how often it began the job again",
            "export ATTEMPT=$((${SLURM_RESTART_COUNT:-0} + 1))",
        ]
    )


def _task(file: LaunchFile) -> str:
    ranks = file.nodes.nproc_per_node
    lines = [
        "# On every node. Which one it is, and the way to the others, is known only there.",
        "# shellcheck disable=SC2317  # srun calls it",
        "task() {",
        "    set -euo pipefail",
    ]
    if file.nodes.count > 1:
        lines += [
            "    # The interface towards another node. By its own name a host often finds but its loopback.",
            '    if [ "$SLURM_NODEID" = 0 ]; then other=$LAST; else other=$HEAD; fi',
            "    address=$(getent ahosts \"$other\" | awk 'NR == 1 {print $1}')",
            '    route=$(ip -o route get "$address")',
            "    interface=$(sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' <<<\"$route\")",
            '    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"',
            '    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$interface}"',
        ]
    lines += [
        "    # a rank that took all cores for its threads would slow down its neighbours",
        f'    export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{max(1, file.cpus_per_task // ranks)}}}"',
        "    # what each rank's last collectives were, for when they wait for each other",
        '    export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE:-2000}" TORCH_NCCL_DUMP_ON_TIMEOUT=1',
    ]
    # torchrun's restarts are unreliable in torch 2.13; a restart is a requeue
    command = node_torchrun_command([], file.nodes, NODE, HEAD, PORT, *file.program)
    torchrun = _wrapped([_quoted(file.python), "-m torch.distributed.run", *_grouped(command)])
    if file.folder:
        lines += [
            f"    export TORCH_FR_DUMP_TEMP_FILE={_quoted(file.folder + '/ranks/fr_')}",
            '    export LABKIT_HOST="$SLURMD_NODENAME"',
            "    # labkit's supervisor of this node, and after its `--` torchrun with labkit's worker round each rank",
            "    trap : TERM  # which is for what this shell waits for",
            "    code=0",
            f"    {_quoted(file.python)} -m labkit.launcher.node {_quoted(file.folder)} "
            '"$SLURM_NODEID" --attempt "$ATTEMPT" -- \\',
            f"        {torchrun} || code=$?",
            "    # a node that could not even begin has said why; the others need not wait for it",
            '    if [ "$code" -gt 1 ] && [ "$code" -lt 128 ]; then',
            '        scancel --signal=TERM "$SLURM_JOB_ID.$SLURM_STEP_ID"',
            "    fi",
            '    exit "$code"',
        ]
    elif file.checkpoints:
        lines += [
            "    trap 'told=yes' TERM",
            "    code=0",
            f"    {torchrun} || code=$?",
            "    # torchrun that is told to end exits with 1, and that would end a node that still saves",
            '    if [ "${told-}" ]; then code=0; fi',
            '    exit "$code"',
        ]
    else:
        lines += [f"    exec {torchrun}"]
    return "\n".join([*lines, "}", "export -f task"])


def _step(file: LaunchFile) -> list[str]:
    """The one step of the job."""
    lines = ["# --cpus-per-task: since Slurm 22.05 a step does not inherit it, and all ranks would share one core"]
    if file.folder:
        lines += [
            "# --kill-on-bad-exit=0: when a node fails, labkit ends the others, once all of them have written down why",
            "# --wait: what then is left after 90 s (a node waits 60 s for the others to begin), Slurm ends",
        ]
    else:
        lines += ["# --kill-on-bad-exit, --wait: a node that has ended ends the others, which would wait for hours"]
    ending = "--kill-on-bad-exit=0 --wait=90" if file.folder else "--kill-on-bad-exit=1 --wait=60"
    return [*lines, f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {ending} --label bash -c task']


def _saving(file: LaunchFile) -> str:
    lines = [
        "# When time is nearly up: the ranks finish their step, save and end.",
        "told=",
        "# shellcheck disable=SC2317  # the trap calls it",
        "tell() {",
        "    told=yes",
        "    echo \"$(date '+%F %T') the time limit is near: the ranks are told to save\"",
    ]
    if file.folder:
        grace = max(5, file.saving_seconds - KEPT_SECONDS)
        request = f'{{"grace": {grace}, "goes_on": true}}'
        lines += [
            "    # as a stop that somebody asks for: each node's supervisor then sends one TERM; several lose ranks",
            *(f"    {line}" for line in _replaced(f"{file.folder}/stop.json", f"echo '{request}'")),
        ]
    else:
        lines += [
            "    # to all processes of the job's steps, not to this script; ranks get a second one from torchrun,",
            "    # which waits 30 s for them",
            '    scancel --signal=TERM "$SLURM_JOB_ID"',
        ]
    return "\n".join([*lines, "}", "trap tell USR1"])


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
            'while [ "$told" ] && kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done',
            "",
            *(["# with 0 it came to its end while it was told"] if file.folder else []),
            "# without a new checkpoint it would go round in circles",
            f'if [ "$told" ]{unfinished} && [ "$(committed)" != "$before" ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
        ]
    )


def _replaced(path: str, command: str) -> list[str]:
    """Lines that put what `command` prints into a file, in one step: others read it meanwhile."""
    return [f"{command} >{_quoted(f'{path}.new')}", f"mv {_quoted(f'{path}.new')} {_quoted(path)}"]


def _grouped(command: Sequence[str]) -> list[str]:
    """A command as shell text, an option and its value to a piece."""
    pieces: list[str] = []
    for word in map(_expanded, command):
        if pieces and pieces[-1].startswith("-") and " " not in pieces[-1] and not word.startswith("-"):
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    return pieces


def _wrapped(pieces: Sequence[str], width: int = 110) -> str:
    """On as many lines as it takes."""
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += f" {piece}" if lines[-1] else piece
    return " \\\n        ".join(lines)


def _expanded(word: str) -> str:
    """For a shell, with what only the job knows as the variable that holds it."""
    pieces = re.split(f"([{''.join(VARIABLES)}])", word)
    return "".join(VARIABLES.get(piece) or _quoted(piece) for piece in pieces if piece) or "''"


def _quoted(text: str) -> str:
    """For a shell, between double quotes what single ones would make hard to read, or shellcheck take for a mistake."""
    if not re.search("['$`]", _sound(text)):
        return shlex.quote(text)
    return '"' + re.sub(r'(["$`\\])', r"\\\1", text) + '"'


def _option(name: str, value: object = None) -> str:
    return _directive(f"--{name}" if value is None else f"--{name}={value}")


def _directive(option: str) -> str:
    """For sbatch, which takes quotes and backslashes as a shell does, and no variables."""
    return f"#SBATCH {shlex.quote(_sound(str(option)))}"


def _sound(word: str) -> str:
    if CONTROL.search(word):
        raise LaunchError(f"{word!r} cannot stand in a launch file: it has a line break or another control character")
    return word
