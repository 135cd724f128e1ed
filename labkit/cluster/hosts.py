"""Starts a run on several hosts by plain ssh: looks at each, makes the run's folder, begins its part on each.

    python -m labkit.cluster.hosts RUN_FOLDER OWNER_PID      ends the run when the process that started it has ended

torchrun's rendezvous is static, at an address of the first host that the others were seen to reach; names in
/etc/hosts, which are often wrong, are not relied upon.
"""

from __future__ import annotations

import os
import random
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from labkit.arguments import Parameters
from labkit.cluster.ssh import ask, check_names, is_address, is_this_host
from labkit.errors import LaunchError, RunFolderError
from labkit.files import Json
from labkit.hardware import Gpu, Hardware, hardware, is_loopback, own_address_towards, resolved
from labkit.launch_options import LaunchOptions
from labkit.launcher import Launchable, check_ranks, create_run, node_command, prepare_launch, stop
from labkit.record import Nodes, RunFolder, State
from labkit.stored_runs import runs_root
from labkit.write import Script

HOSTS_AT_ONCE = 64  # each is a thread that waits for an ssh
LOOK_SECONDS = 0.5
PORTS = range(20_000, 30_000)  # below those that systems hand out themselves
T = TypeVar("T")
_ties: list[subprocess.Popen[bytes]] = []


def begin(
    script: Launchable,
    options: LaunchOptions,
    parameters: Parameters,
    *,
    tied: bool,
    prediction: Mapping[str, Json] | None = None,
) -> RunFolder:
    """Start a run on every host and return its folder. Raises LaunchError before any rank starts."""
    if options.retries or options.min_ranks is not None:
        raise LaunchError(
            "retries and min_ranks work on one machine only; on several, restart the run from its newest checkpoint, "
            "or use a scheduler (labkit slurm)"
        )
    names = check_names(options.hosts)
    env = {name: str(value) for name, value in (options.env or {}).items()}
    looks = _look(names, runs_root(options.runs_dir), env.get("CUDA_VISIBLE_DEVICES"))
    machines = [_machine(look["machine"]) for look in looks]
    ranks = _ranks(names, machines, options.nproc_per_node, options.backend)
    address, port = _head_address(names, looks), int(looks[0]["free_port"])
    _each(names[1:], lambda _, host: ask(host, "reach", address=address))
    nodes = Nodes(len(names), ranks, tuple(map(_host, names)))
    launch = prepare_launch(script, options, parameters, nodes=nodes, machine=machines[0])
    folder = create_run(launch, address=address, port=port, prediction=prediction)

    def begin_node(node: int, host: str) -> None:
        command = node_command(folder, node, address, port)
        ask(host, "begin", folder=str(folder.path), node=node, env=env, command=command)

    try:
        _each(names, begin_node)
    except BaseException:  # an interrupt, too: nobody would know of the nodes that have started
        removed = folder.path.rename(folder.path.with_name(f".{folder.id}"))  # ends them, even the late ones
        shutil.rmtree(removed, ignore_errors=True)
        raise
    if tied:
        _ties[:] = [process for process in _ties if process.poll() is None]
        _ties.append(tie(folder))
    return folder


def lines_to_paste(
    script: Script | str | os.PathLike[str], options: LaunchOptions
) -> tuple[RunFolder, list[tuple[str, str]]]:
    """The folder of a run and (host, line to paste there), for use without ssh. Nothing is started."""
    names = check_names(options.hosts)
    machine = hardware()
    ranks = check_ranks(options.nproc_per_node, options.backend, machine)
    address, port = _address_by_name(names), random.choice(PORTS)
    nodes = Nodes(len(names), ranks, tuple(map(_host, names)))
    folder = create_run(prepare_launch(script, options, {}, nodes=nodes, machine=machine), address=address, port=port)
    path = os.environ.get("PYTHONPATH")
    modules = f"PYTHONPATH={shlex.quote(path)} " if path else ""
    commands = [shlex.join(node_command(folder, node, address, port)) for node in range(nodes.count)]
    lines = [f"cd {shlex.quote(str(Path.cwd()))}; {modules}{command}" for command in commands]
    return folder, list(zip(names, lines, strict=True))


def _look(names: list[str], root: Path, visible_devices: str | None) -> list[dict[str, Any]]:
    """The properties of each host. Raises LaunchError if one of them cannot take part."""
    beacon = root / f".labkit-{secrets.token_hex(4)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        beacon.touch()
    except OSError as error:
        raise RunFolderError(f"runs cannot be stored in {root}: {error.strerror}") from None
    try:
        looks = _each(names, lambda _, host: ask(host, "look", beacon=str(beacon), visible_devices=visible_devices))
    finally:
        beacon.unlink(missing_ok=True)
    for host, look in zip(names, looks, strict=True):
        if not look["sees_runs"]:
            raise LaunchError(f"host {host} cannot see {root}: runs_dir must be on a file system that all hosts share")
        for what, version in look["versions"].items():
            if version != looks[0]["versions"][what]:
                raise LaunchError(
                    f"{host} has {what} {version}, {names[0]} has {looks[0]['versions'][what]}: every host needs the "
                    "same environment"
                )
    return looks


def _ranks(names: list[str], machines: list[Hardware], wanted: int | str, backend: str | None) -> int:
    """Ranks per host. Raises LaunchError when a host cannot run that many, or would use its GPUs twice."""
    counts = []
    for host, machine in zip(names, machines, strict=True):
        try:
            counts.append(check_ranks(wanted, backend, machine))
        except LaunchError as error:
            raise LaunchError(f"{host}: {error}") from None
        if machine.gpus and names.count(host) > 1:
            raise LaunchError(
                f"hosts lists {host} twice, so both nodes would use the same GPUs; for two nodes on its CPU pass "
                "env={'CUDA_VISIBLE_DEVICES': ''}"
            )
    if len(set(counts)) > 1:
        each = ", ".join(f"{host} {count}" for host, count in zip(names, counts, strict=True))
        raise LaunchError(f"the hosts would start different numbers of ranks ({each}); set nproc_per_node")
    return counts[0]


def _head_address(names: list[str], looks: list[dict[str, Any]]) -> str:
    """An address of the first host that the others can reach: the one that was given, the one that ssh reached it by,
    or that of the route from here to the others. /etc/hosts helps only where it is right."""
    head = _host(names[0])
    if is_address(head) and not is_loopback(head):
        return head
    if not is_this_host(names[0]):
        return str(looks[0]["address"] or resolved(head))
    others = [look["address"] for look in looks if look["address"]]
    return own_address_towards(others[0]) if others else "127.0.0.1"


def _address_by_name(names: list[str]) -> str:
    """As `_head_address`, but found on this machine alone. Raises LaunchError for a loopback address."""
    heads = [_host(name) for name in names]
    others = [host for host in heads if not is_this_host(host)]
    if not others:
        return "127.0.0.1"
    address = own_address_towards(resolved(others[0])) if is_this_host(heads[0]) else resolved(heads[0])
    if is_loopback(address):
        raise LaunchError(f"{heads[0]} resolves to {address} here, which no other host can reach; pass its address")
    return address


def _host(name: str) -> str:
    """The name without ssh's user."""
    return name.rpartition("@")[2]


def _each(names: Sequence[str], do: Callable[[int, str], T]) -> list[T]:
    """Call a function for all hosts concurrently; raises the first host's exception."""
    if not names:
        return []
    with ThreadPoolExecutor(HOSTS_AT_ONCE, thread_name_prefix="labkit-host") as threads:
        return [done.result() for done in [threads.submit(do, n, host) for n, host in enumerate(names)]]


def _machine(value: dict[str, Any]) -> Hardware:
    gpus = tuple(Gpu(g["name"], g["memory"], (g["capability"][0], g["capability"][1])) for g in value["gpus"])
    return Hardware(**{**value, "gpus": gpus})


def tie(folder: RunFolder) -> subprocess.Popen[bytes]:
    """End the run when this process ends, as the supervisor does on one machine."""
    with folder.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "labkit.cluster.hosts", str(folder.path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def main() -> None:
    folder, owner = RunFolder(sys.argv[1]), int(sys.argv[2])
    while os.getppid() == owner:
        if State.read(folder).is_final:
            return
        time.sleep(LOOK_SECONDS)
    stop(folder)


if __name__ == "__main__":
    main()
