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
# # 21 · Long context: a sequence on several ranks
#
# **You will be able to** divide one sequence among ranks so that all have the same work, choose between gathering keys
# and passing them round, and say what a rank then holds. **15 minutes. You need** labs 06 and 07.
#
# One sequence is longer than a device's memory. Samples cannot be divided further: there is one. **Context
# parallelism** divides the sequence. Almost everything in a transformer looks at one position at a time. Only attention
# looks back: a query needs the keys and values of all earlier positions, also those of other ranks. Each row below is a
# query; what is colored are the keys that it sees.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks that split each sequence
context: int = 512  # positions

# %%
import labkit
from labkit.lessons import Lesson, draw, sized
from labkit.lessons.labs.sequences import divided, in_order, pairs, zigzag

lab = Lesson("21_long_context", ranks=nproc_per_node)
divided(2)

# %% [markdown]
# ## Your predictions
#
# *In order*: rank 0 takes the first part, rank 1 the second, … *Zigzag*: cut the sequence into 2N chunks and give rank
# r chunk r and chunk 2N − 1 − r. In **gather** every rank collects the keys and values of the whole sequence, one layer
# at a time; in **ring** they go from rank to rank, and a rank never holds more than two parts.

# %%
uneven = lab.ask("in order: work of the last rank, how many times the mean", default=1, unit="times")
apart = lab.ask(
    "gather: largest difference of a loss to one rank's, in float64",
    default=1e-16,
    options={"not a bit": 0, "the last digits": 1e-16, "visibly": 0.01},
)
saves = lab.ask("ring: its peak at this length, how many times gather's", default=0.6, unit="times")

# %% [markdown]
# ## Run both
#
# The model is an ordinary one: it calls `F.scaled_dot_product_attention(q, k, v, is_causal=True)`, which the strategy
# replaces, and counts its positions from 0, which a hook corrects. Without that hook nothing would fail: each rank
# would train on its tokens with the positions of the sequence's start.

# %%
sizes = {"width": 32, "layers": 2, "context": context}
single, split = (sized(labkit.Script.load(name, "precision"), **sizes) for name in ("single", "context_parallel"))
options = {"global_batch_size": 4, "precision": "fp64"}
planned = {
    way: labkit.plan(split, nproc_per_node=lab.ranks, attention=way, **options).bytes for way in ("gather", "ring")
}
lab.predict_each({f"{way}: peak of a rank": size for way, size in planned.items()}, "B", within=0.06)
lab.predict_each({apart: 1e-9, "ring: largest difference of a loss": 1e-9}, how="at most")
ratio = planned["ring"] / planned["gather"]
lab.predict(saves, ratio, "times", within=0.08)
print(f"planned peaks of a rank, in bytes: {planned}; ring over gather {ratio:.2f}")
one = lab.launch(single, ranks=1, steps=4, **options)
runs = {way: lab.launch(split, attention=way, steps=4, trace_memory=True, **options) for way in planned}

# %%
off = {way: (run.losses() / one.losses() - 1).abs().max() for way, run in runs.items()}
held = {way: run.memory().ranks[0].traced.categories for way, run in runs.items()}
peaks = {way: max(rank.traced.bytes for rank in run.memory().ranks) for way, run in runs.items()}
results = {f"{way}: peak of a rank": size for way, size in peaks.items()} | {saves: peaks["ring"] / peaks["gather"]}
lab.measure_each(results | {apart: off["gather"], "ring: largest difference of a loss": off["ring"]})
draw.bars(held, unit="B", title="rank 0 at its peak")

# %% [markdown]
# Both train what one rank trains. `gather` keeps keys and values of the whole sequence for backward, and a mask. The
# ring keeps a rank's own part, but also holds the scores of 128 queries at a time, which torch's attention kernels
# never write out: at this length that is more. It sends N − 1 times in forward, and 2N − 1 times in backward, where
# gradients travel along and make one more hop, home.
#
# ## Who computes how much?
#
# Count the pairs of a query and a key that it sees, for each rank, in the mask.

# %%
zig = "zigzag: work of the last rank, how many times the mean"
for name, owners, expected in ((uneven, in_order(lab.ranks), 2 - 1 / lab.ranks), (zig, zigzag(lab.ranks), 1)):
    work = pairs(owners, context)
    mean = sum(work) / lab.ranks
    print(f"owners of the chunks: {owners}, pairs of each rank: {work}")
    lab.verify(name, expected, work[-1] / mean, "times", within=0.01)
lab.score()

# %% [markdown]
# ## Why
#
# In order, the last rank sees (2 − 1/N) times the mean: with many ranks all wait for one that has twice their work. A
# chunk near the beginning and one near the end together are always the mean. This cell of the script does both:

# %%
print(split.cells["context"].text)
lab.explore(divided, ranks=[2, 4, 8, 16])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# One sequence of 4,096 positions, 4 layers of width 512. Which way holds less now?

# %%
long = sized(labkit.Script.load("context_parallel"), width=512, layers=4, heads=8, context=4096)
ways = {way: (long, {"attention": way}) for way in ("gather", "ring")}
lab.plans(ways, global_batch_size=1)

# %% [markdown]
# ## Try this
#
# 1. `nproc_per_node = 3`: 512 positions do not split into six chunks. When does the script say so?
#    <details><summary>Answer</summary>In the first step, which is when it sees a sequence: "512 positions do not split
#    into 2 chunks for each of 3 context ranks".</details>
# 2. Take the hook out of the strategy: `str` in place of `embedding.register_forward_pre_hook`.
#    <details><summary>Answer</summary>It trains. After four steps the largest difference of a loss to one rank's is
#    0.001, not 2e-16: the tokens have wrong positions. Only a comparison shows it.</details>
# 3. A sequence of 2,048 positions (`context = 2048`, one sample a step): which way holds less?
#    <details><summary>Answer</summary>Planned: gather 29.0 MiB, ring 23.1. What gather keeps grows with the sequence,
#    its mask with the square; the ring's scores are those of 128 queries at a time.</details>
#
# ## Sources
#
# Liu et al., *Ring Attention* (arXiv 2310.01889). Llama Team, *The Llama 3 Herd of Models* (arXiv 2407.21783), section
# 3.3.2: all-gather of keys and values, 2N chunks. torch/distributed/tensor/experimental: context parallelism.

# %%
lab.check()
