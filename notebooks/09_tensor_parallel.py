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
# **You will be able to** split two layers over ranks with one sum, count what tensor and sequence parallelism send, and
# say which parts of a model they leave whole. **25 minutes. You need** labs 02, 06 and 07.
#
# A transformer's MLP is `gelu(x A) B`. Each rank gets some **columns** of A and the same **rows** of B:

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; 4 works, too: the model has four heads
global_batch_size: int = 4  # samples per optimizer step; every rank works on all of them

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized
from labkit.lessons.labs.collectives import collectives

lab, N = Lesson("09_tensor_parallel", ranks=nproc_per_node), nproc_per_node
draw.split(N)

# %% [markdown]
# ## Your predictions
#
# labkit's small transformer: four blocks, each with attention and an MLP. Attention is split like the MLP; its heads
# are the columns.

# %%
sums = lab.ask("all-reduces in a backward of four blocks", default=4)
gathers = lab.ask("all-gathers in a forward with sequence parallelism", default=8)
share = lab.ask(f"share of the model's parameters on each of {N} ranks", default=100 / N, unit="%")

# %% [markdown]
# ## Split by hand
#
# In float64, so that only the order of additions can make a difference. The third result is the other way round: A is
# split by rows and B is whole, so each rank has a partial sum of `x A`, and takes gelu of that.

# %%
import torch
import torch.distributed as dist
from torch.nn import functional as F


def by_hand(device):
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, a, b = (torch.randn(shape, dtype=torch.float64).to(device) for shape in ((8, 16), (16, 64), (64, 16)))
    whole = F.gelu(x.requires_grad_() @ a) @ b
    right = torch.autograd.grad(whole.sum(), x)[0]
    mine = F.gelu(x @ a.chunk(ranks, dim=1)[rank]) @ b.chunk(ranks, dim=0)[rank]
    gradient = torch.autograd.grad(mine.sum(), x)[0]
    other = F.gelu(x.chunk(ranks, dim=1)[rank] @ a.chunk(ranks, dim=0)[rank]) @ b
    answer = []
    for addend, result in ((mine, whole), (gradient, right), (other, whole)):
        dist.all_reduce(addend.detach_())
        answer.append(((addend - result).abs().max() / result.abs().max()).item())
    return answer


# %%
right, back, wrong = "columns, then rows: off by", "its gradient of x: off by", "rows, then columns: off by"
lab.predict_each({right: 1e-12, back: 1e-12}, how="at most")
lab.predict(wrong, 0.1, how="at least")
run, (off, *_) = lab.run(by_hand)
lab.measure_each(dict(zip((right, back, wrong), off, strict=True)), run=run)

# %% [markdown]
# Columns of A give whole columns of `x A`, and gelu works on each number alone. So the ranks need one all-reduce at the
# end, and one in backward, where every rank has the gradient of x through its own columns only. A block has an MLP and
# attention: **2 all-reduces in forward and 2 in backward for each block** (Megatron-LM).
#
# ## A whole model
#
# labkit's script lets torch do this, by a plan for the layers of a block:

# %%
script, single = Script.load("tensor_parallel"), Script.load("single")
text = script.cells["tensor"].text
print(text[text.index("# Layers of the Block") :].split("\n\n\n")[0])

# %% [markdown]
# With **sequence parallelism** the ranks also divide the positions between the split layers; norms and residuals are
# then not computed N times over. A sum becomes a reduce-scatter, so that each rank gets the sum of its positions, and,
# before the next split layer, an all-gather: the same bytes in two halves. One more all-gather, after the last block,
# makes the sequence whole again, and backward gathers the gradient before the first block.
#
# A rank holds 1/N of `qkv`, `out`, `up` and `down`. Embeddings, norms, the head and the biases that are added after a
# sum stay whole. (One number is all-reduced in every step of every script, how many predictions there are. gloo records
# it even in a group of one rank.)

# %%
L, w, context, one = 4, 128, 128, int(lab.on_cpu)  # blocks, width; calls for the number of predictions
halved, alike = 12 * w * w + 7 * w, 6 * w  # of a block: weights and biases that are split; norms and two biases
ends = (256 + context + 2 + 256) * w  # embeddings, the last norm, the head
whole, mine = L * (halved + alike) + ends, L * (halved // N + alike) + ends
expected = {"tensor: all-reduces forward": 2 * L + one, "tensor: other collectives": 0, gathers: 2 * L + 1}
expected |= {"sequence: all-gathers backward": 2 * L + 1, "sequence: all-reduces": one}
lab.predict_each(expected | {f"sequence: reduce-scatters {phase}": 2 * L for phase in ("forward", "backward")})
lab.predict(sums, 2 * L)
lab.predict(share, mine / whole, "%")
inputs = 2 * L * global_batch_size * context * (w + 2) * 8  # of norms, with their means and deviations, in fp64
saved = lab.predict("sequence: activations that a rank saves", inputs - inputs // N, "B", within=0.01)
lab.predict_each({f"{way}: loss, compared with one device": 1e-9 for way in ("tensor", "sequence")}, how="at most")
options = {"global_batch_size": global_batch_size, "precision": "fp64", "steps": 9}
alone = lab.launch(single, ranks=1, **options)
options |= {"profile": True, "trace_memory": True}
runs = {"tensor": lab.launch(script, **options), "sequence": lab.launch(script, sequence_parallel=True, **options)}

# %%
tensor, sequence = (collectives(run) for run in runs.values())
results = {"tensor: all-reduces forward": tensor["all_reduce", "forward"], sums: tensor["all_reduce", "backward"]}
results |= {"tensor: other collectives": sum(tensor.values()) - sum(results.values())}
results |= {
    gathers: sequence["all_gather", "forward"],
    "sequence: all-gathers backward": sequence["all_gather", "backward"],
}
results |= {"sequence: all-reduces": sequence["all_reduce", "forward"] + sequence["all_reduce", "backward"]}
for phase in ("forward", "backward"):
    results[f"sequence: reduce-scatters {phase}"] = sequence["reduce_scatter", phase]
for way, run in runs.items():
    results[f"{way}: loss, compared with one device"] = (run.losses() / alone.losses() - 1).abs().max()
held = {way: run.memory().ranks[0].traced.categories for way, run in runs.items()}
results |= {share: held["tensor"]["parameters"] / (8 * whole)}
results |= {"sequence: activations that a rank saves": held["tensor"]["activations"] - held["sequence"]["activations"]}
lab.measure_each(results, run=runs["sequence"])
display(draw.bars(held, unit="B", title="rank 0 at its peak"))
lab.score()

# %% [markdown]
# ## Why
#
# DDP's all-reduces hide behind backward. These stand in the middle of the computation, and nothing can go on before
# they have arrived. That is why tensor parallelism needs the fastest link there is.

# %%
runs["tensor"].timeline()

# %% [markdown]
# What one all-reduce carries does not depend on the layer's size but on the samples: batch × context × width numbers.
# So many tokens favor DDP, and wide layers tensor parallelism. Move the sliders: bytes of a step, for four blocks in
# fp32.


# %%
def of_step(tokens, width):
    sent = {"tensor parallel": 4 * 4 * tokens * width * 4, "DDP": 4 * (4 * (12 * width**2 + 13 * width))}
    return draw.bars(predicted=sent, unit="B")


lab.explore(of_step, tokens=[128, 512, 2048, 8192], width=[128, 1024, 4096])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# The same question for a transformer of 113 million parameters, 32 samples a step: how much of it is waiting?

# %%
ways = {name: sized(Script.load(name), width=768, layers=16, heads=16) for name in ("ddp", "tensor_parallel")}
lab.plans(ways, global_batch_size=32)

# %% [markdown]
# ## Try this
#
# 1. The plans above with `global_batch_size=8`: who gains?
#    <details><summary>Answer</summary>Tensor parallelism: its sums shrink with the samples, those of DDP do
#    not. On 2 × T4 both now wait a third of a step, and it is ahead, 127 ms to 148. On 8 × A100 it is behind, 37 ms to
#    14, because of the optimizer's 28: torch does not update whole and split parameters together, so the host launches
#    their updates one by one. With 32 samples DDP was ahead on both.</details>
# 2. `nproc_per_node = 3`: what is refused?
#    <details><summary>Answer</summary>"4 heads of out do not split over 3 tensor ranks", on all ranks, before
#    the first step: a head is not cut.</details>
# 3. Forget one sum: in the text of the `tensor` cell, `RowwiseParallel(output_layouts=Partial())` for the layer `down`.
#    <details><summary>Answer</summary>Nothing crashes. Five all-reduces in forward instead of nine, and after nine
#    steps the loss has been off by up to 8%: each rank goes on with its own partial sum.</details>
#
# ## Sources
#
# Shoeybi et al., *Megatron-LM* (arXiv 1909.08053), section 3. Korthikanti et al. (arXiv 2205.05198): sequence
# parallelism; section 4.2.2 keeps a part of what torch keeps whole, and gathers it again in backward.
# torch/distributed/tensor/parallel.
#
# ### Appendix: what was claimed, and what the articles say
#
# The third article (003, line 41) says that model or tensor parallelism puts "model layers across devices". That is a
# pipeline: the first rank would hold other blocks than the last, and no activation would be summed.

# %%
lab.check({sums: ("003, line 41: layers across devices", 0)})
