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
# # 15 · Meshes: several strategies at once
#
# **You will be able to** make a mesh, say which ranks talk along each of its axes, when, and what they hold, and tell
# when more axes are worth it. **25 minutes. You need** labs 05, 13 and 14.
#
# One strategy alone reaches its limit: FSDP on 64 ranks gathers every block from 64 ranks, over the slowest link
# between them; a tensor split over hosts waits in the middle of every block. So each strategy gets some of the ranks
# only.
#
# Ranks form a grid, a **mesh**, and each axis has a strategy of its own. The ranks that differ only in the coordinate
# of one axis form a process group. The picture shows eight ranks with the axes pipeline, data (FSDP) and tensor, 2 × 2
# × 2; one color is one group:

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks, on two cores, too; 8 gives a mesh of 2 x 2 x 2
accumulate: int = 2  # micro-batches per step
large: bool = True  # plan a GPT of 838 million parameters, a minute; otherwise one of 113 million

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab, ranks = Lesson("15_meshes", ranks=nproc_per_node), nproc_per_node
draw.mesh(pipeline=2, data=2, tensor=2)

# %% [markdown]
# Neighbors form a tensor group: they send the most, in the middle of every block, and need the fastest link. A pipeline
# sends the least, so its stages may be on different hosts.
#
# ## Your predictions
#
# Four ranks, on two hosts with two each. **HSDP** (hybrid sharding) is FSDP on a mesh of two axes: within a host
# ("shard") it divides the states, and the hosts ("replicate") hold the same shards, as in DDP. The model of the first
# two questions has three layers, each a unit of its own, and a step has one batch.
#
# The last two are about a transformer of four blocks on data × tensor, 2 × 2. Each step has two micro-batches. FSDP
# gathers a block when it is first needed and keeps it until the step ends (`reshard_after_forward=False`); the
# embeddings, the last norm and the head are one more unit. labkit's script also all-reduces two single numbers in every
# step: count them, too.

# %%
hybrid_held = lab.ask("HSDP: share of the parameters that a rank holds between two steps", default=25, unit="%")
between = lab.ask("HSDP: collectives of a step that a rank makes with another host", default=9)
sums = lab.ask("all-reduces of a rank in a step of data × tensor", default=16)
gathers = lab.ask("all-gathers of a rank in the same step", default=10)
share = lab.ask("share of the parameters that a rank of data × tensor holds between two steps", default=25, unit="%")

# %% [markdown]
# ## FSDP within each host: HSDP
#
# `fully_shard` with a mesh of two axes shards along the second and replicates along the first. Each rank trains on
# samples of its own, once with FSDP over all ranks and once with HSDP, and notes every collective of the third step
# with the ranks of its group:

# %%
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def third_step_on(device, shape, axes):
    mesh = init_device_mesh(device.type, tuple(shape), mesh_dim_names=tuple(axes))
    model = tower(256, 3, device)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh)
    torch.manual_seed(dist.get_rank())
    x, optimizer = torch.randn(8, 256).to(device), torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        began = time.time_ns()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    groups = {f"mesh_{axis}": mesh[axis].mesh.tolist() for axis in axes}
    calls = [(kind, groups.get(group), size) for kind, group, size in calls_since(began)]
    dist.all_reduce(loss)
    placements = str(next(model.parameters()).placements)
    return {"loss": loss.item(), "calls": calls, "held": held(model.parameters()), "placements": placements}


# %%
import pandas as pd

ways = {"FSDP": ([ranks], ["shard"]), "HSDP": ([2, ranks // 2], ["replicate", "shard"])}
answers = {way: lab.run(third_step_on, *mesh, options={"shown": False})[1] for way, mesh in ways.items()}
fsdp, hsdp = answers["FSDP"][0], answers["HSDP"][0]
for way, of in (("FSDP", fsdp), ("HSDP", hsdp)):
    print(f"{way}: a weight is {of['placements']}; the loss of all ranks is {of['loss']:.6f}")
calls = [[f"{kind} {group}" for kind, group, _ in of["calls"]] for of in answers["HSDP"]]
pd.DataFrame({f"rank {rank}": of_rank for rank, of_rank in enumerate(calls)})

# %% [markdown]
# Read a column from top to bottom: all-gathers within the host, in forward and again in backward; then for each layer
# the gradients are summed within the host (reduce-scatter, which gloo makes of an all-reduce) and at once between the
# hosts (all-reduce), with the one rank there that has the same shard. Nothing waits for these sums before
# the end of backward.
#
# A rank holds half of the parameters instead of a quarter: HSDP pays with memory. What it buys is that only gradients
# cross the slow link, and of these only the rank's own shard: no weights.

# %%
model_bytes, host = 3 * (256 * 256 + 256) * 4, [*range(ranks // 2)]  # of rank 0
across = [size for _, group, size in hsdp["calls"] if not set(group) <= set(host)]
lab.verify(hybrid_held, 1 / (ranks // 2), hsdp["held"] / model_bytes, "%", within=0.001)
lab.verify(between, 3, len(across))
lab.verify("HSDP: bytes of these, over all gradients", 1 / (ranks // 2), sum(across) / model_bytes, "%", within=0.001)
lab.verify("HSDP: difference of the loss to FSDP's", 1e-5, abs(hsdp["loss"] / fsdp["loss"] - 1), how="at most")

# %% [markdown]
# ## Two strategies on one mesh
#
# `init_device_mesh` makes the groups of all axes; each strategy gets the axis that it works along:
#
# ```python
# mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
# for block in model.blocks:
#     parallelize_module(block, mesh["tensor"], {"up": columns, "down": rows})  # and attention, lab 14
#     fully_shard(block, mesh=mesh["data"])  # shards what the tensor axis has left on this rank
# fully_shard(model, mesh=mesh["data"])
# # ranks of one tensor group read the same samples:
# sampler = DistributedSampler(dataset, mesh["data"].size(), mesh["data"].get_local_rank())
# ```
#
# labkit's `hybrid` script does this, with a pipeline as well. Run three meshes of four ranks, in float64, so that their
# losses can be compared with those of one device:

# %%
script, single = sized(Script.load("hybrid"), width=64), sized(Script.load("single"), width=64)
third = "pipeline × tensor" if ranks == 4 else "pipeline × data × tensor"
meshes = {"data × tensor": (1, 2), "pipeline × data": (2, 1), third: (2, 2)}  # ranks of pipeline and tensor
options = {"global_batch_size": 2 * ranks, "precision": "fp64", "steps": 9, "shown": False, "trace_memory": True}
alone = lab.launch(single, ranks=1, **options)
options |= {"accumulate": accumulate, "profile": True}
runs = {name: lab.launch(script, pipeline=p, tensor=t, **options) for name, (p, t) in meshes.items()}

# %%
kinds = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
spans = {way: run.timeline().of_step() for way, run in runs.items()}
table = pd.DataFrame({way: {k: sum(s.kind == k for s in each) / ranks for k in kinds} for way, each in spans.items()})
at_peak = {way: run.memory().ranks[0].traced.categories for way, run in {"one device": alone, **runs}.items()}
differ = max((run.losses() / alone.losses() - 1).abs().max() for run in runs.values())
print(f"calls of a rank in one step; the losses of nine steps differ from one device's by at most {differ:.0e}")
display(table, draw.bars(at_peak, unit="B", title="rank 0 at its peak"))

# %% [markdown]
# ## Why
#
# With *p* stages, L blocks and *m* micro-batches, a rank makes these calls in one step:
#
# | axis | sends | calls |
# |---|---|---|
# | tensor | sums of activations, in each of its blocks | 4 (L / p) m all-reduces |
# | data | weights and gradients of its blocks and the rest | L / p + 1 all-gathers, as many reduce-scatters |
# | pipeline | activations or their gradients, between stages | m receives in the first and last stage, else 2 m |
#
# The tensor axis sends in every block and every micro-batch, the data axis once per step. A rank of 2 × 2 holds more
# than a quarter of the parameters: tensor parallelism leaves norms, embeddings and the head whole, and FSDP halves all
# of it. All three meshes train the same as one device does.

# %%
blocks, w = 4, 64
split, whole, ends = 12 * w * w + 7 * w, 6 * w, (256 + 128 + 2 + 256) * w  # of a block; embeddings, norm and head
of_rank = (blocks * (split / 2 + whole) + ends) / (ranks // 2) / (blocks * (split + whole) + ends)
parameters = {way: of["parameters"] for way, of in at_peak.items()}
lab.verify(share, of_rank, parameters["data × tensor"] / parameters["one device"], "%", within=0.001)
lab.verify(sums, 4 * blocks * accumulate + 2, table["data × tensor"]["all_reduce"])
lab.verify(gathers, blocks + 1, table["data × tensor"]["all_gather"])
lab.verify("largest difference of a loss to one device's", 1e-9, differ, how="at most")
lab.score()

# %% [markdown]
# This is one step of the last mesh. Stages compute in turn, and within a stage the tensor ranks wait for each other.
# (The bubble in the title does not count these waits; ideally it is (p - 1)/(m + p - 1), lab 13.)

# %%
runs[third].timeline()

# %% [markdown]
# ## Which axes?
#
# Begin with one: DDP, or FSDP where the states do not fit. Add an axis when you see a reason for it:
#
# | reason | axis | along it |
# |---|---|---|
# | FSDP's gathers between hosts are not hidden | replicas (**HSDP**): FSDP only within a host | the hosts |
# | a rank has less than one sample left, or a block does not fit | tensor | GPUs with NVLink |
# | links between hosts are slow, and there are many micro-batches | pipeline | the hosts |
#
# In Hugging Face's `TrainingArguments` all sizes are set in one
# `parallelism_config`: `ParallelismConfig(dp_replicate_size=…, dp_shard_size=…, tp_size=…)`, from Accelerate. Which
# ranks should share a host here?

# %%
lab.explore(draw.mesh, pipeline=[1, 2, 4], data=[1, 2, 4], tensor=[1, 2, 4])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# Is a second axis worth it within one host? FSDP alone divides parameters, gradients and optimizer state among all
# ranks. The plans are for eight samples per step:

# %%
gpt = {"vocabulary": 50257, "context": 1024, "width": 1280, "heads": 20, "layers": 36}
sizes = gpt if large else {"width": 768, "heads": 12, "layers": 16}
fsdp, hybrid = (sized(Script.load(name), **sizes) for name in ("fsdp", "hybrid"))
ways = {"FSDP": fsdp, "data × tensor": (hybrid, {"tensor": 2}), "pipeline × data": (hybrid, {"pipeline": 2})}
lab.plans(ways, global_batch_size=8)

# %% [markdown]
# FSDP alone needs the least memory, and none of the others is clearly faster: compare the ranges. Within one host a
# second axis rarely pays.
#
# ## Recap
#
# | axis | a rank holds | it sends | when |
# |---|---|---|---|
# | tensor | 1/t of the split layers | activations | in every block of every micro-batch |
# | data, sharded (FSDP) | 1/d of what is left | weights and gradients | once per step and unit |
# | replicate (HSDP) | the same as the other replicas | the gradients of its shard | once per step and unit |
# | pipeline | 1/p of the layers | activations at a border | once per micro-batch |
#
# ## Try this
#
# 1. `draw.mesh(pipeline=4, data=2, tensor=1)`: to which ranks does rank 3 send, and what?
#    <details><summary>Answer</summary>It is the second replica of the second stage. It sends activations to rank 5 and
#    gradients to rank 1 (its pipeline group is 1, 3, 5, 7), and shares weights and gradients with rank 2. Along the
#    tensor axis it is alone.</details>
# 2. Repeat the plans above (`large = True`) with `{"tensor": 4}` instead of `{"tensor": 2}`, on 8 × A100: does a rank
#    hold less?
#    <details><summary>Answer</summary>No: 10.9 GiB instead of 8.2. Only two ranks are left on the data axis, so less is
#    sharded, and a rank works on twice the samples. A step takes 509 ms instead of 445; with FSDP alone it takes
#    331.</details>
# 3. Gather again in every micro-batch, with `reshard_after_forward=True`: `script = script.with_cells(strategy=
#    script.cells["strategy"].text.replace("forward=False", "forward=True"))`. Which axis sends more now, and does the
#    loss change?
#    <details><summary>Answer</summary>The data axis: 15 all-gathers instead of 5 in data × tensor, 9 instead of 3
#    in pipeline × data. Reduce-scatters and the loss are the same, so nothing but the time tells you.</details>
#
# ## Sources
#
# Narayanan et al. (arXiv 2104.04473): the three axes and their order. torch/distributed/device_mesh.py. The PyTorch
# team and IBM trained a model of 7 billion parameters with FSDP alone (fms-fsdp); for 70 billion they give a
# throughput, not a trained model.
