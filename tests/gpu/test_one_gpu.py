"""What one GPU can show beside labkit's claims, the most informative first; on several the same tests use the first."""

from __future__ import annotations

import gzip
import math
import pickle
import re
import subprocess
import sys
import time
from itertools import chain

import pytest
from gpu.devices import (
    BEGIN,
    CUDA,
    GPUS,
    HALF,
    KIND,
    difference,
    in_full,
    losses,
    needs_gpu,
    only_rank,
    raw,
    read,
    stopped_and_saved,
    tiny,
)
from gpu.gpt2 import BATCH, gpt2

import labkit
from labkit.diagnosis.probes import nvml
from labkit.hardware.machine import hardware

GIB = 1 << 30
PHASES = ["input", "forward", "backward", "optimizer", "communication"]
COMPUTING = """held = torch.ones(1 << 28, device=device)
print("computing", flush=True)
if cuda:
    torch.cuda._sleep(1 << 40)  # clock cycles: minutes
torch.cuda.synchronize() if cuda else torch.linalg.svd(torch.randn(4000, 4000))
"""
WAITING = """from datetime import timedelta
group, x = dist.new_group([0], timeout=timedelta(seconds=10)), torch.ones(1 << 20, device=device)
for call in range(4):
    if cuda and call == 3:
        torch.cuda._sleep(1 << 40)  # which NCCL waits for
    dist.all_reduce(x, group=group)
if not cuda:
    with open(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}{rank}", "wb") as file:
        file.write(torch._C._distributed_c10d._dump_fr_trace())
    sys.exit("gloo")
torch.cuda.synchronize()
"""
ASLEEP = """held = torch.ones(1 << 28, device=device)
print("asleep", flush=True)
time.sleep(600)
"""
EXHAUSTING = """small, held, size = torch.ones(64, 64, device=device), [], 1 << 30
if sys.argv[1] == "tensor":
    torch.empty(1 << 50, device=device)
if sys.argv[1] == "pinned":
    torch.empty(1 << 45, dtype=torch.uint8, pin_memory=True)
while size > 1 << 20:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        size //= 2
small @ small
torch.cuda.synchronize()
"""
OVERFLOWING = """half = torch.float16 if cuda else torch.bfloat16
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, backoff_factor=2.0**-20)
skipped = 0
for _ in range(20):
    optimizer.zero_grad()
    with torch.autocast(device.type, half):
        loss = model(torch.ones(4, 8, device=device)).square().mean() * 1e6
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
print("skipped", skipped, flush=True)
dist.destroy_process_group()
"""

LOGGING = """from accelerate import Accelerator
accelerator, parameter = Accelerator(cpu=not cuda), torch.nn.Parameter(torch.ones((), device=device))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(1, 21):
    optimizer.zero_grad()
    loss = parameter * parameter
    loss.backward()
    optimizer.step()
    if cuda:
        torch.cuda.set_sync_debug_mode("error")
    accelerator.log({"mine": loss * step}, step=step)
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
torch.cuda.synchronize() if cuda else None
dist.destroy_process_group()
"""


def wait_for(run: labkit.Run, text: str) -> None:
    deadline = time.monotonic() + 120
    while not (run.folder.log(0).exists() and text in run.logs(rank=0)):
        assert time.monotonic() < deadline, run.status()
        time.sleep(0.1)


def held_on_gpus() -> int | None:
    """Bytes in use on all GPUs, by NVML's count; None where it has none."""
    try:
        known = nvml(hardware())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    sizes = [(card.memory, card.free) for card in known.cards] if known else []
    return sum(memory - free for memory, free in sizes) if sizes and None not in chain(*sizes) else None


@pytest.mark.timeout(60)
def test_a_number_on_the_gpu_that_is_logged_is_recorded_without_waiting_for_it(tmp_path):
    run = labkit.launch(raw(tmp_path, "tracking", LOGGING), nproc_per_node=1, wait=True)

    mine = run.metrics().dropna(subset=["mine"]).set_index("step")["mine"]
    assert mine.to_dict() == {step: pytest.approx(0.64 ** (step - 1) * step, rel=1e-5) for step in range(1, 21)}


@in_full
@pytest.mark.timeout(45)
def test_a_rank_inside_a_kernel_is_found_at_its_line_and_stopped_and_the_gpu_is_free_again(figures, tmp_path):
    before = held_on_gpus()
    run = labkit.launch(raw(tmp_path, "computing", COMPUTING), nproc_per_node=1, wait=False)
    wait_for(run, "computing")
    time.sleep(1)
    line = len((BEGIN + COMPUTING).splitlines())
    figures["stacks"] = run.stacks().sentence
    held = held_on_gpus()
    began = time.monotonic()
    run.stop(grace=2)
    figures["stop, s"] = time.monotonic() - began

    assert f"computing.py line {line}" in figures["stacks"]
    if before is None:
        figures["NVML"] = "n/a"
    else:
        assert held > before + GIB
        while (left := held_on_gpus() - before) > GIB / 10 and time.monotonic() < began + 15:
            time.sleep(0.2)
        figures["free again, s"], figures["left, MiB"] = time.monotonic() - began, left / 2**20
        assert left <= GIB / 10


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["tensor", *(pytest.param(how, marks=needs_gpu) for how in ("cublasCreate", "pinned"))])
def test_out_of_memory_is_named(how, figures, tmp_path):
    with pytest.raises(labkit.RankFailedError):
        labkit.launch(raw(tmp_path, "exhausting", EXHAUSTING), args=[how], nproc_per_node=1, wait=True)
    cause = labkit.attach("latest").status().cause

    figures["cause"] = cause["sentence"][:200]
    assert cause["out_of_memory"] == ("device" if CUDA and how != "pinned" else "host")


@needs_gpu
@pytest.mark.timeout(75)
def test_a_batch_that_is_too_large_fits_once_the_advice_is_followed(figures):
    script, options = gpt2("single"), {"nproc_per_node": 1, "precision": HALF}
    few = labkit.plan(script, global_batch_size=BATCH, **options)
    options["global_batch_size"] = BATCH * int(2 * hardware().gpus[0].memory // few.bytes)
    with pytest.raises(labkit.RankFailedError):
        labkit.launch(script, steps=2, wait=True, **options)
    cause = labkit.attach("latest").status().cause
    figures["samples"], figures["cause"] = options["global_batch_size"], cause["sentence"][:200]
    assert "raise accumulate (now 1)" in cause["advice"]
    run = labkit.launch(script, steps=2, accumulate=4, wait=True, **options)

    figures["peak, MiB"] = only_rank(run).memory_peak / 2**20
    assert len(run.losses()) == 2


@pytest.mark.timeout(75)
def test_the_flight_record_of_a_collective_that_timed_out_is_in_the_ranks_folder(figures, tmp_path):
    """Written by NCCL at the group's time limit; without a GPU by the script, since gloo writes none."""
    with pytest.raises(labkit.RankFailedError):
        labkit.launch(raw(tmp_path, "waiting", WAITING), nproc_per_node=1, watchdog=25, wait=True)
    run = labkit.attach("latest")
    (dump,) = run.folder.ranks.glob("fr_*")
    calls = pickle.loads(dump.read_bytes())["entries"]

    figures["cause"], figures["file"] = run.status().cause["sentence"][:200], dump.name
    figures["calls"] = [f"{call['profiling_name']}: {call['state']}" for call in calls]
    assert len(calls) == 4
    assert all("all_reduce" in call["profiling_name"] for call in calls)


@pytest.mark.timeout(30)
def test_asking_about_the_machine_imports_no_torch(figures):
    code = "import sys, labkit; print(labkit.doctor()); sys.exit('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    assert shown.returncode == 0, shown.stderr
    figures["devices"] = GPUS
    assert ("no GPU" in shown.stdout) == (not CUDA)


def test_a_run_records_memory_phases_and_losses_also_around_validation_with_workers(figures):
    """Workers pin their batches on a GPU. How phases add up is only reported: it depends on the machine's load."""
    script = tiny("single", "workers", "validate")
    run = labkit.launch(script, nproc_per_node=1, steps=40, workers=1, validate_every=15, wait=True)
    reader, rank, metrics = read(run), only_rank(run), run.metrics()
    steps = metrics[metrics["step_seconds"].notna()]
    shares = steps[PHASES].sum(axis=1) / steps["step_seconds"]

    assert rank.device.startswith(KIND)
    assert rank.memory_peak > 0
    assert rank.end.dropped == 0
    assert [*run.losses().index[:20], run.losses().index[-1]] == [*range(1, 21), 40]  # then ten a second
    figures["step, ms"] = 1e3 * steps["step_seconds"].median()
    figures["phases / step"], figures["at most"] = float(shares.median()), float(shares.max())
    if CUDA:
        devices = [device for host in reader.hosts.values() for device in host.devices]
        assert f"GPU-{rank.uuid}" in [device.uuid for device in devices]


def test_sixteen_bits_train_and_the_profile_has_what_the_device_did(figures):
    run = labkit.launch(tiny("ddp"), nproc_per_node=1, steps=20, precision=HALF, profile=True, wait=True)
    values, spans = list(run.losses()), run.timeline().spans

    figures[f"loss in {HALF}"], figures["spans"] = values[-1], len(spans)
    assert len(values) == 20
    assert all(map(math.isfinite, values))
    assert values[-1] < values[0]
    if CUDA:
        trace = gzip.decompress(run.folder.profile(0).read_bytes()).decode()
        figures["kernels"] = len(re.findall(r'"cat": *"kernel"', trace))
        assert figures["kernels"]


@pytest.mark.parametrize(
    ("strategy", "precision", "options"),
    [
        ("ddp", "fp32", {}),
        ("fsdp", HALF, {}),
        pytest.param("ddp", "fp32", {"optimizer": "adamw_fused"}, marks=in_full),
        pytest.param("ddp", HALF, {"selective_checkpointing": True}, marks=in_full),
        pytest.param("fsdp", "fp32", {}, marks=in_full),
        pytest.param("ddp", HALF, {}, marks=in_full),
    ],
)
def test_memory_is_as_planned(strategy, precision, options, figures):
    plan = labkit.plan(strategy, nproc_per_node=1, precision=precision, **options)
    run = labkit.launch(plan, steps=3, trace_memory=True, wait=True)
    (rank,) = run.memory().ranks
    assert rank.traced is not None
    figures |= {name: peak.bytes / 2**20 for name, peak in rank.peaks.items()}
    figures[f"{rank.process_name}, MiB"] = rank.process / 2**20
    latest = only_rank(run).latest
    if "reserved" in latest:
        figures["reserved - allocated, MiB"] = (latest["reserved"] - latest["memory"]) / 2**20

    assert plan.bytes == pytest.approx(rank.traced.bytes, rel=0.05)


def test_every_strategy_on_one_rank_has_the_losses_of_single(figures):
    alone = losses(tiny("single"), 1)
    for name in ("ddp", "zero1", "zero2", "fsdp") if CUDA else ("fsdp",):
        figures[name] = difference(alone, losses(tiny(name), 1))
    assert max(figures.values()) < 1e-9


@pytest.mark.timeout(30)
def test_a_rank_before_its_first_collective_does_not_hold_the_gil_and_is_stopped_at_once(figures, tmp_path):
    run = labkit.launch(raw(tmp_path, "asleep", ASLEEP), nproc_per_node=1, wait=False)
    wait_for(run, "asleep")

    figures["stacks"] = run.stacks().sentence
    assert "GIL" not in figures["stacks"]
    started = time.monotonic()
    run.stop(grace=0)
    figures["stop, s"] = time.monotonic() - started


@pytest.mark.timeout(30)
def test_a_scaler_that_skips_steps_changes_no_count(figures, tmp_path):
    run = labkit.launch(raw(tmp_path, "overflowing", OVERFLOWING), nproc_per_node=1, wait=True)

    figures["skipped"] = int(run.logs(rank=0).split("skipped ")[1].split()[0])
    assert 0 < figures["skipped"] < 20
    assert only_rank(run).step == 20


@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_offloaded_shards_leave_the_gpu_in_view(precision, figures):
    options = {"clip": 1.0} if precision == "fp16" else {}
    run = labkit.launch(
        tiny("fsdp"), nproc_per_node=1, steps=8, cpu_offload=True, precision=precision, wait=True, **options
    )
    rank = only_rank(run)

    figures["device"], figures["peak, MiB"] = rank.device, rank.memory_peak / 2**20
    assert rank.device.startswith("cuda")
    assert rank.memory_limit == hardware().gpus[0].memory
    assert all(map(math.isfinite, run.losses()))


@needs_gpu
@pytest.mark.skipif(GPUS > 1, reason="the ranks share a GPU only where there is one")
def test_two_ranks_share_the_gpu_over_gloo(figures):
    alone = losses("single", 1)
    for name in ("ddp", "zero1", "fsdp", "fsdp1", "tensor_parallel"):
        figures[name] = difference(alone, losses(name, 2, backend="gloo"))
    assert max(figures.values()) < 1e-9
    with pytest.raises(labkit.RankFailedError, match="the stages of a pipeline need a GPU each"):
        losses("pipeline", 2, backend="gloo", accumulate=2)


def test_a_run_that_a_term_stopped_saves_and_repeats_every_bit(figures, tmp_path):
    """With dropout, and checkpoints written while training continues."""
    options = {"nproc_per_node": 1, "deterministic": True, "save_every": 1000, "async_save": True}
    script = tiny("fsdp", "checkpoints", "deterministic")
    first = labkit.launch(script, steps=100_000, checkpoint_dir=tmp_path / "parts", wait=False, **options)
    steps = stopped_and_saved(first)
    rest = labkit.launch(script, steps=steps + 4, checkpoint_dir=tmp_path / "parts", wait=True, **options)
    whole = labkit.launch(script, steps=steps + 4, checkpoint_dir=tmp_path / "whole", wait=True, **options)

    figures["resumed at step"] = steps
    resumed, expected = rest.losses(), whole.losses()
    common = resumed.index.intersection(expected.index)
    assert len(common)
    assert list(resumed[common]) == list(expected[common])


@needs_gpu
def test_compiled_and_fused_sixteen_bits_train(figures):
    fused = {"precision": "fp16", "optimizer": "adamw_fused"}  # the loss scale is removed before the fused update
    for name, more in (("eager", {}), ("compiled", {"compile": True}), ("fused AdamW in fp16", fused)):
        run = labkit.launch("ddp", **{"nproc_per_node": 1, "steps": 30, "precision": HALF, "wait": True} | more)
        figures[f"{name}, ms"] = 1e3 * float(run.metrics()["step_seconds"].dropna().median())
        assert all(map(math.isfinite, run.losses()))


def test_a_step_takes_as_long_as_the_data_sheet_lets_expect(figures):
    """For the report: planned from the data sheet, planned from a measurement, and run."""
    precision = HALF if CUDA else "fp32"  # a CPU is slow in 16 bits
    run = labkit.launch("single", nproc_per_node=1, steps=30 if CUDA else 3, precision=precision, wait=True)
    steps = run.metrics()["step_seconds"].dropna()
    figures["measured, ms"] = 1e3 * float(steps.median())
    sheet = labkit.plan("single", nproc_per_node=1, precision=precision).step
    measured = labkit.plan("single", nproc_per_node=1, precision=precision, measure=True).step
    figures["from the data sheet, ms"] = 1e3 * sheet.seconds if sheet else "no data sheet"
    figures["from a measurement, ms"] = 1e3 * measured.seconds if measured else "n/a"

    assert measured is not None
