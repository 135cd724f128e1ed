"""What labkit does on another host, over ssh: look whether a run can be there, and begin its part of one.

    python -m labkit.cluster.remote look | begin      a JSON request on stdin, a JSON answer on stdout

The request travels through stdin, because a command line can be read by every user of the host.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from labkit.errors import LabError, LaunchError
from labkit.hardware import hardware, own_address_towards
from labkit.launcher import check_gpus_are_free
from labkit.record import RunFolder, last_beat
from labkit.version import __version__

__all__ = ["begin", "look", "reach"]

BEGINNING_SECONDS = 30.0
LOOK_SECONDS = 0.05


def main() -> None:
    request = json.load(sys.stdin)
    answers: dict[str, Callable[..., dict[str, Any]]] = {"look": look, "reach": reach, "begin": begin}
    try:
        answer = answers[sys.argv[1]](**request)
    except LabError as error:
        answer = {"problem": str(error)}
    print(json.dumps(answer))


def look(beacon: str, visible_devices: str | None = None) -> dict[str, Any]:
    """The properties of this host. `beacon` is a file that it can see only if it shares the runs folder."""
    came_by = os.environ.get("SSH_CONNECTION", "").split()  # client's address and port, server's address and port
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
    return {
        "host": socket.gethostname(),
        "address": came_by[2] if len(came_by) == 4 else None,
        "free_port": port,
        "sees_runs": Path(beacon).is_file(),
        "machine": asdict(hardware(visible_devices)),
        "versions": {"python": sys.version.split()[0], "torch": version("torch"), "labkit": __version__},
    }


def reach(address: str) -> dict[str, Any]:
    """This host's address towards another. Raises LaunchError if there is no route."""
    return {"from": own_address_towards(address)}


def begin(folder: str, node: int, command: Sequence[str], env: Mapping[str, str]) -> dict[str, Any]:
    """Start the supervisor of a node, detached, and wait until it has started. Raises LaunchError."""
    run = RunFolder(folder)
    home = run.node(node)
    if not run.manifest.is_file():
        raise LaunchError(f"{run.path} does not exist: runs_dir must be on a file system that all hosts share")
    if {**os.environ, **env}.get("LABKIT_SHARE_GPUS") != "1":
        check_gpus_are_free(run.read_manifest().get("gpus") or [])
    home.path.mkdir(parents=True, exist_ok=True)
    with home.supervisor_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # it outlives the ssh that started it
        )
    deadline = time.monotonic() + BEGINNING_SECONDS
    while last_beat(home) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()  # it has started nothing yet, and must not once the launch is given up
            process.wait()
            lines = home.supervisor_log.read_text(errors="replace").strip().splitlines()
            raise LaunchError(lines[-1] if lines else "the supervisor of its ranks has not started")
        time.sleep(LOOK_SECONDS)
    _begun[:] = [one for one in (*_begun, process) if one.poll() is None]
    return {"pid": process.pid}


_begun: list[subprocess.Popen[bytes]] = []  # in this process: one that has ended is a zombie until it is polled


if __name__ == "__main__":
    main()
