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
# # 12 · Activation checkpointing: compute again instead of keeping
#
# No stage of ZeRO divides activations, and with long texts or large batches they are what fills a GPU (lab 04). They
# need not be kept: they can be computed again when backward asks for them.
#
# **You will be able to** write activation checkpointing yourself, say how much memory it saves and how much work it
# costs, choose what to recompute, and combine it with dropout and with FSDP. **20 minutes. You need** labs 04 and 05.
#
# Forward saves tensors for backward. Activation checkpointing (also: gradient checkpointing, recomputation) saves only
# the *input* of each block. When backward reaches a block, the block's forward runs a second time, saving everything,
# and then its backward runs. So a rank holds one input per block, and the activations of one block at a time. (It has
# nothing to do with checkpoints on disk, lab 16.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
plans: bool = True  # plan GPT-2 large for GPUs: some 30 seconds more

# %%
from labkit import Script
from labkit_labs import Lesson, defined, draw, sized
from labkit_labs.labs.step_memory import Meter

lab = Lesson("12_activation_checkpointing", ranks=nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# The model is labkit's transformer, 256 wide with eight blocks, on samples of 128 tokens. For each token and each unit
# of its width a block saves 16 values (lab 04); its input is one of them. Backward takes about twice as many
# floating-point operations (**FLOPs**) as forward: it computes the gradients of the inputs and those of the weights.

# %%
left = lab.ask("saved with checkpointing, as a share of what is saved without", default=50, unit="%")
work = lab.ask("FLOPs of a step with checkpointing: how many times those without", default=2, unit="times")
half = lab.ask("saved if every second block is recomputed, as a share of what is saved without", default=40, unit="%")

# %% [markdown]
# ## See it first
#
# labkit's FSDP script, without and with it, on two ranks with four samples each. labkit knows the option, and adds the
# cell that serves it.

# %%
script, options = sized(Script.load("fsdp"), width=256, layers=8), {"global_batch_size": 8, "trace_memory": True}
runs = {
    name: lab.launch(script, steps=4, shown=False, activation_checkpointing=recompute, **options)
    for name, recompute in {"FSDP": False, "FSDP, recomputed": True}.items()
}
peaks = {name: run.memory().ranks[0].traced for name, run in runs.items()}
differ = (runs["FSDP, recomputed"].losses() / runs["FSDP"].losses() - 1).abs().max()
draw.bars({name: peak.categories for name, peak in peaks.items()}, unit="B", title="rank 0 at its peak")

# %% [markdown]
# FSDP divides parameters, gradients and optimizer state; recomputing removes most of the activations. Each does what
# the other cannot. (*Temporary*, 10 MiB, is the block that is being recomputed. The peak is now late in backward, where
# most gradients exist.)
#
# ## Ten lines by hand
#
# From here on no ranks are needed; everything runs in this process.
#
# Whatever an operation saves for backward passes through two hooks, if you install them: the first when it is saved,
# the second when backward wants it back. `recomputed` saves a number instead of the tensor, so that the tensor is
# freed. The first time that backward asks for one of them, the block runs again, and its tensors are stored in the same
# order. `x` is kept, because `unpack` uses it.

# %%
import itertools

import torch
from torch.autograd.graph import saved_tensors_hooks


def recomputed(block, x):
    order, saved = itertools.count(), []

    def unpack(number):
        if not saved:
            with torch.enable_grad(), saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda _: None):
                block(x)  # the second forward
        return saved[number]

    with saved_tensors_hooks(lambda tensor: next(order), unpack):
        return block(x)


# %% [markdown]
# ## Four ways to recompute
#
# `checkpoint` is torch's own function, and works in the same way as `recomputed`. **Every second** recomputes every
# second block only. **Selective** checkpointing keeps what is expensive to compute, the results of matrix products and
# of attention, and recomputes the rest, which is cheap: norms, activation functions, sums. For that torch asks a
# *policy* about each operator.

# %%
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode


def policy(context, operator, *args, **kwargs):
    expensive = any(name in str(operator) for name in ("aten.mm", "aten.addmm", "scaled_dot_product"))
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


selective = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(policy)}
ways = {
    "all kept": lambda block, x, number: block(x),
    "by hand": lambda block, x, number: recomputed(block, x),
    "checkpoint": lambda block, x, number: checkpoint(block, x, use_reentrant=False),
    "every second": lambda block, x, number: recomputed(block, x) if number % 2 else block(x),
    "selective": lambda block, x, number: checkpoint(block, x, **selective),
}
torch.manual_seed(0)
torch.set_num_threads(1)  # times depend less on what else is running
model, tokens = defined(script, "model").Model(), torch.randint(256, (4, 128))


def loss_of(way):
    x = model.embed(tokens)
    for number, block in enumerate(model.blocks):
        x = ways[way](block, x, number)
    return F.cross_entropy(model.unembed(x).flatten(0, 1), tokens.flatten())


# %% [markdown]
# `Meter` counts the bytes of all tensors that are made inside it and not yet freed, and `FlopCounterMode` the FLOPs of
# matrix products, which are nearly all. This is a step of the first and the third way, operator by operator:


# %%
def measured(way):
    model.zero_grad()
    with Meter() as memory:
        loss = loss_of(way)
        saved = memory.held
        loss.backward()
    with FlopCounterMode(display=False) as counter:
        loss_of(way).backward()
    return {"saved": saved, "peak": max(memory.curve), "curve": memory.curve, "FLOPs": counter.get_total_flops()}


seen = {way: measured(way) for way in ways}
curves = {way: enumerate(size / 2**20 for size in seen[way]["curve"]) for way in ("all kept", "checkpoint")}
draw.curves(curves, "MiB held, without the parameters", over="operator")

# %% [markdown]
# Without checkpointing the memory climbs through all of forward. With it, it climbs by a small step per block, and in
# backward there is a hump for each block, while the gradients grow. At the end both hold the gradients, and nothing
# else.
#
# ## The price
#
# Forward runs twice and backward, which is worth two forwards, once: 4 parts of work instead of 3. The table has what
# forward leaves behind (values per token and unit of width, all blocks together), the peak in MiB, and FLOPs and time,
# how many times those of the first row. The ways take turns on the clock, three times, and the median is shown.

# %%
import timeit

import pandas as pd

turns = [{way: timeit.timeit(lambda way=way: loss_of(way).backward(), number=1) for way in ways} for _ in range(3)]
table = pd.DataFrame(seen).T.drop(columns="curve").astype(float)
table["saved"], table["peak"] = table["saved"] / (4 * tokens.numel() * 256), table["peak"] / 2**20
table["FLOPs"] /= table["FLOPs"]["all kept"]
table["time"] = pd.DataFrame([{way: turn[way] / turn["all kept"] for way in ways} for turn in turns]).median()
table.round(2)

# %% [markdown]
# - **All kept:** 16 values in each of eight blocks, and 3 for the loss: 131.
# - **By hand:** one value per block, 11. The FLOPs are 4/3, less embeddings and head, which are not recomputed.
# - **checkpoint** needs 1.22 times the FLOPs: it stops the second forward as soon as backward has all that it needs. So
#   the last matrix product of each block, a third of its FLOPs, is not repeated.
# - **Every second:** half the savings for half the work: 71. You can choose any number of blocks, as many as the memory
#   requires.
# - **Selective:** no matrix product is repeated, and 5 of 16 values are saved: 91. A GPU spends more time on norms and
#   sums than their FLOPs suggest, because they wait for memory, so this is not free either.
#
# ## Dropout
#
# The second forward must compute what the first one did. Dropout draws random numbers, and would draw others. So
# `checkpoint` stores the state of the random number generators before a block and restores it for the second forward
# (`preserve_rng_state=True`, the default; `recomputed` does not do it). This is the largest difference of a gradient to
# that without checkpointing:

# %%
layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(64, 64))


def gradient(**options):
    torch.manual_seed(0)
    x = torch.ones(8, 64, requires_grad=True)
    (checkpoint(layers, x, use_reentrant=False, **options) if options else layers(x)).sum().backward()
    return x.grad


off = {keep: (gradient(preserve_rng_state=keep) - gradient()).abs().max().item() for keep in (True, False)}
print("\n".join(f"preserve_rng_state={keep}: {difference:.2g}" for keep, difference in off.items()))

# %% [markdown]
# Without it gradients are wrong, and no error tells you: `checkpoint` compares shapes and dtypes of the two forwards,
# not their numbers. A block that depends on anything else that changes, such as a counter, has the same problem, and
# one that changes something, such as BatchNorm its running statistics, does it twice.
#
# `use_reentrant=False` chooses the newer of torch's two variants, the one with hooks. The older one calls backward
# within backward; it needs an input with `requires_grad=True`, and takes no policy. Always name the variant.

# %%
kept, work_of = table["saved"]["all kept"], {"blocks": 8 * 12 * 256, "head": 256}  # weights, in units of the width
by_way = {"all kept": 8 * 16 + 3, "checkpoint": 8 + 3, "every second": 8 * 8.5 + 3, "selective": 8 * 11 + 3}
lab.verify_each({f"{way}: values saved": (n, table["saved"][way]) for way, n in by_way.items()}, within=0.01)
lab.verify(left, 11 / 131, table["saved"]["checkpoint"] / kept, "%", within=0.01)
lab.verify(half, 71 / 131, table["saved"]["every second"] / kept, "%", within=0.01)
by_hand = (4 * work_of["blocks"] + 3 * work_of["head"]) / (3 * sum(work_of.values()))
lab.verify(work, by_hand, table["FLOPs"]["by hand"], "times", within=0.01)
lab.verify("by hand: time of a step", by_hand, table["time"]["by hand"], "times", within=0.2, timed=True)
lab.verify("dropout: largest difference of a gradient", 0, off[True])
lab.verify("FSDP: largest relative difference of a loss", 1e-5, differ, how="at most")
lab.score()

# %% [markdown]
# ## With FSDP
#
# First `checkpoint`, then `fully_shard`: what runs twice is then *inside* the unit. In backward FSDP gathers a unit,
# its forward runs again, then its backward, then the unit is freed. The gather is the one that backward needs anyway,
# so recomputing sends nothing more.
#
# ```python
# for block in model.blocks:
#     block.forward = partial(checkpoint, block.forward, use_reentrant=False)
# for block in model.blocks:
#     fully_shard(block)
# fully_shard(model)
# ```
#
# labkit's scripts do it in this order: `activation_checkpointing=True`, or `selective_checkpointing=True` with the
# policy above. In Transformers it is `model.gradient_checkpointing_enable()`, or `gradient_checkpointing=True` in
# `TrainingArguments`. With `torch.compile` the compiler decides itself which values it keeps.
#
# ## On 2 × T4 and 8 × A100
#
# GPT-2 large, 838 million parameters, with eight samples of 512 tokens per step. On two T4s its states take 6.2 GiB of
# each rank under FSDP:

# %%
gpt = {"vocabulary": 50257, "context": 512, "width": 1280, "heads": 20, "layers": 36}
fsdp = sized(Script.load("fsdp"), **gpt)
more = {"recomputed": {"activation_checkpointing": True}, "selective": {"selective_checkpointing": True}}
cases = {"FSDP": fsdp} | {f"FSDP, {name}": (fsdp, each) for name, each in more.items()}
lab.plans(cases, global_batch_size=8) if plans else print("(skipped: set plans = True)")

# %% [markdown]
# With everything recomputed a T4 needs a third less, and a step takes a quarter longer: less than 4/3, because the
# optimizer and communication do not run twice. Selective checkpointing costs no time in this plan, which judges
# operators by their FLOPs; a GPU would need some. What is saved can be used for more samples.
#
# ## Try this
#
# 1. Let `recomputed` run two blocks at a time: `recomputed(torch.nn.Sequential(…), x)`. What is saved, and what becomes
#    of the peak?
#    <details><summary>Answer</summary>Half as many inputs: 4 + 3 = 7 values instead of 11. But in backward the
#    activations of two blocks exist at once, 32 values instead of 16. With L blocks in groups of g it is L / g + 16 g,
#    smallest when g is the square root of L / 16: that is the square root of Chen et al., with their numbers.</details>
# 2. `checkpoint` the whole model instead of its blocks. What is saved?
#    <details><summary>Answer</summary>At the end of forward nearly nothing. But backward begins with a second forward
#    of everything, which saves everything: the peak is the same as without, and the step takes longer.</details>
# 3. Set `preserve_rng_state=False` in a model without dropout. What does it save?
#    <details><summary>Answer</summary>The results are the same. What is saved is reading the states of the generators,
#    CPU and GPU, before each block and setting them again in backward: little, but for every block.</details>
#
# ## Recap
#
# | | a rank holds of activations | FLOPs | sends |
# |---|---|---|---|
# | all kept | 16 values per token, width and block | 3 | nothing more |
# | every second block | 8.5 | 3.5 | nothing more |
# | selective | 11 | 3, and the cheap operators again | nothing more |
# | recomputed | 1, and one block's 16 | 4 at most | nothing more |
#
# ## Sources
#
# Chen et al., *Training Deep Nets with Sublinear Memory Cost* (arXiv 1604.06174): the method, and why one more forward
# is all it costs. Korthikanti et al. (arXiv 2205.05198): selective recomputation. torch/utils/checkpoint.py.
