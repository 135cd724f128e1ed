"""Prepares a multi-node run before anything starts: its folder, and the command that starts each node."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import RunFolderError
from labkit.files import write_json
from labkit.hardware import Hardware, platform_name
from labkit.launcher import checks
from labkit.launcher.locks import gpus_of
from labkit.launcher.request import Launchable, check, checkpoint_arguments, with_options
from labkit.launcher.starting import removed_on_failure, write_folder
from labkit.launcher.torchrun import (
    TORCHRUN,
    assignments,
    guest_arguments,
    node_torchrun_command,
    plain_arguments,
    recorded_environment,
)
from labkit.record import Nodes, RunFolder, runs_root
from labkit.write import LaunchOptions

__all__ = ["create_on_nodes", "node_command", "plain_command", "torchrun_of_node"]


def create_on_nodes(
    script: Launchable,
    nodes: Nodes,
    options: LaunchOptions,
    parameters: Mapping[str, Any],
    *,
    address: str = "HEAD",
    port: int | str = "PORT",
    machine: Hardware | None = None,
    prediction: Mapping[str, Any] | None = None,
    saves: bool = False,
) -> RunFolder:
    """Create the folder of a run on several nodes, and start nothing. Raises LaunchError or ScriptError.

    `address` and `port` are the rendezvous, placeholders if only the job will know them. `machine` describes each host;
    None if it is not known yet. With `saves`, a script that can save checkpoints does so, and the run can be resumed.
    """
    checks.check_torch(platform_name())
    env = checks.check_environment(options.env or {})
    request = check(script, options.args, parameters, nodes.world_size, env.get("PYTHONPATH", ""))
    if machine and not request.path:
        checks.check_precision(request.options.get("precision"), machine, nodes.nproc_per_node)
    request = with_options(request, ["checkpoint_dir"]) if saves else request
    folder = RunFolder.create(runs_root(options.runs_dir), str(options.name or request.script.name))
    with removed_on_failure(folder):
        folder.nodes.mkdir()
        arguments = [*request.argv, *checkpoint_arguments(request, {"save_every": "1"} if saves else {}, folder)]
        program = request.words(folder)
        plain = [plain_command(nodes, node, address, port, program, request.argv) for node in range(nodes.count)]
        lines = [" ".join([*assignments(env), line]) for line in plain]
        manifest = {
            "torchrun": _torchrun(folder, nodes, 0, address, port, program, arguments),
            "world_size": nodes.world_size,
            "nodes": nodes.as_dict(),
            "backend": None if machine is None else machine.backend,
            "devices": [] if machine is None else [gpu.name for gpu in machine.gpus] or ["cpu"],
            "platform": platform_name() if machine is None else machine.platform,
            "env": recorded_environment(env),
            "gpus": [] if machine is None else gpus_of(machine, nodes.nproc_per_node),
            "retries": 0,
            "watchdog": options.watchdog,
        }
        write_folder(folder, request, arguments, lines, manifest)
        if prediction:
            write_json(folder.plan, prediction)
    return folder


def torchrun_of_node(folder: RunFolder, node: int | str, address: str, port: int | str) -> list[str]:
    """The torchrun command, with labkit's guest in each rank, for one node of a created run; `node` may be a shell
    variable."""
    manifest = folder.read_manifest()
    nodes = manifest.nodes
    if nodes is None:
        raise RunFolderError(f"{folder.id} is a single-node run; expected a multi-node run")
    return _torchrun(folder, nodes, node, address, port, manifest.program, manifest.args)


def node_command(folder: RunFolder, node: int, address: str, port: int) -> list[str]:
    """The command that one host of a run executes: the node's supervisor, which starts torchrun."""
    supervisor = [sys.executable, "-m", "labkit.launcher.node", str(folder.path), str(node), "--"]
    return [*supervisor, *torchrun_of_node(folder, node, address, port)]


def plain_command(
    nodes: Nodes, node: int | str, address: str, port: int | str, program: Sequence[str], args: Sequence[str]
) -> str:
    """The command that runs one node's part of the same training without labkit."""
    rest = plain_arguments(program, args)
    return shlex.join(node_torchrun_command(["torchrun"], nodes, node, address, port, *rest))


def _torchrun(
    folder: RunFolder,
    nodes: Nodes,
    node: int | str,
    address: str,
    port: int | str,
    program: Sequence[str],
    args: Sequence[str],
) -> list[str]:
    torchrun = [sys.executable, "-P", "-m", TORCHRUN]
    rest = guest_arguments(folder, folder.node(node).torchrun_logs, program, args)
    return node_torchrun_command(torchrun, nodes, node, address, port, *rest)
