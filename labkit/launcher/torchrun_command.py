"""Builds the torchrun command of a run, or of one node of several, and the environment of its ranks."""

from __future__ import annotations

import ipaddress
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from labkit.errors import RunFolderError
from labkit.rank_files import FOLDER, HIDDEN, HOST, MARKER, NODE_MARKER
from labkit.record import Nodes, RunFolder
from labkit.session import current_folder

TORCHRUN = "torch.distributed.run"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# Left over from an earlier torchrun, a Slurm job or a container image; they would change world size or rendezvous.
LEFTOVERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
LEFTOVER_PREFIXES = ("PET_", "TORCHELASTIC_")
# An allowlist: any other variable may hold a secret and is never written to disk.
RECORDED_PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "LABKIT_")
RECORDED = ("KAGGLE_KERNEL_RUN_TYPE", "PYTHONPATH", "PYTHONSAFEPATH", "LD_PRELOAD")
# Where NCCL's watchdog writes its flight record at a time limit, followed by the rank; the second name is the older.
NCCL_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# After a time limit the watchdog sleeps four times this long before it ends the rank: 60 s by torch's default.
DUMP_MILLISECONDS = "2500"
# shutdown.py decides how long ranks may save, so torchrun's limit (30 s, fixed before torch 2.13) must be longer.
OWN_GRACE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "180"}
# torchrun looks up this host's own name, up to six times and only for its log; if a name server does not answer, the
# system's default is to wait 10 s each time.
QUICK_LOOKUPS = {"RES_OPTIONS": "timeout:1 attempts:1"}
# Set for labkit; a command without it does not need them.
OURS = ("LABKIT_", "KINETO_", "TORCH_FR_")
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PWD", "KEY", "CREDENTIAL", "AUTH")


def torchrun_command(folder: RunFolder, nproc_per_node: int, program: Sequence[str], args: Sequence[str]) -> list[str]:
    """The command of unmodified torchrun with labkit's guest on each rank. It never restarts them, because torch 2.13's
    own restarts are unreliable.

    `-P`: a `random.py` in the working folder must not break torchrun's own imports, nor does it under `torchrun`.
    `--local-addr`: by default the ranks connect to this host's own name, which may not resolve, or to another address.
    """
    launcher = [sys.executable, "-P", "-m", TORCHRUN, "--standalone", "--local-addr", "localhost"]
    ranks = ["--nproc-per-node", str(nproc_per_node), "--max-restarts", "0"]
    return [*launcher, *ranks, *guest_arguments(folder, folder.torchrun_logs, program, args)]


def node_torchrun_command(
    torchrun: Sequence[str], nodes: Nodes, rank: int | str, address: str, port: int | str, *rest: str
) -> list[str]:
    """torchrun for node `rank` of a fixed number of nodes; `rest` follows torchrun's own options.

    The rendezvous is static: with c10d's, an agent that is cut off hangs for minutes, and host names must be correct.
    """
    where = ["--node-rank", str(rank), "--master-addr", address, "--master-port", str(port)]
    sizes = ["--nnodes", str(nodes.count), "--nproc-per-node", str(nodes.nproc_per_node)]
    return [*torchrun, *sizes, *where, "--max-restarts", "0", *rest]


def guest_node_command(
    folder: RunFolder,
    nodes: Nodes,
    node: int | str,
    address: str,
    port: int | str,
    program: Sequence[str],
    args: Sequence[str],
) -> list[str]:
    """torchrun for one node, with labkit's guest in each rank."""
    torchrun = [sys.executable, "-P", "-m", TORCHRUN]
    rest = guest_arguments(folder, folder.node(node).torchrun_logs, program, args)
    return node_torchrun_command(torchrun, nodes, node, address, port, *rest)


def node_command(folder: RunFolder, node: int | str, address: str, port: int | str) -> list[str]:
    """The command that one host of a run executes: the node's supervisor, which starts torchrun. `node`, `address` and
    `port` may be variables of a shell."""
    manifest = folder.read_manifest()
    if manifest.nodes is None:
        raise RunFolderError(f"{folder.id} is a single-node run; expected a multi-node run")
    supervisor = [sys.executable, "-m", "labkit.launcher.node", str(folder.path), str(node), "--"]
    torchrun = guest_node_command(folder, manifest.nodes, node, address, port, manifest.program, manifest.args)
    return [*supervisor, *torchrun]


def guest_arguments(run: RunFolder, logs: Path, program: Sequence[str], args: Sequence[str]) -> list[str]:
    """The arguments after torchrun's own options: the guest of `program`, a script or `-m` and a module.

    `--`: without it torchrun refuses a script's option that abbreviates several of its own, such as `--log`.
    """
    return ["--redirects", "3", "--log-dir", str(logs), "--", str(run.guest), *program, *args]


def reproducing_command(
    program: Sequence[str], nproc_per_node: int, args: Sequence[str], env: Mapping[str, str]
) -> str:
    """The command that runs the same training without labkit; `env` holds the variables added for its ranks."""
    words = ["torchrun", "--standalone", f"--nproc-per-node={nproc_per_node}", *plain_arguments(program, args)]
    return " ".join([*assignments(env), shlex.join(words)])


def plain_arguments(program: Sequence[str], args: Sequence[str]) -> list[str]:
    """The arguments after torchrun's own options, without labkit."""
    return [*(["-m", "--", program[1]] if program[0] == "-m" else ["--", *program]), *args]


def assignments(env: Mapping[str, str]) -> list[str]:
    """`NAME=value` words for a shell, without labkit's own; the value of a possible secret is left out."""
    values = recorded_environment(env)
    names = sorted(name for name in env if not name.startswith(OURS))
    return [f"{name}={shlex.quote(values[name]) if name in values else '…'}" for name in names]


def rank_environment(
    base: Mapping[str, str], extra: Mapping[str, str] | None = None, interface: str = LOOPBACK
) -> tuple[dict[str, str], list[str]]:
    """`(environment, dropped)`: torchrun's environment, and the names of the leftovers that were removed.

    `interface` is the network interface to the other ranks: on one machine the loopback.
    """
    inherited = without_leftovers(base)
    dropped = sorted(base.keys() - inherited.keys() - {MARKER, NODE_MARKER})
    defaults = {
        "GLOO_SOCKET_IFNAME": interface,
        "TORCH_FR_BUFFER_SIZE": "2000",  # entries of the flight recorder: which collectives each rank has called
    } | ({"NCCL_SOCKET_IFNAME": interface} if interface != LOOPBACK else {})
    return {**defaults, **inherited, **(extra or {})}, dropped


def without_leftovers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of an earlier torchrun or another run."""
    theirs = (*LEFTOVERS, MARKER, NODE_MARKER)
    return {k: v for k, v in environment.items() if k not in theirs and not k.startswith(LEFTOVER_PREFIXES)}


def attempt_command(
    command: Sequence[str], run: RunFolder, attempt: RunFolder, elapsed: float, ranks: int | None = None
) -> list[str]:
    """The command of a run with the logs in one attempt's folder and the rest of its deadline. `elapsed` is seconds,
    `ranks` the number of ranks if it is not that of the launch."""
    words = [str(attempt.torchrun_logs) if word == str(run.torchrun_logs) else word for word in command]
    if ranks is not None:
        words[words.index("--nproc-per-node") + 1] = str(ranks)
    if attempt is not run and "--deadline-seconds" in words[:-1]:
        where = words.index("--deadline-seconds") + 1
        with suppress(ValueError):  # the script refuses it
            words[where] = f"{max(1.0, float(words[where]) - elapsed):.0f}"
    return words


def marked(
    environment: Mapping[str, str], run: RunFolder, attempt: RunFolder, command: Sequence[str]
) -> dict[str, str]:
    """The environment of a torchrun command with the marker of the run's processes, and with what torchrun and the
    guest need, which the script does not see."""
    dumps = dict.fromkeys(NCCL_DUMPS, str(attempt.ranks / "fr_")) | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    dumps["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = DUMP_MILLISECONDS
    torchruns = OWN_GRACE | (QUICK_LOOKUPS if _needs_no_name(command) else {})
    hidden = [HOST, *(name for name in torchruns if name not in environment)]
    guest = {FOLDER: str(attempt.path), HIDDEN: ",".join(hidden)}
    return {**dumps, **torchruns, **environment, **guest, MARKER: run.marker}


def _needs_no_name(command: Sequence[str]) -> bool:
    """Whether torchrun and its ranks connect to localhost or to a numeric address."""
    if "--standalone" in command:
        return True
    try:
        ipaddress.ip_address(command[command.index("--master-addr") + 1])
    except ValueError:  # from `index`, too
        return False
    return True


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that is written to run.json."""
    return {
        k: v
        for k, v in sorted(environment.items())
        if (k in RECORDED or k.startswith(RECORDED_PREFIXES)) and not any(word in k.upper() for word in SECRET_WORDS)
    }


def script_folder(path: str | os.PathLike[str] | None) -> str:
    """Where modules next to the script are searched: its own folder, to which links lead, or the notebook's."""
    return str(Path(path).resolve().parent if path else current_folder())
