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
# # 14 · Meshes: several strategies at once
#
# **You will be able to** make a mesh, say what a rank sends along each of its axes and what it holds, and tell when
# more axes are worth it. **25 minutes. You need** labs 05, 12 and 13.
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

lab, N, m = Lesson("14_meshes", ranks=nproc_per_node), nproc_per_node, accumulate
draw.mesh(pipeline=2, data=2, tensor=2)

# %% [markdown]
# Neighbors form a tensor group: they send the most, in the middle of every block, and need the fastest link. A pipeline
# sends the least, so its stages may be on different hosts.
#
# ## Your predictions
#
# A transformer of four blocks trains on four ranks: data × tensor, 2 × 2. Each step has two micro-batches. FSDP gathers
# a block when it is first needed and keeps it until the step ends (`reshard_after_forward=False`); the embeddings, the
# last norm and the head are one more unit. labkit's script also all-reduces two single numbers in every step: count
# them, too.

# %%
sums = lab.ask("all-reduces of a rank in a step of data × tensor", default=16)
gathers = lab.ask("all-gathers of a rank in the same step", default=10)
share = lab.ask("share of the parameters that a rank of data × tensor holds between two steps", default=25, unit="%")

# %% [markdown]
# ## In code
#
# `init_device_mesh` makes the groups of all axes; each strategy gets the axis that it works along:
#
# ```python
# mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
# for block in model.blocks:
#     parallelize_module(block, mesh["tensor"], {"up": columns, "down": rows})  # and attention, lab 13
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
third = "pipeline × tensor" if N == 4 else "pipeline × data × tensor"
meshes = {"data × tensor": (1, 2), "pipeline × data": (2, 1), third: (2, 2)}  # ranks of pipeline and tensor
L, w = 4, 64
split, whole, ends = 12 * w * w + 7 * w, 6 * w, (256 + 128 + 2 + 256) * w  # of a block; embeddings, norm and head
lab.predict_each({sums: 4 * L * m + 2, gathers: L + 1})
lab.predict(share, (L * (split / 2 + whole) + ends) / (N // 2) / (L * (split + whole) + ends), "%", within=0.001)
lab.predict(off := "largest difference of a loss to one device's", 1e-9, how="at most")
options = {"global_batch_size": 2 * N, "precision": "fp64", "steps": 9, "shown": False}
alone = lab.launch(single, ranks=1, trace_memory=True, **options)
options |= {"accumulate": m, "profile": True, "trace_memory": True}
runs = {name: lab.launch(script, pipeline=p, tensor=t, **options) for name, (p, t) in meshes.items()}

# %%
import pandas as pd

kinds = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
spans = {name: run.timeline().of_step() for name, run in runs.items()}
table = pd.DataFrame({name: {k: sum(s.kind == k for s in each) / N for k in kinds} for name, each in spans.items()})
held = {name: run.memory().ranks[0].traced.categories for name, run in {"one device": alone, **runs}.items()}
of_rank = held["data × tensor"]["parameters"] / held["one device"]["parameters"]
differ = max((run.losses() / alone.losses() - 1).abs().max() for run in runs.values())
made = table["data × tensor"]
lab.measure_each({sums: made["all_reduce"], gathers: made["all_gather"], share: of_rank, off: differ})
display(table, draw.bars(held, unit="B", title="rank 0 at its peak"))
lab.score()

# %% [markdown]
# ## Why
#
# With *p* stages, L blocks and *m* micro-batches, a rank makes these calls in one step:
#
# | axis | sends | calls |
# |---|---|---|
# | tensor | sums of activations, in each of its blocks | 4 (L / p) m all-reduces |
# | data | weights and gradients of its blocks and the rest | L / p + 1 all-gathers, as many reduce-scatters |
# | pipeline | activations or their gradients, between stages | m receives in the first and last stage, 2 m in between |
#
# The tensor axis sends in every block and every micro-batch, the data axis once per step. A rank of 2 × 2 holds more
# than a quarter of the parameters: tensor parallelism leaves norms, embeddings and the head whole, and FSDP halves all
# of it. All three meshes train the same as one device does.
#
# This is one step of the last mesh. Stages compute in turn, and within a stage the tensor ranks wait for each other.
# (The bubble in the title does not count these waits; ideally it is (p - 1)/(m + p - 1), lab 12.)

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
# HSDP is `fully_shard` with a mesh of two axes, `init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate",
# "shard"))`: it shards along the second. In Hugging Face's `TrainingArguments` all sizes are set in one
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
#
# ### Appendix: what was claimed, and what the articles say
#
# "Use 3D Parallelism (Data + Pipeline + Tensor) for even bigger models (100B+ parameters)", says the third article
# (003, line 484).

# %%
lab.check()
