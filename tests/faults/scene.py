"""What the tests of kernels, terminals, papermill and stops share: a run brought to a known moment, and what must be
true of it after a fault.

Times are those of the acceptance list, twice as long: the machine may be shared.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client import KernelManager

import labkit
from labkit.host import Identity
from labkit.record import RunFolder, RunReader
from labkit.stored_runs import list_runs

FAULTY = Path(__file__).parents[1] / "scripts" / "faulty.py"
SHARED_MACHINE = 2
APART_SECONDS = 0.5
ENDLESS = 100_000  # steps
STEPPED = "            step += 1\n"  # in main
# The number of the attempt, as a rank can find it out.
ATTEMPTS = 'os.path.join(os.environ["LABKIT_RUNS"], os.environ["LABKIT_RUN"], "attempts")'
ATTEMPT = f'(1 + len(next(os.walk({ATTEMPTS}), ("", []))[1]))'

Written = dict[Path, bytes]


def falling(script: labkit.Script, step: int) -> labkit.Script:
    """Of which every rank is killed after this step of the first attempt, before it reports the step."""
    text = str(script)
    assert text.count(STEPPED) == 1
    kill = f"{STEPPED}            if step == {step} and {ATTEMPT} == 1:\n"
    return labkit.Script.parse(
        text.replace(STEPPED, f"{kill}                os.kill(os.getpid(), 9)\n"), name=f"falling-{script.name}"
    )


def wait_until(true: Callable[[], Any], seconds: float = 120, what: object = "") -> Any:
    """The first value of `true()` that is true."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what() if callable(what) else what or true}")
        time.sleep(0.05)
    return value


def the_run(seconds: float = 120) -> RunFolder:
    """The newest run, as soon as there is one and it has a state."""
    return wait_until(lambda: [run for run in list_runs() if run.state.exists()], seconds, "no run was launched")[-1]


def wait_for_step(run: labkit.Run | RunFolder, step: int = 3, seconds: float = 120) -> RunFolder:
    """Until every rank has written `step` or one after it."""
    folder = folder_of(run)
    world_size = folder.read_manifest().world_size

    def there() -> bool:
        assert read(folder.state)["state"] in ("starting", "running"), read(folder.state)
        return min(last_step(folder, rank) for rank in range(world_size)) >= step

    wait_until(there, seconds, lambda: f"step {step}: {read(folder.state)}")
    return folder


def last_step(folder: RunFolder, rank: int) -> int:
    return max((record["step"] for record in steps_of(folder, rank)), default=0)


def steps_of(folder: RunFolder, rank: int) -> list[dict[str, Any]]:
    """The whole lines of a rank's metrics that tell of steps; each of them must be JSON."""
    path = folder.metrics(rank)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["k"] == "step"]


def written(folder: RunFolder) -> Written:
    """What must never be lost: the whole lines of every rank's metrics and logs, so far."""
    files = [*folder.path.glob("ranks/*/metrics.jsonl"), *folder.path.glob("ranks/*/*.log")]
    return {file: content[: content.rfind(b"\n") + 1] for file in files if (content := file.read_bytes())}


def marked(folder: RunFolder) -> list[psutil.Process]:
    """Living processes whose environment carries the run's marker, found without labkit's help."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LABKIT_RUN") == folder.id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def ranks_of(folder: RunFolder) -> dict[int, psutil.Process]:
    """The process of each rank (and not its children)."""
    agent = read(folder.agent)["agent"]["pid"]
    return {int(p.environ()["RANK"]): p for p in marked(folder) if p.ppid() == agent and "RANK" in p.environ()}


def folder_of(run: labkit.Run | RunFolder) -> RunFolder:
    return run if isinstance(run, RunFolder) else run.folder


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes())


def assert_clean(
    run: labkit.Run | RunFolder, before: Written | None = None, *, state: str | None = "stopped", within: float = 8
) -> dict[str, Any]:
    """Within the time from now on: nothing of the run alive, `state.json` final and true (any final state when `state`
    is None), nothing lost of what was written before. Returns the content of `state.json`."""
    folder, began = folder_of(run), time.monotonic()
    supervisor = Identity.read(read(folder.agent).get("supervisor")) if folder.agent.exists() else None

    def over() -> bool:
        return not (marked(folder) or (supervisor and supervisor.is_alive())) and labkit.Run(folder).status().is_final

    wait_until(over, within * SHARED_MACHINE, lambda: f"{read(folder.state)}, alive: {marked(folder)}")
    seconds = time.monotonic() - began
    time.sleep(APART_SECONDS)
    assert not marked(folder)

    told = read(folder.state)
    told_by_labkit = labkit.attach(folder.path).status()
    state = state or told["state"]
    assert told_by_labkit.state == state, f"{told_by_labkit} after {seconds:.1f} s"
    if state != "lost":  # which nobody was left to write
        assert told["state"] == state
        assert told["ended"] >= told["started"]
    assert (told_by_labkit.cause is None) == (state == "succeeded")
    assert_nothing_lost(folder, before or {})
    return told


def assert_over(run: labkit.Run | RunFolder) -> None:
    """The same of a run that has ended in whatever way; every record can be read, and its report be written."""
    folder = folder_of(run)
    assert_clean(folder, state=None)
    reader = RunReader(folder).read_all()
    assert reader.ranks
    assert reader.undecodable == 0
    assert labkit.attach(folder.path).report().stat().st_size > 1000


def assert_goes_on(run: labkit.Run | RunFolder, before: Written, *, within: float = 8) -> None:
    """It is still running, every rank of it, and no step is missing."""
    folder = folder_of(run)
    world_size = folder.read_manifest().world_size
    wait_for_step(folder, 1 + max(last_step(folder, rank) for rank in range(world_size)), within * SHARED_MACHINE)
    time.sleep(APART_SECONDS)
    assert labkit.attach(folder.path).status().state == "running"
    assert read(folder.state)["notice"] is None
    assert sorted(ranks_of(folder)) == list(range(world_size))
    assert_nothing_lost(folder, before)


def assert_nothing_lost(folder: RunFolder, before: Written) -> None:
    for path, content in before.items():
        assert path.read_bytes().startswith(content), path
    assert folder.read_manifest().id == folder.id
    compile(folder.script.read_text(), str(folder.script), "exec")
    for rank in folder.started_ranks():
        records = steps_of(folder, rank)
        assert gaps([(record["step"], record["n"]) for record in records]) == []


def gaps(steps: list[tuple[int, int]]) -> list[int]:
    """Of records `(step, how many steps it sums up)`: the steps before which at least one is missing or told twice."""
    ends = [0, *(step for step, _ in steps)]
    return [step for (step, n), end in zip(steps, ends, strict=False) if step - n != end]


class Kernel:
    """A real Jupyter kernel and a client of it."""

    def __init__(self, env: Mapping[str, str]):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=dict(env))
        self.connect()

    def connect(self) -> None:
        """A client that the kernel answers: one that connects while a kernel starts may never hear from it."""
        for last in (False, False, True):
            self.client = self.manager.client()
            self.client.start_channels()
            try:
                self.client.wait_for_ready(timeout=25)
                return
            except RuntimeError:
                self.client.stop_channels()
                if last:
                    raise

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def run(self, code: str, seconds: float = 60) -> str:
        """What the cell printed, and its error."""
        said: list[str] = []

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            said.append(content.get("text") or "\n".join(content.get("traceback", [])))

        self.client.execute_interactive(code, timeout=seconds, output_hook=hear, stop_on_error=False)
        return "\n".join(said)

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


def known(error: BaseException, rank: int) -> dict[str, object]:
    """What a rank's guest knows of its failure."""
    try:
        message = str(error.code if isinstance(error, SystemExit) else error)
    except BaseException:
        message = "<exception str() failed>"
    record = {"time_ns": time.time_ns(), "rank": rank, "pid": 1, "step": 3, "message": message, "script_line": None}
    kind = "exit" if isinstance(error, SystemExit) else "exception"
    return record | {"kind": kind, "exception": type(error).__name__}


def in_another_process(code: str) -> str:
    """What a fresh Python prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def stopped_at_the_end() -> Iterator[None]:
    """For runs that are meant to survive what is done to them."""
    try:
        yield
    finally:
        for folder in list_runs():
            labkit.Run(folder).stop()
