"""Many launches with faults drawn at random: no process left, no wrong culprit, no run in a false state.

make soak        (LABKIT_SOAK=100 for another number of launches)
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter

import psutil
import pytest
from faults.matrix import FAULTS, FAULTY
from faults.scene import assert_over, wait_for_step

import labkit
from labkit.files import read_json
from labkit.launcher.stopping import processes_of

LAUNCHES = int(os.environ.get("LABKIT_SOAK", "100"))
SEED = 20261121

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def from_outside(kind: str, chance: random.Random) -> tuple[str, str]:
    """Do something to a run that is going well; `(state, sentence)` as they must be."""
    run = labkit.launch(FAULTY, args=["--steps", "2000"], wait=False)
    if kind == "stop at once":
        time.sleep(chance.uniform(0.0, 3.0))
    else:
        wait_for_step(run.folder, chance.randint(1, 10))
    agent = read_json(run.folder.agent).get("agent") or {}
    if kind.startswith("stop"):
        if kind == "stop a stopped rank":
            victim = chance.choice(ranks_of(run))
            psutil.Process(victim).suspend()
        run.stop(grace=chance.choice([0.0, 2.0]))
        expected = "stopped", "stopped on request"
    elif kind == "kill torchrun":
        psutil.Process(agent["pid"]).kill()
        expected = "failed", "torchrun was killed (SIGKILL)"
    else:
        rank = chance.randint(0, 1)
        psutil.Process(ranks_of(run)[rank]).kill()
        expected = "failed", f"rank {rank} was killed (SIGKILL)"
    while not (state := run.status()).is_final:
        time.sleep(0.05)
    assert_over(run.folder)
    assert (state.state, expected[1] in state.cause["sentence"]) == (expected[0], True), state
    return expected


def ranks_of(run: labkit.Run) -> list[int]:
    """Pids by rank."""
    beats = {rank: read_json(run.folder.heartbeat(rank))["pid"] for rank in run.folder.started_ranks()}
    alive = {process.pid for process in processes_of(run.folder)}
    return [pid for _, pid in sorted(beats.items()) if pid in alive]


def test_random_faults(capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(SEED)
    outside = ["stop at once", "stop", "stop a stopped rank", "kill torchrun", "kill a rank"]
    done: Counter[str] = Counter()
    wrong: list[str] = []
    for _ in range(LAUNCHES):
        fault = chance.choice([*FAULTS, *outside])
        if isinstance(fault, str):
            done[fault] += 1
            from_outside(fault, chance)
            continue
        done[fault.fault] += 1
        run = labkit.launch(FAULTY, nproc_per_node=2, args=fault.arguments(), wait=False)
        with pytest.raises(labkit.RankFailedError) as caught:
            run.wait(timeout=120)
        assert_over(run.folder)
        if not re.search(fault.says, caught.value.cause["sentence"]):
            wrong.append(f"{fault.fault}: {caught.value.cause['sentence']}")
    with capsys.disabled():
        print(f"\n{sum(done.values())} launches with random faults (seed {SEED}): {dict(done)}")
        print(f"processes left 0, runs in a false state 0, wrong culprits {len(wrong)}")
    assert not wrong
