"""Runs one small program under bare torchrun and under labkit, and says what differs.

A program is a cell of programs/*.py or one that generated.py composes. Comments at its start say how it is started:
`# ranks 2`, `# args 50 --lr 1e-3`, `# env A=1 B=`, `# start app` (a file, a folder, `-m package`) and `# bytes latin-1`
(how the file is written); `# needs keras` says which package it uses that is not among labkit's own. A cell
`name: lib/x.py` is a file next to the program `name`.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import select
import shlex
import shutil
import sys
import tempfile
import time
import uuid
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import labkit
from labkit.launcher.warm import session
from labkit.record import RunFolder

PROGRAMS = Path(__file__).parent / "programs"
EXIT_CODE = re.compile(r"^\s*rank\s*: (\d+) \(local_rank.*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
SECONDS = 90
ENDING_SECONDS = 5.0  # in which a resource tracker sees that its process has ended
LEFT_SECONDS = 2.5  # what a program that says `# leaves` leaves running is looked at this long after its end
ABORT = "terminate called without an active exception"


@dataclass(frozen=True)
class Program:
    name: str
    text: str
    files: dict[str, str] = field(default_factory=dict)
    source: str = ""

    def _given(self, key: str) -> str:
        found = re.search(rf"^# {key} (.*)$", self.text.split("\nimport", 1)[0], re.MULTILINE)
        return found[1] if found else ""

    @property
    def needs(self) -> str:
        return self._given("needs")

    @property
    def ranks(self) -> int:
        return int(self._given("ranks") or 1)

    @property
    def args(self) -> list[str]:
        return shlex.split(self._given("args"))

    @property
    def env(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in shlex.split(self._given("env")))

    @property
    def start(self) -> list[str]:
        return shlex.split(self._given("start")) or [f"{self.name}.py"]

    def write(self, folder: Path) -> None:
        encoding = self._given("bytes") or "utf-8"
        data = self.text.replace("\n", "\r\n").encode() if encoding == "crlf" else self.text.encode(encoding)
        (folder / f"{self.name}.py").write_bytes(data)
        for path, text in self.files.items():
            archive, _, inner = path.partition(".pyz/")
            file = folder / (f"{archive}.pyz" if inner else path)
            file.parent.mkdir(parents=True, exist_ok=True)
            if inner:
                with zipfile.ZipFile(file, "a") as packed:
                    packed.writestr(zipfile.ZipInfo(inner), text)  # whose time is always the same
            else:
                file.write_text(text)
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "elsewhere").mkdir(exist_ok=True)
        shutil.copyfile(folder / f"{self.name}.py", folder / "program")
        if self.start == ["a/b/link.py"]:
            (folder / "a" / "b").mkdir(parents=True)
            (folder / "a" / "b" / "link.py").symlink_to("../../linked.py")


def programs() -> list[Program]:
    """The hand-written ones."""
    found = []
    for path in sorted(PROGRAMS.glob("*.py")):
        cells = re.split(r"^# %% (.+)\n", path.read_text(), flags=re.MULTILINE)[1:]
        texts = dict(zip(cells[::2], (text.strip("\n") + "\n" for text in cells[1::2]), strict=True))
        for name in (title for title in texts if ": " not in title):
            files = {title.split(": ")[1]: text for title, text in texts.items() if title.startswith(f"{name}: ")}
            found.append(Program(name, texts[name], files, path.stem))
    return found


@dataclass
class Seen:
    """What can be seen of a program from outside."""

    codes: dict[int, int]  # of the ranks that failed
    succeeded: bool
    printed: dict[str, str]
    files: dict[str, bytes | str]
    running: list[str]
    shared_memory: list[str]


def under_torchrun(program: Program) -> Seen:
    """Gloo's threads abort many of its ranks at their end; such a run is repeated."""
    for _ in range(12):
        seen = _run(program, _torchrun)
        if not any(ABORT in text for text in seen.printed.values()):
            return seen
    raise AssertionError(f"{program.name} aborts each time under bare torchrun")


def under_labkit(program: Program, *, warm: bool) -> Seen:
    if warm:
        warm_up()
    return _run(program, _labkit_warm if warm else _labkit_cold)


def warm_up() -> None:
    """Have a warm process that has imported torch."""
    if not session._warm or session._warm[0].process.poll() is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "nothing.py")
            path.write_text("import torch\n")
            labkit.launch(path, nproc_per_node=1, runs_dir=folder, wait=True)
            select.select([session._warm[0].control], [], [], 60)


def _run(program: Program, start) -> Seen:
    mark = uuid.uuid4().hex
    before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="same-") as temporary:
        folder, outside = Path(temporary, "work"), Path(temporary, "outside")
        folder.mkdir()
        outside.mkdir()
        program.write(folder)
        environment = {**os.environ, **program.env, "SAME_PROGRAM": mark}
        for name in ("LABKIT_UI", "PYTEST_CURRENT_TEST", "PYTHONPATH"):
            if name not in program.env:
                environment.pop(name, None)
        succeeded, log, streams = start(program, folder, outside, environment)
        time.sleep(LEFT_SECONDS * ("# leaves" in program.text))
        deadline = time.monotonic() + ENDING_SECONDS
        while "resource_tracker" in str(running := _running(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in psutil.process_iter():
            if _is_marked(process, mark):
                process.kill()
        text = {name: _plain(path.read_bytes().decode("utf-8", "replace"), temporary) for name, path in streams.items()}
        files = {
            _plain(str(p.relative_to(folder)), temporary): _content(p, temporary)
            for p in sorted(folder.rglob("*"))
            if _counts(p)
        }
        codes = {int(rank): int(code) for rank, code in EXIT_CODE.findall(log)}
        shared = sorted(path.name for path in set(Path("/dev/shm").iterdir()) - before)
        return Seen(codes, succeeded, text, files, running, [re.sub(r"\d+|[0-9a-f]{6,}", "N", name) for name in shared])


def _torchrun(program: Program, folder: Path, outside: Path, environment: dict[str, str]):
    logs = outside / "logs"
    words = program.start
    module = words[:1] == ["-m"]
    args = ["--standalone", "--redirects", "3", "--nproc-per-node", str(program.ranks), "--log-dir", str(logs)]
    args += [*(["-m"] if module else []), "--", *(words[1:] if module else words), *program.args]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.run"])
    agent = context.Process(target=_be_torchrun, args=(args, folder, outside / "torchrun.log", environment))
    agent.start()
    agent.join(SECONDS)
    if agent.is_alive():
        agent.kill()
        raise TimeoutError(f"{program.name} runs for more than {SECONDS} s under bare torchrun")
    streams = {f"rank {path.parent.name} {path.stem}": path for path in logs.rglob("std*.log")}
    return agent.exitcode == 0, (outside / "torchrun.log").read_text(), streams


def _be_torchrun(args: list[str], folder: Path, log: Path, environment: dict[str, str]) -> None:
    """Run torchrun in a fork of a process that has imported it. Its ranks are new processes as always. The torchrun of
    `_labkit_cold` is no fork: if a fork changed what ranks see, the comparison would show it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(file := os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(file, 2)
    sys.argv = ["torch.distributed.run", *args]
    from torch.distributed.run import main

    main()


def _labkit_cold(program: Program, folder: Path, outside: Path, environment: dict[str, str]):
    session.FORKS = False
    try:
        return _labkit(program, folder, outside, environment)
    finally:
        session.FORKS = True


def _labkit_warm(program: Program, folder: Path, outside: Path, environment: dict[str, str]):
    return _labkit(program, folder, outside, environment)


def _labkit(program: Program, folder: Path, outside: Path, environment: dict[str, str]):
    here, before = Path.cwd(), dict(os.environ)
    words = program.start
    what = {"module": words[1]} if words[0] == "-m" else {}
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            run = labkit.launch(
                *([] if what else words),
                nproc_per_node=program.ranks,
                args=program.args,
                runs_dir=outside,
                wait=False,
                **what,
            )
            try:
                state = run.wait(SECONDS)
            except labkit.RankFailedError:
                state = run.status()
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(here)
    folder = RunFolder(run.path)
    if session.FORKS and folder.read_manifest().new_processes is None:
        header = json.loads(folder.metrics(0).read_text().splitlines()[0])
        assert header.get("forked"), f"{program.name} should have run as a fork"
    names = ("stdout", "stderr")
    streams = {f"rank {rank} {name}": folder.log(rank, name) for rank in range(program.ranks) for name in names}
    return state.state == "succeeded", folder.torchrun_log.read_text(), streams


def _counts(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _content(path: Path, temporary: str) -> bytes | str:
    data = path.read_bytes()
    if path.name.startswith("events.out"):
        return str(len(data) > 100)
    if path.suffix in (".pt", ".zip", ".gz", ".xz"):
        return str(len(data))
    try:
        return _plain(data.decode(), temporary)
    except UnicodeDecodeError:
        return data


# What differs between any two runs of one program.
PLAIN = (
    (re.compile(r"0x[0-9a-f]{6,}"), "0xADDRESS"),
    (re.compile(r"started \d{9,}"), "started N"),
    (re.compile(r"same-\w{8}"), "FOLDER"),
    (re.compile(r"(outside/)(logs|\d{8}T\d{6}Z-[\w.-]+/torchrun)/[\w-]+"), r"\1LOGS"),
    (re.compile(r"\b(pid|ppid|PID)(\W{1,3})\d+"), r"\1\2N"),
    (re.compile(r"(SAME_PROGRAM\W+)[0-9a-f]{32}"), r"\1MARK"),
    (re.compile(r"(MASTER_PORT\W+)\d+"), r"\1PORT"),
    (re.compile(r"(TORCHELASTIC_RUN_ID\W+)[\w-]+"), r"\1ID"),
    (re.compile(r"tmp-?\w{8}\b"), "TMP"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+"), "TIME"),
    (re.compile(r"\[rank\d+\]:\[.*?\]"), "[TORCH]"),
    (re.compile(r"\b[VIWE]\d{4} [\d:.]+ \d+ |USDT:[\d: -]+"), "LOGGED "),  # by torch
    (re.compile(r"(tfevents)\.\d+(\.\w+)\.\d+"), r"\1\2"),
    (re.compile(r"('train_\w*(runtime|per_second)': )'[\d.]+'"), r"\1N"),
)


def _plain(text: str, temporary: str) -> str:
    for pattern, replacement in PLAIN:
        text = pattern.sub(replacement, text)
    return text


def _running(mark: str) -> list[str]:
    """The commands of a program's processes."""
    return sorted(filter(None, (_plain_command(p) for p in psutil.process_iter() if _is_marked(p, mark))))


def _plain_command(process: psutil.Process) -> str:
    """The start of its command line, empty if it is just ending."""
    try:
        return re.sub(r"\d+", "N", " ".join(process.cmdline()[:3]))
    except psutil.Error:
        return ""


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return (
            process.pid != os.getpid()
            and process.environ().get("SAME_PROGRAM") == mark
            and process.status() != "zombie"
            and "labkit.launcher" not in " ".join(process.cmdline())
        )
    except psutil.Error:
        return False
