"""Asks another host over ssh, or this one directly, whether a run can be on it, or to begin its part; answers there.

    python -m labkit.cluster.ssh look | reach | begin      a JSON request on stdin, a JSON answer on stdout

The request travels through stdin, because a command line can be read by every user of the host.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from labkit.errors import LabError, LaunchError
from labkit.hardware import hardware, is_loopback, own_address_towards, resolved
from labkit.launcher import check_gpus_are_free
from labkit.record import Node, RunFolder
from labkit.text import plain
from labkit.version import __version__

NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*")  # never an option of ssh
CONNECT_SECONDS = 10
ANSWER_SECONDS = 120.0  # it imports torch and queries GPUs there
NOT_FOUND = 127
# An sshd with too many logins at once, such as that of a jump host, closes some of them (MaxStartups).
BUSY, BUSY_SECONDS = re.compile("kex_exchange_identification|Connection reset"), (1.0, 3.0)
SSH_FAILED = 255
PASTE = "`labkit launch --hosts … --print` prints the lines to paste into a terminal on each host instead"
BEGINNING_SECONDS = 30.0
LOOK_SECONDS = 0.05
_begun: list[subprocess.Popen[bytes]] = []  # in this process: one that has ended is a zombie until it is polled


def check_names(hosts: Any) -> list[str]:
    """Check the names of hosts, as accepted by ssh. Raises LaunchError."""
    if isinstance(hosts, str | bytes) or not isinstance(hosts, list | tuple) or not hosts:
        raise LaunchError(f"hosts must be a list of names such as ['hA', 'hB'], got {hosts!r}")
    for host in hosts:
        if not isinstance(host, str) or not NAME.fullmatch(host):
            raise LaunchError(f"{host!r} is not a host name: expected one for `ssh`, such as hA, user@hA or 10.0.0.1")
    return list(hosts)


def is_this_host(host: str) -> bool:
    """Whether a name refers to this machine. Raises LaunchError for another name that resolves to the loopback."""
    if host in ("localhost", "127.0.0.1", "::1", socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        address = resolved(host)
    except LaunchError:
        return False  # ssh may have it in its own configuration
    if is_loopback(address):
        raise LaunchError(
            f"{host} resolves to {address} here, which is this machine, {socket.gethostname()!r}. "
            f"Correct /etc/hosts, or pass the host's address instead of its name"
        )
    return any(a.address.split("%")[0] == address for addresses in psutil.net_if_addrs().values() for a in addresses)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def ask(host: str, question: str, **request: Any) -> dict[str, Any]:
    """The answer of `labkit.cluster.ssh` on a host. Raises LaunchError with the message of ssh or the host."""
    if is_this_host(host):
        return ANSWERS[question](**request)
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", "--", host, _there(question)]
    try:
        for pause in (*BUSY_SECONDS, None):
            done = subprocess.run(
                command, input=json.dumps(request), capture_output=True, text=True, timeout=ANSWER_SECONDS
            )
            if pause is None or done.returncode != SSH_FAILED or not BUSY.search(done.stderr):
                break
            time.sleep(pause)
    except FileNotFoundError:
        raise LaunchError(f"ssh was not found, so {host} cannot be reached. {PASTE}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{host} did not answer within {ANSWER_SECONDS:.0f} s. {PASTE}") from None
    answer = _answer(done.stdout)
    if answer is None:
        raise LaunchError(_why(host, done.returncode, done.stderr))
    if "problem" in answer:
        raise LaunchError(f"{host}: {plain(str(answer['problem']))}")
    return answer


def _there(question: str) -> str:
    """The command for the other host's shell: same interpreter, modules and, if it has it, folder."""
    path = os.environ.get("PYTHONPATH")
    settings = ["env", f"PYTHONPATH={path}"] if path else []
    # -P: a `random.py` in the folder must not be imported instead of the standard library's
    words = [*settings, sys.executable, "-P", "-m", "labkit.cluster.ssh", question]
    return f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {shlex.join(words)}"


def _answer(text: str) -> dict[str, Any] | None:
    """The answer in the last line; a login shell may print others before."""
    try:
        value = json.loads(text.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return value if isinstance(value, dict) else None


def _why(host: str, code: int, errors: str) -> str:
    lines = [line.strip() for line in plain(errors).strip().splitlines() if line.strip()]
    last = lines[-1] if lines else f"it exited with {code}"
    if code == SSH_FAILED:
        return f"ssh {host} failed: {last}. It must work without a password: try `ssh {host} true`. {PASTE}"
    if code == NOT_FOUND:
        return f"{host} has no {sys.executable}: every host needs the same Python at the same path ({last})"
    if "No module named" in errors:
        return f"{host} has no labkit for {sys.executable} ({last}): install it there in the same environment"
    return f"{host} could not be queried: {last}"


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
        check_gpus_are_free(list(run.read_manifest().gpus))
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
    while Node(home).last_beat() is None:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()  # it has started nothing yet, and must not once the launch is given up
            process.wait()
            lines = home.supervisor_log.read_text(errors="replace").strip().splitlines()
            raise LaunchError(lines[-1] if lines else "the supervisor of its ranks has not started")
        time.sleep(LOOK_SECONDS)
    _begun[:] = [one for one in (*_begun, process) if one.poll() is None]
    return {"pid": process.pid}


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {"look": look, "reach": reach, "begin": begin}


def main() -> None:
    request = json.load(sys.stdin)
    try:
        answer = ANSWERS[sys.argv[1]](**request)
    except LabError as error:
        answer = {"problem": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
