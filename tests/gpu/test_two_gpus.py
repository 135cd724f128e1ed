"""What two GPUs can show, in the order of information per second."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from gpu.devices import (
    CUDA,
    EVERYTHING,
    HALF,
    TINY,
    difference,
    in_full,
    losses,
    needs_gpu,
    needs_two,
    needs_two_gpus,
    raw,
    read,
    stopped_and_saved,
    tiny,
)

import labkit
from labkit.link.measure import measure_link

pytestmark = needs_two

HANGS = Path(__file__).parents[1] / "scripts" / "hangs.py"
FORWARD = "    def forward(self, tokens):\n"
# On rank 1, in the third training step.
THIRD = """        import torch.distributed as dist
        self.calls = getattr(self, "calls", 0) + self.training
        third = self.training and self.calls == 3 and dist.get_rank() == 1
"""
RAISING = TINY.replace(FORWARD, f"{FORWARD}{THIRD}        if third:\n            raise ValueError('boom')\n")
OVERFLOWING = TINY.replace(FORWARD, f"{FORWARD}{THIRD}").replace(
    "return self.head(x)", "return self.head(x) * (1e38 if third else 1)"
)
NORMALIZED = TINY.replace("nn.Dropout(0.1)", "nn.Flatten(0, 1), nn.BatchNorm1d(64), nn.Unflatten(0, (-1, 128))")
LEAVING = """from datetime import timedelta
group = dist.new_group(timeout=timedelta(seconds=15))
for _ in range(3):
    dist.all_reduce(torch.ones(1 << 20, device=device), group=group)
if rank == 0:
    print(dist.all_reduce(torch.ones(1 << 20, device=device), group=group))
    torch.ones(1, device=device).item()
    time.sleep(60)
"""
STRATEGIES = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "fsdp": {},
    "fsdp1": {},
    "tensor_parallel": {},
    "hybrid": {"tensor": 2},
    "context_parallel": {},
    "context_parallel, ring": {"attention": "ring"},
    "pipeline": {"accumulate": 4, "schedule": "GPipe"},
    "pipeline, 1F1B": {"accumulate": 4, "schedule": "1F1B"},
    "pipeline, Interleaved1F1B": {"accumulate": 4, "schedule": "Interleaved1F1B"},
}


def ended_after(run: labkit.Run, rank: int) -> float:
    """Seconds from a rank's own record of its failure to the end of the run."""
    ended = run.status().ended
    assert ended is not None
    return ended - run.folder.error(rank).stat().st_mtime


@needs_gpu
def test_the_gpus_reach_each_other_with_large_messages_and_split_groups(figures, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shown = str(labkit.doctor(preflight=True))
    figures["preflight"] = next(line.strip() for line in shown.splitlines() if "ranks communicate" in line)[:120]
    assert "communicate over nccl" in shown


def test_one_rank_that_raises_ends_the_run_soon(figures):
    script = tiny("ddp", "checkpoints", model=RAISING)
    with pytest.raises(labkit.RankFailedError, match="rank 1 failed: ValueError: boom"):
        labkit.launch(script, nproc_per_node=2, steps=100, save_every=1000, wait=True)
    figures["seconds to the end"] = ended_after(labkit.attach("latest"), 1)
    if CUDA:
        assert figures["seconds to the end"] < 10


@pytest.mark.parametrize(
    ("hang", "sentence"),
    [
        ("sizes", f"the ranks disagree: as collective #4 rank 0 called all_reduce(Float [{1 << 22 if CUDA else 4}])"),
        pytest.param("queued", "rank 1 has not entered `all_reduce` #4", marks=in_full),
    ],
)
def test_the_first_collective_that_differs_or_is_missing_is_named(hang, sentence, figures):
    run = labkit.launch(HANGS, nproc_per_node=2, args=[hang], wait=False)
    deadline, shown = time.monotonic() + 90, ""
    while sentence not in shown and time.monotonic() < deadline:
        time.sleep(0.5)
        shown = run.stacks().sentence
    run.stop(grace=0)
    figures["stacks"] = shown[:200]
    assert sentence in shown


@pytest.mark.timeout(400)  # thirteen launches in full
def test_every_strategy_on_two_ranks_has_the_losses_of_single(figures):
    alone = losses("single", 1)
    for name, options in STRATEGIES.items() if EVERYTHING else [("fsdp", {})]:
        figures[name] = difference(alone, losses(name.partition(",")[0], 2, **options))
    assert max(figures.values()) < 1e-9


@needs_gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy, figures):
    script = tiny(strategy, "precision", "optimizers", model=OVERFLOWING)
    options = {"precision": "fp16", "optimizer": "adamw_fused"}
    run = labkit.launch(script, nproc_per_node=2, steps=12, wait=True, **options)
    ranks = read(run).ranks.values()

    figures["steps"] = [rank.step for rank in ranks]
    figures["last loss"] = list(run.losses())[-1]
    assert figures["steps"] == [12, 12]
    assert math.isfinite(figures["last loss"])


@in_full
def test_a_rank_that_left_early_is_named_at_the_groups_time_limit_and_the_dump_is_kept(figures, tmp_path):
    with pytest.raises(labkit.RankFailedError):
        labkit.launch(raw(tmp_path, "leaving", LEAVING), nproc_per_node=2, watchdog=60, wait=True)
    run = labkit.attach("latest")
    figures["cause"] = run.status().cause["sentence"][:200]
    figures["dumps"] = [path.name for path in run.folder.ranks.glob("fr_*")]
    assert "rank 1" in figures["cause"]
    if CUDA:
        assert figures["dumps"]


@in_full
def test_a_run_is_stopped_in_mid_training_and_resumed_by_other_strategies(figures, tmp_path):
    options = {"checkpoint_dir": tmp_path / "kept", "save_every": 1000}
    first = labkit.launch(tiny("ddp", "checkpoints"), nproc_per_node=2, steps=100_000, wait=False, **options)
    step = saved = stopped_and_saved(first)
    for name, ranks, more in (("fsdp", 2, {"deadline_seconds": 600}), ("single", 1, {})):
        resumed = labkit.launch(tiny(name, "checkpoints"), nproc_per_node=ranks, steps=step + 4, **options, **more)
        resumed.wait()
        figures[f"{name} from"] = resumed.losses().index[0] - 1 if len(resumed.losses()) else step
        step += 4
    assert figures["fsdp from"] == saved
    assert figures["single from"] == figures["fsdp from"] + 4


@needs_gpu
def test_the_link_is_as_fast_as_assumed(figures, tmp_path, monkeypatch):
    """For the report."""
    assumed = labkit.plan("ddp", nproc_per_node=2).device.link
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    link = measure_link(2)
    figures |= {kind: str(line) for kind, line in link.kinds.items()}
    figures["assumed, GB/s"] = assumed / 1e9 if assumed else "n/a"


@needs_two_gpus
@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {}), ("hybrid", {"tensor": 2})])
def test_memory_in_sixteen_bits_is_as_planned(strategy, options, figures):
    plan = labkit.plan(strategy, nproc_per_node=2, precision=HALF, **options)
    run = labkit.launch(plan, steps=3, trace_memory=True, wait=True)
    traced = [rank.traced.bytes for rank in run.memory().ranks if rank.traced]
    figures["planned, MiB"], figures["traced, MiB"] = plan.bytes / 2**20, max(traced) / 2**20
    assert plan.bytes == pytest.approx(max(traced), rel=0.05)


@needs_two_gpus
def test_batch_norm_over_all_ranks_has_the_losses_of_single(figures):
    alone = losses(tiny("single", model=NORMALIZED), 1)
    figures["apart"] = difference(alone, losses(tiny("ddp", model=NORMALIZED), 2, sync_batch_norm=True))
    assert figures["apart"] < 1e-9
