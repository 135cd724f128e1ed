"""A launch, a stop and a cause over many simulated nodes that share a slow file system.

python benchmarks/many_nodes.py                               128 nodes of 8 ranks, 20 ms for each answer
python benchmarks/many_nodes.py --nodes 2 --answer-ms 0

Each node is a real supervisor, `python -m labkit.launcher.node`, with its sampler, in process, host-name and mount
namespaces of its own with another boot id, so that the nodes know each other only by their files; torchrun and its
ranks are one process without torch. Calls to the run folder are delayed in each Python process (`slow_files.py`). All
nodes share this machine's processors, which slows them down; none of these times would be shorter here than on as many
machines. The last node is started when the others have been waiting for a while. Needs root, for the namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from slow_files import SlowFiles

import labkit
from labkit.launcher.multinode import create, node_command
from labkit.record import Nodes, RunFolder, read_state
from labkit.record.files import read_json
from labkit.record.identity import HOST
from labkit.write.launch_options import LaunchOptions

HERE = Path(__file__).parent
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SITE = "import os\nfrom pathlib import Path\nfrom slow_files import SlowFiles\n"
SITE += "folder, seconds, counts = os.environ['SLOW_FILES'].split(':')\n"
SITE += "SlowFiles(Path(folder), float(seconds), Path(counts, str(os.urandom(4).hex()))).__enter__()\n"
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
        self.address = next(
            a.address for each in psutil.net_if_addrs().values() for a in each
            if a.family == socket.AF_INET and not a.address.startswith("127.")
        )  # fmt: skip
        options = LaunchOptions(runs_dir=root / "runs", watchdog=600.0)
        self.nodes = Nodes(nodes, ranks)
        self.folder = create(script, self.nodes, options, {}, address=self.address, port=self.port)
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

    def launch(self) -> tuple[float, float]:
        """Seconds from the start and from the first heartbeat of the last node until every node has its ranks."""
        last = self.nodes.count - 1
        for node in range(last):
            self.start(node)
        self.wait(lambda: all(self.folder.node(n).node_heartbeat.exists() for n in range(last)), 300)
        time.sleep(CALM_SECONDS)
        started = time.time()
        self.start(last)
        self.wait(self.folder.node(last).node_heartbeat.exists, 60)
        alive = time.time()
        self.wait(lambda: len(list(self.events.glob("started-*"))) == self.nodes.count, 300)
        trained = max(float(path.read_text()) for path in self.events.glob("started-*"))
        return trained - started, trained - alive

    def calls(self) -> tuple[int, int]:
        """All (calls, opened files) so far."""
        counted = [memoryview(path.read_bytes()).cast("q") for path in self.counts.iterdir()]
        return sum(each[0] for each in counted), sum(each[1] for each in counted)

    def calls_each_second(self) -> list[float]:
        before = self.calls()
        time.sleep(COUNTING_SECONDS)
        return [(after - b) / COUNTING_SECONDS for after, b in zip(self.calls(), before, strict=True)]

    def ended(self) -> dict[str, Any]:
        """Wait until all supervisors have exited; returns the cause, which must be the same in all of their files."""
        for process in self.processes.values():
            process.wait(300)
        states = [read_json(self.folder.node(node).state) for node in range(self.nodes.count)]
        causes = {json.dumps([state["state"], (state["cause"] or {}).get("sentence")]) for state in states}
        if len(causes) != 1:
            raise SystemExit(f"the nodes disagree: {causes}")
        return states[0]

    def wait(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(process.poll() for process in self.processes.values()):
                logs = [path for path in sorted((self.root / "logs").glob("*.log")) if path.read_text()]
                raise SystemExit(f"{condition} within {seconds} s\n" + "\n".join(path.read_text() for path in logs[:9]))
            time.sleep(0.05)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def measure(options: argparse.Namespace, end: Callable[[Cluster], float]) -> None:
    with tempfile.TemporaryDirectory() as root:
        cluster = Cluster(Path(root), options.nodes, options.ranks, options.answer_ms / 1e3)
        try:
            began = time.time()
            from_start, from_beat = cluster.launch()
            print(f"all nodes up after {time.time() - began:.0f} s on this machine")
            print(f"launch: {from_start:.1f} s from the start of the last node, {from_beat:.1f} s from its first beat")
            time.sleep(CALM_SECONDS)
            calls, opened = cluster.calls_each_second()
            print(
                f"while it trains: {calls:,.0f} calls a second, {opened:,.0f} files opened; load {os.getloadavg()[0]:.0f}"
            )
            decided = end(cluster)
            seen = time.time()
            state = cluster.ended()
            outcomes = [read_json(cluster.folder.node(node).outcome) or {} for node in range(options.nodes)]
            ends = sorted(outcome["ended"] - decided for outcome in outcomes if outcome)
            states = sorted(p.stat().st_mtime - decided for p in cluster.folder.nodes.glob("*/state.json"))
            print(f"first outcome {ends[0]:.1f} s, second {ends[1]:.1f}, last {ends[-1]:.1f}; states {states[0]:.1f} to {states[-1]:.1f}")
            print(
                f"seen to have ended after {seen - decided:.1f} s, all supervisors gone after {time.time() - decided:.1f} s"
            )
            print(f"{state['state']}: {(state['cause'] or {}).get('sentence')}\n", flush=True)
        finally:
            cluster.close()


def stop(cluster: Cluster) -> float:
    decided = time.time()
    with SlowFiles(cluster.folder.path, cluster.answer_seconds):
        labkit.attach(cluster.folder.path).stop()
    return decided


def fail(cluster: Cluster) -> float:
    """A rank of the middle node fails."""
    decided = time.time()
    (cluster.events / ".fail").write_text(str(cluster.nodes.world_size // 2))
    (cluster.events / ".fail").rename(cluster.events / "fail")
    wait_final(cluster)
    return decided


def lose(cluster: Cluster) -> float:
    """The middle node disappears with all of its processes."""
    decided = time.time()
    process = cluster.processes.pop(cluster.nodes.count // 2)
    process.kill()
    process.wait()
    wait_final(cluster)
    return decided


def wait_final(cluster: Cluster) -> None:
    with SlowFiles(cluster.folder.path, cluster.answer_seconds):
        deadline = time.monotonic() + 300
        while not read_state(RunFolder(cluster.folder.path)).is_final and time.monotonic() < deadline:
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=8, help="on each node")
    parser.add_argument("--answer-ms", type=float, default=20.0)
    parser.add_argument("--only", choices=["stop", "fail", "lose"])
    options = parser.parse_args()
    os.environ["LABKIT_UI"] = "svg"
    for name, end in (("stop", stop), ("fail", fail), ("lose", lose)):
        if options.only in (None, name):
            print(f"== {name}: {options.nodes} nodes, {options.ranks} ranks on each, {options.answer_ms:g} ms ==")
            measure(options, end)


if __name__ == "__main__":
    main()
