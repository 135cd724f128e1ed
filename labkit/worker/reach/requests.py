"""Carries out requests of the run's owner to a running training, where an optimizer's step ends, or at a line at which
all ranks stay (held.py).

The guest's thread looks for requests; the training's own thread only compares two attributes after a step, and meets
the other ranks (record/requests.py) when there is one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from labkit.files import is_only_writable_by, read_json, write_json
from labkit.record import RequestFolder, RunFolder
from labkit.worker.reach.evaluate import evaluate, execute, execute_here, name_of, names_around, names_here
from labkit.worker.reach.held import LOOK_SECONDS, MEETING_SECONDS, Clocked, Lines
from labkit.worker.reach.quantities import remove_hooks
from labkit.worker.reach.settings import Settings, append_event
from labkit.worker.recorder import Recorder

PAUSED_SECONDS = 0.02


class Request:
    """A request that this rank has read, from then on."""

    def __init__(self, folder: RequestFolder, content: Mapping[str, Any], world_size: int):
        self.folder, self.content = folder, content
        self.kind = str(content["kind"])
        self.ranks: list[int] = [*range(world_size)] if content["ranks"] is None else content["ranks"]
        self.meets = content["ranks"] is None
        self.limit = float(content["timeout"])
        self.expires = time.monotonic() + self.limit


class Training(Clocked, Protocol):
    """What requests need of the probe."""

    def record_profile(self, path: Path, steps: int, tell: Callable[[str], None]) -> None: ...
    def end_profile(self, why: str) -> None: ...


class Reach:
    """One rank's part in requests. `step` returns the number of steps done.

    `flagged` and `due` tell the training's thread to call `at_boundary`: a request has come, or a step is reached.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        world_size: int,
        recorder: Recorder,
        settings: Settings,
        step: Callable[[], int],
        training: Training | None = None,
    ):
        self.flagged = False
        self.due: float = math.inf
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._recorder, self._settings, self._step, self._training = recorder, settings, step, training
        self._released = folder.requests / "released"  # the supervisor stops the run
        self._number = 1
        self._request: Request | None = None
        self._pause_at: float = math.inf  # the step at whose end this rank waits
        self._stepping: Request | None = None  # the one that lets this rank make some steps
        self._profiled: Request | None = None  # the one whose profile is being recorded
        self._watched: dict[str, tuple[str, int]] = {}  # expression and interval in steps, by name
        self._breakpoint: Breakpoint | None = None
        self.lines = Lines(folder, (rank, world_size), training, self._condition_here, self._stay, recorder.drop)
        self.hit: str | None = None  # why this run is paused: the condition and where it held, or the line
        self._optimizer: Any = None
        self._alone = True

    def listen(self) -> None:
        """Called ten times a second by another thread than the training's."""
        try:
            self._advance()
        except Exception as error:  # a full disk, a deleted folder, an invalid request
            self._recorder.drop(error)
            if not self.flagged:
                self._request, self._number = None, self._number + 1

    def _advance(self) -> None:
        if self.lines.is_decided or self.lines.was_here:
            self.due = 0  # the training's thread clears up at the end of this step
        request = self._request = self._request or self._newest()
        if request is None or self.flagged:
            return
        meeting = request.folder.look()
        if meeting.decision or time.monotonic() > request.expires:  # the process that asked has given up, or is gone
            request.folder.decide("given-up")
            self._request, self._number = None, self._number + 1
        elif meeting.seen >= {*request.ranks}:
            self.flagged = True  # first, so that the end of the step after this one cannot miss it
            step = self._step()
            request.folder.mark(f"step-{self._rank}-{max(step, min(step + 1, self._pause_at)):.0f}")

    @property
    def paused(self) -> bool:
        return self._pause_at <= self._step()

    def _newest(self) -> Request | None:
        """The next request, unless there is none or it does not concern this rank."""
        folder = RequestFolder(self._folder.requests / str(self._number))
        if not folder.path.exists():
            return None
        if not is_only_writable_by(os.geteuid(), self._folder.requests, folder.path, folder.text):
            raise PermissionError(f"other users can write to {folder.path}, so the request was rejected")
        request = Request(folder, read_json(folder.text), self._world_size)
        if self._rank not in request.ranks:
            self._number += 1
            return None
        folder.mark(f"seen-{self._rank}")
        return request

    # Called by the training's thread.

    def at_boundary(self, optimizer: Any, step: int, step_seconds: float, *, alone: bool = True) -> None:
        """Do what is due at the end of a step of the optimizer whose steps are counted; `alone`: it is the only one.
        Returns when the training may continue."""
        if self.lines.is_busy:
            return  # a cell of the owner's makes a step
        self._optimizer, self._alone, self.lines.is_busy = optimizer, alone, True
        try:
            if self.lines.was_here:
                names_around(optimizer)  # clears what the frames have kept of their variables
                self.lines.was_here = False
            if self.lines.is_decided:
                self.lines.leave()
            self._record_watched(step)
            if self._breakpoint is not None:
                self._stop_at(self._breakpoint, step)
            if self.flagged:
                self._meet(step, MEETING_SECONDS + 2 * step_seconds)
            self._wait(step)
        finally:
            self.lines.is_busy = False

    def _condition_here(self, condition: str) -> Mapping[str, Any]:
        return self._evaluated({condition: condition}, together=False)[condition]

    def _stay(self, why: str, condition: str | None) -> None:
        """Wait at a line, like a rank that is paused."""
        self._pause_at = step = self._step()
        self.hit = why
        if self._rank == 0:
            self._append({"kind": "hit", "condition": condition, "why": why}, step)
        self._wait(step)

    def _wait(self, step: int) -> None:
        """Carry out requests while this rank is paused, and say when to come here again."""
        if self.paused and self._stepping is not None:
            self._answer(self._stepping, step, [{"held": True}] if self.lines.is_here else [])
            self._stepping = None
        if self.paused and self._profiled is not None and self._training is not None:
            self._training.end_profile("the run was paused before all steps were recorded")
        while self.paused:
            time.sleep(PAUSED_SECONDS)
            if self.flagged:
                self._meet(step, MEETING_SECONDS)
            elif self._released.exists():
                self._pause_at = math.inf
        self.hit = None
        watched = min((every - step % every for _, every in self._watched.values()), default=math.inf)
        is_next = self._breakpoint is not None or self.lines.was_here
        self.due = step + 1 if is_next else min(self._pause_at, step + watched)

    def _meet(self, step: int, patience: float) -> None:
        """Carry out the request if all its ranks are here. Returns at once if they meet at a later step."""
        request = self._request
        assert request is not None
        try:
            decision = self._decision(request, step, patience)
        except OSError as error:  # a full disk: without this rank the others do not agree
            self._recorder.drop(error)
            decision = "given-up"
        if decision is None:
            return
        try:
            if decision == "agreed":
                self._carry_out(request, step)
        finally:
            self._number += 1
            self.flagged = False
            self._request = None  # last: from here on the other thread looks for the next request

    def _decision(self, request: Request, step: int, patience: float) -> Literal["agreed", "given-up"] | None:
        """Wait for the other ranks. None if they meet at a later step; ranks that are held at a line meet there."""
        folder, deadline = request.folder, min(time.monotonic() + patience, request.expires)
        while (meeting := folder.look()).decision is None:
            at = meeting.step(request.ranks)
            if time.monotonic() > deadline:
                folder.decide("given-up")
            elif at is not None and step < at and not self.lines.is_here:
                return None
            elif at is not None and self._rank not in meeting.here:
                folder.mark(f"here-{self._rank}")
            elif meeting.here >= {*request.ranks}:
                folder.decide("agreed")
            else:
                time.sleep(LOOK_SECONDS)
        return meeting.decision

    def _carry_out(self, request: Request, step: int) -> None:
        if self._stepping is not None and (request.kind in ("pause", "resume") or request.content.get("resume")):
            self._answer(self._stepping, step, [])
            self._stepping = None
        try:
            results = self._results(request, step)
        except Exception as error:  # an unusual optimizer or frame
            results = [{"error": repr(error)}]
        if self._rank == request.ranks[0]:
            self._note(request, step, [result["error"] for result in results if "error" in result])
        if request.kind == "resume" and request.content["steps"]:
            self._stepping = request  # answered when the steps are done
        elif request.kind == "profile" and not results:
            self._profiled = request  # answered when the profile is
        else:
            self._answer(request, step, results)

    def _answer(self, request: Request, step: int, results: list[dict[str, Any]]) -> None:
        try:
            write_json(request.folder.answer(self._rank), {"step": step, "results": results})
        except (OSError, ValueError) as error:
            self._recorder.drop(error)

    def _results(self, request: Request, step: int) -> list[dict[str, Any]]:
        import torch

        content = request.content
        if request.kind == "ask":
            with torch.no_grad():
                return evaluate(content["expression"], self._names(), together=request.meets, limit=request.limit)
        if request.kind == "exec":
            if self.lines.is_here:
                return execute_here(content["cell"], self._optimizer, request.limit)
            return execute(content["cell"], names_around(self._optimizer), request.limit)
        if request.kind == "set":
            if self._optimizer is None:
                return [{"error": "no optimizer has made a step since the first request; set options after one"}]
            try:
                self._settings.change(content["values"], self._optimizer)
            except ValueError as error:
                return [{"error": str(error)}]
            return [] if self._alone else [{"only": name_of(self._optimizer)}]
        if request.kind == "watch":
            (result,) = self._evaluated({content["name"]: content["expression"]}).values()
            if "error" not in result:
                self._watched[content["name"]] = content["expression"], content["every"]
            return [result]
        if request.kind == "breakpoint":
            if content["resume"]:
                self._pause_at = math.inf
            condition, at = content["condition"], content.get("at")
            self.lines.remove(calls=condition is None and at is None)
            if at is None:
                return [self._set_breakpoint(condition)]
            self._remove_breakpoint()
            return [self.lines.set(condition, at, request.folder.path.name)]
        if request.kind == "save":
            return [self._save()]
        if request.kind == "profile":
            return self._record_profile(request, content["steps"])
        if request.kind == "unwatch":
            self._watched.pop(content["name"], None)
            remove_hooks()
        elif request.kind == "pause":
            self._pause_at = step
        elif request.kind == "resume":
            self._pause_at = step + (content["steps"] or math.inf)
        return []

    def _record_profile(self, request: Request, steps: int) -> list[dict[str, Any]]:
        if self.paused or self._training is None:
            return [{"error": "the run is paused, so no steps can be recorded; resume() it first"}]

        def ended(why: str) -> None:
            self._profiled = None
            self._answer(request, self._step(), [{"error": why}] if why else [])

        self._training.record_profile(self._folder.profile(self._rank), steps, ended)
        return []

    def _save(self) -> dict[str, Any]:
        """Have the checkpoints of one of labkit's scripts save at the end of this step."""
        checkpoints: Any = names_around(self._optimizer).get("checkpoints")
        if not (hasattr(checkpoints, "requested") and checkpoints.on):
            return {"error": "save() works only in labkit's own scripts launched with checkpoint_dir"}
        if self.paused:
            return {"error": "the run is paused within a step and can only save at its end; resume() it first"}
        checkpoints.requested = True
        return {}

    def _set_breakpoint(self, condition: str | None) -> dict[str, Any]:
        result: dict[str, Any] = {}
        self._remove_breakpoint()
        if condition is not None:
            (result,) = self._evaluated({condition: condition}).values()
            try:
                self._breakpoint = Breakpoint(condition, self._rank, self._world_size)
            except LookupError as error:
                return {"error": str(error)}
        return result

    def _names(self) -> dict[str, Any]:
        return names_here(self._optimizer) if self.lines.is_here else names_around(self._optimizer)

    def _remove_breakpoint(self) -> None:
        if self._breakpoint is not None:
            self._breakpoint.remove()
        self._breakpoint = None

    def _stop_at(self, point: Breakpoint, step: int) -> None:
        """Pause if the condition holds on any rank, and remove it."""
        (result,) = self._evaluated({point.condition: point.condition}).values()
        if "error" in result:
            self._recorder.drop(ValueError(f"{point.condition}: {result['error']}"))
        try:
            ranks = point.ranks_where(bool(result.get("value")))
        except Exception as error:  # a rank has ended
            self._recorder.drop(error)
            self._remove_breakpoint()
            return
        if ranks:
            self._pause_at = step
            self.hit = f"{point.condition} holds on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            if self._rank == 0:
                self._append({"kind": "hit", "condition": point.condition, "ranks": ranks}, step)
            self._remove_breakpoint()

    def _record_watched(self, step: int) -> None:
        due = {name: expression for name, (expression, every) in self._watched.items() if step % every == 0}
        for name, result in self._evaluated(due).items() if due else ():
            if "error" in result:
                self._recorder.drop(ValueError(f"{name}: {result['error']}"))
            else:
                self._recorder.write({"k": "report", "step": step, name: result["value"]})

    def _evaluated(self, expressions: Mapping[str, str], *, together: bool = True) -> dict[str, dict[str, Any]]:
        """The results, of which those that are not numbers are errors."""
        import torch

        with torch.no_grad():
            names = self._names()
            results = {
                name: evaluate(f"({expression}),", names, together=together, limit=MEETING_SECONDS)[0]
                for name, expression in expressions.items()
            }
        return {
            name: result
            if "error" in result or isinstance(result.get("value"), int | float)
            else {"error": f"expected a number, got {result.get('value', 'an array')}"}
            for name, result in results.items()
        }

    def _note(self, request: Request, step: int, errors: list[str]) -> None:
        self._append({**request.content, "errors": errors} if errors else request.content, step)

    def _append(self, event: Mapping[str, Any], step: int) -> None:
        try:
            append_event(self._folder, step, **event)
        except OSError as error:
            self._recorder.drop(error)


class Breakpoint:
    """While it is set, the ranks tell each other after each step whether it holds: one all-reduce of a byte per rank
    over gloo. All ranks must create it at the same step. Raises LookupError if they have no process group."""

    def __init__(self, condition: str, rank: int, world_size: int):
        import torch.distributed as dist

        self.condition = condition
        self._rank, self._world_size = rank, world_size
        self._group: Any = None
        if world_size > 1:
            if not (dist.is_available() and dist.is_initialized()):
                raise LookupError("the ranks have no process group, so they cannot stop at the same step")
            self._group = dist.new_group(backend="gloo")  # on the host: the device may be far behind

    def ranks_where(self, holds: bool) -> list[int]:
        """The ranks whose condition holds. Raises RuntimeError if a rank has left."""
        if self._group is None:
            return [self._rank] if holds else []
        import torch
        import torch.distributed as dist

        held = torch.zeros(self._world_size, dtype=torch.uint8, device="cpu")  # whatever the script's default is
        held[self._rank] = holds
        dist.all_reduce(held, group=self._group)
        return held.nonzero().flatten().tolist()

    def remove(self) -> None:
        import torch.distributed as dist

        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
