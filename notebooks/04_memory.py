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
# # 04 · Memory: what fills a GPU, and who has to hold it
#
# DDP keeps everything on every rank: parameters, gradients, optimizer state. However many GPUs you add, you cannot
# train a larger model than on one of them. This lab adds up what that costs, and what is left when each rank keeps only
# its part.
#
# **You will be able to** say what fills a GPU before you rent it, which part of that each stage of ZeRO (a way to
# divide the states) divides among the ranks, and what to do about the rest. **30 minutes. You need** labs 01, 02 and
# 03.
#
# This is a step of a model with 100 million parameters, in fp32, with 2 GB of activations. The optimizer is SGD with
# momentum, which keeps one number for each parameter. Parameters and optimizer state are there all the time.
# **Activations**, what layers save for backward, build up during forward; backward frees them layer by layer while
# gradients appear. The **peak** is what has to fit.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 8  # samples per step, over all ranks
seven_billion: bool = True  # plan a model of 7 billion parameters as well: some 20 seconds more

# %%
import labkit
from labkit_labs import Lesson, draw, sized

lab = Lesson("04_memory", ranks=nproc_per_node)
draw.step(parameters=0.4, gradients=0.4, optimizer=0.4, activations=2, unit="GB")

# %% [markdown]
# ## Your predictions
#
# The model is the small transformer of labkit's scripts, 256 wide with four blocks: 3.3 million parameters, trained
# in fp32 with AdamW. Each of two ranks has four samples of 128 tokens; a token is one byte of text. FSDP, the last of
# the strategies below, divides parameters, gradients and optimizer state among the ranks. The first question is about
# training with `precision="bf16"`: torch's *autocast* then computes in bf16, a format of 16 bits. In fp32 the three
# take 16 bytes together (lab 01).

# %%
states = lab.ask("bytes per parameter for parameters, gradients and AdamW, if it computes in bf16", default=8, unit="B")
activations = lab.ask("share of activations in DDP's peak", default=20, unit="%")
saved = lab.ask("FSDP's peak on two ranks, as a share of DDP's", default=50, unit="%")

# %% [markdown]
# ## Sixteen bytes per parameter
#
# AdamW keeps two **moments** for each parameter: running means of the gradients (the direction of the update) and of
# the squared gradients (the update is divided by their square root). Parameters, gradients and the optimizer's state
# together are the **states**. Bytes per parameter:
#
# | | parameter | gradient | optimizer | together |
# |---|---|---|---|---|
# | fp32, also under autocast | 4 | 4 | moments 4 + 4 | 16 |
# | 16-bit weights (ZeRO paper, DeepSpeed) | 2 | 2 | fp32 copy 4, moments 4 + 4 | 16 |
#
# **Autocast** (`precision="bf16"`) casts weights for each matrix product and keeps the states in fp32. In the second
# row the weights themselves have 16 bits. Small updates would be lost to rounding there, so the optimizer updates a
# **master copy** in fp32. Both rows add up to 16, which is eight times the size of a bf16 checkpoint.
#
# All ranks need the states, but not all of the time: the optimizer updates one parameter independently of the others.
# **ZeRO** (zero redundancy optimizer) has three stages. In stage 1 a rank keeps the optimizer's state of its own 1/N of
# the parameters, updates these and sends them to the others. In stage 2 it also keeps only the gradients of its own
# part, in stage 3 only its own part of the parameters: a block is gathered when it is about to compute. Stage 3 is what
# PyTorch calls FSDP.

# %%
draw.zero(8, mixed=True, billions=7)

# %% [markdown]
# The paper says that stage 1 saves up to 4 times, stage 2 up to 8 times, stage 3 N times. Here are the factors for both
# rows of the table above. "Up to" is for many ranks; and 4 and 8 are for 16-bit weights, where the optimizer holds 12
# of the 16 bytes. In fp32 it holds 8, and the limits are 2 and 4:

# %%
import pandas as pd


def per_parameter(stage, ranks, parameters, gradients, optimizer):
    """Bytes per parameter on each rank; stage 0 is DDP."""
    sizes = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
    divided = ["optimizer", "gradients", "parameters"][:stage]
    return {name: size / ranks if name in divided else size for name, size in sizes.items()}


kinds = {"16-bit weights": (2, 2, 12), "fp32": (4, 4, 8)}
factors = {
    (f"ZeRO-{stage}", kind): {f"{n} ranks": 16 / sum(per_parameter(stage, n, *sizes).values()) for n in (2, 8, 512)}
    for stage in (1, 2, 3)
    for kind, sizes in kinds.items()
}
pd.DataFrame(factors).T.map("{:.4g}×".format)

# %% [markdown]
# ## Measure it
#
# Four trainings follow, each on two ranks. PyTorch has stage 1 as `ZeroRedundancyOptimizer` and stage 3 as FSDP. It
# has no stage 2; the nearest is FSDP that keeps what it has gathered from forward until backward ends (lab 05),
# labkit's `zero2`. Between two steps it holds less than stage 2, in which every rank keeps all parameters. The
# library DeepSpeed has all three stages.
#
# `labkit.plan` predicts what a rank will hold. It takes the script through a step on tensors that have a shape but no
# data, which allocates nothing: a **rehearsal**. `launch(plan)` then trains, and in one step each rank records
# everything that torch allocates. That step is slow, so the panels are hidden.

# %%
strategies = {"DDP": "ddp", "ZeRO-1": "zero1", "nearly ZeRO-2": "zero2", "FSDP": "fsdp"}
scripts = {name: sized(labkit.Script.load(strategy), width=256) for name, strategy in strategies.items()}
options = {"nproc_per_node": lab.ranks, "global_batch_size": global_batch_size}
plans = {name: labkit.plan(script, **options) for name, script in scripts.items()}
runs = {name: lab.launch(plan, steps=4, shown=False) for name, plan in plans.items()}

# %%
elements = plans["DDP"].facts.elements  # the number of parameters


def bytes_per_parameter(run):
    """What a rank holds at its peak, by category: the mean over the ranks."""
    return pd.DataFrame([rank.traced.categories for rank in run.memory().ranks]).mean() / elements


rows = ["parameters", "gradients", "optimizer", "activations", "communication", "temporary"]
table = pd.DataFrame({name: bytes_per_parameter(run) for name, run in runs.items()}).reindex(rows).fillna(0)
table.loc["together"] = table.sum()
table.round(1)

# %%
planned = {name: plan.peak.categories for name, plan in plans.items()}
measured = {name: (column.drop("together") * elements).to_dict() for name, column in table.items()}
draw.bars(measured, planned, unit="B", title="a rank at its peak")

# %% [markdown]
# Parameters and AdamW's moments are as the formula says: 4 and 8 bytes, or half of that. The formula leaves out the
# rest:
#
# - *Activations* are the largest part here. No stage of ZeRO divides them: a rank has its own samples.
# - *Communication*, under FSDP, is what it has gathered for the moment: here one block (3 MiB), the one before it,
#   gathered in advance (3), and what is in no block (0.6): the **embeddings**, tables with a vector for each possible
#   token and each position, and the output layer, also called the head. `zero2` has gathered everything: its peak is
#   at the end of forward, before there are gradients, and the buffer of the last gather is still there, a block more.
#   DDP and ZeRO-1 have nothing there on a CPU; on GPUs they do, see the plans at the end.
# - *Gradients* depend on when the peak is. DDP has buckets for all gradients all the time, and labkit lets the
#   gradients lie in them (`gradient_as_bucket_view=True`; by default they lie beside the buckets, which takes 4 bytes
#   per parameter more). At FSDP's peak, early in backward, few gradients exist.
# - *Temporary* is what an operation needs only while it runs.

# %%
ddp, fsdp = table["DDP"], table["FSDP"]
in_bf16 = labkit.plan(scripts["DDP"], **options, precision="bf16").peak
three = sum(in_bf16.categories[part] for part in rows[:3]) / elements
print(f"DDP computing in bf16, planned: {three:.1f} bytes per parameter for parameters, gradients and AdamW")
lab.verify(states, 16, three, "B", within=0.01, planned=True, because="autocast keeps all three in fp32")
lab.verify("FSDP: parameters of a rank, in bytes per parameter", 4 / lab.ranks, fsdp["parameters"], within=0.001)
lab.verify("FSDP: AdamW of a rank, in bytes per parameter", 8 / lab.ranks, fsdp["optimizer"], within=0.001)
peak = {name: plan.peak.bytes for name, plan in plans.items()}
share, predicted = ddp["activations"] / ddp["together"], planned["DDP"]["activations"] / peak["DDP"]
lab.verify(activations, predicted, share, "%", within=0.06)
lab.verify(saved, peak["FSDP"] / peak["DDP"], fsdp["together"] / ddp["together"], "%", within=0.06)
lab.verify_each({f"{name}: peak": (peak[name], table[name]["together"] * elements) for name in plans}, "B", within=0.06)
lab.score()

# %% [markdown]
# ## Why FSDP needs more than half
#
# It divides the states by N, but not the activations, and it holds some whole blocks beside its shards. Only where
# the optimizer's update is the peak of both, because activations are few, does FSDP need 1/N of DDP's memory. With
# few parameters and many activations it saves little, as here; the model of lab 05 is of the other kind.
#
# **How large are the activations?** A block of GPT-2's kind, whose MLP is four times as wide as the block, saves 16
# values for each token and each number of its width, without dropout and with attention that does not store its
# scores (a number for each pair of tokens): 64 bytes in fp32, 32 in 16 bits. (Under autocast nearer 60% remain than
# half, because the inputs of layer norms stay in fp32, and the weights' 16-bit copies take 2 bytes per parameter.)
# Here that is 4 blocks × 512 tokens × 256 × 64 bytes = 32 MiB. The loss needs three tensors as large as the
# **logits** (the model's scores of all possible next tokens), 4 bytes × tokens × vocabulary, here 1.5 MiB together.
# Backward begins with them and has freed them when it comes to the last block, where the peak is here. For other
# blocks, ask `labkit.plan`.
#
# What to do about each part:
#
# - **States:** use FSDP (lab 05). torch's ZeRO-1 saves less, and is often slower.
# - **Activations:** process fewer samples at a time and accumulate gradients (lab 03), recompute activations in
#   backward (lab 12), or compute in 16 bits (lab 11).
# - **Both**, when only some weights are to be trained: LoRA, which trains small additions (lab 22).
#
# The picture shows the memory per GPU under FSDP in GB, for a model of the given size with 1 GB of activations, not
# counting gathered blocks and buffers:

# %%
T4 = 15.3  # GB that torch can use there: the 14.24 GiB of the plans below


def under_fsdp(ranks, billions):
    size = billions / ranks
    return draw.step(4 * size, 4 * size, 8 * size, 1, "GB", top=16 * billions + 1, limit=T4, limit_name="T4:")


lab.explore(under_fsdp, ranks=[1, 2, 8], billions=[0.1, 1.5, 7])

# %% [markdown]
# ## What other tools show
#
# On a CPU, `top` shows a process's *resident set*: all that it has in physical memory. On a GPU, `nvidia-smi` shows
# what the process has taken from the GPU: CUDA's *context* (its code and its libraries' buffers, about half a GiB), and
# whatever torch's allocator keeps for later (`torch.cuda.memory_reserved()`). Neither reliably falls when a tensor is
# freed. To compare models, use what torch has allocated, `torch.cuda.max_memory_allocated()`. To see whether a process
# fits, use `torch.cuda.max_memory_reserved()` and add the context. This is how the memory of DDP's run was divided:

# %%
print(runs["DDP"].memory().ranks[0].outside().replace("; ", "\n"))

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# The model is a transformer of 350 million parameters, the size of GPT-2 medium. (In the cell, `vocabulary` is the
# number of possible tokens, and `context` the tokens of a sample.) At 16 bytes each that is 5 GiB. A T4 leaves 14 GiB
# for tensors: its 16 GB are less than 15 GiB, and the driver and CUDA keep some. The global batch is fixed, so a rank
# has four samples on 2 × T4 and one on 8 × A100.

# %%
medium = {"vocabulary": 50257, "context": 512, "width": 1024, "heads": 16, "layers": 20}
gpt = {name.upper(): sized(labkit.Script.load(name), **medium) for name in ("ddp", "fsdp")}
on_gpus = lab.plans(gpt, global_batch_size=8)
display(on_gpus)

# %%
for device in ("2xT4", "8xA100 80"):
    plain, divided = (on_gpus.judged[name, device].peak for name in ("DDP", "FSDP"))
    print(f"{device}: FSDP needs {1 - divided.bytes / plain.bytes:.0%} less. DDP's peak is in {plain.phase}.")
for name, script in gpt.items():
    print(f"{name}: up to {labkit.plan(script, device='2xT4', global_batch_size=8).advice.largest} samples on each T4")

# %% [markdown]
# On a T4 even DDP fits. FSDP saves a larger share on eight ranks than on two: the states are divided by eight, and with
# one sample on each rank there are few activations.
#
# DDP has a part here that it does not have on a CPU: *communication*. At the start of its second step it replaces its
# buckets by others, filled in the order in which gradients became ready in the first step. NCCL may hold on to the old
# ones until that step's backward, so the plan counts them: 4 bytes more per parameter, 20 with the states.
#
# AdamW's update also needs memory of its own on a GPU: by default torch updates all parameters together, operation by
# operation (`foreach=True`), and an intermediate result as large as all of a rank's parameters takes 4 bytes for
# each. But by then activations and old buckets are gone, so under DDP it is the peak only where these are smaller.
# Under FSDP gradients count, too: at the peak of backward a rank has few of them, at the update all of its own. That
# is why the update is the peak in the plan of 7 billion parameters on two ranks below. With `fused=True` (labkit's
# `optimizer="adamw_fused"`) one GPU program (a *kernel*) makes the whole update and needs no such result. That is
# faster, but it does not lower a peak that is in backward.
#
# **What to do with the memory that FSDP frees?** Train a larger model, or more samples at a time; the cell above also
# prints how many samples of 512 tokens fit on each T4.
#
# **Seven billion parameters.** The states are 16 × 7 = 112 GB, more than an A100 or an H100 has (80 GB): under DDP it
# does not matter how many there are. Under FSDP each of 8 ranks holds 14 GB of them, each of 2 holds 56 GB. A popular
# article says 28 GB for one GPU and 14 GB for each of two; that is the parameters alone. The plans are for one sample
# of 2,048 tokens on each rank, whose activations take 16 GiB. (On two ranks the
# gradients and AdamW's intermediate result take 13 GiB each, together more than that, so the peak is at the update.)

# %%
large = {"vocabulary": 32000, "context": 2048, "width": 4096, "heads": 32, "layers": 33}
if seven_billion:
    seven = sized(labkit.Script.load("fsdp"), **large)
    of_ranks = {n: labkit.plan(seven, nproc_per_node=n, device="A100 80", global_batch_size=n) for n in (2, 8)}
    display(draw.bars(predicted={f"{n} ranks": plan.peak.categories for n, plan in of_ranks.items()}, unit="B"))
    for n, plan in of_ranks.items():
        states = plan.peak.categories["parameters"] + plan.peak.categories["optimizer"]
        name = f"7B, FSDP on {n}: parameters and AdamW of a rank"
        lab.verify(name, 12 * plan.facts.elements / n, states, "B", within=0.01, planned=True, because="rehearsed")
    display(lab.score())
else:
    print("(skipped on this page: set seven_billion = True)")

# %% [markdown]
# ## Recap
#
# For *N* ranks, and a model whose parameters take *P* bytes in fp32. All figures are per rank. What is sent is to be
# multiplied by (N - 1) / N; activations come on top of what is held.
#
# | | held | sent by each rank in a step | waits | use it if |
# |---|---|---|---|---|
# | one rank | 4 P: parameters, gradients, two moments | nothing | never | it is fast enough |
# | DDP | 4 P | 2 P | for the last bucket, and for a slower rank | a step fits |
# | ZeRO-1, as in torch | 2 P + 2 P / N | 3 P: all-reduce, new parameters | as DDP, and for the update | lab 06 |
# | ZeRO-2 (DeepSpeed) | P + 3 P / N | 2 P: reduce-scatter, all-gather | as ZeRO-1 | lab 06 |
# | FSDP, or ZeRO-3 | 4 P / N, and a block or two | lab 05 | lab 05 | lab 05 |
#
# With a reduce-scatter instead of the all-reduce, as in the paper, ZeRO-1 sends 2 P, too. In ZeRO-2 as the paper has
# it all parameters stay, and the all-gather follows the update. labkit's `zero2` sends the same bytes at other times:
# it gathers a block before its forward and frees it after its backward.
#
# Even so, ZeRO-1 and ZeRO-2 leave all parameters on every rank. Lab 05 divides these as well.
#
# ## Try this
#
# 1. `labkit.plan(scripts["FSDP"], nproc_per_node=4, global_batch_size=16)`: which parts shrink with four ranks, and
#    which do not?
#    <details><summary>Answer</summary>Parameters and AdamW halve again, 6.3 to 3.2 MiB and 12.7 to 6.3. Activations
#    stay at 32 MiB, because a rank still has four samples. So the peak falls only from 61.5 to 52.0 MiB, and DDP's
#    stays at 86.3 whatever the number of ranks.</details>
# 2. Which is larger at the peak of DDP with a single sample of 16 tokens per rank, states or activations? Plan it:
#    `labkit.plan(sized(scripts["DDP"], context=16), nproc_per_node=2, global_batch_size=2)`.
#    <details><summary>Answer</summary>The states: 50.3 MiB of 52.4, and 1.0 of activations. FSDP then
#    holds 35.0 MiB, two thirds of that and not half: what is gathered, and a block's gradients on their way, come on
#    top (9.6).</details>
# 3. `print(in_bf16)`: do activations halve when the script computes in 16 bits?
#    <details><summary>Answer</summary>No: they shrink from 32.1 to 25.5 MiB. Layer norms, the sum that runs through
#    all blocks and the loss stay in fp32, and the 16-bit copies of the weights are kept for backward.</details>
#
# ## Sources
#
# Rajbhandari et al., *ZeRO* (arXiv 1910.02054): section 3.1 has the 16 bytes, section 5 the three stages. Korthikanti
# et al. (arXiv 2205.05198): the activations of a transformer layer.
