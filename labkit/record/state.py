"""The state of a run: `state.json`, replaced atomically, and the actual state if its writer was killed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar, Literal

from labkit.dataclass_json import from_json
from labkit.files import Json, in_parallel, read_json, read_object, read_text, write_json
from labkit.record.cause import Cause
from labkit.record.folder import RunFolder
from labkit.record.manifest import Nodes
from labkit.record.nodes import Node

StateName = Literal["starting", "running", "succeeded", "failed", "stopped", "lost"]
WORST_FIRST = ("failed", "stopped", "lost", "succeeded")

NAMED_NOTICES = 3
MOST_NAMED = 4  # processes that were left running
# How long a run may be without a supervisor before it counts as lost. Launch records its identity when it has a pid.
STARTING_SECONDS = 30.0


@dataclass(frozen=True)
class State:
    """The state of a run. `started` and `ended` are seconds since the epoch; `exit_code` is torchrun's.

    `cause` is None for a run that succeeded or is active. `notice` is a warning of the supervisor: that no rank makes
    progress, or that the newest checkpoint was not saved. `stuck_since` is when a rank last made progress, in seconds
    since the epoch, if none does now. `stops_by` is when the wait of a run that is being stopped ends, which `notice`
    explains. `attempt` counts from 1; `earlier` holds how the previous attempts ended, see `as_earlier`, and
    `restarted_ranks` if the next one had fewer ranks. `ranks` is the number of ranks of this attempt, if
    fewer than were launched. `wrong`: the training was found to be certainly wrong, and `notice` begins with why.
    """

    state: StateName
    started: float
    ended: float | None = None
    exit_code: int | None = None
    cause: Cause | None = None
    killed: int = 0
    checkpoint: str | None = None
    notice: str | None = None
    stuck_since: float | None = None
    stops_by: float | None = None
    attempt: int = 1
    earlier: list[dict[str, Json]] = field(default_factory=list)
    ranks: int | None = None
    wrong: bool = False
    format: int = 1
    FINAL: ClassVar = ("succeeded", "failed", "stopped", "lost")

    @property
    def is_final(self) -> bool:
        return self.state in State.FINAL

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far, in seconds."""
        return (self.ended or time.time()) - self.started

    @property
    def stuck_seconds(self) -> float | None:
        """How long no rank of a running run has made progress; None while one does."""
        if self.state != "running" or self.stuck_since is None:
            return None
        return max(0.0, time.time() - self.stuck_since)

    @property
    def is_paused(self) -> bool:
        """Whether at least one rank of a running run waits for a resume; `notice` then says why."""
        return bool(self.paused)

    @property
    def paused(self) -> Literal["paused", "held", ""]:
        """`paused` at the end of a step, `held` at a line, or neither."""
        notice = (self.notice or "") if self.state == "running" else ""
        return "paused" if notice.startswith("paused") else "held" if notice.startswith("held at ") else ""

    @classmethod
    def read(cls, folder: RunFolder) -> State:
        """The state of a run. A run whose supervisor is gone without having written a final state is "lost", and so are
        a copy of the folder of an active run, whose end is written to the original, and a run in another format."""
        state = cls.written(folder)
        if other := folder.of_another_version():
            return replace(
                state,
                state="lost",
                ended=state.ended or state.started,
                cause=Cause("version", f"its run.json has {other}"),
            )
        if state.is_final:
            return state
        if original := folder.original():
            sentence = f"this folder is a copy of {original}, made while the run was active, and does not follow it"
            cause = Cause("copy", sentence, advice=(f"The run itself: labkit attach {original}",))
            return replace(state, state="lost", ended=_last_heartbeat(folder, state), cause=cause)
        if folder.nodes.is_dir():
            return _of_nodes(folder, state)
        if state.supervisor_is_alive(folder):
            return state
        state = cls.written(folder)  # the supervisor may have written the final state just before it exited
        if state.is_final:
            return state
        return replace(state, state="lost", ended=_last_heartbeat(folder, state), cause=_why_lost(folder))

    @staticmethod
    def is_settled(folder: RunFolder) -> bool:
        """Whether the run's own state.json, not only those of its nodes, has a final state."""
        return read_object(folder.state).get("state") in State.FINAL

    @classmethod
    def written(cls, folder: RunFolder) -> State:
        """The content of state.json; "lost" if it is missing or damaged."""
        if state := from_json(cls, read_json(folder.state), strict=True):
            return state
        gone = "the run's folder was deleted" if not folder.path.exists() else "state.json is missing or damaged"
        now = time.time()
        return cls("lost", now, ended=now, cause=Cause("lost", gone))

    def write(self, folder: RunFolder) -> None:
        """Write state.json. Raises OSError."""
        cause = dict(self.cause) if self.cause else None
        write_json(folder.state, asdict(replace(self, cause=None)) | {"cause": cause}, reserve=folder.reserve)

    def supervisor_is_alive(self, folder: RunFolder) -> bool:
        """Whether the run's supervisor is alive, or still about to start."""
        supervisor = Node(folder).supervisor()
        if supervisor is None:
            return abs(time.time() - self.started) < STARTING_SECONDS
        return supervisor.is_elsewhere or supervisor.is_alive()

    @classmethod
    def current_ranks(cls, folder: RunFolder) -> range:
        """The ranks of the newest attempt."""
        return range(cls.read(folder).ranks or folder.read_manifest().world_size)

    def __repr__(self) -> str:
        after = f"after {self.seconds:.1f} s"
        if self.is_paused:
            return f"{self.paused} {after}{(self.notice or '').removeprefix(self.paused)}"
        sentence = f": {self.cause.sentence}" if self.cause else f", but {self.notice}" if self.notice else ""
        return f"{self.state} {after}{sentence}"

    def as_earlier(self) -> dict[str, Json]:
        """How this attempt ended, as `earlier` of the next one holds it."""
        cause = dict(self.cause) if self.cause else None
        return {"ended": self.ended, "exit_code": self.exit_code, "cause": cause, "checkpoint": self.checkpoint}


def _why_lost(folder: RunFolder) -> Cause:
    """Why the supervisor is gone, with advice if it failed before it wrote its own agent.json."""
    started = Node(folder).supervisor() is not None and not Node(folder).supervisor_is_starting()
    try:
        log = [] if started else read_text(folder.supervisor_log).split("\n")
    except OSError:
        log = []
    if error := next((line.strip() for line in reversed(log) if "Error" in line), ""):
        advice = (
            f"Its output is in {folder.supervisor_log}. It is a separate Python process: labkit and torch must be "
            "installed, or on PYTHONPATH; a notebook's sys.path does not reach it."
        )
        return Cause("lost", f"the run's supervisor could not start: {error}", advice=(advice,))
    why = "killed, or the machine was rebooted"
    if place := folder.moved_from():
        why += f", or this folder was moved or copied from {place} to another file system while the run was active"
    return Cause("lost", f"the run's supervisor is gone ({why}) and left no result")


def _last_heartbeat(folder: RunFolder, state: State) -> float:
    """When a rank or a node of the newest attempt last wrote a heartbeat, in seconds since the epoch."""
    attempt = folder.latest
    beats = [*attempt.ranks.glob("*/heartbeat.json"), *attempt.nodes.glob("*/heartbeat.json")]
    return max([state.started, *(beat.stat().st_mtime for beat in beats)])


def _of_nodes(folder: RunFolder, root: State) -> State:
    nodes = folder.glimpsed_manifest().nodes
    if nodes is None:
        return replace(root, state="lost", cause=Cause("lost", "run.json is missing or damaged"))
    *before, newest = folder.attempts()
    state = _of_attempt(newest, nodes, root)
    if state.state == "lost" and state.ended is None:
        state = replace(state, ended=_last_heartbeat(folder, state))
    if not before:
        return state
    states = [_of_attempt(attempt, nodes, root) for attempt in before]
    return replace(state, attempt=int(newest.path.name), earlier=[one.as_earlier() for one in states])


def _of_attempt(attempt: RunFolder, nodes: Nodes, root: State) -> State:
    each = [attempt.node(node) for node in range(nodes.count)]
    heard, states = zip(*in_parallel(_heard_and_state, each), strict=True)
    return merged(root, states, heard)


def _heard_and_state(node: RunFolder) -> tuple[bool, State | None]:
    """Whether a node is alive, and its state, None if it has not started."""
    heard = Node(node).is_heard()  # read before the state: a node writes its final state before it exits
    state = State.written(node)
    return heard, state if state.state != "lost" or node.state.exists() else None


def merged(root: State, states: Sequence[State | None], heard: Sequence[bool]) -> State:
    """The state of a run from the state of each node (None if it has not started) and whether the node is alive.

    `root` is the run's own state, written at the launch.
    """
    killed = sum(state.killed for state in states if state)
    states = [state and replace(state, started=root.started, killed=killed) for state in states]
    started = [state for state in states if state is not None]
    active = [s for s, is_alive in zip(states, heard, strict=True) if s is not None and not s.is_final and is_alive]
    ended = sorted((s for s in started if s.is_final), key=lambda s: WORST_FIRST.index(s.state))
    if not started:
        return replace(root, state="starting", notice=f"none of its {len(states)} nodes has started yet")
    if active:
        name: StateName = "running" if any(s.state == "running" for s in started) else "starting"
        notice = next((s.notice for s in active if s.notice), None)
        stuck = [s.stuck_since for s in active if s.stuck_since is not None]
        stuck_since = max(stuck) if len(stuck) == len(active) else None
        stops_by = max((s.stops_by for s in active if s.stops_by is not None), default=None)
        wrong = any(s.wrong for s in active)
        return replace(active[0], state=name, notice=notice, stuck_since=stuck_since, stops_by=stops_by, wrong=wrong)
    if not ended or (ended[0].state == "succeeded" and len(ended) < len(states)):
        cause = Cause("lost", "the supervisors of this run's nodes are gone and left no result")
        return replace(started[0], state="lost", cause=cause)
    code = next((s.exit_code for s in ended if s.exit_code), ended[0].exit_code)
    notices = [*dict.fromkeys(s.notice for s in ended if s.notice)]  # each node's are about its own ranks
    more = [f"and {len(notices) - NAMED_NOTICES} more"] if len(notices) > NAMED_NOTICES else []
    notice = "; ".join([*notices[:NAMED_NOTICES], *more]) or None
    latest = max(s.ended or 0.0 for s in ended)
    return replace(ended[0], ended=latest, exit_code=code, notice=notice, wrong=any(s.wrong for s in ended))


@dataclass(frozen=True)
class LeftRunning:
    """`processes` are texts such as "`python upload.py` (pid 4242)"; `killed` are those that labkit had to end. `until`
    is when it does so, None if at once; `ended` is when none was left. Both are seconds since the epoch."""

    processes: tuple[str, ...] = ()
    until: float | None = None
    ended: float | None = None
    killed: tuple[str, ...] = ()

    @property
    def notice(self) -> str:
        """The notice in the final state of the run, in words that stay true."""
        were = f"{_listed(self.processes)} {'was' if len(self.processes) == 1 else 'were'}"
        fate = f"had until {_clock(self.until)} to end" if self.until else "ended with the job"
        return f"{were} still running when its ranks had ended, and {fate}"

    @property
    def outcome(self) -> str:
        """What labkit had to end; empty if nothing."""
        if not self.killed or self.ended is None:
            return ""
        return f"labkit ended {_listed(self.killed)} at {_clock(self.ended)}, which its ranks had left running"

    def write(self, home: RunFolder) -> None:
        """Write left-running.json. Raises OSError."""
        write_json(home.left_running, asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> dict[RunFolder, LeftRunning]:
        """What the supervisors of a run have written, by the folder of each: the run's own, or that of a node."""
        homes = [folder, *map(RunFolder, sorted(folder.latest.nodes.glob("*")))]
        read = [(home, from_json(cls, read_json(home.left_running))) for home in homes]
        return {home: left for home, left in read if left}


def _listed(names: tuple[str, ...]) -> str:
    *most, last = names if len(names) <= MOST_NAMED else (*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more")
    return f"{', '.join(most)} and {last}" if most else last


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a number that is not a time
        return "an unknown time"
