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
# # 09 · Tensor and sequence parallel: one layer on all ranks
#
# The third article (003, line 41) says that model or tensor parallelism puts "model layers across devices". That is a
# pipeline. Tensor parallelism splits **every** layer: each rank works on each layer, with its part of the weights, and
# parts have to be added up again and again. You will split a layer by hand, predict how often ranks talk in one step
# and what each of them holds, and count both in real ranks. The loss must be that of one device to 1e-9.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; 4 works, too: the model has four heads
global_batch_size: int = 4  # samples per optimizer step; every rank works on all of them

# %%
import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("09_tensor_parallel")
N = nproc_per_node

# %% [markdown]
# ## Two layers split by hand
#
# A transformer's MLP is `gelu(x A) B`. Give each rank some **columns** of A: it gets the same columns of `x A`, whole,
# and gelu works on them alone. Give it the same **rows** of B: it gets an addend of the result. One sum over the ranks
# is all they have to say to each other (Megatron-LM, arXiv 1909.08053, section 3).

# %%
import torch
from torch.nn import functional as F

torch.manual_seed(0)
x, a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((8, 16), (16, 64), (64, 16)))


def whole(x):
    return F.gelu(x @ a) @ b


def addends(x):
    """What each of N ranks computes from its columns of A and its rows of B."""
    return [F.gelu(x @ columns) @ rows for columns, rows in zip(a.chunk(N, dim=1), b.chunk(N, dim=0), strict=True)]


def rows_first(x):
    """A by rows and B by columns: gelu of each rank's addend, which is not gelu of the sum."""
    parts = [F.gelu(share @ rows) for share, rows in zip(x.chunk(N, dim=1), a.chunk(N, dim=0), strict=True)]
    return sum(parts) @ b


def apart(found, right):
    return float((found - right).detach().abs().max() / right.detach().abs().max())


# %%
claims.predict("A by columns, B by rows, one sum: off by at most", 1e-12, how="at most")
claims.predict("the other way round: off by at least", 0.1, how="at least")
claims.predict("gradient of x: the ranks' parts, summed, off by at most", 1e-12, how="at most")

claims.measure("A by columns, B by rows, one sum: off by at most", apart(sum(addends(x)), whole(x)))
claims.measure("the other way round: off by at least", apart(rows_first(x), whole(x)), because="gelu is not linear")

(right,) = torch.autograd.grad(whole(x).sum(), x)
of_ranks = [torch.autograd.grad(part.sum(), x)[0] for part in addends(x)]
claims.measure("gradient of x: the ranks' parts, summed, off by at most", apart(sum(of_ranks), right))
display(claims)

# %% [markdown]
# The last line is the price of the way back: every rank has the gradient of x through its own columns only, so
# backward needs a sum, too. One sum forward and one backward for the MLP; for attention the same, its heads being
# the columns. A block has both: **2 L forward and 2 L backward** for L blocks.
#
# ## Predict a step
#
# labkit's script lets torch do this. Its `tensor` cell has the plan for a block, and carries it out:

# %%
model_sizes = {"layers": 4, "width": 128, "context": 128}  # of the scripts' own model
script = Script.load("tensor_parallel")
text = script.cells["data"].text
scripts = {name: Script.load(name).with_cells(data=text.replace("2**20", "2**17")) for name in ("single", script.name)}
tensor_cell = script.cells["tensor"].text
print(tensor_cell[tensor_cell.index("# Layers of the Block") : tensor_cell.index("def split_layer")])

# %% [markdown]
# With **sequence parallelism** the ranks also divide the positions between the split layers: norms and residuals are
# then not computed N times over. A sum becomes a reduce-scatter (each rank gets the sum of its positions) and, before
# the next split layer, an all-gather: the same bytes in two halves. After the last block the sequence is gathered once
# more. Backward cuts it there, and gathers the gradient where forward cut the sequence, before the first block. The
# gradients of the norms, and of the biases after a sum, come from each rank's own positions and have yet to be summed.
# That happens in AdamW: for six tensors of a block, once for each moment. The extra `sequence_parallel` does all this
# in the `strategy` cell:

# %%
extended = Script.load("tensor_parallel", "sequence_parallel").cells["strategy"].text
print(extended[extended.index("def split_sequence") : extended.index("def check_sequence")])

# %% [markdown]
# And one all-reduce belongs to every step of every script, whatever the strategy: before the model is called, the ranks
# along the data axis sum how many predictions they have, for the loss is the mean over all of them. Here that axis has
# one rank, with the whole batch, and there is nothing to send. gloo's call is recorded all the same; NCCL starts no
# kernel for a group of one.

# %%
L = model_sizes["layers"]
COUNT = int(on_cpu)  # all-reduces of the number of predictions
claims.predict(
    "tensor: all-reduces forward", 2 * L + COUNT, "calls", article="003, line 41: layers across devices", said=COUNT
)
claims.predict("tensor: all-reduces backward", 2 * L, "calls")
claims.predict("tensor: other collectives", 0, "calls")
for phase in ("forward", "backward"):
    claims.predict(f"sequence: reduce-scatters {phase}", 2 * L, "calls")
    claims.predict(f"sequence: all-gathers {phase}", 2 * L + 1, "calls")
claims.predict("sequence: all-reduces forward and backward", COUNT, "calls")
claims.predict("loss apart from one device's, tensor", 1e-9, how="at most")
claims.predict("loss apart from one device's, sequence", 1e-9, how="at most")
display(claims)

# %% [markdown]
# And what does a rank hold? Every tensor of `qkv`, `out`, `up` and `down` is split, except the biases of `out` and
# `down`, which are added after the sum. Embeddings, norms and the head stay whole on every rank.

# %%
FLOAT = 8  # bytes: the runs are in fp64, so that losses can be compared
width, context = model_sizes["width"], model_sizes["context"]
split = 12 * width * width + 7 * width  # weights of four layers; biases of qkv (3) and up (4), per width
alike = 4 * width + 2 * width  # two norms; biases of out and down
ends = 256 * width + context * width + 2 * width + 256 * width  # embeddings, the last norm, the head
of_a_rank = FLOAT * (L * (split // N + alike) + ends)
P = FLOAT * (L * (split + alike) + ends)
print(f"the model {P:,} B; a rank {of_a_rank:,} B, {of_a_rank / P:.0%} of it")

options = {"global_batch_size": global_batch_size, "precision": "fp64"}
plan = labkit.plan(scripts[script.name], nproc_per_node=N, **options)
claims.predict("tensor: parameters, first rank", of_a_rank, "B")
claims.predict("tensor: parameters, last rank", of_a_rank, "B")
claims.predict("tensor: peak", plan.bytes, "B", within=0.02)
display(plan)

# %% [markdown]
# What does sequence parallelism save? Each norm keeps its input for backward, and the mean and the deviation of every
# position: those are now divided. Its output is not: the all-gather that follows makes it whole, and torch keeps what
# was gathered. (The paper, arXiv 2205.05198, section 4.2.2, keeps the part and gathers again in backward.)

# %%
positions = global_batch_size * context
norms = 2 * L * (positions * width + 2 * positions) * FLOAT
claims.predict("sequence: activations less by", norms - norms // N, "B", within=0.01)

# %% [markdown]
# ## Measure
#
# One device first, then the two ways. `profile=True` records three steps of every rank; in another step every rank
# traces what it allocates.

# %%
single = labkit.launch(scripts["single"], nproc_per_node=1, steps=9, env=env, **options)
single.wait()
runs = {"tensor": labkit.launch(plan, steps=9, profile=True, env=env)}
runs["tensor"].wait()
options |= {"sequence_parallel": True, "profile": True, "trace_memory": True}
runs["sequence"] = labkit.launch(scripts[script.name], nproc_per_node=N, steps=9, env=env, **options)
runs["sequence"].wait()

# %%
from collections import Counter

PHASES = ("forward", "backward", "optimizer")
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def collectives(run, rank):
    """(kind, phase) of every collective in a rank's last recorded step; the phase is the latest that had begun."""
    spans = [span for span in run.timeline().of_step() if span.rank == rank]
    begins = {phase: min(span.start for span in spans if span.kind == phase) for phase in PHASES}
    return Counter(
        (span.kind, max((p for p in PHASES if begins[p] <= span.start), key=begins.get, default="forward"))
        for span in spans
        if span.kind in KINDS
    )


seen = {way: [collectives(run, rank) for rank in range(N)] for way, run in runs.items()}
assert all(rank == ranks[0] for ranks in seen.values() for rank in ranks)  # all of them, on every layer
calls = {way: ranks[0] for way, ranks in seen.items()}
for way in calls:
    print(f"{way}:", ", ".join(f"{count} x {kind} {phase}" for (kind, phase), count in sorted(calls[way].items())))

# %%
tensor, sequence = calls["tensor"], calls["sequence"]
for phase in ("forward", "backward"):
    claims.measure(f"tensor: all-reduces {phase}", tensor["all_reduce", phase], run=runs["tensor"])
    for kind, name in (("reduce_scatter", "reduce-scatters"), ("all_gather", "all-gathers")):
        claims.measure(f"sequence: {name} {phase}", sequence[kind, phase], run=runs["sequence"])
others = sum(tensor.values()) - tensor["all_reduce", "forward"] - tensor["all_reduce", "backward"]
claims.measure("tensor: other collectives", others, run=runs["tensor"])
left = sequence["all_reduce", "forward"] + sequence["all_reduce", "backward"]
claims.measure("sequence: all-reduces forward and backward", left, run=runs["sequence"])


def losses(run):
    """By step, as rank 0 reports them: its batch is the whole one."""
    table = run.metrics()
    return table[table["rank"].eq(0) & table["loss"].notna()].drop_duplicates("step").set_index("step")["loss"]


for way, run in runs.items():
    off = (losses(run) / losses(single) - 1).abs()
    assert len(off.dropna()) == 9
    claims.measure(f"loss apart from one device's, {way}", off.max(), run=run)

held = {way: [rank.traced for rank in run.memory().ranks] for way, run in runs.items()}
first, last = held["tensor"][0], held["tensor"][-1]
claims.measure("tensor: parameters, first rank", first.categories["parameters"], run=runs["tensor"])
claims.measure("tensor: parameters, last rank", last.categories["parameters"], run=runs["tensor"])
peak = max(rank.bytes for rank in held["tensor"])
claims.measure("tensor: peak", peak, run=runs["tensor"], because=f"it is in {first.phase}")
less = first.categories["activations"] - held["sequence"][0].categories["activations"]
claims.measure("sequence: activations less by", less, run=runs["sequence"])
display(claims)

# %% [markdown]
# If layers lay across devices, the first rank would hold other blocks than the last, and no activation would be summed.
# Here every rank has a part of every layer. That is why tensor parallelism needs the fastest link there is: DDP's one
# sum of the gradients can hide behind backward, but these sums stand in the middle of the computation.

# %%
runs["tensor"].timeline()

# %% [markdown]
# What one sum moves does not depend on the layer's size, but on the samples: batch x context x width numbers.

# %%
one = global_batch_size * context * width * FLOAT
print(f"tensor parallel: 4 x {L} sums of {one:,} B = {4 * L * one:,} B a step; DDP would sum {P:,} B")

# %% [markdown]
# What a rank holds, by category, planned and measured:

# %%
runs["tensor"].memory()

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `nproc_per_node = 4`: which predictions change? Then 3, and read what is refused, and why.
# - At which `global_batch_size` do tensor parallelism and DDP say the same amount here?
# - `activation_checkpointing=True` in `options`: recomputing a block repeats one of its two sums forward. Which, and
#   why not the other? See by how much the count backward is off.
# - Make claims fail: forget one sum. Before the plan is made, in the text of the `tensor` cell, write
#   `RowwiseParallel(output_layouts=Partial() if name == "down" else Replicate())` for `RowwiseParallel()`; then
#   `scripts["tensor_parallel"] = scripts["tensor_parallel"].with_cells(tensor=…)`. Nothing crashes. Which claims
#   notice?
