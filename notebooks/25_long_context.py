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
# # 25 · Long context: a sequence on several ranks
#
# **You will be able to** divide one sequence among ranks so that all have the same work, choose between gathering keys
# and passing them around, and say what a rank then holds. **15 minutes. You need** labs 04 and 05.
#
# A single sequence may need more memory than a device has, and neither DDP nor FSDP can split one sample among ranks.
# **Context parallelism** divides the sequence. Almost everything in a transformer looks at one position at a time. Only
# attention looks back: a query needs the keys and values of all earlier positions, including those on other ranks. Each
# row below is a query; the keys that it sees are colored.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks that split each sequence
context: int = 512  # positions

# %%
import labkit
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.sequences import divided, in_order, pairs, zigzag

lab = Lesson("25_long_context", ranks=nproc_per_node)
divided(2)

# %% [markdown]
# ## Your predictions
#
# *In order*: rank 0 takes the first part, rank 1 the second, and so on. *Zigzag*: the sequence is cut into 2N chunks,
# and rank r gets chunks r and 2N − 1 − r. In **gather** every rank collects the keys and values of the whole sequence,
# one layer at a time; in **ring** they go from rank to rank, and a rank never holds more than two parts.

# %%
uneven = lab.ask("in order, on 8 ranks: work of the last one, how many times the mean", default=1.5, unit="times")
visibly = {"only by rounding": 1e-7, "visibly": 0.01}
apart = lab.ask("gather: largest difference of a loss to one rank's", default=0.01, options=visibly)
saves = lab.ask("ring: its peak at 512 positions, how many times gather's", default=0.6, unit="times")

# %% [markdown]
# ## Run both
#
# The model is an ordinary one: it calls `F.scaled_dot_product_attention(q, k, v, is_causal=True)`, which the strategy
# replaces, and counts its positions from 0, which a hook corrects. Without that hook nothing would fail, but each rank
# would train on its tokens with the positions of the start of the sequence.

# %%
sizes = {"width": 32, "layers": 2, "context": context}
single, split = (sized(labkit.Script.load(name), **sizes) for name in ("single", "context_parallel"))
options = {"global_batch_size": 4}
ways = ("gather", "ring")
one = lab.launch(single, ranks=1, steps=4, shown=False, **options)
runs = {way: lab.launch(split, attention=way, steps=4, trace_memory=True, shown=False, **options) for way in ways}

# %%
peaks = {way: max((rank.traced for rank in run.memory().ranks), key=lambda it: it.bytes) for way, run in runs.items()}
planned = {way: labkit.plan(split, nproc_per_node=lab.ranks, attention=way, **options) for way in ways}
display(draw.bars({way: peak.categories for way, peak in peaks.items()}, unit="B", title="the fuller rank at its peak"))
off = {way: (run.losses() / one.losses() - 1).abs().max() for way, run in runs.items()}
lab.verify_each({f"{way}: largest difference of a loss to one rank's": (1e-4, off[way]) for way in ways}, how="at most")
smaller = planned["ring"].bytes / planned["gather"].bytes
lab.verify(saves, smaller, peaks["ring"].bytes / peaks["gather"].bytes, "times", within=0.08)

# %% [markdown]
# Both train the same as one rank. `gather` keeps the keys and values of the whole sequence for backward, and a mask. A
# ring keeps only a rank's own part. But labkit's ring uses plain matrix products, for 128 queries at a time, and their
# scores, 128 × positions for each head and sample, take more than that at this length. (A fused attention kernel never
# writes scores to memory. torch's own ring, below, uses such a kernel.)
#
# ## Who computes how much?
#
# Count the pairs of a query and a key that it sees, for each of 8 ranks:

# %%
for name, owners in (("in order", in_order(8)), ("zigzag", zigzag(8))):
    work = pairs(owners, context)
    print(f"{name}: {[round(8 * each / sum(work), 2) for each in work]}")
work = pairs(in_order(8), context)
lab.verify(uneven, 2 - 1 / 8, 8 * work[-1] / sum(work), "times", within=0.01)
lab.score()

# %% [markdown]
# ## Why
#
# In order, the last of N ranks has (2 − 1/N) times the mean work: with many ranks, all wait for one that has nearly
# twice the mean. In a zigzag each rank has one chunk near the beginning and one just as near the end, and two such
# chunks together always have the mean work.

# %%
lab.explore(divided, ranks=[2, 4, 8, 16])

# %% [markdown]
# This is **gather**, as a rank computes it; `size` is the length of a chunk. It sends once per layer, before attention
# can begin, and in backward gradients travel the opposite way:
#
# ```python
# k, v = gathered(k), gathered(v)  # in the sequence's order; in backward a reduce-scatter
# for queries, chunk in zip(q.chunk(2, dim=-2), (r, 2 * N - 1 - r)):  # this rank's two chunks
#     seen = size * (chunk + 1)  # keys that the last of these queries sees
#     keys, values = k[..., :seen, :], v[..., :seen, :]
#     outputs.append(F.scaled_dot_product_attention(queries, keys, values, mask))
# ```
#
# With **ring**, a rank sends keys and values to its neighbor N − 1 times, while it attends to those that it has. The
# results of the parts are added up, weighted by their softmax sums. In backward the gradients of keys and values travel
# along, and one hop further to return home. `print(split.cells["context"].text)` shows both.
#
# **In your own code**, on GPUs, use this for a model that calls `scaled_dot_product_attention(…, is_causal=True)`. (It
# is a prototype in torch. It uses a zigzag, too, and gathers by default.)
#
# ```python
# from torch.distributed.tensor.experimental import context_parallel
#
# positions = torch.arange(length, device=device)  # divided as well, as by the hook above
# with context_parallel(mesh, buffers=[tokens, targets, positions], buffer_seq_dims=[1, 1, 0]):
#     loss = loss_of(model(tokens, positions), targets)  # this rank's part of each
#     loss.backward()
# ```
#
# The ranks of one sequence have different tokens, so their gradients are averaged, as in DDP or FSDP.
#
# ## On 2 × T4 and 8 × A100
#
# Take one sequence of 4,096 positions and 4 layers of width 512. Which way holds less now?

# %%
long = sized(labkit.Script.load("context_parallel"), width=512, layers=4, heads=8, context=4096)
ways = {way: (long, {"attention": way}) for way in ("gather", "ring")}
lab.plans(ways, global_batch_size=1)

# %% [markdown]
# The ring does: gathered keys and values, and the mask, grow with the whole sequence, but the ring's part of them does
# not. It also waits less, because it sends while it computes.
#
# **Which to choose?** Try activation checkpointing and a fused attention kernel first, with FSDP for the states; use
# context parallelism when one sequence still does not fit. Then choose gather, which is simpler, and cheap if few heads
# have keys and values of their own (grouped-query attention, as in Llama 3, which was trained this way). Choose a ring
# for sequences whose keys and values do not fit as a whole, or for a slow link.
#
# ## Try this
#
# 1. `nproc_per_node = 3`: 512 positions cannot be split into six chunks. When do you find out?
#    <details><summary>Answer</summary>Before anything runs: `labkit.plan` says "512 positions cannot be split into 2
#    chunks for each of 3 context ranks". Launched without a plan, the script says so in its first step, which is when
#    it sees a sequence.</details>
# 2. Take the hook out of the strategy: `str` in place of `embedding.register_forward_pre_hook`.
#    <details><summary>Answer</summary>It trains. After four steps the largest difference of a loss to one rank's is
#    0.001: the tokens have wrong positions. Only a comparison shows it.</details>
# 3. Use a sequence of 2,048 positions (`context = 2048`, one sample per step): which way holds less?
#    <details><summary>Answer</summary>The ring. What gather keeps grows with the sequence, and its mask with the square
#    of its length; the ring's scores are those of 128 queries at a time.</details>
#
# ## Sources
#
# Liu et al., *Ring Attention* (arXiv 2310.01889). Llama Team, *The Llama 3 Herd of Models* (arXiv 2407.21783), section
# 3.3.2: all-gather of keys and values, 2N chunks. torch/distributed/tensor/experimental: context parallelism.
