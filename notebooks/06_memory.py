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
# # 06 · Memory: where the bytes go
#
# A model of 7 billion parameters needs 28 GB, and FSDP on two GPUs 14 GB on each: so says the second article (002,
# lines 825-827). You will count what a rank really holds, byte by byte: parameters, gradients, optimizer state,
# activations, communication buffers. Each number is **predicted before the run** and measured in a real training step
# of real ranks, under DDP, ZeRO-1 and FSDP. At the end the 7B example is worked right.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 8  # samples per optimizer step, over all ranks
seven_billion: bool = True  # plan the 7B example, too: some ten seconds

# %%
import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("06_memory")
N = nproc_per_node

# %% [markdown]
# ## Sixteen bytes per parameter
#
# In fp32 with AdamW every parameter has a gradient and two moments: 4 + 4 + 8 bytes. (The ZeRO paper, arXiv 1910.02054,
# section 3.1, has 16 for mixed precision, too: 2 + 2 + 12.) The optimizer also counts its steps, in one number of 4
# bytes per tensor. What strategy divides which of the three?
#
# | | parameters | gradients | optimizer state |
# |---|---|---|---|
# | DDP | 4 P | 4 P | 8 P |
# | ZeRO-1 | 4 P | 4 P | 8 P / N |
# | FSDP (ZeRO-3) | 4 P / N | 4 P / N | 8 P / N |
#
# The model is the small decoder-only transformer of labkit's scripts, twice as wide:

# %%
model = Script.load("ddp").cells["model"].text.replace("width=128", "width=256")
defined = {}
exec(model, defined)  # its cell, run here as well, to count
whole = defined["Model"]()
P = sum(p.numel() for p in whole.parameters())
tensors = len(list(whole.parameters()))
print(f"{P:,} parameters in {tensors} tensors: {16 * P:,} bytes of states")
print(whole.blocks[0])
del whole

# %% [markdown]
# ## Predict
#
# The states by the table above. The peak is more: activations, and what strategies need to talk. `labkit.plan` finds it
# in two independent ways, by formulas and by a rehearsal of the script on tensors that hold no data.

# %%
scripts = {name: Script.load(name).with_cells(model=model) for name in ("ddp", "zero1", "fsdp")}
options = {"global_batch_size": global_batch_size}
plans = {name: labkit.plan(scripts[name], nproc_per_node=N, **options) for name in ("ddp", "fsdp")}
plans["fsdp"]

# %%
SAYS = "articles: FSDP keeps 1/N of everything"
claims.predict("DDP: parameters", 4 * P, "B")
claims.predict("DDP: optimizer state", 8 * P + 4 * tensors, "B")
claims.predict("DDP: peak", plans["ddp"].formulas.bytes, "B", within=0.02)
claims.predict("ZeRO-1: optimizer state of all ranks", 8 * P + 4 * tensors, "B")
claims.predict("FSDP: parameters of all ranks", 4 * P, "B")
claims.predict("FSDP: optimizer state of all ranks", 8 * P + N * 4 * tensors, "B")
claims.predict("FSDP: peak", plans["fsdp"].formulas.bytes, "B", within=0.06)
claims.predict("FSDP: peak over DDP's", 1 / N, "%", how="at least", article=SAYS)
display(claims)

# %% [markdown]
# ## Measure
#
# `launch(plan)` writes the prediction into the run's folder before the first rank starts. In the run every rank traces
# what torch allocates during one step, which the plan does not know.

# %%
runs = {"ddp": labkit.launch(plans["ddp"], steps=4, env=env)}
runs["ddp"].wait()
runs["zero1"] = labkit.launch(scripts["zero1"], nproc_per_node=N, steps=4, env=env, trace_memory=True, **options)
runs["zero1"].wait()
runs["fsdp"] = labkit.launch(plans["fsdp"], steps=4, env=env)
runs["fsdp"].wait()

# %%
held = {name: [rank.traced for rank in run.memory().ranks] for name, run in runs.items()}


def everywhere(strategy, category):
    """Bytes of a category over all ranks."""
    return sum(peak.categories[category] for peak in held[strategy])


ddp, zero1, fsdp = (runs[name] for name in ("ddp", "zero1", "fsdp"))
claims.measure("DDP: parameters", held["ddp"][0].categories["parameters"], run=ddp)
claims.measure("DDP: optimizer state", held["ddp"][0].categories["optimizer"], run=ddp)
claims.measure("ZeRO-1: optimizer state of all ranks", everywhere("zero1", "optimizer"), run=zero1)
claims.measure("FSDP: parameters of all ranks", everywhere("fsdp", "parameters"), run=fsdp)
claims.measure("FSDP: optimizer state of all ranks", everywhere("fsdp", "optimizer"), run=fsdp)
peaks = {name: max(peak.bytes for peak in ranks) for name, ranks in held.items()}
claims.measure("DDP: peak", peaks["ddp"], run=ddp, because=f"it is in {held['ddp'][0].phase}")
claims.measure("FSDP: peak", peaks["fsdp"], run=fsdp, because=f"it is in {held['fsdp'][0].phase}")
claims.measure("FSDP: peak over DDP's", peaks["fsdp"] / peaks["ddp"], run=fsdp, because="activations are not divided")
display(claims)

# %% [markdown]
# FSDP does not divide the activations, and while a block computes, the whole of it is there. So each of two ranks
# always needs more than half of what one needs. Category by category:

# %%
fsdp.memory()

# %% [markdown]
# ## The 7B example, worked right
#
# The second article gives 28 GB for a 7B model on one GPU and 14 GB each with FSDP on two. 28 GB are the parameters
# alone. With gradients and AdamW's state it is 112 GB; two ranks hold 56 GB each, before the first activation.

# %%
if seven_billion:
    seven = Script.load("fsdp")
    sizes = "vocabulary=256, context=128, width=128, heads=4, layers=4"
    large = "vocabulary=32000, context=2048, width=4096, heads=32, layers=33"
    data = seven.cells["data"].text.replace("context=128", "context=2048")
    seven = seven.with_cells(model=seven.cells["model"].text.replace(sizes, large), data=data)
    plan = labkit.plan(seven, nproc_per_node=2, device="A100 80", global_batch_size=2)
    name = "7B, FSDP on 2: parameters and optimizer state of a rank"
    claims.predict(name, 12 * plan.facts.elements / 2, "B", within=0.01, article="002, line 827: 14 GB", said=14e9)
    rehearsed = plan.rehearsed.categories
    claims.measure(name, rehearsed["parameters"] + rehearsed["optimizer"], because="rehearsed, not run")
    display(plan)

# %% [markdown]
# Nothing of this was run: the plan's rehearsal goes through the script's own step on tensors without data. That it can
# be believed is what the small runs above have shown.

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `nproc_per_node = 4`: which rows of the table above change, and which do not?
# - `labkit.plan(scripts["ddp"], nproc_per_node=N, activation_checkpointing=True, **options)`, which adds the extra that
#   declares this option: the peak moves to another moment. Where?
# - `precision="bf16"`: the states stay what they are. Why?
# - Make a claim fail: let the ranks keep a copy of every weight, of which the plan knows nothing, and see which claims
#   notice: after the plans are made, `model.replace("return self.unembed(", "self.twice = [p * 1 for p in
#   self.parameters()]; return self.unembed(")`, and launch scripts with that model instead of the plans.
