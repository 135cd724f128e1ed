"""Reaches into a running training: the asker's side of requests to its ranks (record/requests.py)."""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.arguments import AtLeastOne, Seconds, checked
from labkit.cluster import state_of_run
from labkit.errors import LabError
from labkit.line_folder import LineFolder
from labkit.record import Event, Records, Report, RequestFolder, RunFolder, State
from labkit.text import plain

if TYPE_CHECKING:
    import pandas as pd

TIMEOUT = 30.0
POLL_SECONDS = 0.02
RECORD_POLL_SECONDS = 0.2
RECORD_FIELDS = ("k", "t", "step", "time")  # of metrics.jsonl
STATE_SECONDS = 10.0  # for which a request may be carried out before the run's state says so
SHOWN = 60  # characters that tell apart why ranks are held, of those in a notice
SEEN_SECONDS = 5.0  # within which a rank that lives sees a request, once it is the next


class Reachable:
    """A run whose ranks execute requests at the end of an optimizer step, or at a line where they are held. A request
    that not all ranks can execute raises LabError and changes nothing; `timeout` is how many seconds the ranks have to
    reach the same step."""

    folder: RunFolder

    @checked()
    def ask(self, expression: str, *, ranks: Sequence[int] | None = None, timeout: Seconds = TIMEOUT) -> pd.DataFrame:
        """Evaluate an expression on every rank at the end of the same step. Returns one row per rank, with columns
        `rank`, `step`, and one for the expression, or for each element of a tuple (`"loss.item(), x.shape"`). The
        script's own `rank` and `step` are in the columns `rank_` and `step_`.

        Names are those of the training loop's frame. Numbers, text and arrays of up to 10,000 elements are returned as
        values, anything else as its repr, and an exception as its message. Random state and gradients are unaffected.
        Sharded tensors are gathered, because all ranks evaluate together. `ranks=[1]` asks only that rank, without
        waiting for the others, so collectives are not possible there. An evaluation is interrupted after `timeout`
        seconds.
        """
        import pandas as pd

        columns = _columns(expression)
        answers = self._request("ask", ranks, timeout, expression=expression)
        rows = [
            {"rank": rank, "step": answer["step"], **dict(zip(columns, map(_value, answer["results"]), strict=True))}
            for rank, answer in sorted(answers.items())
        ]
        return pd.DataFrame(rows)

    @checked()
    def exec(self, cell: str, *, ranks: Sequence[int] | None = None, timeout: Seconds = TIMEOUT) -> None:
        """Execute statements on every rank at the end of the same step, and print each rank's output.

        They can modify the training's objects, but assigning a name does not change the script's variable.
        """
        if self.folder.cells.is_dir():
            raise LabError(
                f"the ranks of {self.folder.id} wait for cells: labkit.ranks(run={self.folder.id!r}).exec(…)"
            )
        _parse(cell, "exec")
        for rank, answer in sorted(self._request("exec", ranks, timeout, cell=cell).items()):
            (result,) = answer["results"]
            text = "\n".join(filter(None, (result["printed"].rstrip(), result.get("error"))))
            print(plain(f"== rank {rank}, step {answer['step']} ==\n{text}").rstrip())

    @checked()
    def watch(self, expression: str, *, every: AtLeastOne = 10, name: str | None = None) -> None:
        """Record an expression on every rank every `every` steps, as a metric called `name` (default: the expression),
        on the ranks where it is a number. Built in are `grad_norm(model)`, `weight_norm(model)`,
        `update_ratio(optimizer)`, `dead_share(model)` and `largest_output(model, "blocks.0")`. `unwatch` stops it."""
        _parse(expression, "eval")
        name = name or expression
        if name in RECORD_FIELDS:
            raise LabError(f"{name!r} is a reserved field name; choose another name=")
        answers = self._request("watch", name=name, expression=expression, every=every)
        results = [result for answer in answers.values() for result in answer["results"]]
        if all("error" in result for result in results):
            raise LabError(plain(f"{expression} cannot be watched: {results[0]['error']}"))

    @checked()
    def unwatch(self, name: str) -> None:
        """Stop recording an expression."""
        self._request("unwatch", name=name)

    def set(self, **options: Any) -> int:
        """Set options of the optimizer, such as `lr=1e-4`, in all its parameter groups, or `clip`, `validate_every` and
        `patience` of labkit's scripts. Returns the first step that uses them. They override the script's schedule until
        `lr=None` ends that. Checkpoints of labkit's scripts store them.

        With several optimizers, it sets options of the one whose steps are counted, and prints which. Every change is
        recorded in the run's `events.jsonl`.
        """
        if not options:
            raise LabError("set needs at least one option of the optimizer, for example lr=1e-4")
        answers = self._request("set", values=options)
        if errors := [result["error"] for each in answers.values() for result in each["results"] if "error" in result]:
            raise LabError(plain(errors[0]))
        if others := [result["only"] for each in answers.values() for result in each["results"]]:
            how = f"run.exec(\"other.param_groups[0]['{next(iter(options))}'] = …\") changes another one"
            print(plain(f"set in {others[0]}, the optimizer whose steps are counted; {how}"))
        return 1 + _step_of(answers)

    @checked()
    def pause(self, *, timeout: Seconds = TIMEOUT) -> int:
        """Pause all ranks at the end of the same step, and return that step, once `status()` says so, too. A paused run
        counts as alive: its watchdog and the timeouts of collectives do not expire, and you can still query it. If a
        rank cannot come, none is paused, and LabError names it."""
        step = _step_of(self._request("pause", timeout=timeout))
        self._await_state("paused", "held")
        return step

    @checked()
    def breakpoint(
        self, condition: str | None = "", *, at: str | None = None, timeout: Seconds = TIMEOUT
    ) -> int | None:
        """Pause all ranks at the end of the first step where a condition holds on any rank, such as `"loss > 10 or loss
        != loss"`; `status()` then names the rank. The breakpoint is removed when its condition holds; a new one
        replaces it, and None removes it. While it is set, the ranks synchronize after every step.

        `at="train.py:26"` holds all ranks before they execute this line of the script, or of a module that it has
        imported, the next time, or the first time that a condition holds there on any rank. `ask` and `exec` then work
        in that frame, whose variables `exec` can assign. Without a condition it waits until the ranks are held, for at
        most `timeout` seconds, and returns how many steps they have done; None if no rank has come there yet, such as
        those of a paused run. Raises LabError if a rank comes there and another does not: then all ranks go on.
        """
        if at is None:
            if condition == "":
                raise LabError("breakpoint needs a condition, a line such as at='train.py:26', or None to remove it")
            self._set_breakpoint(condition, resume=False)
            return None
        line = self._set_line(condition or None, at, resume=False, timeout=timeout)
        if condition or state_of_run(self.folder).is_paused:
            return None
        return self._await_line(line, at, time.monotonic() + timeout)

    @checked()
    def until(self, condition: str = "", *, at: str | None = None, timeout: Seconds = TIMEOUT) -> int:
        """Resume, if the run is paused, until the end of the first step where a condition holds on any rank. Returns
        that step, with all ranks paused at its end. An interrupt leaves the breakpoint set. Raises LabError if the run
        ends first. With `at`, until all ranks are held at a line, as by `breakpoint`; `timeout` is how many seconds the
        ranks have to reach the same step, so that it can be set."""
        if at is not None:
            line = self._set_line(condition or None, at, resume=True, timeout=timeout)
            return self._await_line(line, at) or 0
        attempt = self.folder.latest
        events = _later(attempt.events)
        self._set_breakpoint(condition, resume=True)
        for event in self._new_records(events, attempt, f"{condition} was true"):
            if not isinstance(event, Event):
                continue
            if event.kind == "hit" and event.step is not None:
                self._await_state("paused", "held")
                return event.step
            if event.kind == "breakpoint" and event.condition != condition:
                break
        raise LabError(plain(f"another breakpoint replaced {condition}"))

    def _set_line(self, condition: str | None, at: str, *, resume: bool, timeout: float) -> LineFolder:
        file, _, line = at.rpartition(":")
        if not (file.strip() and line.isdecimal() and int(line)):
            raise LabError(f"expected a file and a line, such as at='train.py:26', got {at!r}")
        if condition is not None:
            _parse(condition, "eval")
        answers = self._request("breakpoint", None, timeout, condition=condition, at=at, resume=resume)
        results = [result for answer in answers.values() for result in answer["results"]]
        if errors := [result["error"] for result in results if "error" in result]:
            if len(errors) < len(results):
                self._request("breakpoint", condition=None, resume=False)
            raise LabError(plain(f"{self.folder.id} cannot be held at {at}: {errors[0]}"))
        return LineFolder(self.folder.latest.requests, str(results[0]["line"]))

    def _await_line(self, line: LineFolder, at: str, deadline: float = math.inf) -> int | None:
        """The steps done when all ranks are held there; None if they are not yet at the deadline."""
        attempt = self.folder.latest
        while (decision := line.decision()) is None:
            if (state := state_of_run(self.folder)).is_final or self.folder.latest.path != attempt.path:
                raise LabError(plain(f"{self.folder.id} ended before its ranks came to {at}: {state}"))
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)
        if decision["decision"] == "removed":
            raise LabError(plain(f"the breakpoint at {at} was removed, or another one replaced it"))
        if decision["decision"] == "refused":
            self._await_state("")
            advice = "choose a line that every rank executes"
            raise LabError(plain(f"the ranks go on, not held at {at}: {decision.get('why')}; {advice}"))
        self._await_state(str(decision["why"])[:SHOWN])
        return int(str(decision["step"]))

    def _set_breakpoint(self, condition: str | None, *, resume: bool) -> None:
        if condition is not None:
            _parse(condition, "eval")
        answers = self._request("breakpoint", condition=condition, resume=resume)
        results = [result for answer in answers.values() for result in answer["results"]]
        if results and all("error" in result for result in results):
            self._request("breakpoint", condition=None, resume=False)
            raise LabError(plain(f"{condition} cannot be a condition: {results[0]['error']}"))

    @checked()
    def save(self, *, timeout: Seconds = TIMEOUT) -> str:
        """Make one of labkit's scripts save a checkpoint at the end of this step, and return its name, such as
        `step-412`.

        `timeout` is how long the ranks may take to reach the same step, not how long they save. Raises LabError if the
        script has no `checkpoint_dir` or the checkpoint was not saved.
        """
        answers = self._request("save", timeout=timeout)
        if errors := [result["error"] for each in answers.values() for result in each["results"] if "error" in result]:
            raise LabError(plain(errors[0]))
        attempt, step = self.folder.latest, _step_of(answers)
        for record in self._new_records(Records(attempt.metrics(0)), attempt, f"step {step} was saved"):
            checkpoint = str(record.values.get("checkpoint")) if isinstance(record, Report) else ""
            if checkpoint.startswith(f"step {step} not saved"):
                raise LabError(plain(checkpoint))
            if checkpoint == f"step-{step}":
                break
        return f"step-{step}"

    def _new_records(self, tail: Records, attempt: RunFolder, awaited: str) -> Iterator[object]:
        """The records of a file as they are written. Raises LabError when the attempt ends."""
        while True:
            state = state_of_run(self.folder)  # before the records, so that the last ones are read
            for records in tail.chunks():
                yield from records
            if state.is_final or self.folder.latest.path != attempt.path:
                raise LabError(plain(f"{self.folder.id} ended before {awaited}: {state}"))
            time.sleep(RECORD_POLL_SECONDS)

    @checked()
    def step(self, steps: AtLeastOne = 1, *, timeout: Seconds = TIMEOUT) -> int:
        """Resume a paused run for `steps` steps and pause it again; returns the step after which it is paused."""
        answers = self._request("resume", timeout=timeout, steps=steps)
        self._await_state("held" if any(answer["results"] for answer in answers.values()) else "paused")
        return _step_of(answers)

    def resume(self) -> None:
        """Resume a paused run; returns once `status()` says so, too, or all ranks are held again."""
        events = _later(self.folder.latest.events)
        self._request("resume", steps=None)
        self._await_state("", unless=events)

    def _await_state(self, *starts: str, unless: Records | None = None) -> None:
        """Wait for the run's supervisor, which reads once a second whether ranks are paused or held, to write it:
        something that starts like this, or, if that is empty, that they are neither, `unless` the ranks have hit a
        breakpoint since."""
        deadline = time.monotonic() + STATE_SECONDS
        while not (state := state_of_run(self.folder)).is_final and time.monotonic() < deadline:
            if (state.notice or "").startswith(starts) if all(starts) else not state.is_paused:
                break
            new = unless.chunks() if unless is not None else ()
            if any(isinstance(each, Event) and each.kind == "hit" for records in new for each in records):
                break
            time.sleep(POLL_SECONDS)

    def _record_profile(self, steps: int, ranks: Sequence[int] | None, timeout: float) -> None:
        """Have torch's profiler record steps, in place of an earlier profile."""
        answers = self._request("profile", ranks, timeout, patience=math.inf, steps=steps)
        if errors := [result["error"] for each in answers.values() for result in each["results"]]:
            raise LabError(plain(f"{self.folder.id} was not profiled: {errors[0]}"))
        for rank in {*State.current_ranks(self.folder)} - answers.keys():
            self.folder.latest.profile(rank).unlink(missing_ok=True)  # of the earlier one

    def _request(
        self,
        kind: str,
        ranks: Sequence[int] | None = None,
        timeout: Seconds = TIMEOUT,
        patience: float | None = None,
        **content: Any,
    ) -> dict[int, Mapping[str, Any]]:
        """The answers by rank; `patience` is how many seconds they may take, once the ranks have met, if it is not
        `timeout`."""
        attempt = self._reachable_attempt(timeout)
        world = State.current_ranks(self.folder)
        if ranks is not None and (not ranks or not {*ranks} <= {*world}):
            raise LabError(f"ranks must be among {', '.join(map(str, world))}; got {ranks!r}")
        targets = sorted(world if ranks is None else {*ranks})
        request = {"kind": kind, "ranks": None if ranks is None else targets, "timeout": timeout, **content}
        try:
            folder = RequestFolder.post(attempt.requests, request)
        except TypeError as error:
            raise LabError(f"a request can contain only numbers and text: {error}") from None
        except OSError as error:
            raise LabError(plain(f"the request could not be written: {error}")) from None
        try:
            return self._answers(attempt, folder, targets, timeout, timeout if patience is None else patience)
        except BaseException:  # even an interrupt
            folder.decide("given-up")
            raise

    def _reachable_attempt(self, timeout: float) -> RunFolder:
        run, deadline = self.folder, time.monotonic() + timeout
        run.check_own("send it requests")
        while (state := state_of_run(run)).state == "starting" and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if state.state != "running":
            raise LabError(plain(f"{run.id} is not running: {state.state}"))
        if not run.latest.requests.is_dir():
            raise LabError(
                plain(
                    f"{run.id} is not reachable: it was launched with reachable=False, LABKIT_REACHABLE=0, or headless"
                )
            )
        return run.latest

    def _answers(
        self, attempt: RunFolder, request: RequestFolder, targets: list[int], timeout: float, patience: float
    ) -> dict[int, Mapping[str, Any]]:
        started = seen_by = time.monotonic()
        limit = started + timeout
        agreed = False
        while len(answers := request.answers(targets)) < len(targets):
            time.sleep(POLL_SECONDS)
            now, meeting = time.monotonic(), request.look()
            if (state := state_of_run(self.folder)).is_final or self.folder.latest.path != attempt.path:
                raise LabError(plain(f"{self.folder.id} ended before every rank had answered: {state}"))
            if meeting.decision == "agreed" and not agreed:
                agreed, limit = True, now + patience + SEEN_SECONDS
            # A rank that has no records yet is importing torch.
            have_begun = [attempt.metrics(rank).exists() for rank in targets]
            if not _is_next(request) or not all(have_begun):
                seen_by = now
            unseen = now - seen_by > SEEN_SECONDS and not meeting.seen >= {*targets}
            if meeting.decision is None and (now > limit or unseen):
                request.decide("given-up")  # unless the ranks have just agreed: look again
            elif meeting.decision == "given-up" or now > limit:
                raise LabError(_why(request, targets, {*answers}, now - started))
        return answers


def _later(path: Path) -> Records:
    """The records of a file without those that are there."""
    records = Records(path)
    for _ in records.chunks():
        pass
    return records


def _is_next(request: RequestFolder) -> bool:
    """Whether the ranks have dealt with the request before this one."""
    before = RequestFolder(request.path.with_name(str(int(request.path.name) - 1)))
    if not before.path.exists():
        return True
    meeting = before.look()
    done = meeting.here <= before.answers(sorted(meeting.here)).keys()
    return meeting.decision == "given-up" or (meeting.decision == "agreed" and done)


def _why(request: RequestFolder, targets: list[int], answered: set[int], seconds: float) -> str:
    """Why there is no answer, by the ranks that are missing."""
    meeting = request.look()
    at = meeting.step(targets)
    end = "run.stacks() shows where every rank is"
    if meeting.decision == "agreed":
        return f"{_ranks({*targets} - answered)} did not answer within {seconds:.0f} s; {end}"
    if missing := {*targets} - meeting.seen:
        return f"{_ranks(missing)} did not respond within {seconds:.0f} s (stopped, or holding the GIL); {end}"
    what = "the end of a step" if at is None else f"the end of step {at}"
    return (
        f"{_ranks({*targets} - meeting.here)} did not reach {what} within {seconds:.0f} s, so nothing was done; {end}"
    )


def _ranks(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _step_of(answers: dict[int, Mapping[str, Any]]) -> int:
    return max(int(answer["step"]) for answer in answers.values())


def _parse(text: str, mode: str) -> Any:
    try:
        return ast.parse(text.strip() if mode == "eval" else text, mode=mode)
    except SyntaxError as error:
        what = "an expression" if mode == "eval" else "a cell of Python statements"
        raise LabError(f"expected {what}, got {text!r}: {error.msg}") from None


def _columns(expression: str) -> list[str]:
    """The text of an expression, or of each element of a tuple; `step` is `step_`, because tables have both."""
    body = _parse(expression, "eval").body
    text = expression.strip()
    parts = body.elts if isinstance(body, ast.Tuple) else [body]
    names = [str(ast.get_source_segment(text, part)) for part in parts]
    return [f"{name}_" if name in ("rank", "step") else name for name in names]


def _value(result: Mapping[str, Any]) -> Any:
    if "unseen" in result:
        return "measured from the next step on"
    if "array" not in result:
        return result["error"] if "error" in result else result["value"]
    import numpy as np

    return np.asarray(result["array"], result["dtype"])
