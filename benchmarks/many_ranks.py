"""What watching many simulated ranks costs: `labkit.attach` until the live view is drawn, and the view's updates.

python benchmarks/many_ranks.py                    8 ranks, 64 and 1,024 on nodes of 8
python benchmarks/many_ranks.py --answer-ms 20     the file system answers each open, read, stat and listing after 20 ms

Each node's ranks are folded by the code of its supervisor; the nodes themselves are not there. Times are CPU time of
this process; of the slow file system also wall time, because it waits there.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from slow_files import SlowFiles

from labkit.files import write_json
from labkit.record import Nodes, RunFolder, RunReader, State
from labkit.record.fold import NodeFold
from labkit.run import attach
from labkit.view.live.dashboard import OPEN
from labkit.view.live.page import run_html

EACH, HZ, PERIOD_SECONDS, UPDATES, BEFORE = 8, 10, 0.5, 20, 30
PHASES = {"input": 0.004, "forward": 0.03, "backward": 0.05, "optimizer": 0.005, "communication": 0.01}
MEMORY = {"allocated": 5e9, "reserved": 7e9, "peak": 6e9, "retries": 0}
LINE = (
    '{"k": "step", "t": %.3f, "step": %d, "n": 1, "seconds": [0.1, 0.1, 0.1], "samples": 32, '
    + ", ".join(f'"{name}": {value}' for name, value in (PHASES | MEMORY).items())
    + ', "loss": %.4f}\n'
)


class Simulated:
    """A run folder to which `world` ranks write ten records a second each."""

    def __init__(self, root: Path, world: int):
        self.folder, self.world, self.step = RunFolder(root / f"20260102T030405Z-many{world}-0a1b"), world, 0
        nodes = Nodes(max(1, world // EACH), min(EACH, world))
        self.folder.ranks.mkdir(parents=True)
        self.folder.hosts.mkdir()
        manifest = {"format": 1, "created": "2026-01-02T03:04:05+00:00", "name": "many", "world_size": world}
        write_json(self.folder.manifest, manifest | ({"nodes": nodes.as_dict()} if nodes.count > 1 else {}))
        self.folds = []
        for node in range(nodes.count if nodes.count > 1 else 0):
            home = self.folder.node(node)
            home.path.mkdir(parents=True)
            write_json(home.state, {"state": "running", "started": time.time()})
            elsewhere = {"pid": 1, "started": 1.0, "boot": "another", "host": "another"}
            write_json(home.agent, {"supervisor": elsewhere})
            write_json(home.node_heartbeat, {"time": time.time(), "host": f"node-{node:03}", "address": None})
            if nodes.are_folded:
                self.folds.append(NodeFold(self.folder, self.folder, home, nodes.ranks_of(node)))
        write_json(self.folder.state, {"state": "starting", "started": time.time()})
        for rank in range(world):
            self.folder.rank(rank).mkdir()
            self.folder.metrics(rank).write_text(
                f'{{"k": "meta", "t": 0, "time": 1767323045.0, "host": "node-{rank // EACH:03}"}}\n'
                f'{{"k": "model", "t": 0, "device": "cuda:{rank % EACH}", "limit": 16e9}}\n'
                '{"k": "report", "t": 0, "total_steps": 100000}\n'
            )

    def write(self, seconds: float) -> None:
        for rank in range(self.world):
            steps = range(self.step + 1, self.step + 1 + round(seconds * HZ))
            with self.folder.metrics(rank).open("a") as file:
                file.write("".join(LINE % (s / HZ, s, 2.5 / (1 + s / 500) + rank % 7 / 100) for s in steps))
        self.step += round(seconds * HZ)

    def fold(self) -> None:
        """What the nodes' supervisors do once a second."""
        for fold in self.folds:
            fold.update()


def measure(root: Path, world: int, answer_seconds: float) -> None:
    run = Simulated(root, world)
    run.write(BEFORE)
    for _ in range(11):  # the bounded series are written with every tenth fold
        run.fold()
    gc.collect()
    gc.freeze()  # the nodes' memory is not the reader's
    files = SlowFiles(run.folder.path, answer_seconds)
    with capture_output():
        began, wall = time.process_time(), time.perf_counter()
        with files:
            attach(run.folder.path)
        attach_cpu, attach_wall = time.process_time() - began, time.perf_counter() - wall
        OPEN[run.folder.path].finish()
    attach_calls, attach_opened = files.calls, files.opened
    reader = RunReader(run.folder).read_all()
    state, costs, walls, sizes = State("running", time.time()), [], [], []
    for update in range(UPDATES):
        run.write(PERIOD_SECONDS)
        if update % 2 == 0:
            run.fold()
        gc.collect()  # what the nodes have allocated; or the reader's time includes its collection
        with files:
            began, wall = time.process_time(), time.perf_counter()
            if world <= 16 or update % 8 == 0:  # as the live view does
                State.read(run.folder)
            reader.poll()
            sizes.append(len(run_html(run.folder, reader, state).encode()))
            costs.append(time.process_time() - began)
            walls.append(time.perf_counter() - wall)
    share = sum(costs) / len(costs) / PERIOD_SECONDS
    print(
        f"{world:5,} ranks: attach {attach_cpu:.2f} s CPU, {attach_wall:.2f} s, {attach_calls:,} calls; "
        f"an update {1e3 * median(costs):.1f} ms CPU, "
        f"{1e3 * median(walls):.0f} ms; {share:.1%} of a core at 2 Hz; "
        f"{max(sizes):,} bytes; "
        f"{(files.opened - attach_opened) / UPDATES:.0f} files opened an update"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answer-ms", type=float, default=0.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024])
    options = parser.parse_args()
    os.environ["LABKIT_UI"] = "svg"
    InteractiveShell.instance()
    with tempfile.TemporaryDirectory() as root:
        for world in options.ranks:
            measure(Path(root), world, options.answer_ms / 1e3)


if __name__ == "__main__":
    main()
