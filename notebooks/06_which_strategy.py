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
# # 06 · Which strategy? Two totals, before any run
#
# FSDP holds less than DDP and sends more. Is that worth it? Two totals exclude strategies before any run: what a rank
# must **hold** and what must be **sent**. Between those that remain, a plan and a few steps decide.
#
# **You will be able to** place every strategy on a map of these two, choose one with reasons, and say how many days and
# how much money a training takes. **40 minutes. You need** labs 03, 04 and 05.
#
# If memory is short, go down on the map; if the link is slow, go left. The map shows neither computing nor waiting:
# plans do, at the end. You know where DDP stands: every rank holds everything, and gradients are sent. Its ring counts
# the states only, without activations. Where are the others?

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks: 2, 4 or 8
strategies: str = "ddp zero1 zero2 fsdp tensor_parallel pipeline"  # to be run
guides: bool = True  # plan models of 405 million and 7 billion parameters, a minute; otherwise one of 113 million
dollars: float = 2.0  # for one GPU and hour; set what you pay

# %%
from labkit import Script, plan
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.traffic import noting_bytes, sent_in_a_step

lab, names = Lesson("06_which_strategy", ranks=nproc_per_node), strategies.split()
blocks, width, context, batch = 8, 192, 32, 8
block = 4 * (12 * width * width + 13 * width)  # bytes: attention 4 and MLP 8 squares; biases and norms 13 rows
root = 4 * (256 + context + 2 + 256) * width  # bytes: embeddings, the last norm and the head
parameters = blocks * block + root  # bytes
draw.choice({"ddp": (2 * (nproc_per_node - 1) * parameters, 4 * parameters)}, rings="states only")

# %% [markdown]
# Two strategies do more than to divide the batch among the ranks. They have labs of their own (13 and 14), which you
# do not need here:
#
# - A **pipeline** gives each rank some of the blocks, its **stage**. A rank computes its stage for a part of the batch,
#   a **micro-batch**, and sends the result to the next rank; while the next rank computes on it, this one starts the
#   next micro-batch. (1F1B, the order used here, alternates one forward and one backward.)
# - **Tensor parallelism** gives each rank some columns or rows of every matrix. Each rank works on all samples, and the
#   partial results are added up by an all-reduce, twice in each block in forward and twice in backward.
#
# Later stages of a pipeline idle until the first micro-batch arrives and after their last backward, earlier stages
# while they wait for gradients to come back. With more micro-batches that is a smaller part of the step: with p
# stages and m micro-batches it is (p - 1) / (m + p - 1). For two stages, F is a forward, B a backward, and a dot is
# idle time:
#
# ```text
# 1 micro-batch:
#   rank 0  F1 ·  ·  B1
#   rank 1  ·  F1 B1 ·
#
# 4 micro-batches:
#   rank 0  F1 F2 ·  B1 F3 B2 F4 B3 ·  B4
#   rank 1  ·  F1 B1 F2 B2 F3 B3 F4 B4 ·
# ```
#
# ## Your predictions
#
# The model is a transformer of eight narrow blocks, with 3.7 million parameters, and a step has eight samples of 32
# tokens, so parameters, gradients and optimizer state outweigh activations. FSDP, tensor parallelism and the pipeline
# divide the states of the blocks alike, so what comes on top decides which of them holds the least: activations, and
# what FSDP has gathered. Under FSDP each rank has its own samples. Under tensor parallelism each rank has all
# samples, and a part of the activations within blocks. The pipeline cuts the batch into four micro-batches.

# %%
each = {name: float(number) for number, name in enumerate(names)}
least = lab.ask("the strategy whose ranks hold the least", default=each["fsdp"], options=each)
fewest = lab.ask("the strategy that sends the fewest bytes", default=each["ddp"], options=each)
part = lab.ask("bytes that the pipeline sends, as a share of DDP's", default=50, unit="%")

# %% [markdown]
# ## The map
#
# Each strategy is planned, then trains for seven steps. The ranks also write down how many bytes they have sent, as the
# operating system counts them (`noting_bytes`).

# %%
own, plans = {"pipeline": {"schedule": "1F1B", "accumulate": max(nproc_per_node, 4)}}, {}
for name in names:
    script = noting_bytes(sized(Script.load(name), context=context, width=width, heads=8, layers=blocks))
    plans[name] = plan(script, nproc_per_node=lab.ranks, global_batch_size=batch, **own.get(name, {}))
runs = {name: lab.launch(planned, steps=7, shown=False) for name, planned in plans.items()}

# %%
handed_on = 4 * batch * context * width  # bytes that a block hands on to the next, for the whole batch
sends = {"ddp": 2 * parameters, "zero1": 3 * parameters, "zero2": 2 * parameters, "fsdp": 3 * parameters - root}
sends |= {"tensor_parallel": 8 * blocks * handed_on, "pipeline": 2 * handed_on}
rings = {name: ((lab.ranks - 1) * sends[name], plans[name].peak.bytes) for name in names}
peaks = {name: max(rank.traced.bytes for rank in run.memory().ranks) for name, run in runs.items()}
sent = {name: sent_in_a_step(run, lab.ranks, 7) for name, run in runs.items() if lab.counts_bytes}
crosses = {name: (size, peaks[name]) for name, size in sent.items()}
draw.choice(rings, crosses, rings="NCCL, by the formula", crosses="measured here")

# %% [markdown]
# Rings are what the methods send over **NCCL**, the library for GPUs. Crosses are what was sent here: over **gloo**,
# the library for CPUs, if your machine has no GPUs. gloo has no reduce-scatter of its own and makes an all-reduce
# instead (lab 02), which is twice the bytes. So the crosses of `zero2` and `fsdp` are to the right of their rings, by
# the size of the parameters. That is a property of gloo. On GPUs nobody counts the bytes: there are no crosses, and
# the rings count.
#
# On GPUs, a strategy that holds and sends at least as much as another can offer only simplicity or faster computation.
# So `zero2` (FSDP that keeps what it has gathered) beats DDP, and FSDP beats ZeRO-1: each sends no
# more and holds less. Between `zero2` and FSDP you choose: memory or bytes.
#
# The pipeline holds and sends the least here. Its small micro-batches do it: of 1F1B's few micro-batches in flight a
# rank keeps the activations of its own blocks only. What this costs is waiting, which the map does not show.
#
# ## Why
#
# P is the size of all parameters, A what a block hands on to the next for the whole batch, L the number of blocks, N
# that of ranks. An all-reduce of P costs 2 (N - 1) P over all ranks, a gather or a reduce-scatter (N - 1) P (lab 02).
#
# | | a rank holds | sends in a step | all ranks together |
# |---|---|---|---|
# | DDP | 4 P | all-reduce of the gradients | 2 (N - 1) P |
# | ZeRO-1, as in torch | 2 P + 2 P / N | the same, and each updated parameter | 3 (N - 1) P |
# | `zero2` | P + 3 P / N | gather P, reduce-scatter P | 2 (N - 1) P |
# | FSDP | 4 P / N, the root, a unit or two | gather blocks twice, root once, reduce-scatter P | 3 (N - 1) P, or less |
# | tensor | 4 P / N of the blocks, all of the root | 4 all-reduces of A in each of L blocks | 8 (N - 1) L A |
# | pipeline | 4 P / N; first and last stage, the root | A and its gradient from stage to stage | 2 (N - 1) A |
#
# torch's `ZeroRedundancyOptimizer` makes an all-reduce and broadcasts each updated parameter. With a reduce-scatter and
# an all-gather, as in DeepSpeed, ZeRO-1 sends 2 (N - 1) P.
#
# What DDP, ZeRO and FSDP send grows with the parameters, whatever the batch; what tensor parallelism and pipelines send
# grows with the tokens in a batch. So the former win with many tokens, the latter with few tokens and wide layers.

# %%
for name in names:  # a rank that is ahead of the others may have gathered one more block
    ahead = 1.5 * block / rings[name][1] if name in ("fsdp", "zero2") else 0
    lab.verify(f"{name}: peak", rings[name][1], peaks[name], "B", within=0.02 + ahead)
lab.verify(least, each[min(rings, key=lambda name: rings[name][1])], each[min(peaks, key=peaks.get)])
if lab.counts_bytes:
    for name in names:  # gloo's all-reduce instead of a reduce-scatter
        over_gloo = (sends[name] + parameters * (name in ("fsdp", "zero2"))) * (lab.ranks - 1)
        lab.verify(f"{name}: sent by all ranks in a step", over_gloo, sent[name], "B", within=0.02)
    lab.verify(fewest, each[min(names, key=sends.get)], each[min(sent, key=sent.get)])
    lab.verify(part, sends["pipeline"] / sends["ddp"], sent["pipeline"] / sent["ddp"], "%", within=0.02)
lab.score()

# %% [markdown]
# ## Which one?

# %%
questions = [
    ("Does a step fit under DDP?\nin 16 bits, activations recomputed", "yes", "DDP\nthe simplest"),
    ("Do the states fit?\n16 bytes per parameter / N", "no", "less to hold\nLoRA, CPU offload, more GPUs"),
    ("Does one sample fit beside them?\nactivations recomputed", "no", "tensor parallelism\nor context parallelism"),
    ("Does FSDP wait for gathers?", "yes", "more samples, or fewer bytes\nzero2, FSDP within hosts, a pipeline"),
]
draw.decision(questions, "FSDP\none block per unit")

# %% [markdown]
# 1. **DDP**, if it fits: one line, and ordinary checkpoints. Before you leave it, compute in 16 bits (lab 11), take
#    fewer samples at a time and accumulate, recompute activations in backward instead of keeping them (lab 12).
# 2. **The states do not fit on one GPU, but 1/N of them does:** FSDP, with one block per unit (lab 05). If not even
#    1/N of them fits, fewer parameters have to be trained (LoRA, lab 22), or the host has to hold them, or N has to
#    grow.
# 3. **One sample is too much:** FSDP already divides the batch, but not a sample, whose activations a rank has whole.
#    Tensor parallelism divides those within a block, such as the heads of attention and the wide layer of the MLP,
#    where there is NVLink (lab 14). Every rank still has what blocks hand on, for all samples, so once these outweigh
#    the blocks that FSDP gathers, it holds more than FSDP. Context parallelism splits a long text (lab 25).
# 4. **FSDP waits for its gathers:** it sends the same bytes for any number of tokens, so give each rank more of them.
#    Between hosts, send less: FSDP only within a host, and a copy of the model per host (lab 15), or a pipeline (lab
#    13).
#
# **Will the gathers hide?** While a block computes, the next is gathered: 2 FLOPs per parameter and token of the
# rank, beside 4 bytes per parameter, or 2 in 16 bits (which labkit's FSDP gathers under `precision="bf16"`, lab 11).
# Of these bytes a rank sends (N - 1) / N. So gathers hide if a rank has more tokens than 2 (N - 1) / N × FLOP/s ÷
# bytes/s of the link, or half of that in 16 bits. Both are what is reached, not what a data sheet says: of PCIe 3's
# 16 GB/s, collectives reach about 5 (lab 02). In backward, with twice the FLOPs and a reduce-scatter beside the
# gather, it is the same in fp32; in 16 bits, with gradients summed in fp32, half as many again. On eight A100s, with
# 150 TFLOP/s in bf16 and 225 GB/s, that is 580 tokens in forward and 880 in backward; on two T4s, with 6 TFLOP/s in
# fp32 and 5 GB/s, 1,200.
#
# Then compare two or three candidates, with `labkit.plan` or by running a few steps. **More ranks, larger batch?**
# With the same samples on each rank, N ranks have an N times larger global batch and N times fewer steps per epoch,
# and the learning rate has to be found again (lab 21). If the global batch stays the same, nothing changes but the
# time (and BatchNorm, lab 03).
#
# ## On 2 × T4 and 8 × A100
#
# Make the same choice for a larger transformer and eight samples per step (405 million parameters, 113 without
# `guides`):

# %%
large = {"vocabulary": 50257, "context": 512, "width": 1024, "heads": 16, "layers": 24}
sizes = large if guides else {"width": 768, "heads": 16, "layers": 16}
cut = {"pipeline": {"schedule": "1F1B", "accumulate": 8}}  # into micro-batches of one sample
larger = lab.plans({n: (sized(Script.load(n), **sizes), cut.get(n, {})) for n in names}, global_batch_size=8)
display(larger)


# %%
def verdict(planned, device):
    fit = {name: each for (name, on), each in planned.judged.items() if on == device and each.fits}
    fast, least = min(fit, key=lambda name: fit[name].step.seconds), min(fit, key=lambda name: fit[name].peak.bytes)
    even = [name for name, each in fit.items() if each.step.low < fit[fast].step.high and name != fast]
    print(f"{device}: fits: {', '.join(fit)}. Least memory: {least}. Planned fastest: {fast}.")
    print(f"  Its range of times overlaps with those of: {', '.join(even) or 'none'}.")


verdict(larger, "2xT4")
verdict(larger, "8xA100 80")

# %% [markdown]
# If `ddp` is among those that fit, begin with it: question 1. Where ranges overlap, the plan cannot tell which is
# faster, and a few steps of each can. Look at the column *waiting*, too. It has what the map leaves out: the pipeline
# sends the least, and on eight ranks with eight micro-batches it idles for 7/15 of the time that it computes or idles.
# Tensor parallelism holds more than FSDP, because every rank has all samples, and the embeddings and the head whole.
#
# And for 7 billion parameters, in bf16, with 2,048 tokens on each device. "40" and "80" are the GB of an A100:

# %%
if guides:
    seven = {"vocabulary": 32000, "context": 2048, "width": 4096, "heads": 32, "layers": 33}
    ways = {name: (sized(Script.load(name), **seven), {"precision": "bf16"}) for name in ("ddp", "fsdp")}
    judged = lab.plans(ways, devices=("8xA100 40", "8xA100 80"), global_batch_size=8)
    display(judged)
    verdict(judged, "8xA100 40")
    verdict(judged, "8xA100 80")

# %% [markdown]
# The states alone are 16 × 7 = 112 GB, too much for either GPU under DDP, whatever the precision. Divided by eight
# they are 14, and FSDP has room beside them: questions 2 and 3 are answered with yes.
#
# ## Days and money
#
# In forward each parameter is multiplied and added once for each token, in backward twice, for the gradients of the
# inputs and those of the weights: 2 + 4 FLOPs. So a training takes **6 × parameters × tokens** FLOPs. How many of
# them a GPU does in a second is on its data sheet; the share of that which a training reaches is called **MFU** (model
# FLOPs utilization). The trainings of Llama 3 reached 38 to 43%, so 40% is taken here.


# %%
def days(parameters, tokens, gpus, sheet, mfu=0.4):
    """`sheet` is the FLOP/s of one GPU by its data sheet."""
    return 6 * parameters * tokens / (gpus * mfu * sheet) / 86_400


A100, V100 = 312e12, 28e12  # FLOP/s: bf16 by the data sheet; fp16 as an article assumes, which is what is reached
for what, needed, gpus in (
    ("7B, 140 billion tokens, 8 x A100", days(7e9, 140e9, 8, A100), 8),
    ("GPT-3, 175B, 300 billion tokens, 1,024 x A100", days(175e9, 300e9, 1024, A100), 1024),
    ("GPT-3 on one V100", days(175e9, 300e9, 1, V100, mfu=1), 1),
):
    print(f"{what}: {needed:,.1f} days ({needed / 365.25:,.1f} years), {needed * 24 * gpus * dollars:,.0f} dollars")
if guides:
    step = judged.plans["fsdp", "8xA100 80"].step
    print(f"the planner, 7B on 8 x A100: {140e9 / step.predictions_per_second / 86_400:,.0f} days")

# %% [markdown]
# The last of the three is the "355 years" that are often quoted, from a total rounded to 3.14 × 10²³ FLOPs. The
# number of GPU hours, and with it the price, does not depend on how many GPUs share the work, as long as they lose no
# time waiting: twice as many take half as long. The planner does not assume the 40%; it adds up the parts of a step:
# operators, the optimizer, and waiting for communication.
#
# ## Recap: the cheat sheet
#
# For *N* ranks, and a model whose parameters take *P* bytes in fp32; *A* is what a block hands on to the next, for the
# whole batch, *L* the number of blocks. All figures are per rank. What is sent is to be multiplied by (N - 1) / N;
# activations come on top of what is held.
#
# | | held | sent by each rank in a step | waits | use it if |
# |---|---|---|---|---|
# | one rank | 4 P | nothing | never | it is fast enough |
# | DDP | 4 P | 2 P | for the last bucket, and for a slower rank | a step fits |
# | ZeRO-1, as in torch | 2 P + 2 P / N | 3 P | as DDP, and for the update | you cannot use FSDP |
# | ZeRO-2 (DeepSpeed) | P + 3 P / N | 2 P | as ZeRO-1 | FSDP waits a lot, and P fits |
# | `zero2`: FSDP, `never` | as ZeRO-2, between steps as FSDP | 2 P | for the first gather, the last sum | the same |
# | FSDP | 4 P / N, the root, a unit or two | nearly 3 P | also for gathers that nothing hides | the states do not fit |
# | tensor (lab 14) | 4 P / N, the root whole | 8 L A | in every block, four times | a sample or a layer is too large |
# | pipeline (lab 13) | 4 P / N, the root on two stages | 2 A | for the other stages | links are slow |
#
# [The same on one page](../docs/reference/cheat_sheet.md), with more strategies.
#
# ## Try this
#
# 1. `batch = 64`: which rings move, and in which direction?
#    <details><summary>Answer</summary>Planned: what tensor parallelism sends grows from 12 to 96 MiB, far to the right
#    of DDP, which still sends 28; what the pipeline sends grows from 0.4 to 3 MiB. Whatever holds the activations moves
#    up: DDP from 69 to 157 MiB, FSDP from 39 to 126. The pipeline rises from 35 to 81, because its four micro-batches
#    are eight times as large; with `accumulate=32` they are as small as before, and it holds 36.</details>
# 2. `nproc_per_node = 4`: whose bytes triple, and whose memory falls most?
#    <details><summary>Answer</summary>Planned:
#    over all ranks, each strategy sends 3 times as much: 84 MiB by DDP, 125 by FSDP, 36 by tensor parallelism. FSDP
#    and tensor parallelism hold 23 MiB instead of 39 and 38, the pipeline 20 instead of 35; DDP goes only from 69 to
#    63, because a rank has the activations of two samples fewer.</details>
# 3. How many tokens must a step have for tensor parallelism to send as much as DDP, in this model? Does the number of
#    ranks matter?
#    <details><summary>Answer</summary>8 L A = 2 P, and A is 4 bytes × tokens × width: tokens = P / (16
#    L × width) = 14.65 MB / (16 × 8 × 192 bytes) = 596. The ranks do not matter: both grow by N - 1.</details>
#
# ## Sources
#
# Rajbhandari et al., *ZeRO* (arXiv 1910.02054). Kaplan et al. (arXiv 2001.08361): 6 FLOPs. Grattafiori et al.,
# *The Llama 3 Herd of Models* (arXiv 2407.21783): its MFU. PyTorch's team and IBM
# trained a model of 7 billion parameters with FSDP alone (fms-fsdp); for 70 billion they give a throughput, not a
# trained model.
