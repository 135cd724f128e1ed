"""A launch, a stop and a cause over many simulated nodes that share a slow file system.

python benchmarks/many_nodes.py                               128 nodes of 8 ranks, 20 ms for each answer
python benchmarks/many_nodes.py --nodes 2 --answer-ms 0

Each node is a real supervisor, `python -m labkit.launcher.node`, with its sampler, in process, host-name and mount
namespaces of its own with another boot id, so that the nodes know each other only by their files; torchrun and its
ranks are one process without torch. Calls to the run folder are delayed in each Python process (`slow_files.py`). All
nodes share this machine's processors, which makes every time longer than on as many machines. The last node is started
when the others have been waiting for a while. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from IPython.utils.capture import capture_output
from slow_files import SlowFiles

import labkit
from labkit.files import read_json
from labkit.host import HOST
from labkit.launch_options import LaunchOptions
from labkit.launcher.prepare import create_run, prepare_launch
from labkit.launcher.torchrun_command import node_command
from labkit.record import Nodes, RunFolder, State

HERE = Path(__file__).parent
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SITE = "import os\nfrom pathlib import Path\nfrom slow_files import SlowFiles\n"
SITE += "folder, seconds, counts = os.environ['SLOW_FILES'].split(':')\n"
SITE += "SlowFiles(Path(folder), float(seconds), Path(counts, str(os.urandom(4).hex()))).__enter__()\n"
EVENTS = ("stop", "fail", "lose")
CALM_SECONDS, COUNTING_SECONDS = 20.0, 10.0


class Cluster:
    """One run on simulated nodes. `close` leaves no process of them."""

    def __init__(self, root: Path, nodes: int, ranks: int, answer_seconds: float):
        self.events, self.counts, self.site = (root / name for name in ("events", "counts", "site"))
        for folder in (self.events, self.counts, self.site, root / "logs"):
            folder.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE)
        script = root / "train.py"
        script.write_text("print('simulated')\n")
        self.root, self.answer_seconds, self.port = root, answer_seconds, free_port()
        self.address = own_address()
        options = LaunchOptions(runs_dir=root / "runs", watchdog=600.0)
        self.nodes = Nodes(nodes, ranks)
        self.folder = create_run(
            prepare_launch(script, options, {}, nodes=self.nodes), address=self.address, port=self.port
        )
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int) -> None:
        boot = self.root / "logs" / f"boot-{node}"
        boot.write_text(f"boot-of-node-{node}\n")
        own = f'mount --bind {boot} {BOOT_ID} && hostname node-{node:03} && exec "$@"'
        unshared = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c", own, "x"]
        supervisor = node_command(self.folder, node, self.address, self.port)
        torchrun = supervisor.index("--") + 1
        simulated = [sys.executable, "-I", "-S", str(HERE / "simulated_torchrun.py"), str(self.folder.path)]
        simulated += [str(node * self.nodes.nproc_per_node), str(self.nodes.nproc_per_node), str(self.events)]
        simulated += ["--master-addr", self.address, "--master-port", str(self.port)]
        paths = [str(self.site), str(HERE), str(HERE.parent)]
        slow = f"{self.folder.path}:{self.answer_seconds}:{self.counts}"
        with (self.root / "logs" / f"{node}.log").open("wb") as log:
            self.processes[node] = subprocess.Popen(
                [*unshared, *supervisor[:torchrun], *simulated],
                env=os.environ | {"PYTHONPATH": ":".join(paths), "SLOW_FILES": slow, HOST: f"node-{node:03}"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_until_all_train(self) -> float:
        """Returns when the last of the nodes started its ranks, in seconds since the epoch."""
        self.wait(lambda: len([*self.events.glob("started-*")]) == self.nodes.count, 300)
        return max(float(path.read_text()) for path in self.events.glob("started-*"))

    def tell(self, event: str, rank: int) -> None:
        """A rank is to "fail", or the ranks of the node whose first rank it is, to "finish"."""
        (self.events / f".{event}").write_text(str(rank))
        (self.events / f".{event}").rename(self.events / event)

    def lose(self, node: int) -> None:
        """All processes of a node disappear at once."""
        process = self.processes.pop(node)
        process.kill()  # and its process namespace with it
        process.wait()

    def wait_final(self) -> None:
        with SlowFiles(self.folder.path, self.answer_seconds):
            self.wait(lambda: State.read(RunFolder(self.folder.path)).is_final, 300)

    def conclusions(self) -> list[tuple[str, str]]:
        """The state of each node and the sentence of its cause, once all supervisors have exited."""
        for process in self.processes.values():
            process.wait(300)
        states = [read_json(self.folder.node(node).state) for node in range(self.nodes.count)]
        return [(state["state"], (state["cause"] or {}).get("sentence", "")) for state in states]

    def calls(self) -> int:
        """All calls to the run folder so far."""
        return sum(memoryview(path.read_bytes()).cast("q")[0] for path in self.counts.iterdir())

    def wait(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = (path.read_text() for path in sorted((self.root / "logs").glob("*.log")))
                raise TimeoutError("\n".join([f"not within {seconds} s", *filter(None, logs)]))
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def own_address() -> str:
    """An address of this machine that is not the loopback: the nodes do not know that they share a machine."""
    addresses = [a for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    return next(a.address for a in addresses if not a.address.startswith("127."))


def measure(cluster: Cluster, event: str) -> None:
    last = cluster.nodes.count - 1
    for node in range(last):
        cluster.start(node)
    cluster.wait(lambda: all(cluster.folder.node(n).node_heartbeat.exists() for n in range(last)), 300)
    time.sleep(CALM_SECONDS)
    cluster.start(last)
    cluster.wait(cluster.folder.node(last).node_heartbeat.exists, 60)
    heard = time.time()
    waited = cluster.wait_until_all_train() - heard
    print(f"launch: {waited:.1f} s from the last node's first heartbeat until every node trains")
    time.sleep(CALM_SECONDS)
    before = cluster.calls()
    time.sleep(COUNTING_SECONDS)
    print(f"training: {(cluster.calls() - before) / COUNTING_SECONDS / (last + 1):.0f} calls a second by each node")
    with capture_output():
        run = labkit.attach(cluster.folder.path)
    began, middle = time.time(), cluster.nodes.count // 2
    if event == "stop":
        with capture_output(), SlowFiles(cluster.folder.path, cluster.answer_seconds):
            run.stop()
    elif event == "fail":
        cluster.tell("fail", middle * cluster.nodes.nproc_per_node)
    else:
        cluster.lose(middle)
    cluster.wait_final()
    seen = time.time()
    (conclusion,) = set(cluster.conclusions())
    outcomes = [read_json(path) for path in cluster.folder.nodes.glob("*/outcome.json")]
    ended = max(outcome["ended"] for outcome in outcomes if outcome)
    agreed = max(path.stat().st_mtime for path in cluster.folder.nodes.glob("*/state.json"))
    print(f"{event}: the last node ended after {ended - began:.1f} s; all had agreed {agreed - ended:.1f} s later,")
    print(f"which was seen from outside {seen - agreed:.1f} s later: {': '.join(conclusion)}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--answer-ms", type=float, default=20.0)
    parser.add_argument("--only", choices=EVENTS)
    options = parser.parse_args()
    os.environ["LABKIT_UI"] = "svg"
    for event in [options.only] if options.only else EVENTS:
        with tempfile.TemporaryDirectory() as root:
            cluster = Cluster(Path(root), options.nodes, options.ranks, options.answer_ms / 1e3)
            try:
                measure(cluster, event)
            finally:
                cluster.close()


if __name__ == "__main__":
    main()
