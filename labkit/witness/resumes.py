"""Finds trainings that start over: the schedule, the order of samples or the moments of a resume, random numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from labkit.rank_files import WITNESSED
from labkit.record import RunFolder
from labkit.tail import UNSOUND
from labkit.witness.evidence import Evidence, Line, by_place
from labkit.witness.finding import Finding
from labkit.witness.rule import Rule

FEWEST = 2  # batches that are skipped: a script that prefetches skips one
RUNS, FILES = 50, 200  # in which the save of a file is looked for


class Saves:
    """What a rank wrote when it saved a file that was loaded: in this attempt, in an earlier one, or in an earlier run
    of the same script in the same folder of runs."""

    def __init__(self) -> None:
        self._earlier: dict[str, Line | None] = {}

    def of(self, evidence: Evidence, resumed: Line) -> Line | None:
        file = resumed.values["file"]
        own = [line for testimony in evidence.ranks.values() for line in testimony.of("saved", file=file)]
        if own or not file:
            return own[0] if own and file else None
        if str(file) not in self._earlier:
            lines = (line for path in islice(_earlier(evidence.attempt), FILES) for line in _saves(path))
            self._earlier[str(file)] = next((line for line in lines if line.values["file"] == file), None)
        return self._earlier[str(file)]


def _earlier(attempt: RunFolder) -> Iterator[Path]:
    """What ranks have witnessed in the attempts of this run, and of the same script's newest ones."""
    run = attempt if attempt.manifest.exists() else RunFolder(attempt.path.parents[1])
    script = run.glimpsed_manifest().script.path
    with suppress(OSError):  # a run is removed meanwhile
        found = sorted(run.path.parent.glob("*/run.json"), key=lambda path: -path.stat().st_mtime)
        for other in [run, *(RunFolder(path.parent) for path in found[:RUNS])]:
            if other is run or (script and other.glimpsed_manifest().script.path == script):
                for folder in other.attempts():
                    yield from folder.ranks.glob(f"*/{WITNESSED}")


def _saves(path: Path) -> Iterator[Line]:
    with suppress(OSError, *UNSOUND), path.open(encoding="utf-8") as file:
        for text in file:
            if '"k": "saved"' in text:
                yield Line.decode(json.loads(text))


class LostMoments(Rule):
    kind = "lost moments"
    title = "A resume drops the optimizer's moments"
    declared = "dcp.load into a dictionary with an optimizer's param_groups; the keys of the checkpoint's metadata"
    observed = (
        "the checkpoint has keys of the optimizer's state, the dictionary has no place for any; a new optimizer loads "
        "it, and has no state when it makes its first step"
    )
    silent = "the dictionary has no optimizer (weights alone are loaded); any of its state is there; nothing loads it"
    limits = "moments that a script leaves out of what it loads itself, which fine-tuning does on purpose"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "resumed", lambda line: line.values["lost"] > 0):
            yield self.found(
                line,
                f"the optimizer that load_state_dict{evidence.at(line.line)} resumes has none of the "
                f"{line.values['lost']} values of its state that the checkpoint has",
                "dcp.load fills only the places that it is given, and the state_dict() of a new optimizer has none",
                "Give dcp.load what torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer) returns.",
                since=line.step + 1,
            )


class RestartedSchedule(Rule):
    kind = "restarted schedule"
    title = "A resume restarts the learning rate schedule"
    declared = (
        "Optimizer.load_state_dict of a new optimizer, with what torch.load has returned; torch's schedulers, and the "
        "state of one in the same file"
    )
    observed = (
        "a scheduler that has loaded its state, in which the rate is the optimizer's loaded one, has written another "
        "one over it when it was made, with which the first step is made; or (a note) no scheduler has loaded the "
        "state in the file, which this script has saved, and a new one of the same plan is at the rate at which the "
        "saved one had begun"
    )
    silent = (
        "last_epoch is given; the scheduler is stepped to where it was; the script sets the rate itself; the rate does "
        "not change; the saved schedule had ended; another plan; the optimizer has made steps before"
    )
    limits = "a scheduler's state in a file of its own; SequentialLR; ReduceLROnPlateau; rates that are tensors"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "resumed", _overwritten):
            yield self.found(
                line,
                f"the optimizer{evidence.at(line.line)} was resumed at a learning rate of {line.values['rates'][0]:g}, "
                f"and makes its first step at {line.values['now'][0]:g}",
                f"{_type(line)}, which was made later, wrote its first learning rate over the loaded one",
                "Make the scheduler before the optimizer's state is loaded.",
                since=line.step + 1,
            )
        for line in by_place(evidence, "resumed", _restarts):
            begins = line.values["schedules"][0]["last"]
            saved = evidence.shared(Saves).of(evidence, line)
            if saved is None or begins not in saved.values["began"]:
                continue
            yield self.found(
                line,
                f"{_type(line)} restarts at a learning rate of {begins[0]:g}, after the optimizer"
                f"{evidence.at(line.line)} was resumed at {line.values['rates'][0]:g}",
                f"the schedule's state in {line.values['path']}, after {line.values['moves']} moves, is not loaded",
                "Make the scheduler first, then load the states of both.",
                certain=False,
                since=line.step + 1,
            )


class RestartedOrder(Rule):
    kind = "restarted order"
    title = "A resume skips batches in another order"
    declared = (
        "Optimizer.load_state_dict of a new optimizer, with what torch.load has returned; the epoch of a "
        "DistributedSampler that shuffles, when the file was saved and after it was loaded"
    )
    observed = (
        "the resume skips as many batches as had been trained of the epoch in which the file was saved, but the "
        "sampler is at another epoch: some samples are trained again, others are not; or (a note) a file of a later "
        "epoch, whose number it holds, is resumed at epoch 0, in whose order the training had begun"
    )
    silent = (
        "an epoch starts at its first batch; another number of batches is skipped; another seed, data set, "
        "batch size or number of ranks; files that no rank under labkit has saved; at epoch 0 another rate, or a new "
        "schedule, as in a second phase"
    )
    limits = "batches that a sampler leaves out itself, as accelerate.skip_first_batches does; other samplers"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "resumed", lambda line: line.values["passed"] >= FEWEST):
            saved = evidence.shared(Saves).of(evidence, line)
            if saved is None or not _is_other_order(saved, line):
                continue
            yield self.found(
                line,
                f"the resume{evidence.at(line.line)} skips {line.values['passed']} batches, as many as had been "
                f"trained of epoch {saved.values['order'][0]}, but in the order of epoch {line.values['order'][0]}: "
                "some samples are trained again, and others are left out",
                "the new DistributedSampler is not at the epoch in which the checkpoint was saved",
                "Call set_epoch with the epoch that is resumed before its batches are skipped.",
                since=line.step + 1,
            )
        for line in by_place(evidence, "resumed", _goes_on):
            saved = evidence.shared(Saves).of(evidence, line)
            if saved is not None and _is_first_order(saved, line):
                yield self.found(
                    line,
                    f"the resume{evidence.at(line.line)} of {line.values['path']}, which was saved in epoch "
                    f"{saved.values['order'][0]}, begins in the order of epoch 0, in which the training had begun",
                    "the new DistributedSampler's epochs are counted from 0 again",
                    "Call set_epoch with the number of the epoch in the whole training, not in this run of it.",
                    certain=False,
                    since=line.step + 1,
                )


class Reseeded(Rule):
    kind = "reseeded"
    title = "Training steps draw the same random numbers again"
    declared = "nothing is: somebody may want the same noise, so it is always a note"
    observed = (
        "after torch.manual_seed, three or more steps of one optimizer draw, between the fetch of a batch and its "
        "backward, from generators in the same state"
    )
    silent = (
        "within torch.random.fork_rng, and wherever the state is set back; other seeds; nothing is drawn; a new "
        "optimizer, or weights that are loaded, between; a seed between the fetch and the backward"
    )
    limits = "numpy's and Python's generators; what the data set draws; loops without a DataLoader"

    def judge(self, evidence: Evidence) -> Iterable[Finding]:
        for line in by_place(evidence, "reseeded"):
            *steps, last = line.values["steps"]
            yield self.found(
                line,
                f"steps {', '.join(map(str, steps))} and {last} draw the same random numbers (dropout, noise, "
                "augmentations)",
                f"before each of them torch.manual_seed({line.values['seed']}) was called{evidence.at(line.line)}, and "
                "the generators' states were not set back",
                "Seed within torch.random.fork_rng(), or draw what must repeat from a torch.Generator of its own.",
                certain=False,
                since=steps[0],
            )


def _is_other_order(saved: Line, resumed: Line) -> bool:
    """Whether these are two epochs of one training; a script that prefetches may have fetched one batch more."""
    (epoch, *plan), (now, *same) = saved.values["order"] or [0], resumed.values["order"] or [0]
    passed = resumed.values["passed"]
    is_place = abs(passed - saved.values["trained"]) <= 1 and passed != saved.values["passed"]
    return bool(plan) and plan == same and epoch != now and is_place


def _goes_on(line: Line) -> bool:
    """Whether the first step is made as if the training had not been interrupted, and no batch was skipped."""
    rates, schedules = line.values["rates"], line.values["schedules"]
    return bool(rates) and rates == line.values["now"] and all(s["at"] for s in schedules) and not line.values["passed"]


def _is_first_order(saved: Line, resumed: Line) -> bool:
    """Whether the order of the first epoch comes again, although the number of a later one is in the file."""
    (epoch, *plan), (now, *same) = saved.values["order"] or [0], resumed.values["order"] or [0]
    is_counted = not {epoch, epoch + 1}.isdisjoint(resumed.values["epochs"])
    return is_counted and plan == same and now == 0 < epoch and saved.values.get("first") == resumed.values["order"]


def _type(line: Line) -> str:
    return str(line.values["schedules"][0]["type"])


def _overwritten(line: Line) -> bool:
    """Whether a scheduler that has loaded its own state has changed the learning rate that the optimizer has loaded."""
    rates, now = line.values["rates"], line.values["now"]
    return bool(rates) and any(
        (schedule["at"] or 0) > 0 and schedule["last"] == schedule["before"] == rates != now == schedule["made"]
        for schedule in line.values["schedules"]
    )


def _restarts(line: Line) -> bool:
    """Whether an unfinished schedule was saved, and all that are there now are at their beginning."""
    rates, now, schedules = line.values["rates"], line.values["now"], line.values["schedules"]
    return bool(rates and line.values["moves"] and schedules) and all(
        schedule["at"] == 0
        and schedule["alike"]
        and schedule["last"] not in ([], rates)
        and now == (schedule["made"] if schedule["before"] == rates else rates)  # the script sets no other
        for schedule in schedules
    )
