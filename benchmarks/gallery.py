"""Draw the view in every state a run can be in, light and dark, to be looked at before it is changed.

    python benchmarks/gallery.py [folder]

Writes light.html and dark.html, and pictures of them where there is a Chromium. The runs are made up: their folders
hold what ranks on a T4 would write.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from labkit.record import Cause, RunFolder, RunReader, State
from labkit.view.live.page import run_html

GIB = 2**30
THEMES = {"light": ("#ffffff", "#1f2328"), "dark": ("#111111", "#dddddd")}
FIRST_STEP_SECONDS = 4.0  # after the launch, of each attempt
COMMUNICATION = 0.012  # seconds of a step, for the rank that waits for no other
TOTAL_STEPS = 1000
BOOM = "ValueError: expected 10 classes, got label 10"
FRAMES = [
    '  File "/home/ada/train.py", line 41, in <module>\n    main()\n',
    '  File "/home/ada/train.py", line 33, in main\n    loss = loss_of(model(images), labels)\n',
]
TRACE = ["Traceback (most recent call last):\n", *FRAMES, f"{BOOM}\n"]


class MadeUp:
    """A run folder of ranks in synchronous training: all wait for the slowest. The newest record is `ago` seconds old.

    `best_at`: the step of the lowest validation loss, if there is any. `late`: a rank and the first step from which it
    waits 30 ms longer for data. `restarted_at`: the step at which the first attempt failed. `lost_at`: the first step
    whose loss is NaN. `others`: the share of the cores that other programs use, one of them a run of labkit.
    """

    def __init__(
        self,
        root: Path,
        name: str,
        ranks: int,
        steps: int,
        *,
        hosts: int = 1,
        cuda: bool = True,
        best_at: int = 0,
        late: tuple[int, int] | None = None,
        restarted_at: int = 0,
        lost_at: int = 0,
        others: float = 0.0,
        ago: float = 0.3,
    ) -> None:
        self.folder = RunFolder(root / f"20260102T030405Z-{name}-0a1b")
        self.hosts, self.cuda, self.best_at, self.late, self.lost_at = hosts, cuda, best_at, late, lost_at
        self.records: list[list[dict]] = []
        self.chance = random.Random(ranks)
        attempts = [(0, restarted_at), (restarted_at // 50 * 50, steps)] if restarted_at else [(0, steps)]
        self.seconds, written = 0.0, []
        for first, last in attempts:
            written.append([self._first_records(rank, ranks, first, last) for rank in range(ranks)])
            self.seconds += FIRST_STEP_SECONDS
            for step in range(first + 1, last + 1):
                self._step(written[-1], step, first)
        self.launched = time.time() - self.seconds - ago
        for number, ranks_records in enumerate(written, 1):
            self._write(self.folder.attempt(number), ranks_records)
        created = datetime.fromtimestamp(self.launched, UTC).isoformat()
        self.folder.manifest.write_text(json.dumps({"format": 1, "created": created, "world_size": ranks}))
        if cuda and steps:
            self._write_hosts(min(8, ranks // hosts), others)

    def running(self, **fields: object) -> tuple[RunFolder, State]:
        return self.folder, State("running", self.launched, **fields)

    def ended(self, state: str, **fields: object) -> tuple[RunFolder, State]:
        return self.folder, State(state, self.launched, self.launched + self.seconds + 0.4, **fields)

    def _first_records(self, rank: int, ranks: int, first: int, last: int) -> list[dict]:
        size = GIB if self.cuda else GIB / 20
        held = {"parameters": size, "gradients": size, "optimizer": 2 * size, "limit": 14.75 * GIB}
        device, now = f"cuda:{rank % 8}" if self.cuda else "cpu", self.seconds
        return [
            {"k": "meta", "t": now, "after": now, "host": f"node{rank * self.hosts // ranks}"},
            {"k": "report", "t": now + 1, "total_steps": TOTAL_STEPS, "start_step": first},
            {"k": "model", "t": now + FIRST_STEP_SECONDS, "device": device} | held,
        ][: 3 if last else 1]

    def _step(self, records: list[list[dict]], step: int, first: int) -> None:
        works = [self._work(rank, step, slow=2.2 if step == first + 1 else 1.0) for rank in range(len(records))]
        longest = max(sum(work.values()) for work in works) + (COMMUNICATION if len(works) > 1 else 0.0)
        self.seconds += longest
        for rank, work in enumerate(works):
            record = {"k": "step", "t": self.seconds, "step": step - first, "n": 1, "seconds": [longest] * 3}
            loss = self._loss(step) + 0.05 * self.chance.random()
            is_lost = self.lost_at and step >= self.lost_at
            record |= work | {"samples": 32, "loss": "nan" if is_lost else loss}
            record |= {"communication": longest - sum(work.values())} if len(works) > 1 else {}
            used = (4.6 + 0.2 * (rank % 3) + 0.1 * self.chance.random()) * GIB
            if self.cuda:
                record |= {"allocated": used, "reserved": 7.1 * GIB, "peak": 6.4 * GIB, "retries": 0}
            else:
                record |= {"rss": used / 10, "peak": 0.55 * GIB}
            records[rank].append(record)
        if step % 100 == 0:
            records[0].append({"k": "report", "t": self.seconds, "step": step, "checkpoint": f"step-{step}"})
        if self.best_at and step % 40 == 0:
            off = abs(step - self.best_at) / 400
            accuracy = 0.8 - 0.3 * off + 0.01 * self.chance.random()
            values = {"val_loss": 0.5 + off, "val_accuracy": accuracy}
            records[0].append({"k": "report", "t": self.seconds, "step": step} | values)

    def _loss(self, step: int) -> float:
        return 0.2 + 2.3 * math.exp(-step / 200)

    def _work(self, rank: int, step: int, slow: float) -> dict[str, float]:
        """Seconds of each phase in which a rank does not wait for others."""
        usual = {"input": 0.004, "forward": 0.03, "backward": 0.055, "optimizer": 0.005}
        work = {phase: slow * seconds * (1 + 0.06 * self.chance.random()) for phase, seconds in usual.items()}
        if self.late and rank == self.late[0] and step >= self.late[1]:
            work["input"] += 0.03
        return work

    def _write(self, folder: RunFolder, ranks: list[list[dict]]) -> None:
        for rank, (meta, *records) in enumerate(ranks):
            folder.rank(rank).mkdir(parents=True)
            meta |= {"time": self.launched + meta.pop("after")}
            folder.metrics(rank).write_text("".join(json.dumps(record) + "\n" for record in (meta, *records)))
            steps = [record for record in records if record["k"] == "step"]
            folder.log(rank).write_text(
                "".join(f"step {r['step']}: loss {float(r['loss']):.3f}\n" for r in steps[49::50])
            )

    def _write_hosts(self, devices: int, others: float) -> None:
        self.folder.hosts.mkdir()
        card = {"name": "Tesla T4", "memory_total": 15 * GIB}
        seen = {"utilisation": 97, "memory_used": 7.4 * GIB, "power": 68, "temperature": 71}
        memory = {"memory_total": 256 * GIB, "devices": [card for _ in range(devices)]}
        lines = [{"k": "meta", "t": 0, "time": self.launched, "cores": 64, "usable_cores": 64} | memory]
        own = min(0.34, 1 - others)
        busy = {"cpu": round(100 * (own + others)), "busy": 64 * (own + others), "own": 64 * own}
        sample = busy | {"memory_used": 30 * GIB, "on_battery": None}
        sample |= {"throttled": None, "devices": [seen for _ in range(devices)]}
        for second in range(1, int(self.seconds)):
            lines.append({"k": "host", "t": second} | sample)
            lines += [{"k": "runs", "t": second, "runs": ["20260102T030405Z-other-0a1b"]}] if others else []
        for host in range(self.hosts):
            self.folder.host(f"node{host}").write_text("".join(json.dumps(line) + "\n" for line in lines))


def every_state(root: Path) -> dict[str, str]:
    """HTML of the view by what it shows."""
    states = made_up(root).items()
    return {name: run_html(folder, RunReader(folder).read_all(), state) for name, (folder, state) in states}


def made_up(root: Path) -> dict[str, tuple[RunFolder, State]]:
    """A run in every state, by what it shows."""
    stuck = (
        "no rank has made progress since 03:04:51: rank 1 has not entered `all_reduce` #401. Rank 1 is at step 400 in "
        "train.py line 88, cell `main`: `time.sleep(600)`; rank 0 is at step 400, waiting in `all_reduce` (train.py "
        "line 90, cell `main`)"
    )
    failed = {"sentence": f"rank 1 failed: {BOOM} (train.py line 33)", "rank": 1, "traceback": TRACE}
    memory = {
        "sentence": "rank 0 ran out of device memory: OutOfMemoryError: tried to allocate 2.50 GiB; 13.40 GiB of 14.75 "
        "GiB were allocated (parameters 1.00 GiB, gradients 1.00 GiB, optimizer 2.00 GiB, activations and buffers "
        "9.40 GiB)",
        "advice": "to make it fit:\n- raise accumulate (now 1)\n- activation_checkpointing=True\n"
        "- precision='bf16', or 'fp16' on a T4\n- shard the model: Script.load('fsdp')",
        "out_of_memory": "device",
        "rank": 0,
    }
    replicas = (
        "the replicas differ since step 200: the parameters of rank 1 are not those of rank 0 "
        "(train.py line 33, cell `step`)"
    )
    earlier = [{"exit_code": 1, "ended": 0.0, "cause": failed, "checkpoint": "step-200"}]
    starting, hangs, fails = (
        MadeUp(root, "starting", 2, 0),
        MadeUp(root, "stuck", 2, 400, ago=12),
        MadeUp(root, "failed", 2, 200),
    )
    for rank in range(2):
        starting.folder.heartbeat(rank).write_text(json.dumps({"starting": "importing torch"}))
    lost = {
        "exception": "RuntimeError",
        "message": "Connection closed by peer [127.0.0.1]:31245",
        "traceback": TRACE[:3],
    }
    fails.folder.error(0).write_text(json.dumps(lost))
    return {
        "starting": (starting.folder, State("starting", time.time() - 3)),
        "running on one CPU": MadeUp(root, "cpu", 1, 400, cuda=False).running(),
        "running on two GPUs": MadeUp(root, "running", 2, 400).running(),
        "one rank waits for data": MadeUp(root, "late", 2, 400, late=(1, 150)).running(),
        "still improving": MadeUp(root, "improving", 2, 400, best_at=400).running(),
        "overfitting": MadeUp(root, "overfitting", 2, 400, best_at=160).running(),
        "stuck": hangs.running(notice=stuck, stuck_since=hangs.launched + hangs.seconds),
        "failed": fails.ended("failed", exit_code=1, cause=Cause.decode(failed)),
        "out of memory": MadeUp(root, "memory", 2, 0).ended("failed", exit_code=1, cause=Cause.decode(memory)),
        "out of memory in step 121": MadeUp(root, "grown", 2, 120).ended(
            "failed", exit_code=1, cause=Cause.decode(memory)
        ),
        "wrong": MadeUp(root, "wrong", 2, 1000).ended("succeeded", exit_code=0, notice=replicas, wrong=True),
        "NaN, running": MadeUp(root, "diverging", 2, 400, lost_at=230).running(),
        "NaN, finished": MadeUp(root, "diverged", 2, 1000, lost_at=230).ended("succeeded", exit_code=0),
        "beside other programs": MadeUp(root, "beside", 2, 1000, others=0.875).ended("succeeded", exit_code=0),
        "restarted": MadeUp(root, "again", 2, 400, restarted_at=230).running(attempt=2, earlier=earlier),
        "stopped": MadeUp(root, "stopped", 2, 300).ended("stopped", cause=Cause("stopped", "stopped on request")),
        "finished, eight ranks": MadeUp(root, "finished", 8, 1000).ended("succeeded", exit_code=0),
        "64 ranks on 8 machines": MadeUp(root, "many", 64, 400, hosts=8, late=(35, 200)).running(),
    }


def main() -> None:
    into = Path(sys.argv[1] if len(sys.argv) > 1 else "build/gallery")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        pages = every_state(Path(root))
    for name, page in pages.items():
        print(f"{name:24} {len(page.encode()):7,} bytes")
    body = "".join(f"<h3>{name}</h3>{page}" for name, page in pages.items())
    columns = "font-family:sans-serif;margin:24px;columns:2;column-gap:40px"
    for theme, (ground, ink) in THEMES.items():
        style = f"background:{ground};color:{ink};{columns}"
        text = f'<!doctype html><meta charset="utf-8"><title>labkit</title><body style="{style}">{body}'
        (into / f"{theme}.html").write_text(text)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium:
        photograph(chromium, into)


def photograph(chromium: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1640, "height": 1000})
        for theme in THEMES:
            page.goto((folder / f"{theme}.html").absolute().as_uri())
            page.screenshot(path=folder / f"{theme}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
