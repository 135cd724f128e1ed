"""A rank that raises, one that hangs, and a stop, under strategies of docs/how_to/beyond.md: one run, 3 attempts."""

from __future__ import annotations

import pytest
from faults.scene import ATTEMPT, ENDLESS, STEPPED, assert_clean, assert_over, last_step, wait_until

import labkit
from labkit import Script

FAULTS = f"""{STEPPED}            if step == 3 and dist.get_rank() == 1 and {ATTEMPT} == 1:
                raise ValueError("boom")
            if step == 3 and dist.get_rank() == 1 and {ATTEMPT} == 2:
                time.sleep(600)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "task"), [("context_parallel", "bytes"), ("expert_parallel", "mixture"), ("diloco", "bytes")]
)
def test_a_rank_that_raises_one_that_hangs_and_a_stop(strategy, task):
    text = str(Script.load(strategy, task=task))
    assert text.count(STEPPED) == 1
    script = Script.parse(text.replace(STEPPED, FAULTS), name=strategy)
    options = {"sync_every": 2} if strategy == "diloco" else {}
    run = labkit.launch(
        script, nproc_per_node=2, steps=ENDLESS, global_batch_size=4, retries=2, watchdog=12, wait=False, **options
    )
    wait_until(lambda: run.status().attempt == 3, 200, run.status)
    third = run.folder.attempt(3)
    wait_until(lambda: min(last_step(third, rank) for rank in range(2)) >= 3, 120, run.status)

    assert run.stop().state == "stopped"
    raised, hung = (earlier["cause"]["sentence"] for earlier in run.status().earlier)
    assert "rank 1 failed: ValueError: boom" in raised
    assert "stopped by the watchdog after 12 s without progress" in hung
    assert "time.sleep(600)" in hung
    assert_clean(run)
    assert_over(run)
