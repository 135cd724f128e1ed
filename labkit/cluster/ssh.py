"""Query a host via ssh, or directly if it is this machine."""

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
from pathlib import Path
from typing import Any

import psutil

from labkit.cluster import remote
from labkit.errors import LaunchError
from labkit.hardware import is_loopback, resolved
from labkit.text import plain

__all__ = ["ask", "check_names", "is_address", "is_this_host"]

NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:-]*")  # never an option of ssh
CONNECT_SECONDS = 10
ANSWER_SECONDS = 120.0  # it imports torch and queries GPUs there
NOT_FOUND = 127
# An sshd with too many logins at once, such as that of a jump host, closes some of them (MaxStartups).
BUSY, BUSY_SECONDS = re.compile("kex_exchange_identification|Connection reset"), (1.0, 3.0)
SSH_FAILED = 255


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
    """The answer of `labkit.cluster.remote` on a host. Raises LaunchError with the message of ssh or the host."""
    if is_this_host(host):
        here: dict[str, Any] = getattr(remote, question)(**request)
        return here
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


PASTE = "`labkit launch --hosts … --print` prints the lines to paste into a terminal on each host instead"


def _there(question: str) -> str:
    """The command for the other host's shell: same interpreter, modules and folder."""
    path = os.environ.get("PYTHONPATH")
    settings = ["env", f"PYTHONPATH={path}"] if path else []
    # -P: a `random.py` in the folder must not be imported instead of the standard library's
    words = [*settings, sys.executable, "-P", "-m", "labkit.cluster.remote", question]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(words)}"


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
    if "cd:" in last:
        return f"{host} has no folder {Path.cwd()}: launch from a folder that all hosts share ({last})"
    return f"{host} could not be queried: {last}"
