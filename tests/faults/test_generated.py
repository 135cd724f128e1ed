"""Training scripts that nobody wrote by hand end as they must: how, by whose fault, after how many steps, with what
losses, and with no process left.

make soak        (LABKIT_SOAK_SCRIPTS=100 for another number, LABKIT_SOAK_SEED=… for others, or for one of them again)
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from faults.generated import Generated, generate

import labkit
from labkit.record import RunReader

SCRIPTS = int(os.environ.get("LABKIT_SOAK_SCRIPTS", "300"))
SEED = int(os.environ.get("LABKIT_SOAK_SEED", "20261122"))
AT_ONCE = 2
LONGEST_SECONDS = 150
QUICK = ("plain", "GAN", "accumulation", "two trainings")  # shapes that take seconds


def launched(script: Generated, folder: Path) -> labkit.Run:
    """The run of a script, which has ended, or is stopped where it should have."""
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(script.text)
    run = labkit.launch(
        path, nproc_per_node=script.ranks, args=[folder], watchdog=script.watchdog, wait=False, detach=False,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + LONGEST_SECONDS
    while not run.status().is_final and time.monotonic() < deadline:
        if script.ending == "stop" and (folder / "hung").exists():
            time.sleep(0.5)  # for the others to get to where they wait
            break
        time.sleep(0.1)
    if not run.status().is_final:
        run.stop(grace=1)
    return run


def disagreements(script: Generated, run: labkit.Run, folder: Path) -> Iterator[str]:
    """What is not as it must be."""
    state = run.status()
    sentence = state.cause["sentence"] if state.cause else None
    if state.state != script.state:
        yield f"{state.state}, not {script.state}: {sentence}"
    elif script.says and not re.search(script.says, sentence):
        yield f"says {sentence!r}, not {script.says!r}"
    elif script.names_culprit and state.cause.get("rank") != script.culprit:
        yield f"blames rank {state.cause.get('rank')}, not {script.culprit}: {sentence}"
    if not run.is_over:  # a helper may outlive its rank
        run.stop(grace=1)
    metrics = run.metrics()
    for rank in range(script.ranks):
        of_rank = metrics[metrics["rank"] == rank].dropna(subset=["step"])
        losses = losses_of(folder, rank)
        counted, (fewest, most) = max(of_rank["step"], default=0), script.counts(rank)
        if not fewest <= counted <= most:
            yield f"rank {rank}: {counted} steps, not {fewest} to {most}; by its own count {len(losses)}"
        for step, loss in zip(of_rank["step"], of_rank["loss"].astype(float), strict=True):
            own = losses.get(step, loss)  # one that was killed may not have got to writing it down
            if not math.isnan(loss) and (own is None or not math.isclose(loss, own, rel_tol=1e-3, abs_tol=1e-4)):
                yield f"rank {rank}: loss {loss} at step {step}, not {own}"
    ends = {rank: history.end for rank, history in RunReader(run.folder).read_all().ranks.items()}
    if dropped := {rank: end.dropped for rank, end in ends.items() if end and end.dropped}:
        yield f"hooks of the probe failed: {dropped}"
    if script.state == "succeeded" and (found := run.findings()):
        yield f"is right, and is accused: {found!r}"
    if left := processes_with(str(folder)):
        yield f"left behind: {left}"


def losses_of(folder: Path, rank: int) -> dict[int, float | None]:
    """What the script wrote down itself, by step."""
    path = folder / f"losses-{rank}"
    return dict(enumerate(map(json.loads, path.read_text().splitlines()), 1)) if path.exists() else {}


def processes_with(argument: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline", "status"])
            if argument in (p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE]  # fmt: skip


@dataclass
class Trial:
    """What came of a script: `losses` are those that labkit showed and that were compared with the script's own."""

    script: Generated
    losses: int = 0
    wrong: list[str] = field(default_factory=list)


def trial(script: Generated, folder: Path) -> Trial:
    try:
        run = launched(script, folder)
        return Trial(script, run.metrics()["loss"].count(), [*disagreements(script, run, folder)])
    except Exception as error:
        return Trial(script, wrong=[f"{type(error).__name__}: {error}"])


def trials(scripts: list[Generated], tmp_path: Path) -> list[Trial]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(lambda script: trial(script, tmp_path / f"script-{script.seed}"), scripts)]


@pytest.mark.timeout(300)
def test_a_few_generated_scripts(tmp_path: Path) -> None:
    for one in trials([generate(seed, shapes=QUICK) for seed in (0, 2, 3, 5)], tmp_path):  # one of each shape
        assert not one.wrong, f"{one.script.title}: {one.wrong}"


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_generated_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    results = trials([generate(SEED + n) for n in range(SCRIPTS)], tmp_path)
    failures = [f"seed {one.script.seed} ({one.script.title}): {what}" for one in results for what in one.wrong]
    with capsys.disabled():
        print(f"\n{SCRIPTS} generated scripts, seed {SEED}, in {time.monotonic() - began:.0f} s:")
        for feature in ("shape", "fault", "moment", "source", "logger", "ranks", "state"):
            print(f"  {feature}: {dict(Counter(getattr(one.script, feature) for one in results).most_common())}")
        print(
            f"  {sum(one.losses for one in results)} losses compared; {len(failures)} disagreements",
            *failures,
            sep="\n  ",
        )
    assert not failures
