# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 07 · FSDP: gather, compute, free, scatter
#
# FSDP divides what DDP repeats. The price is more communication, and the gain depends on what fills the memory. You
# will count each all-gather and reduce-scatter of a step at three levels of sharding, see what a rank holds at each
# moment, and predict two models: one where FSDP saves more than 40 %, one where it saves less than 20 %. Four sentences
# of the articles are put to the test on the way.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
flagship: bool = True  # plan a GPT of 838 million parameters for two T4s, too: some 25 seconds

# %%
import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("07_fsdp")
N = nproc_per_node

# %% [markdown]
# ## The fourth article's model, scaled down
#
# An MLP of wide layers: 5 of width 16384 there, which take more than 20 GB under DDP; 24 of width 256 here. FSDP treats
# each block as a unit, and what is left, the last layer, as another one: the root.

# %%
import torch
from torch import nn


class Model(nn.Module):
    """(batch, width) in and out."""

    def __init__(self, width=256, layers=24):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers - 1)))
        self.last = nn.Linear(width, width)

    def embed(self, x):
        return x

    def unembed(self, x):
        return self.last(x)

    def forward(self, x):
        return self.unembed(self.blocks(self.embed(x)))


# %%
model = Model()
L, P = len(model.blocks), 4 * sum(p.numel() for p in model.parameters())
root = 4 * sum(p.numel() for p in model.last.parameters())
print(f"{L} blocks and the root: {P:,} B of parameters, {root:,} B of them in the root")
del model

# %% [markdown]
# ## Predict what ranks send and hold
#
# A unit is gathered before it computes, in forward, and freed after it (`reshard_after_forward`); in backward it is
# gathered again, and its gradients are reduce-scattered: each rank gets the sum of its own part, and of no other.
#
# | `reshard_after_forward` | all-gathers | reduce-scatters |
# |---|---|---|
# | always | 2 (L + 1) | L + 1 |
# | auto: all but the root, which backward needs at once | 2 L + 1 | L + 1 |
# | never: what forward gathered stays until backward ends | L + 1 | L + 1 |
#
# `never` is what the older API calls SHARD_GRAD_OP. The guide (001, line 28) says that it shards "gradients and
# optimizer states only". Parameters are sharded as well, outside of forward and backward. And the first article
# (000, line 64) puts the whole model on each GPU, by `.cuda()`, before it is divided. Here it is made on the meta
# device, where it takes no bytes; only shards ever get any.

# %%
import json
import math
import os
import time
from collections import Counter

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

LEVELS = {"always": True, "auto": None, "never": False}


def build(level, device, mesh):
    """(model, bytes it takes on this rank before it is divided)."""
    if level == "ddp":
        model = Model().to(device)
        return DistributedDataParallel(model, gradient_as_bucket_view=True), held(model.parameters())
    with torch.device("meta"):
        model = Model()
    before = held(model.parameters())
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=LEVELS[level])
    model.to_empty(device=device)
    for p in model.parameters():
        nn.init.constant_(p, 0.01)
    return model, before


def held(tensors):
    """Bytes of them on this rank."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(t.nbytes for t in local if not t.is_meta)


def recorded(began):
    """Calls and bytes of whole arrays since then, from torch's flight recorder. gloo records its reduce-scatter as the
    all-reduce that it makes of it."""
    backend = torch._C._distributed_c10d
    dump = backend._dump_nccl_trace_json if dist.get_backend() == "nccl" else backend._dump_fr_trace_json
    calls, sizes = Counter(), Counter()
    for entry in json.loads(dump())["entries"]:
        if entry["time_created_ns"] >= began:
            kind = "gathers" if "gather" in entry["profiling_name"] else "sums"
            calls[kind] += 1
            sizes[kind] += 4 * max(sum(map(math.prod, entry[side])) for side in ("input_sizes", "output_sizes"))
    return {"calls": calls, "bytes": sizes}


def measured(level, device, mesh):
    """One step at a level, the third: DDP settles its buckets in the first two."""
    model, before = build(level, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        began, moments = time.time_ns(), {"made": before, "before forward": held(model.parameters())}
        loss = model(torch.ones(8, 256, device=device)).square().mean()
        moments["after forward"] = held(model.parameters())
        loss.backward()
        moments["after backward"] = held(model.parameters())
        moments["gradients"] = held(p.grad for p in model.parameters())
        optimizer.step()
    return {"moments": moments, **recorded(began)}


def main():
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    print(json.dumps({level: measured(level, device, mesh) for level in ("ddp", *LEVELS)}))
    dist.barrier()
    dist.destroy_process_group()


# %%
gathers = {"always": 2 * (L + 1), "auto": 2 * L + 1, "never": L + 1}
volume = {"always": 2 * P, "auto": 2 * P - root, "never": P}
for level in gathers:
    claims.predict(f"{level}: all-gathers", gathers[level], "calls")
    claims.predict(f"{level}: reduce-scatters", L + 1, "calls")
    claims.predict(f"{level}: bytes gathered", volume[level], "B")
    claims.predict(f"{level}: bytes of gradients summed", P, "B")
claims.predict("ddp: bytes of gradients summed", P, "B")

SAYS = {
    "made": ("000, line 64: .cuda() first", P),
    "before forward": ("001, line 28: SHARD_GRAD_OP shards gradients, optimizer only", P),
    "gradients": ("002, line 560: all GPUs get identical averaged gradients", P),
}
moments = {"made": 0, "before forward": P // N, "after forward": P, "after backward": P // N, "gradients": P // N}
for moment, expected in moments.items():
    article, said = SAYS.get(moment, ("", None))
    claims.predict(f"never: {moment}", expected, "B", article=article, said=said)
claims.predict("auto: after forward", root + (P - root) // N, "B")
claims.predict("ddp: gradients", P, "B")

# %% [markdown]
# ## Measure: one run, four ways
#
# A script of these two cells, in plain PyTorch:

# %%
script = Script.of("sharding_levels", model=Model, main=main)
levels = labkit.launch(script, nproc_per_node=N, env={**env, "TORCH_FR_BUFFER_SIZE": "4000"})
levels.wait()


def reports(run):
    """What each rank printed."""
    lines = [run.logs(rank=rank).splitlines() for rank in range(N)]
    return [json.loads(next(line for line in reversed(each) if line.startswith("{"))) for each in lines]


# %%
ranks = reports(levels)
assert all(rank == ranks[0] for rank in ranks)
for level in gathers:
    found = ranks[0][level]
    claims.measure(f"{level}: all-gathers", found["calls"]["gathers"], run=levels)
    claims.measure(f"{level}: reduce-scatters", found["calls"]["sums"], run=levels)
    claims.measure(f"{level}: bytes gathered", found["bytes"]["gathers"], run=levels)
    claims.measure(f"{level}: bytes of gradients summed", found["bytes"]["sums"], run=levels)
claims.measure("ddp: bytes of gradients summed", ranks[0]["ddp"]["bytes"]["sums"], run=levels)
for moment in moments:
    claims.measure(f"never: {moment}", ranks[0]["never"]["moments"][moment], run=levels)
claims.measure("auto: after forward", ranks[0]["auto"]["moments"]["after forward"], run=levels)
claims.measure("ddp: gradients", ranks[0]["ddp"]["moments"]["gradients"], run=levels)
display(claims)

# %% [markdown]
# An all-reduce is a reduce-scatter and an all-gather: a rank sends (N-1)/N of the array for each. So `never` sends
# **what DDP sends**, 2 P (N-1)/N, which the third article (003, line 420) calls "medium"; `always` sends half as
# much again. And backward ends in shards, not in "identical averaged gradients" of an all-reduce.
#
# ## What does it save?
#
# **States** fill the MLP's memory: with AdamW 16 bytes per parameter, few activations. Of those FSDP keeps 1/N and,
# while a block computes, that block. **Activations** fill the memory of a small transformer with large batches, and
# FSDP does not divide them: the scripts' own model has 4 blocks of width 128, which keep 16 numbers per position and
# width for backward, and the logits of the vocabulary three times.

# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, width=256):
    """Random vectors and classes, the same on every rank."""
    torch.manual_seed(0)
    x, y = torch.randn(512, width), torch.randint(width, (512,))
    return TensorDataset(x[:448], y[:448]), TensorDataset(x[448:], y[448:])


# %%
small = {"data": Script.load("fsdp").cells["data"].text.replace("2**20", "2**16")}
mlp = {name: Script.load(name).with_cells(model=Model, data=load_datasets) for name in ("ddp", "fsdp")}
gpt = {name: Script.load(name).with_cells(**small) for name in ("ddp", "fsdp")}
few, many = {"global_batch_size": 8 * N}, {"global_batch_size": 16 * N}

plan = labkit.plan(mlp["fsdp"], nproc_per_node=N, **few)
of_ddp = next(row for row in plan.advice.rows if row.strategy == "ddp")
claims.predict("MLP: peak under DDP", of_ddp.peak.bytes, "B", within=0.01)
unit = root  # a block is as large; one or two more may be in flight when a rank is ahead of the other
claims.predict("MLP: peak under FSDP", plan.bytes, "B", within=2 * unit / plan.bytes)
claims.predict("MLP: FSDP saves", 0.4, "%", how="at least")
display(plan)

# %% [markdown]
# The transformer's peak comes as backward begins: all activations are there. DDP then holds 16 bytes per parameter,
# since its buckets keep the gradients' place; FSDP holds 12 / N, for there are no gradients yet. With activation
# checkpointing (an option of the extra `recompute_and_compile`) a block keeps its input only, 1 number of the 16, and
# one block at a time has all of them again.

# %%
blocks, width, vocabulary, context = 4, 128, 256, 128
elements = blocks * (12 * width**2 + 13 * width) + (2 * vocabulary + context + 2) * width
states = 16 * elements
number = 4 * 16 * context * width  # bytes: one number per position and width, 16 samples on a rank
activations = blocks * 16 * number + 3 * 4 * 16 * context * vocabulary
most = elements * (16 - 12 / N) / (states + activations)
print(f"{states:,} B of states, {activations:,} B of activations: FSDP can save {most:.1%}")
claims.predict("GPT: FSDP saves", most, "%", how="at most", article="001, line 38: 1/N of each")
recomputing = "GPT, FSDP: activation checkpointing saves"
claims.predict(recomputing, (blocks * 16 - (blocks + 16)) * number, "B", how="at least")

# %%
short = {"steps": 3, "env": env, "nproc_per_node": N, "trace_memory": True}
runs = {}
for name in ("ddp", "fsdp"):
    runs["MLP", name] = labkit.launch(mlp[name], **few, **short)
    runs["MLP", name].wait()
    runs["GPT", name] = labkit.launch(gpt[name], **many, **short)
    runs["GPT", name].wait()
runs["GPT", "recomputed"] = labkit.launch(gpt["fsdp"], activation_checkpointing=True, **many, **short)
runs["GPT", "recomputed"].wait()

# %%
peaks = {key: max((held.traced for held in run.memory().ranks), key=lambda t: t.bytes) for key, run in runs.items()}


def saved(model, before, after):
    return 1 - peaks[model, after].bytes / peaks[model, before].bytes


claims.measure("MLP: peak under DDP", peaks["MLP", "ddp"].bytes, run=runs["MLP", "ddp"])
more = "units in flight: it depends on who is faster"
claims.measure("MLP: peak under FSDP", peaks["MLP", "fsdp"].bytes, run=runs["MLP", "fsdp"], because=more)
claims.measure("MLP: FSDP saves", saved("MLP", "ddp", "fsdp"), run=runs["MLP", "fsdp"], because="states are most of it")
claims.measure("GPT: FSDP saves", saved("GPT", "ddp", "fsdp"), run=runs["GPT", "fsdp"], because="activations")
less = peaks["GPT", "fsdp"].bytes - peaks["GPT", "recomputed"].bytes
claims.measure(recomputing, less, run=runs["GPT", "recomputed"], because="the logits are gone by then, too")
display(claims)

# %% [markdown]
# Where states fill the memory, FSDP on two ranks saves more than 40 %; where activations do, less than 20 %. It never
# saves half, because one unit at a time is whole. So ask first what fills the memory. If it is the states, shard them;
# if it is the activations, recompute them, or take smaller micro-batches; often it is both. Category by category:

# %%
for (model, name), peak in peaks.items():
    parts = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in peak.categories.items() if size >= 1 << 16)
    print(f"{model} {name:>10}: {peak.bytes / 2**20:5.1f} MiB in {peak.phase}: {parts}")

# %% [markdown]
# ## A model that two T4s cannot train with DDP
#
# GPT-2 large, 36 blocks of width 1280 and a head of its own: 838 million parameters, one sample of 1,024 tokens per
# rank. 16 bytes each are 12.5 GiB; a T4 leaves some 14.2 GiB to tensors. Planned in two ways, by formulas and by a
# rehearsal of the script itself; run only where there are two T4s.

# %%
if flagship:
    loaded = Script.load("fsdp")
    sizes = "vocabulary=256, context=128, width=128, heads=4, layers=4"
    large = "vocabulary=50257, context=1024, width=1280, heads=20, layers=36"
    cells = {"model": loaded.cells["model"].text.replace(sizes, large)}
    cells["data"] = loaded.cells["data"].text.replace("context=128", "context=1024")
    scripts = {name: Script.load(name).with_cells(**cells) for name in ("ddp", "fsdp")}
    planned = {name: labkit.plan(each, device="2xT4", global_batch_size=2) for name, each in scripts.items()}
    usable = planned["ddp"].device.usable_by(2)
    claims.predict("838 M on T4, FSDP: formulas", 8.6 * 2**30, "B", within=0.1)
    claims.predict("838 M on T4, DDP: at least what a T4 has", usable, "B", how="at least")
    for name, plan in planned.items():
        claims.predict(f"838 M on T4, {name.upper()}: rehearsal as formulas", plan.formulas.bytes, "B", within=0.01)
        rehearsed = plan.rehearsed.bytes
        claims.measure(f"838 M on T4, {name.upper()}: rehearsal as formulas", rehearsed, because="rehearsed, not run")
    claims.measure("838 M on T4, FSDP: formulas", planned["fsdp"].formulas.bytes, because="planned, not run")
    claims.measure("838 M on T4, DDP: at least what a T4 has", planned["ddp"].bytes, because="planned, not run")
    display(planned["fsdp"])

# %%
two_t4s = ["T4" in gpu.name for gpu in machine.hardware.gpus] == [True, True]
if flagship and two_t4s:
    claims.predict("838 M on T4, FSDP: run", planned["fsdp"].bytes, "B", within=0.1)
    claims.predict("838 M on T4, DDP: runs out of memory", 1)
    fits = labkit.launch(planned["fsdp"], steps=4)
    fits.wait()
    peak = max(held.traced.bytes for held in fits.memory().ranks)
    claims.measure("838 M on T4, FSDP: run", peak, run=fits)
    try:
        labkit.launch(planned["ddp"], steps=4).wait()
        full = False
    except torch.OutOfMemoryError as error:
        full = True
        print(error)
    claims.measure("838 M on T4, DDP: runs out of memory", full)

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `nproc_per_node = 4`: which counts change? (None.) Which bytes?
# - Call `fully_shard` on the whole model only, not on its blocks: one all-gather forward. What is held after it?
# - `layers=5` in `Model`, as in the article: a unit is then a fifth of the model. Does FSDP still save 40 %?
# - `labkit.plan(gpt["fsdp"], nproc_per_node=64, device="A100 80")`: what of the peak is left to divide?
# - Make claims fail: put `model = Model().to(device)` in place of the meta device in `build`; or `LEVELS["never"] =
#   True`. See which claims notice.
