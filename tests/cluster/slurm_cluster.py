"""A real Slurm of two nodes on this machine, with nothing of it left behind.

Each node is a `slurmd` in network, host name and mount namespaces of its own: its own `lo`, an address on a bridge
that leads nowhere else, its own /etc/hosts. All files are in one folder, and /etc/slurm and /var are not touched.

    python tests/cluster/slurm_cluster.py FOLDER      a cluster until stdin is closed; prints `ready` when it is

The process that runs this is the keeper: it is told the death of its owner by the end of its stdin, and as subreaper
it inherits whatever Slurm's daemons leave, so that it can end all of it. Needs root, slurm-wlm, munge, iproute2.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

NODES = ("nodeA", "nodeB")
NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PREFIX, KEEPER = "labkit-slurm-", "keeper.pid"
BRIDGE = "labkit"  # and the keeper's pid, in base 36: a bridge without a keeper is an orphan
READY_SECONDS = 60.0
NODE_PORT = 6818  # free in any case: a node has its address to itself

CONF = """
ClusterName=labkit
SlurmctldHost={host}({network}.254)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
# a requeued job waits until its first credential has expired; 5 s are the least
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
ReturnToService=2
KillWait=5
MessageTimeout=30
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
# to be tried without an accident: more cores than there are, for the two nodes share them
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=02:00:00 State=UP
"""


def why_not() -> str:
    """Why no cluster can be made here; empty when one can."""
    missing = [name for name in NEEDED if not shutil.which(name)]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurm-wlm munge iproute2 util-linux)"
    return "" if os.geteuid() == 0 else "needs root, for network namespaces"


class Cluster:
    """Two nodes, started by `with`. `conf` is what SLURM_CONF must say; `folder` has the daemons' logs."""

    def __init__(self) -> None:
        # Sockets' names are short, pytest's folders may be long.
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.conf = self.folder / "slurm.conf"

    def __enter__(self) -> Cluster:
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._keeper.stdout
        said = self._keeper.stdout.readline().strip()
        if said != "ready":
            logs = "\n".join(p.read_text(errors="replace")[-1500:] for p in self.folder.glob("*.log"))
            self.__exit__()
            raise RuntimeError(f"no Slurm cluster: {said}\n{logs}")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper.stdin
        assert self._keeper.stdout
        self._keeper.stdin.close()
        self._keeper.wait(30)
        self._keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def jobs(self, states: str = "pending,running,completing,suspended") -> dict[str, str]:
        """State by id of the jobs that Slurm knows."""
        command = ["squeue", "--noheader", f"--states={states}", "--format=%i %T"]
        told = subprocess.run(command, capture_output=True, text=True, check=True, env=self.environment)
        return dict(line.split() for line in told.stdout.splitlines())

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def daemon(self, node: str) -> psutil.Process:
        command = ["slurmd", "-D", "-N", node, "-f", str(self.conf)]
        return next(p for p in psutil.process_iter() if p.name() == "slurmd" and p.cmdline() == command)

    def kill(self, node: str) -> None:
        """All that runs on a node, Slurm's daemon included: it is gone for good."""
        network = Path(f"/proc/{self.daemon(node).pid}/ns/net").readlink()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if Path(f"/proc/{process.pid}/ns/net").readlink() == network:
                    process.kill()

    @contextmanager
    def hidden(self, node: str, path: Path) -> Iterator[None]:
        """A folder that one node does not share: something empty is mounted over it there."""
        within = ("nsenter", "--mount", f"--target={self.daemon(node).pid}")
        run(*within, "mount", "-t", "tmpfs", "none", str(path))
        try:
            yield
        finally:
            run(*within, "umount", "--lazy", str(path))

    def processes(self) -> list[psutil.Process]:
        """What jobs have running on the nodes: everything but the daemons themselves."""
        daemons = ("munged", "slurmctld", "slurmscriptd", "slurmd", "unshare")
        found = []
        for process in psutil.Process(self._keeper.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.name() not in daemons and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def keep(folder: Path) -> None:
    """The keeper: start everything, wait for the end of stdin, end everything."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    sweep_orphans()
    (folder / KEEPER).write_text(str(os.getpid()))
    bridge = BRIDGE + _base36(os.getpid())
    ended = False
    try:
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        start(folder, bridge, lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        wait_until_idle()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # from here on what is inherited is only to be reaped
        print("ready", flush=True)
        sys.stdin.read()
        ended = True
    except Exception as error:
        print(str(error).replace("\n", " "), flush=True)
    finally:
        while living := below():
            for process in living:
                with suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        subprocess.run(["ip", "link", "del", bridge], stderr=subprocess.DEVNULL)
        if ended:  # otherwise whoever asked for it may want to know why
            shutil.rmtree(folder, ignore_errors=True)


def below() -> list[psutil.Process]:
    """The living processes that this one has started or inherited."""
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def start(folder: Path, bridge: str, die_with_us) -> None:
    """munge, the controller and the nodes."""
    network = f"10.{192 + os.getpid() // 256 % 64}.{os.getpid() % 256}"
    addresses = {name: f"{network}.{number}" for number, name in enumerate(NODES, 1)}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "preexec_fn": die_with_us}
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    files = [f"--{what}-file={folder}/munge.{what}" for what in ("key", "pid", "seed")]
    folder.chmod(0o755)  # munge wants every user to reach its socket
    with (folder / "munge.log").open("wb") as log:
        subprocess.Popen(
            ["munged", "--foreground", "--num-threads=2", f"--socket={folder}/munge.socket", *files],
            stderr=log,
            **options,
        )

    run("ip", "link", "add", bridge, "type", "bridge")
    run("ip", "addr", "add", f"{network}.254/24", "dev", bridge)
    run("ip", "link", "set", bridge, "up")
    nodes = "\n".join(f"NodeName={n} NodeAddr={a} CPUs=4 RealMemory=4096 State=UNKNOWN" for n, a in addresses.items())
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(
            host=socket.gethostname(),
            network=network,
            folder=folder,
            nodes=nodes,
            names=",".join(NODES),
            controller_port=free_port(),
            node_port=NODE_PORT,
        )
    )
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in addresses.items()))
    (folder / "state").mkdir()
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
    wait_for(folder / "munge.socket")
    subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], stderr=subprocess.DEVNULL, **options)
    for name, address in addresses.items():
        script = f'hostname {name}; mount --bind {folder}/hosts /etc/hosts; read go; exec slurmd -D -N {name} -f "$0"'
        node = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, str(conf)],
            **options | {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL},
        )
        connect(node.pid, f"{bridge[6:]}{name[-1]}", bridge, address)
        assert node.stdin
        node.stdin.write(b"go\n")
        node.stdin.close()


def connect(pid: int, link: str, bridge: str, address: str) -> None:
    """Put one end of a cable into the namespace of `pid` as eth0, the other into the bridge."""
    here = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/ns/net").readlink() == here and time.monotonic() < deadline:
        time.sleep(0.01)
    within = ("nsenter", "--net", f"--target={pid}", "ip")
    run("ip", "link", "add", f"v{link}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", f"v{link}", "master", bridge, "up")
    run(*within, "addr", "add", f"{address}/24", "dev", "eth0")
    run(*within, "link", "set", "eth0", "up")
    run(*within, "link", "set", "lo", "up")


def wait_until_idle() -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        told = subprocess.run(["sinfo", "--noheader", "--Node", "--format=%T"], capture_output=True, text=True)
        if told.stdout.split() == ["idle"] * len(NODES):
            return
        time.sleep(0.2)
    raise TimeoutError(f"the nodes are not idle after {READY_SECONDS:g} s: {told.stdout} {told.stderr}")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 10
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear")
        time.sleep(0.02)


def free_port() -> int:
    """For the controller, which listens on every address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def sweep_orphans() -> None:
    """What is left of keepers that were killed themselves: jobs, which Slurm re-parents to init, folders, bridges."""
    for told in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{KEEPER}"):
        if not psutil.pid_exists(int(told.read_text() or os.getpid())):
            for process in psutil.process_iter():
                # not psutil's environ(): slurmstepd writes its title over the beginning
                with suppress(psutil.Error, OSError):
                    if (
                        f"SLURM_CONF={told.parent}/slurm.conf".encode()
                        in Path(f"/proc/{process.pid}/environ").read_bytes()
                    ):
                        process.kill()
            shutil.rmtree(told.parent, ignore_errors=True)
    for path in Path("/sys/class/net").glob(f"{BRIDGE}*"):
        with suppress(ValueError):
            if not psutil.pid_exists(int(path.name.removeprefix(BRIDGE), 36)):
                subprocess.run(["ip", "link", "del", path.name], stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _base36(number: int) -> str:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return (_base36(number // 36) if number >= 36 else "") + digits[number % 36]


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
