"""Every sentence of the verdicts on the gallery's runs is true by the lines that their ranks wrote, which are read here
without labkit's readers."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, stdev

import pytest

from labkit.record import RunReader
from labkit.view.live.page import run_html
from labkit.view.live.verdict import verdict

GIB = 2**30
WINDOW = 50  # newest records, one per step here
CHECKS = {}


@dataclass
class Raw:
    """The lines of the newest attempt of a run."""

    ranks: list[list[dict]]
    machine: list[dict]
    has_ended: bool

    def of(self, kind: str) -> list[list[dict]]:
        return [[line for line in lines if line["k"] == kind] for lines in self.ranks]

    @cached_property
    def steps(self) -> list[list[dict]]:
        return [records[2:] for records in self.of("step")]  # the first two warm up

    @cached_property
    def losses(self) -> dict[int, list[float]]:
        """Each rank's loss by step."""
        by_step: dict[int, list[float]] = {}
        for rank, records in enumerate(self.of("step")):
            before = next(line["start_step"] for line in self.ranks[rank] if "start_step" in line)
            for record in records:
                by_step.setdefault(before + record["step"], []).append(float(record["loss"]))
        return by_step

    def evaluated(self, name: str) -> dict[int, float]:
        return {line["step"]: line[name] for line in self.of("report")[0] if name in line}

    def recent(self, rank: int, *phases: str) -> float:
        """Seconds of a step."""
        return mean(sum(record[phase] for phase in phases) for record in self.steps[rank][-WINDOW:])

    def step_seconds(self, rank: int) -> float:
        return mean(record["seconds"][0] for record in self.steps[rank][-WINDOW:])

    def own(self, rank: int) -> float:
        return self.recent(rank, "input", "forward", "optimizer")

    @property
    def numbers(self) -> range:
        return range(len(self.ranks))


def read(folder: Path, has_ended: bool) -> Raw:
    newest = max(folder.glob("attempts/*"), default=folder, key=lambda path: int(path.name))
    files = sorted(newest.glob("ranks/*/metrics.jsonl"), key=lambda path: int(path.parent.name))
    return Raw([*map(lines, files)], lines(folder / "hosts" / "node0.jsonl"), has_ended)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check(pattern: str):
    """Registers what is true if a sentence with this pattern is; its groups are the arguments."""
    return lambda function: CHECKS.setdefault(re.compile(pattern), function)


@check(
    r"loss (is|was) (still falling|rising)( at the end|): median (\S+) over the last (\d+) steps, (\S+) over the \5 .*"
)
def the_loss_changes(raw, verb, how, end, after, steps, before):
    means = [mean(losses) for _, losses in sorted(raw.losses.items())]
    last, earlier = means[-int(steps) :], means[-2 * int(steps) : -int(steps)]
    assert raw.has_ended == (verb == "was") == bool(end)
    assert all(map(math.isfinite, means))
    assert median(last) == pytest.approx(float(after), rel=0.02)
    assert median(earlier) == pytest.approx(float(before), rel=0.02)
    assert (median(last) < median(earlier)) == (how == "still falling")


@check(r"(\w+) (is|was) still improving(?: at the end|): (\S+), the best so far \((\S+) three .* before\)")
def an_evaluation_improves(raw, name, verb, best, before):
    values = list(raw.evaluated(name).values())
    assert raw.has_ended == (verb == "was")
    assert values[-1] == min(values) == pytest.approx(float(best), rel=1e-3)
    assert values[-4] == pytest.approx(float(before), rel=1e-3)


@check(r"loss has not fallen by more than its noise since step (\d+): median (\S+)")
def the_loss_is_flat(raw, step, typical):
    means = {at: mean(losses) for at, losses in sorted(raw.losses.items())}
    flat = [value for at, value in means.items() if at >= int(step)]
    assert median(flat) == pytest.approx(float(typical), rel=0.02)
    assert all(value > max(flat) for at, value in means.items() if at < int(step))
    half = len(flat) // 2
    assert abs(mean(flat[half:]) - mean(flat[:half])) < 3 * stdev(flat) * math.sqrt(2 / half)


@check(r"loss (fell|rose) from (\S+) to (\S+) \(medians of the first and the last (\d+) losses recorded\)")
def the_last_losses_are_apart_from_the_first(raw, how, before, after, count):
    means = [mean(losses) for _, losses in sorted(raw.losses.items())]
    first, last = means[: int(count)], means[-int(count) :]
    assert median(first) == pytest.approx(float(before), rel=0.02)
    assert median(last) == pytest.approx(float(after), rel=0.02)
    assert max(last) < min(first) if how == "fell" else min(last) > max(first)


@check(
    r"rank (\d+)'s (input|forward) (?:wait|pass) takes (\S+) times as long since about step (\d+) \(.*\): (\S+) ms "
    r"instead of (\S+) ms"
)
def a_part_of_the_step_takes_longer(raw, rank, phase, times, step, now, before):
    start = next((line["start_step"] for line in raw.ranks[int(rank)] if "start_step" in line), 0)
    seconds = {start + record["step"]: record[phase] / record["n"] for record in raw.steps[int(rank)]}
    since, earlier = ([v for at, v in seconds.items() if (at >= int(step)) is late] for late in (True, False))
    assert median(since) == pytest.approx(float(now) / 1e3, rel=0.05)
    assert median(earlier) == pytest.approx(float(before) / 1e3, rel=0.05)
    assert median(since) / median(earlier) == pytest.approx(float(times), rel=0.06)


@check(r"(\w+): (\S+), best (\S+) at step (\d+)")
def the_best_evaluation_was_one_of_the_last(raw, name, newest, best, step):
    values = raw.evaluated(name)
    assert min(values, key=values.get) == int(step)
    assert values[int(step)] == pytest.approx(float(best), rel=1e-3)
    assert [*values.values()][-1] == pytest.approx(float(newest), rel=1e-3)
    assert 1 <= sum(at > int(step) for at in values) <= 2


@check(r"(\w+) has risen since step (\d+) \(best (\S+)\) while the training loss fell: overfitting")
def it_overfits(raw, name, step, best):
    values = raw.evaluated(name)
    assert min(values, key=values.get) == int(step)
    assert values[int(step)] == pytest.approx(float(best), rel=1e-3)
    later = [value for at, value in values.items() if at > int(step)]
    assert len(later) >= 3 and later[-1] > 1.05 * values[int(step)]
    since = [mean(losses) for at, losses in sorted(raw.losses.items()) if at >= int(step)]
    assert mean(since[-len(since) // 3 :]) < mean(since[: len(since) // 3])


@check(r"rank (\d+)(?: on \S+|) is the straggler: (\S+) ms \((\d+)% of the step\) behind (.*), mostly (.*)")
def a_rank_is_late(raw, rank, milliseconds, share, behind, phase):
    own = [raw.own(number) for number in raw.numbers]
    late = int(rank)
    other = median(own) if "median" in behind else own[int(behind.removeprefix("rank "))]
    assert own[late] == max(own)
    assert own[late] - other == pytest.approx(float(milliseconds) / 1e3, rel=0.01)
    assert (own[late] - other) / max(map(raw.step_seconds, raw.numbers)) == pytest.approx(int(share) / 100, abs=0.006)
    extra = {
        each: raw.recent(late, each) - median(raw.recent(number, each) for number in raw.numbers if number != late)
        for each in ("input", "forward", "optimizer")
    }
    assert max(extra, key=extra.get) == {"input wait": "input"}.get(phase, phase)


@check(r"compute-bound: (\d+)% compute(?:, (\d+)% communication|), (\d+)% input")
def computing_takes_most_of_a_step(raw, computes, communicates, waits):
    kinds = {"compute": ("forward", "backward", "optimizer"), "input": ("input",)}
    kinds |= {"communication": ("communication",)} if communicates else {}
    shares = [
        {kind: raw.recent(rank, *phases) / raw.step_seconds(rank) for kind, phases in kinds.items()}
        for rank in raw.numbers
    ]
    least = min(shares, key=lambda share: share["input"] + share.get("communication", 0.0))
    for kind, percent in {"compute": computes, "communication": communicates, "input": waits}.items():
        assert percent is None or least[kind] == pytest.approx(int(percent) / 100, abs=0.006), kind


@check(r"memory fits: peak (\S+) (GiB|MiB), (\d+)% of (\S+) GiB")
def memory_fits(raw, peak, unit, share, limit):
    most = max(record["peak"] for records in raw.of("step") for record in records)
    assert most == pytest.approx(float(peak) * (GIB if unit == "GiB" else 2**20), rel=0.01)
    assert {model["limit"] for (model,) in raw.of("model")} == {float(limit) * GIB}
    assert most / (float(limit) * GIB) == pytest.approx(int(share) / 100, abs=0.006)


@check(r"the loss is NaN or infinite on ranks? ([\d, -]+) since step (\d+): lower the learning rate or check the data")
def the_loss_is_lost(raw, ranks, step):
    assert ranks == ", ".join(map(str, raw.numbers))
    for at, losses in raw.losses.items():
        assert all(map(math.isfinite, losses)) == (at < int(step))


@check(r"other programs used (\d+)% of these cores")
def other_programs_use_the_cores(raw, share):
    cores = raw.machine[0]["usable_cores"]
    samples = [line for line in raw.machine if line["k"] == "host"]
    others = mean(line["busy"] - line["own"] for line in samples) / cores
    assert raw.has_ended and others == pytest.approx(int(share) / 100, abs=0.006) and others >= 0.25
    assert mean(line["busy"] for line in samples) >= 0.9 * cores


@check(r"it overlapped with run (\S+) from (\S+) to (\S+), on the same (?:GPUs|cores)")
def another_run_was_active(raw, run, start, end):
    shift = raw.machine[0]["time"] - raw.machine[0]["t"]
    times = [
        line["t"] + shift for line in raw.machine if line["k"] == "runs" and any(run in each for each in line["runs"])
    ]
    clocks = [time.strftime("%H:%M:%S", time.localtime(moment)) for moment in (times[0], times[-1])]
    assert clocks == [start, end]


@pytest.fixture(scope="module")
def runs(gallery, tmp_path_factory):
    class Flat(gallery.MadeUp):
        def _loss(self, step):
            return 20.0 / step if step < 6 else 0.3

    root = tmp_path_factory.mktemp("verdicts")
    more = {
        "flat": Flat(root, "flat", 2, 200).running(),
        "shortly after the best": gallery.MadeUp(root, "after", 2, 400, best_at=330).running(),
    }
    return gallery.made_up(root) | more


def test_every_sentence_is_true_by_the_records(runs):
    checked = 0
    for name, (folder, state) in runs.items():
        raw = read(folder.path, state.is_final)
        sentences = verdict(RunReader(folder).read_all(), state, limit=99)
        for sentence in (part for joined in sentences for part in joined.split("; ")):
            matches = [(match, true) for pattern, true in CHECKS.items() if (match := pattern.fullmatch(sentence))]
            assert len(matches) == 1, f"{name}: nothing here checks {sentence!r}"
            match, is_true = matches[0]
            is_true(raw, *match.groups())
            checked += 1
    assert checked > 30


def test_no_sentence_contradicts_the_end(runs):
    for name, (folder, state) in runs.items():
        sentences = verdict(RunReader(folder).read_all(), state, limit=99)
        goes_wrong = state.cause is not None or state.wrong or state.stuck_since is not None or "NaN" in name
        assert not (goes_wrong and any("memory" in sentence for sentence in sentences)), name
        assert not ("NaN" in name and any("falling" in sentence for sentence in sentences)), name


LEADS = {
    "starting": "",
    "running on one CPU": "loss is still falling",
    "one rank waits for data": "loss is still falling",
    "flat": "loss has not fallen by more than its noise since step 6",
    "shortly after the best": "val_loss: 0.675, best 0.525 at step 320",
    "still improving": "val_loss is still improving",
    "overfitting": "val_loss has risen",
    "stuck": "no rank has made progress",
    "failed": "rank 1 failed: ValueError",
    "out of memory": "rank 0 ran out of device memory",
    "out of memory in step 121": "rank 0 ran out of device memory",
    "wrong": "the replicas differ",
    "NaN, running": "the loss is NaN or infinite",
    "NaN, finished": "the loss is NaN or infinite",
    "stopped": "stopped on request",
    "beside other programs": "loss was still falling at the end",
    "finished, eight ranks": "loss was still falling at the end",
}


def test_the_first_bold_sentence_is_the_one_that_matters(runs):
    for name, lead in LEADS.items():
        folder, state = runs[name]
        page = run_html(folder, RunReader(folder).read_all(), state, with_charts=False, with_log=False)
        bold = re.findall(r"(?<!</span> )<b>(.*?)</b>", page)  # but for values of metrics
        assert bold[0].startswith(lead) if lead else not bold, name


def test_a_run_whose_loss_is_nan_is_not_green(runs):
    for name in ("NaN, running", "NaN, finished"):
        folder, state = runs[name]
        page = run_html(folder, RunReader(folder).read_all(), state, with_charts=False, with_log=False)
        assert f"▲&nbsp;{state.state}, but the loss is NaN" in page
