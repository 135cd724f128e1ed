"""Holds all ranks at a line of the script: where the run's owner has set a breakpoint, or where the script calls
`breakpoint()`. The ranks agree by files (line_folder.py); each waits some seconds for the others, which may be in a
collective that needs it, and all go on if one does not come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from labkit.files import read_object
from labkit.line_folder import LineFolder
from labkit.record import RunFolder
from labkit.text import slug
from labkit.worker.measures.profile import in_backward
from labkit.worker.reach import evaluate as evaluation
from labkit.worker.reach.lines import LineTrap, code_with, name_of_line

LOOK_SECONDS = 0.002
MEETING_SECONDS = 5.0  # besides two steps: how long ranks wait for one that does not come
FIRST_STEP_SECONDS = 30.0  # the same before the first step has ended


class Clocked(Protocol):
    """What is needed of the probe."""

    step: int

    @property
    def latest_step_seconds(self) -> float | None: ...
    def leave_out(self, seconds: float) -> None: ...


class Lines:
    """One rank's breakpoints at lines. `evaluate` evaluates a condition, `stay` returns when the run is resumed.

    While `is_busy`, lines are passed over: an expression of the owner's may come to them. `is_here`: the training's
    thread is at one; `was_here`: it has been since the last step. `refused` says why the ranks did not stay.
    """

    def __init__(
        self,
        folder: RunFolder,
        ranks: tuple[int, int],
        probe: Clocked | None,
        evaluate: Callable[[str], Mapping[str, Any]],
        stay: Callable[[str, str | None], None],
        drop: Callable[[Exception], None],
    ):
        self.is_busy = self.is_here = self.was_here = False
        self.refused: str | None = None
        self._folder, (self._rank, self._world_size), self._probe = folder, ranks, probe
        self._evaluate, self._stay, self._drop = evaluate, stay, drop
        self._released = folder.requests / "released"
        self._line: LineFolder | None = None  # at which there is a breakpoint
        self._passes = 0  # how often this rank has come there
        self._trap: LineTrap | None = None
        self._calls: Counter[str] = Counter()  # of breakpoint(), by line
        self._passed_over: set[str] = set()  # the lines of those at which not all ranks stay
        self._passes_over_calls = False

    @property
    def is_decided(self) -> bool:
        """Whether the ranks have gone on from a line without this one, which shall remove its trap."""
        return self._line is not None and self._line.decision() is not None

    def set(self, condition: str | None, at: str, name: str) -> dict[str, Any]:
        """Set a breakpoint for the training's thread, which calls this."""
        self.remove()
        file, _, line = at.rpartition(":")
        folder = LineFolder(self._folder.requests, name)
        try:
            if in_backward():
                raise LookupError("the optimizer steps within backward(), in a thread of its own")
            self._trap = LineTrap(code_with(file, int(line)), int(line), lambda: self._reach(folder, condition))
        except LookupError as error:
            return {"error": str(error.args[0])}
        self._line, self._passes = folder, 0
        return {"line": name}

    def remove(self, *, calls: bool = False) -> None:
        """Remove the breakpoint; if `calls`, pass over those that the script calls, too."""
        self.refused, self._passes_over_calls = None, calls or self._passes_over_calls
        if self._line is not None:
            with suppress(OSError):
                self._line.decide("removed")  # unless the ranks have stayed, or have not
        self.leave()

    def leave(self) -> None:
        """Hold nobody, as in a forked child."""
        if self._trap is not None:
            self._trap.remove()
        self._trap = self._line = None

    def call(self) -> None:
        """Called by `breakpoint()`."""
        frame = evaluation.frame_here()
        line = name_of_line(frame.f_code, frame.f_lineno)
        if self.is_busy or self._passes_over_calls or line in self._passed_over:
            return
        self._calls[line] += 1
        folder = LineFolder(self._folder.requests, f"call-{slug(line)}-{self._calls[line]}")
        if self._come_to(folder, 1, None) == "refused":
            self._passed_over.add(line)

    def _reach(self, folder: LineFolder, condition: str | None) -> None:
        if not self.is_busy and folder is self._line:
            self._passes += 1
            self._come_to(folder, self._passes, condition)

    def _come_to(self, folder: LineFolder, passes: int, condition: str | None) -> str | None:
        """Stay at the line that the script is about to execute, for the n-th time, if all ranks do. Returns what was
        decided; None if they go on because the condition holds on none."""
        started, frame = time.perf_counter(), evaluation.frame_here()
        evaluation.held = frame
        line = name_of_line(frame.f_code, frame.f_lineno)
        self.is_busy = self.is_here = self.was_here = True
        try:
            decision = self._decision(folder, line, passes, condition)
            if decision is None:
                return None
            if self._line is folder:
                self.leave()
            is_held = decision["decision"] == "held"
            self.refused = None if is_held else f"not held: {decision.get('why')}"
            if is_held:
                self._stay(str(decision["why"]), condition)
            return str(decision["decision"])
        except Exception as error:  # a full disk, a deleted folder: without this rank the others do not stay
            self._drop(error)
            return None
        finally:
            self.is_busy = self.is_here = False
            evaluation.held = None
            if self._probe is not None:
                self._probe.leave_out(time.perf_counter() - started)

    def _decision(self, folder: LineFolder, line: str, passes: int, condition: str | None) -> Mapping[str, Any] | None:
        result = {"value": True} if condition is None else self._evaluate(condition)
        if "error" in result:
            folder.decide("refused", why=f"{condition} cannot be evaluated at {line}: {result['error']}")
        folder.arrive(self._rank, passes, bool(result.get("value")))
        latest = self._probe.latest_step_seconds if self._probe is not None else None
        patience = FIRST_STEP_SECONDS if latest is None else MEETING_SECONDS + 2 * latest
        deadline = time.monotonic() + patience
        while (decision := folder.decision()) is None:
            there = folder.look()
            late = [rank for rank in range(self._world_size) if there.get(rank, (0, False))[0] < passes]
            if not late:
                where = [str(rank) for rank, (_, holds) in sorted(there.items()) if holds]
                if not where or any(count > passes for count, _ in there.values()):
                    return None
                whose = f"rank{'s' * (len(where) > 1)} {', '.join(where)}"
                because = "" if condition is None else f", because of {whose}: {condition}"
                step = self._probe.step if self._probe is not None else 0
                folder.decide("held", why=f"held at {line}, all ranks{because}", step=step)
            elif self._released.exists():
                return None
            elif time.monotonic() > deadline:
                folder.decide("refused", why=self._why(late, line.partition(" ")[0], patience))
            else:
                time.sleep(LOOK_SECONDS)
        return decision

    def _why(self, late: list[int], line: str, seconds: float) -> str:
        """Which ranks did not come, and where they are."""
        others = f" and {len(late) - 1} more" * (len(late) > 1)
        beat = read_object(self._folder.heartbeat(late[0]))
        waits = f", in {beat['call']}" if beat.get("call") else ", waiting for others" if beat.get("waits") else ""
        place = f"; it is at line {beat['line']}{waits}" if beat.get("line") else ""
        return f"rank {late[0]}{others} did not come to {line} within {seconds:.0f} s{place}"
