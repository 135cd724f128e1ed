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
# # 04 · Memory: where the bytes go
#
# **You will be able to** say what fills a GPU before you rent it, which part of that each strategy divides, and what to
# do about the rest. **20 minutes. You need** labs 01 and 03.
#
# This is a step of a model with 100 million parameters, in fp32 with AdamW, and 2 GB of activations. Parameters and
# optimizer state are there all the time. Activations, what layers save for backward, build up during forward; backward
# frees them layer by layer while gradients appear. The peak is what has to fit. (DDP differs in one thing: it holds
# buckets for all gradients all the time. `gradient_as_bucket_view=True`, which labkit sets, puts the gradients into
# them. By default gradients are stored beside the buckets, which takes 4 bytes per parameter more than in this lab.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 8  # samples per step, over all ranks
seven_billion: bool = True  # plan CPU offload, and a model of 7 billion parameters: some 20 seconds more

# %%
import labkit
from labkit_labs import Lesson, draw, sized

lab = Lesson("04_memory", ranks=nproc_per_node)
draw.step(parameters=0.4, gradients=0.4, optimizer=0.8, activations=2, unit="GB")

# %% [markdown]
# ## Your predictions
#
# The model is the small transformer of labkit's scripts, 256 wide with four blocks: 3.3 million parameters. Each of two
# ranks has four samples of 128 tokens; a token is one byte of text. A block saves about 16 values for each token and
# each unit of its width.

# %%
adam = lab.ask("AdamW's state: how many times the size of the parameters", default=1, unit="times")
activations = lab.ask("share of activations in DDP's peak", default=20, unit="%")
saved = lab.ask("FSDP's peak on two ranks, as a share of DDP's", default=50, unit="%")

# %% [markdown]
# ## Sixteen bytes per parameter
#
# In fp32 each parameter takes 4 bytes and its gradient 4 more. AdamW keeps two **moments** for each parameter, 4 bytes
# each: running means of the gradients (the direction) and of the squared gradients (the step is divided by the square
# root). Parameters, gradients and moments together are the **states**. **ZeRO** (zero redundancy optimizer) divides
# them among the N ranks, in three stages. In bytes per parameter:
#
# | | parameters | gradients | AdamW |
# |---|---|---|---|
# | DDP | 4 | 4 | 8 |
# | ZeRO-1 | 4 | 4 | 8 / N |
# | ZeRO-2 | 4 | 4 / N | 8 / N |
# | FSDP (ZeRO-3) | 4 / N | 4 / N | 8 / N |
#
# Under ZeRO-1 a rank updates its own part of the parameters and sends it to the others. ZeRO-2 leaves a rank only its
# own part of the gradients, FSDP only its own part of the parameters: blocks are gathered to compute. DeepSpeed has all
# three (stage 1, 2, 3); PyTorch has stage 1 as `ZeroRedundancyOptimizer`, stage 3 as FSDP, and nearly stage 2 as
# `fully_shard(…, reshard_after_forward=False)` (lab 05).
#
# **With 16 bits.** Autocast (`precision="bf16"`) casts weights for each matrix product; the states stay as above. (fp16
# on a T4 takes the same bytes, and needs a scaler, lab 10.) A model loaded in bf16 and trained with plain AdamW takes
# 8, but small updates are lost to rounding. So DeepSpeed, for one, keeps a **master copy** in fp32 for AdamW: weight,
# gradient, copy and moments, 2 + 2 + 4 + 8 bytes, make 16 again. **On a GPU** AdamW updates all parameters at once,
# which takes another 4 bytes per parameter during the update, 20 in all, unless `fused=True` (labkit's
# `optimizer="adamw_fused"`). 16 bytes per parameter is eight times the size of a bf16 checkpoint.
#
# `labkit.plan` works out the states and the activations without running anything, and `launch(plan)` keeps the
# prediction with the run. The picture shows the three stages in fp32.

# %%
draw.zero(4)

# %%
options = {"global_batch_size": global_batch_size}
names = {"DDP": "ddp", "ZeRO-1": "zero1", "FSDP": "fsdp"}
scripts = {name: sized(labkit.Script.load(strategy), width=256) for name, strategy in names.items()}
plans = {name: labkit.plan(script, nproc_per_node=lab.ranks, **options) for name, script in scripts.items()}

# %%
P = 4 * plans["DDP"].facts.elements  # bytes
states = {"DDP: parameters": P, "FSDP: parameters of all ranks": P}
states |= {"ZeRO-1: AdamW of all ranks": 2 * P, "FSDP: AdamW of all ranks": 2 * P}
lab.predict_each(states, "B", within=0.001)  # AdamW also counts its steps, 4 bytes for each tensor
lab.predict(adam, 2, "times", within=0.001)
peaks = {name: plan.peak.bytes for name, plan in plans.items()}
shares = {activations: plans["DDP"].peak.categories["activations"], saved: peaks["FSDP"]}
lab.predict_each({name: size / peaks["DDP"] for name, size in shares.items()}, "%", within=0.06)
lab.predict(same := "CPU offload: largest relative difference of a loss", 1e-6, how="at most")
lab.predict_each({f"{name}: peak": size for name, size in peaks.items()}, "B", within=0.06)

# %% [markdown]
# During one step of the first three runs every rank records everything that torch allocates. That makes them slow, so
# their panels are hidden. The last one is FSDP with CPU offload, explained below.

# %%
runs = {name: lab.launch(plan, steps=4, shown=False) for name, plan in plans.items()}
offloaded = lab.launch(scripts["FSDP"], steps=4, cpu_offload=True, shown=False, **options)

# %%
held = {name: [rank.traced for rank in run.memory().ranks] for name, run in runs.items()}
first, top = held["DDP"][0].categories, {name: max(each.bytes for each in ranks) for name, ranks in held.items()}
results = {
    "DDP: parameters": first["parameters"],
    "FSDP: parameters of all ranks": sum(each.categories["parameters"] for each in held["FSDP"]),
    "ZeRO-1: AdamW of all ranks": sum(each.categories["optimizer"] for each in held["ZeRO-1"]),
    "FSDP: AdamW of all ranks": sum(each.categories["optimizer"] for each in held["FSDP"]),
    adam: first["optimizer"] / first["parameters"],
    activations: first["activations"] / top["DDP"],
    saved: top["FSDP"] / top["DDP"],
    same: (offloaded.losses() / runs["FSDP"].losses() - 1).abs().max(),
}
lab.measure_each(results | {f"{name}: peak": size for name, size in top.items()}, run=runs["FSDP"])
planned = {name: each.peak.categories for name, each in plans.items()}
draw.bars({name: ranks[0].categories for name, ranks in held.items()}, planned, unit="B", title="rank 0 at its peak")

# %% [markdown]
# ## Why
#
# **AdamW's moments are half of the states**, so ZeRO-1 alone already helps. **FSDP needs more than 1/N of DDP's memory
# while the peak is in forward or backward**: it does not divide activations, which are the largest part here, and it
# holds some whole blocks beside the shards. Where the optimizer's step is the peak of both, FSDP needs 1/N. On a model
# with few parameters and many activations it saves little; lab 05 has both kinds.
#
# *Communication* is what FSDP has gathered: here the last block (3 MiB), the one before it, prefetched (3), and what is
# in no block, the embeddings and the output layer (0.6). DDP's buckets are counted as gradients, which lie in them
# (`gradient_as_bucket_view`). *Temporary* is what an operation needs only while it runs. At FSDP's peak, early in
# backward, few gradients exist. The newest (1 MiB) is counted as a gradient when measured and as temporary in the
# prediction; the total is the same.
#
# **Activations of a block:** GPT-2's block, whose MLP is four times as wide, saves 16 values for each token and unit of
# width, without dropout and with attention that does not store its scores: 64 bytes in fp32, 32 in 16 bits. (With
# autocast nearer 60% remain, because the inputs of layer norms stay in fp32, and the weights' 16-bit copies take 2
# bytes per parameter: question 3 below.) Here that is 4 blocks × 512 tokens × 256 × 64 bytes = 32 MiB. For the loss add
# three tensors as large as the logits, 4 bytes × tokens × vocabulary. For other blocks, Hugging Face's too, use
# `labkit.plan` (lab 21).
#
# What to do about each part:
#
# - **States:** use FSDP (torch's ZeRO-1 saves less and is often slower, lab 05), then **CPU offload**
#   (`cpu_offload=True`): shards and AdamW's moments stay in host memory, a shard is copied to the GPU when its block is
#   about to compute, and AdamW runs on the CPU. The last run above did that, with the same losses. The host needs 16
#   bytes per parameter for all of its ranks together, and a step takes at least ten times as long, because shards cross
#   PCIe (lab 05). On a CPU it saves nothing: host and device share one memory.
# - **Activations:** process fewer samples at a time (accumulate gradients; if FSDP reduces them only after the last
#   micro-batch, as in labkit's script, a rank holds whole gradients until then), recompute activations (activation
#   checkpointing), or use half precision.
#
# The picture shows the memory per GPU in GB, for a model of the given size with 1 GB of activations and fused AdamW
# (otherwise its update needs 20 bytes per parameter instead of 16), not counting gathered blocks and buffers:

# %%
T4 = 15.3  # GB that torch can use there: the 14.24 GiB of the plans below


def of_fsdp(ranks, billions):
    each = billions / ranks
    return draw.step(4 * each, 4 * each, 8 * each, 1, "GB", top=16 * billions + 1, limit=T4, limit_name="T4:")


lab.explore(of_fsdp, ranks=[1, 2, 8], billions=[0.1, 1.5, 7])
lab.score()

# %% [markdown]
# **Other tools show more than these bytes.** On a CPU, `top` shows a process's *resident set*: all that it has in
# physical memory. On a GPU, `nvidia-smi` shows what the process has reserved there, with CUDA's context and whatever
# torch's allocator keeps for later (`torch.cuda.memory_reserved()`). Neither reliably falls when a tensor is freed. So
# to compare models, use what torch allocates (`torch.cuda.max_memory_allocated()`); to see whether a process fits, add
# about half a GiB for CUDA to `torch.cuda.max_memory_reserved()`. This is how the memory of DDP's run was divided:

# %%
print(runs["DDP"].memory().ranks[0].outside().replace("; ", "\n"))

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# The model is a transformer of 350 million parameters, the size of GPT-2 medium. At 16 bytes each that is 5 GiB. A T4
# leaves 14 GiB for tensors: its 16 GB are less than 15 GiB, and the driver and CUDA keep some. The global batch is
# fixed, so a rank has four samples on 2 × T4 and one on 8 × A100.

# %%
medium = {"vocabulary": 50257, "context": 512, "width": 1024, "heads": 16, "layers": 20}
gpt = {name.upper(): sized(labkit.Script.load(name), **medium) for name in ("ddp", "fsdp")}
gpt |= {"FSDP, CPU offload": (gpt["FSDP"], {"cpu_offload": True})} if seven_billion else {}
lab.plans(gpt, global_batch_size=8)

# %% [markdown]
# On a T4 even DDP fits. FSDP needs a third less on two ranks, and 72% less on eight, where activations are few: not
# 7/8, because its own peak is in backward. On the A100s DDP's peak is in AdamW's update, with 20 bytes per parameter
# and no activations. On two T4s FSDP's step takes as long as DDP's; on the A100s it is shorter, although it waits more,
# because each rank updates only its part of the parameters.
#
# A popular article gives 28 GB for a model of 7 billion parameters on one GPU, and 14 GB each with FSDP on two. 28 GB
# is the parameters alone, and 14 GB half of them. With gradients and AdamW it is 112 GB, and 56 GB on each of two,
# before any activations. The planner can show it by a rehearsal of the script on tensors without data:

# %%
large = {"vocabulary": 32000, "context": 2048, "width": 4096, "heads": 32, "layers": 33}
if seven_billion:
    seven = sized(labkit.Script.load("fsdp"), **large)
    plan = labkit.plan(seven, nproc_per_node=2, device="A100 80", global_batch_size=2)
    name, parts = "7B, FSDP on 2: parameters and AdamW of a rank", plan.peak.categories
    lab.predict(name, 12 * plan.facts.elements / 2, "B", within=0.01)
    lab.calculated(name, parts["parameters"] + parts["optimizer"], because="rehearsed, not run")
    display(plan)
else:
    print("(skipped on this page: set seven_billion = True)")

# %% [markdown]
# ## Try this
#
# 1. `labkit.plan(scripts["FSDP"], nproc_per_node=4, global_batch_size=16)`: which parts shrink with four ranks, and
#    which do not?
#    <details><summary>Answer</summary>Parameters and AdamW halve again, 6.3 to 3.2 MiB and 12.7 to 6.3. Activations
#    stay at 32 MiB, because a rank still has four samples. So the peak falls only from 61.5 to 52.0 MiB, and DDP's
#    stays at 86.3 whatever the number of ranks.</details>
# 2. `labkit.plan(scripts["DDP"], nproc_per_node=2, activation_checkpointing=True, **options)`: what is left of the
#    activations?
#    <details><summary>Answer</summary>2 MiB of 32: the inputs of the blocks. The peak falls from 86.3 to 63.7 MiB. It
#    is still in backward, while one block is recomputed (11 MiB of temporary tensors).</details>
# 3. Plan the same with `precision="bf16"` instead. Do the states shrink?
#    <details><summary>Answer</summary>No: parameters,
#    gradients and AdamW take 50.7 MiB, as before. <code>precision="bf16"</code> computes in 16 bits and keeps its
#    weights in 32. Activations shrink, from 32.1 to 25.5 MiB, but do not halve: layer norms, the residual stream and
#    the loss stay in fp32, and the 16-bit copies of the weights are kept for backward.</details>
#
# **In your own code:** LoRA freezes most weights, which then need neither gradients nor AdamW's state; activations
# remain mostly the same. bf16 weights without a master copy halve all states, but small updates are lost to rounding.
#
# ## Sources
#
# Rajbhandari et al., *ZeRO* (arXiv 1910.02054): section 3.1 has the 16 bytes, section 5 the three stages. Korthikanti
# et al. (arXiv 2205.05198): the activations of a transformer layer.
#
# ### Appendix: what was claimed, and what the articles say
#
# The articles say that FSDP keeps 1/N of everything. The 28 and 14 GB are those of *Distributed Training with PyTorch:
# DDP vs FSDP* (002, lines 825-827).

# %%
articles = {saved: ("FSDP keeps 1/N of everything", 1 / lab.ranks)}
lab.check(articles | ({name: ("002, line 827: 14 GB", 14e9)} if seven_billion else {}))
