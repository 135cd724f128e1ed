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
# *About a minute on a laptop's CPU. You should know what FSDP (lab 07) does.*
#
# One sequence is longer than a device's memory. Samples cannot be divided further: there is one. **Context
# parallelism** divides the sequence. Almost everything in a transformer looks at one position at a time, so each rank
# computes its own positions, alone. Only attention looks back: a query needs the keys and values of all earlier
# positions, also those of other ranks.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks that split each sequence
context: int = 512  # positions

# %%
import torch

import labkit
from labkit import Script
from labkit.claims import Claims

N, T, L, STEPS = nproc_per_node, context, 2, 4
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
claims = Claims("21_long_context")

# %% [markdown]
# ## Who computes how much?
#
# A query at position p sees p + 1 keys. If rank 0 takes the first part of the sequence and rank 1 the second, they
# compute different numbers of pairs of a query and a key, and all wait for the last rank.
#
# *Zigzag*: cut the sequence into 2N chunks, and give rank r chunk r and chunk 2N − 1 − r.


# %%
def pairs(chunks):
    """The pairs of a query in these chunks of T / 2N positions and a key that it sees, counted in the mask."""
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    return sum(int(rows.sum()) for number, rows in enumerate(mask.chunk(2 * N)) if number in chunks)


orders = {"in order": lambda rank: (2 * rank, 2 * rank + 1), "zigzag": lambda rank: (rank, 2 * N - 1 - rank)}
claims.predict("in order: pairs of the last rank over the mean", 2 - 1 / N, within=0.01)
claims.predict("zigzag: pairs of the last rank over the mean", 1, within=0.01)
for name, chunks_of in orders.items():
    work = [pairs(chunks_of(rank)) for rank in range(N)]
    claims.measure(f"{name}: pairs of the last rank over the mean", work[-1] / (sum(work) / N))
    print(f"{name:>8}: {work}")

# %% [markdown]
# ## The script
#
# The model is an ordinary one: it calls `F.scaled_dot_product_attention(q, k, v, is_causal=True)`, which the strategy
# replaces, and counts its positions from 0, which a hook corrects. Without that hook nothing would fail: each rank
# would train on its tokens with the positions of the sequence's start.


# %%
def longer(strategy):
    loaded = Script.load(strategy, "precision")
    model, data = (loaded.cells[title].text.replace("context=128", f"context={T}") for title in ("model", "data"))
    model = model.replace("width=128, heads=4, layers=4", f"width=32, heads=4, layers={L}")
    return loaded.with_cells(model=model, data=data.replace("2**20", "2**18"))


split = longer("context_parallel")
print(split.cells["context"].text)

# %% [markdown]
# Keys and values reach the other ranks in one of two ways. `gather`: every rank holds those of the whole sequence, one
# layer at a time, and backward sums up their gradients by a reduce-scatter. `ring`: they go from rank to rank, and a
# rank never holds more than two parts; it sends N − 1 times in forward, and 2N − 1 times in backward, where gradients
# travel along and make one more hop, home.
#
# ## Predict
#
# - By how much may the losses differ from one rank's, in float64?
# - What does a rank hold at the peak? The plan rehearses a step on tensors without data.
# - Which of the two holds less at this length, and which at a hundred times it?

# %%
options = {"global_batch_size": 4, "precision": "fp64", "steps": STEPS, "env": env}
plans = {}
for attention in ("gather", "ring"):
    planned = {"attention": attention, "global_batch_size": 4, "precision": "fp64"}
    plans[attention] = labkit.plan(split, nproc_per_node=N, **planned)
    claims.predict(f"{attention}: largest difference of a loss", 1e-9, how="at most")
    claims.predict(f"{attention}: peak of a rank", plans[attention].bytes, "B", within=0.06)

# %% [markdown]
# ## Measure

# %%
alone = labkit.launch(longer("single"), nproc_per_node=1, wait=True, **options)
for attention in plans:
    run = labkit.launch(split, nproc_per_node=N, attention=attention, trace_memory=True, wait=True, **options)
    apart = (run.losses() / alone.losses() - 1).abs().dropna()
    assert len(apart) == STEPS
    peak = max(rank.traced.bytes for rank in run.memory().ranks)
    claims.measure(f"{attention}: largest difference of a loss", apart.max(), run=run)
    claims.measure(f"{attention}: peak of a rank", peak, run=run)
display(claims)

# %% [markdown]
# Both train what one rank trains. `gather` keeps keys and values of the whole sequence for backward, and a mask; the
# ring keeps a rank's own part, but also holds the scores of 128 queries at a time, which torch's attention kernels
# never write out: at this length that is more. Activation checkpointing frees what is kept between forward and
# backward, which is how long contexts are trained: `labkit.launch(split, activation_checkpointing=True, …)`.

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `nproc_per_node = 4` and `context_ranks=2` in the launch: a mesh of data and context ranks.
# - `nproc_per_node = 3`: 512 positions do not split into six chunks. When does the script say so?
# - Remove the line with `register_forward_pre_hook` from the strategy cell. Which claims become false?
# - `context = 2048` and one sequence, `global_batch_size=1` with `nproc_per_node = 2`: plan it. Which holds less now?
# - Plan a context of 65,536 on four T4s: `labkit.plan(split, device="4xT4", activation_checkpointing=True, …)`.
