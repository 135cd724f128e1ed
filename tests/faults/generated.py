"""Training scripts from a seed, each with what must be true of its run: how it ends, whom labkit names, how many steps.

A script is a loop's shape, a source of batches, a way of logging, and a fault at a moment on one rank. It writes what
it knows of itself, step by step, into the folder it is given, so that also a rank that was killed can be compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from textwrap import indent

from faults.loops import BARRIER, FRAMEWORKS, HEAD, LOGGERS, SHAPES, loop_of

__all__ = ["Generated", "generate"]

FAULTS = {
    "none": "pass",
    "raise": 'raise ValueError("boom")',
    "long message": 'raise ValueError("boom\\n" + "x" * 300_000)',
    "chain": 'raise RuntimeError("boom") from KeyError("inner")',
    "exit": "sys.exit(3)",
    "leave": "sys.exit(0)",
    "quit": "os._exit(7)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "term": "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(600)",
    "crash": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hang": '(FOLDER / "hung").touch()\ntime.sleep(600)',
    "thread dies": 'threading.Thread(target=json.loads, args="{").start()\n(FOLDER / "hung").touch()\ntime.sleep(600)',
    "command": 'subprocess.check_call(["sh", "-c", "echo no such shard >&2; exit 4"])',
    "skip": 'skipped.add("logging")',
    "memory": "raise MemoryError",
    "device memory": 'import torch\nraise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")',
    "nan": 'FACTOR = float("nan")',
    "helper": 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", str(FOLDER)]{helper_options})',
    "mismatch": "dist.broadcast(torch.zeros(8), src=CULPRIT)\nwhile True:\n    dist.all_reduce(torch.zeros(3))",
}
SAYS = {
    "raise": "failed: ValueError: boom",
    "long message": "failed: ValueError: boom",
    "chain": "failed: RuntimeError: boom, caused by KeyError: 'inner'",
    "exit": r"exited with 3\b",
    "leave": r"exited at step {made} \(.*: `sys\.exit\(0\)`\) without an error",
    "quit": r"exited with 7\b",
    "kill": r"was killed \(SIGKILL\)",
    "term": r"was killed \(SIGTERM\)",
    "crash": r"was killed \(SIGSEGV\)",
    "command": r"failed: CalledProcessError: .* status 4\. It printed: no such shard",
    "memory": "ran out of host memory: MemoryError",
    "device memory": "ran out of device memory: OutOfMemoryError",
}
OF_WORKERS = {
    "raise": r"ValueError: boom \(in a DataLoader worker\)",
    "kill": r"its DataLoader worker \(pid \d+\) was killed \(SIGKILL\)",
    "quit": r"its DataLoader worker \(pid \d+\) exited with code 7\b",
}
LATER = {"hang": "thread dies", "raise": "command"}
HARMLESS = ("none", "nan", "helper")
EXCEPTIONS = ("raise", "command", "long message", "chain", "exit", "leave", "memory", "device memory")
WITHOUT_LAST_RECORD = ("quit", "kill", "term", "crash", "hang", "thread dies")  # of the last tenth of a second
OF_ANY_STEP = ("before backward", "after backward", "in optimizer", "evaluation", "checkpoint")
AROUND = ("import", "start", "end", "exit")
WATCHDOG_SECONDS = 15.0
HELPER_OPTIONS = ("", ", env={}", ", start_new_session=True", ", env={}, start_new_session=True")


@dataclass(frozen=True)
class Generated:
    """What was drawn, how the script is launched, and what must be true of its run.

    `ending` is how a hang ends: "stop" by the test, "watchdog", or "limit", the process group's.
    `keeps` the optimizer of a training before. Without a `pace` steps come faster than records may be written.
    """

    seed: int
    shape: str
    source: str
    logger: str
    ranks: int
    steps: int
    passes: int
    workers: int
    pace: float
    fault: str
    moment: str
    culprit: int
    at: int
    ending: str
    end: str
    keeps: bool
    helper_options: str

    @property
    def title(self) -> str:
        where = f" on rank {self.culprit} at {self.moment} {self.at} {self.ending}" if self.fault != "none" else ""
        return f"{self.shape}, {self.source}, logs by {self.logger}, {self.ranks} ranks, {self.fault}{where}"

    @property
    def text(self) -> str:
        short_limit = self.ending == "limit" or self.fault in ("mismatch", "skip")
        fault = indent(FAULTS[self.fault].replace("{helper_options}", self.helper_options), "    ")
        drawn = vars(self) | {"title": f"{self.seed}: {self.title}", "fault": fault, "logger": LOGGERS[self.logger]}
        head = HEAD.format(**drawn, group_timeout=10 if short_limit else 300)
        return head + loop_of(
            self.shape, self.source, self.end, self.keeps, self.logger == "progress bar", self.fault == "skip"
        )

    @property
    def watchdog(self) -> float | None:
        return WATCHDOG_SECONDS if self.ending == "watchdog" else None

    @property
    def state(self) -> str:
        if self.fault in HARMLESS or (self.moment == "exit" and self.fault in EXCEPTIONS):  # which Python only prints
            return "succeeded"
        if self.fault == "leave" and (self.ranks == 1 or (self.moment == "end" and self.end != BARRIER)):
            return "succeeded"
        return "stopped" if self.ending == "stop" else "failed"

    @property
    def says(self) -> str | None:
        """A pattern of the cause's sentence."""
        who = f"^rank {self.culprit}"
        if self.state != "failed":
            return "^stopped on request" if self.state == "stopped" else None
        if self.ending == "watchdog":
            return rf"^stopped by the watchdog after 15 s.*rank {self.culprit} [^;]*time\.sleep\(600\)"
        if self.ending == "limit" and self.fault == "thread dies":
            return rf"^a thread of rank {self.culprit} raised JSONDecodeError: .*\. Rank {self.culprit} had been"
        if self.fault == "skip":
            who = f"rank {self.culprit}"  # before a second step, or where the other call was C++'s, only that they part
            return rf"{who} left out |called `all_reduce` .* while {who} (went on to|called)|the ranks disagree: as"
        if self.ending == "limit":
            return rf"{who} had been .*`time\.sleep\(600\)`\) for \d+ s when rank \d"
        if self.fault == "mismatch":
            return r"called `broadcast` \(.*while rank|while rank \d+ called `broadcast`"
        if self.moment == "data" and self.workers:
            return f"{who} failed: {OF_WORKERS[self.fault]}"
        return f"{who} {SAYS[self.fault].format(made=self.made)}"

    @property
    def names_culprit(self) -> bool:
        return self.state == "failed" and self.ending != "watchdog" and self.fault not in ("mismatch", "skip")

    @property
    def made(self) -> int:
        """Steps that the culprit makes before the fault."""
        if self.moment in AROUND:
            return 0 if self.moment in ("import", "start") else self.steps
        after = self.moment in ("evaluation", "checkpoint", "logging")
        return (
            self.at
            if after or (self.shape, self.moment) == ("optimizer in backward", "after backward")
            else self.at - 1
        )

    def counts(self, rank: int) -> tuple[int, int]:
        """The fewest and the most steps that labkit may count."""
        fewest = most = self.steps
        if self.fault not in HARMLESS and (self.state != "succeeded" or self.fault == "leave"):
            # a worker that dies is noticed at once, batches are fetched ahead
            early = self.moment == "data" and self.workers and self.fault != "raise"
            if rank == self.culprit and self.fault != "skip":
                fewest = most = self.made
                waits_at_exit = self.moment == "exit" and self.ending
                if early or (not self.pace and self.fault in WITHOUT_LAST_RECORD and not waits_at_exit):
                    fewest = 0
            else:  # it waits in a collective of this step or of the next, until torchrun ends it
                fewest = max(0, self.made - 1) if self.pace and not early else 0
                most = min(self.made + 1, self.steps)
        if self.shape == "two trainings" and self.keeps and fewest == self.steps // 2 + 1:
            fewest -= 1  # until it steps again, the new optimizer may as well be a second one of the same training
        return fewest, most


def generate(seed: int, shapes: tuple[str, ...] = (*SHAPES, *FRAMEWORKS)) -> Generated:
    """The script of a seed, always the same. Combinations whose outcome cannot be told beforehand are left out."""
    chance = random.Random(seed)
    name = chance.choice(shapes)
    shape, own_loop = SHAPES.get(name), name in SHAPES and name != "accelerate"
    ranks, steps = chance.choice([1, 1, 2, 2, 2, 2, 2, 4] if shape else [1, 2]), chance.randint(3, 8)
    source, end = (chance.choice(shape.sources), chance.choice(shape.end)) if shape else ("DataLoader", "")
    moment = chance.choice([*(shape.moments if shape else OF_ANY_STEP) * 2, *AROUND])
    faults = {*FAULTS} - {"mismatch", "skip", *LATER.values()}
    if name == "by hand" and ranks > 1 and chance.random() < 0.4:
        moment, faults = "before backward", {"mismatch"}
    elif own_loop and source == "DataLoader" and chance.random() < 0.3:
        moment, faults = "data", {*OF_WORKERS}
    if not own_loop or name == "RL" or moment in (*AROUND, "data"):  # of NaN no action can be drawn
        faults -= {"nan"}
    if name in FRAMEWORKS:  # Lightning handles it
        faults -= {"term"}
    if ranks > 1 and moment in ("import", "start"):  # the others would wait for half an hour
        faults -= {"leave"}
    fault = chance.choice([one for one in (*FAULTS, "none", "hang") if one in faults])
    # imports may take longer than the watchdog waits
    endings = ["stop"] if name in FRAMEWORKS or moment in ("import", "start") else ["stop", "watchdog"]
    if own_loop and ranks > 1 and (moment in OF_ANY_STEP or (moment == "end" and end == BARRIER)):
        endings += ["limit"] * 2
    more = random.Random(f"later kinds of {seed}")  # so that a seed stays what it was
    if own_loop and ranks > 1 and more.random() < 0.15:
        fault, moment = "skip", "logging"
    elif fault in LATER and moment != "data" and more.random() < 0.4:
        fault = LATER[fault]
    return Generated(
        seed=seed,
        shape=name,
        source=source,
        logger=chance.choice([*LOGGERS]),
        ranks=ranks,
        steps=steps,
        passes=chance.choice(shape.passes if shape else (1, 1, 2)),
        workers=chance.choice([0, 0, 2]),
        pace=chance.choice([0.12, 0.12, 0.0]),
        fault=fault,
        moment=moment,
        culprit=chance.randrange(ranks),
        at=chance.randint(1, steps - 1),
        ending=chance.choice(endings) if fault in ("hang", "thread dies") else "",
        end=end,
        keeps=chance.choice([True, False]),
        helper_options=chance.choice(HELPER_OPTIONS),
    )
