"""Two hosts on this machine: network namespaces joined by a virtual cable, with their own names; sshd on the second.

They share processes and files with the machine, so every process can be found from outside. Each has its own
interfaces, addresses, routes, ports, /etc/hosts, host name and boot id, by which labkit tells machines apart.
Needs root.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

TOOLS = ("ip", "unshare", "ssh", "ssh-keygen")
SSHD = "/usr/sbin/sshd"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
ADDRESSES = {"A": "10.231.77.1", "B": "10.231.77.2"}
ROOT = Path(__file__).parents[2]

RIGHT = {"A": "10.231.77.1 hA\n10.231.77.2 hB\n", "B": "10.231.77.1 hA\n10.231.77.2 hB\n"}
# as the installers of Debian and Ubuntu write it
LOOPBACK = {"A": "127.0.1.1 hA\n10.231.77.2 hB\n", "B": "127.0.1.1 hB\n10.231.77.1 hA\n"}
# as cloned virtual machines are: both have the name of the image
CLONED = {"A": "127.0.0.1 vm\n10.231.77.1 hA\n10.231.77.2 hB\n", "B": "127.0.0.1 vm\n10.231.77.1 hA\n10.231.77.2 hB\n"}


def why_not() -> str:
    """Why there can be no such hosts here; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + ([] if Path(SSHD).exists() else [SSHD])
    if missing:
        return f"not installed: {', '.join(missing)} (iproute2, util-linux, openssh-server)"
    probe = f"lk{os.getpid()}p"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if done.returncode:
        return f"no network namespaces here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


class TwoHosts:
    """Hosts A and B; names are unique per process. `close` leaves nothing of them."""

    def __init__(self, folder: Path, *, names=RIGHT, called=("hA", "hB"), unseen: Path | None = None):
        self.folder, self.called = folder, dict(zip("AB", called, strict=True))
        self.unseen = unseen  # a folder that is not there on B
        self.unique = f"lk{os.getpid()}"
        self.daemons: list[subprocess.Popen[bytes]] = []
        folder.mkdir()
        remove_those_of_the_dead()
        try:
            self._connect(names)
            self._serve_ssh()
        except BaseException:
            self.close()
            raise

    def space(self, host: str) -> str:
        return self.unique + host

    def _connect(self, names) -> None:
        for host in "AB":
            ip("netns", "add", self.space(host))
            etc = Path("/etc/netns", self.space(host))
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names[host]}")
        ip("link", "add", f"{self.unique}a", "type", "veth", "peer", "name", f"{self.unique}b")
        for host in "AB":
            wire = self.unique + host.lower()
            ip("link", "set", wire, "netns", self.space(host))
            ip("-n", self.space(host), "link", "set", "lo", "up")
            ip("-n", self.space(host), "addr", "add", f"{ADDRESSES[host]}/24", "dev", wire)
            ip("-n", self.space(host), "link", "set", wire, "up")

    def _serve_ssh(self) -> None:
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)], check=True)
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nAuthorizedKeysFile {self.folder}/key.pub\nPidFile none\nUsePAM no\n"
            f"StrictModes no\nListenAddress {ADDRESSES['B']}\nPasswordAuthentication no\nPrintMotd no\n"
        )
        (self.folder / "ssh_config").write_text(
            f"IdentityFile {self.folder}/key\nIdentitiesOnly yes\nUserKnownHostsFile /dev/null\n"
            "StrictHostKeyChecking no\nLogLevel ERROR\n"
        )
        # who calls `ssh` gets the test's key
        wrapper = self.folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        wrapper.chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd refuses to start without
        self.daemons.append(self.start("B", [SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")], log="sshd.log"))

    def start(self, host: str, command: list[str], *, log: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a process on a host."""
        boot = self.folder / f"boot_{host}"
        boot.write_text(f"another-boot-{host}\n")
        own = f'mount --bind {boot} {BOOT_ID} && hostname {self.called[host]} && exec "$@"'
        if self.unseen is not None and host == "B":
            own = f"mount -t tmpfs none {self.unseen.parent} && {own}"
        setting = ["unshare", "-u", "sh", "-c", own, "x"]
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.space(host), *setting, *command],
                env=self._environment(),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def labkit(self, *words: str, host: str = "A", seconds: float = 60, cwd: Path | None = None) -> tuple[int, str]:
        """The exit code and the words of a `labkit` command on a host, in a folder."""
        log = self.folder / "labkit.log"
        before = log.stat().st_size if log.exists() else 0
        process = self.start(host, [sys.executable, "-m", "labkit.cli", *words], log=log.name, cwd=cwd)
        try:
            code = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        return code, log.read_bytes()[before:].decode()

    def _environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return os.environ | {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(paths)}

    def link(self, state: str) -> None:
        """Pull B's cable ("down"), or plug it in again ("up")."""
        ip("-n", self.space("B"), "link", "set", f"{self.unique}b", state)

    def processes(self, host: str) -> list[psutil.Process]:
        """Every process of a host, the daemon of this fixture apart."""
        done = subprocess.run(["ip", "netns", "pids", self.space(host)], capture_output=True, text=True)
        daemons = {daemon.pid for daemon in self.daemons}
        found = []
        for pid in map(int, done.stdout.split()):
            with suppress(psutil.Error):
                if pid not in daemons and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill_everything_on(self, host: str) -> None:
        for process in self.processes(host):
            with suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        for host in "AB":
            remove(self.space(host))
        for daemon in self.daemons:
            daemon.wait()


def remove(space: str) -> None:
    """A network namespace, every process in it, its interfaces and its files."""
    done = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
    for pid in map(int, done.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", space], capture_output=True)
    shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
    with suppress(OSError):
        Path("/etc/netns").rmdir()


def remove_those_of_the_dead() -> None:
    """What a test left behind that was killed: the names tell whose they were."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for space, pid in re.findall(r"^(lk(\d+)[ABp])\b", listed, re.MULTILINE):
        if not psutil.pid_exists(int(pid)):
            remove(space)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


needs_hosts = pytest.mark.skipif(bool(reason := why_not()), reason=reason or "they can be made")
