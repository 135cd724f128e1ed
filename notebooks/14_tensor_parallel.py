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
# # 14 · Tensor and sequence parallel: one layer on all ranks
#
# **You will be able to** split a model's layers over ranks, count what tensor and sequence parallelism send, say which
# parts of a model they leave whole, and when they are worth it. **25 minutes. You need** labs 02, 04 and 05.
#
# DDP and FSDP give each rank samples of its own: a step cannot have fewer samples than ranks, and each rank computes
# whole layers, with all of their activations. Tensor parallelism cuts the layer itself.
#
# All ranks work on the same samples, and each computes a part of every layer. A transformer's MLP is `gelu(x A) B`.
# Each rank gets some **columns** of A and the same **rows** of B; the sum over the ranks is the MLP's output. Attention
# is split in the same way: each rank computes some of the heads.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; 4 works, too: the model has four heads
global_batch_size: int = 4  # samples per optimizer step; every rank works on all of them
plans: bool = True  # plan for GPUs: some seconds more

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.traffic import collectives

lab, ranks = Lesson("14_tensor_parallel", ranks=nproc_per_node), nproc_per_node
draw.split(ranks)

# %% [markdown]
# ## Your predictions
#
# The model is labkit's small transformer, 128 wide: four blocks, each with attention and an MLP. For the second
# question: **sequence parallelism** also divides what lies between the split layers, norms and residuals: each rank
# computes them for some of the positions only. A split layer needs all positions, so an `all_gather` comes before it,
# and the sum after it becomes a `reduce_scatter`.

# %%
by_rows = lab.ask("A by rows, B whole, results summed: is it the MLP's output", default=1, options={"yes": 1, "no": 0})
sums = lab.ask("all-reduces in a backward of four blocks", default=4)
gathers = lab.ask("all-gathers in a forward with sequence parallelism", default=8)
share = lab.ask(f"share of the model's parameters on each of {ranks} ranks", default=100 / ranks, unit="%")

# %% [markdown]
# ## Split by hand
#
# The numbers are float64, so that only the order of additions can make a difference.

# %%
import torch
import torch.distributed as dist
from torch.nn import functional as F


def by_hand(device):
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, A, B = (torch.randn(shape, dtype=torch.float64).to(device) for shape in ((8, 16), (16, 64), (64, 16)))
    whole = F.gelu(x @ A) @ B
    columns = F.gelu(x @ A.chunk(ranks, dim=1)[rank]) @ B.chunk(ranks, dim=0)[rank]
    rows = F.gelu(x.chunk(ranks, dim=1)[rank] @ A.chunk(ranks, dim=0)[rank]) @ B
    for result in (columns, rows):
        dist.all_reduce(result)
    return [((result - whole).abs().max() / whole.abs().max()).item() for result in (columns, rows)]


# %%
run, ((columns, rows), *_) = lab.run(by_hand, options={"shown": False})
print(f"largest difference to the whole MLP, relative: columns of A {columns:.0e}, rows of A {rows:.2f}")
lab.verify("columns of A, rows of B: largest relative difference", 1e-12, columns, how="at most")
lab.verify(by_rows, 0, int(rows < 0.01))

# %% [markdown]
# Columns of A give whole columns of `x A`, and gelu works on each number alone. Rows of A give every rank only a part
# of each *sum*, and the gelu of the parts does not add up to the gelu of the sum. So the ranks need one all-reduce at
# the end, and one in backward, where each rank has the gradient of *x* through its own columns only. With attention
# that makes 2 all-reduces in forward and 2 in backward for each block (Megatron-LM).
#
# ## A whole model
#
# torch does this for you. For the layers of labkit's `Block`, your own code would be:
#
# ```python
# mesh = init_device_mesh("cuda", (dist.get_world_size(),))
# columns, rows = ColwiseParallel(), RowwiseParallel()
# for block in model.blocks:
#     parallelize_module(block, mesh, {"qkv": columns, "out": rows, "up": columns, "down": rows})
# ```
#
# The block's code stays as it is if it does not fix the number of heads: `unflatten(-1, (-1, 3, head_width))`, not
# `(heads, 3, head_width)`. All ranks must read the same samples. labkit's script does the same. Train once on one
# device, once split, and once with sequence parallelism as well. (The collectives are those of one step. One all-reduce
# in forward is labkit's own: it adds up the number of predictions.)

# %%
script, single = Script.load("tensor_parallel"), Script.load("single")
options = {"global_batch_size": global_batch_size, "precision": "fp64", "steps": 9, "trace_memory": True}
alone = lab.launch(single, ranks=1, shown=False, **options)
options |= {"profile": True, "shown": False}
runs = {"tensor": lab.launch(script, **options), "sequence": lab.launch(script, sequence_parallel=True, **options)}

# %%
table = collectives(runs)
held = {way: run.memory().ranks[0].traced.categories for way, run in {"one device": alone, **runs}.items()}
differ = max((run.losses() / alone.losses() - 1).abs().max() for run in runs.values())
print(f"the losses of nine steps differ from one device's by at most {differ:.0e}")
display(table, draw.bars(held, unit="B", title="rank 0 at its peak"))

# %% [markdown]
# ## Why
#
# A rank holds 1/N of qkv, out, up and down. Embeddings, norms, the head, and the biases that are added after a sum stay
# whole. The ninth all-gather comes after the last block: the head needs all positions. In numbers, for width *w*: a
# block has 12 w² + 7 w parameters that are split and 6 w that are not; the embeddings of 256 bytes and 128 positions,
# the last norm and the head have 642 w.

# %%
blocks, w = 4, 128
split, whole, ends = 12 * w * w + 7 * w, 6 * w, (256 + 128 + 2 + 256) * w
of_rank, of_model = blocks * (split / ranks + whole) + ends, blocks * (split + whole) + ends
parameters = {way: of["parameters"] for way, of in held.items()}
lab.verify(share, of_rank / of_model, parameters["tensor"] / parameters["one device"], "%", within=0.001)
lab.verify(sums, 2 * blocks, table["tensor"]["all_reduce", "backward"])
lab.verify(gathers, 2 * blocks + 1, table["sequence"]["all_gather", "forward"])
lab.verify("largest difference of a loss to one device's", 1e-9, differ, how="at most")
lab.score()

# %% [markdown]
# These collectives stand around each pair of split layers, A and B or qkv and out:
#
# | | before two split layers | after them | norms and residuals |
# |---|---|---|---|
# | tensor | nothing; backward: all-reduce | all-reduce; backward: nothing | all positions, on every rank |
# | sequence | all-gather; backward: reduce-scatter | reduce-scatter; backward: all-gather | 1/N of them |
#
# An all-reduce is a reduce-scatter and an all-gather (lab 02), so sequence parallelism sends as many bytes, but saves
# activations. But a rank's norms now see 1/N of the positions, so their gradients have to be summed, too: hence the
# all-reduces in the optimizer's step.
#
# DDP's all-reduces hide behind backward. These are in the middle of the computation, and nothing can go on until they
# have finished. That is why tensor parallelism needs the fastest link there is.

# %%
runs["tensor"].timeline()

# %% [markdown]
# One all-reduce carries batch × context × width numbers; DDP's gradients grow with the square of the width. So many
# tokens in a step favor DDP, and wide layers favor tensor parallelism. These are the bytes passed to all-reduces in a
# step, for four blocks in fp32:


# %%
def of_step(tokens, width):
    sent = {"tensor parallel": 4 * 4 * tokens * width * 4, "DDP": 4 * (4 * (12 * width**2 + 13 * width))}
    return draw.bars(predicted=sent, unit="B")


lab.explore(of_step, tokens=[128, 512, 2048, 8192], width=[128, 1024, 4096])

# %% [markdown]
# ## When?
#
# - **Within a host with NVLink**, use it when one sample is too much for a device, or when a step has fewer samples
#   than ranks. It divides activations within the split layers, which FSDP does not.
# - **Add sequence parallelism** when the remaining activations are the problem.
# - **Otherwise** use DDP or FSDP, which wait less. On several hosts, use tensor parallelism only within each (lab 15).
# - **Hugging Face:** models come with a plan: `from_pretrained(name,
#   distributed_config=DistributedConfig(tp_plan="auto"))`, from `transformers.distributed`, under torchrun.
#
# ## On 2 × T4 and 8 × A100
#
# How much of a step is spent waiting, with a transformer of 113 million parameters and 32 samples per step?

# %%
ways = {name: sized(Script.load(name), width=768, layers=16, heads=16) for name in ("ddp", "tensor_parallel")}
lab.plans(ways, global_batch_size=32) if plans else print("(skipped: set plans = True)")

# %% [markdown]
# Tensor parallelism holds less and waits more; the model fits under DDP, so here DDP is the choice.
#
# ## Recap
#
# | strategy | a rank holds | sends | waits |
# |---|---|---|---|
# | DDP | everything | gradients, once per step | at the end of backward |
# | FSDP | 1/N of all states | weights and gradients of every unit | for weights that are late |
# | tensor parallel | 1/N of the split layers, the rest whole | activations | 4 times in every block |
# | with sequence parallel | and 1/N of the activations between them | as many bytes | as often |
#
# ## Try this
#
# 1. Repeat the plans above with `global_batch_size=8`: which strategy gains?
#    <details><summary>Answer</summary>Tensor parallelism: its sums shrink with the samples, while those of DDP do not.
#    On 2 × T4 both now wait a third of a step, and it is ahead. On 8 × A100 it is behind, because of the optimizer's 28
#    ms: torch does not update whole and split parameters together, so the host launches their updates one by
#    one.</details>
# 2. `nproc_per_node = 3`: what is refused?
#    <details><summary>Answer</summary>"4 heads of out cannot be split across 3 tensor ranks", on all ranks,
#    before the first step: a head is not cut.</details>
# 3. Forget one sum: in the script's `tensor` cell, `RowwiseParallel(output_layouts=Partial())` for the layer `down`.
#    <details><summary>Answer</summary>Nothing crashes. There are five all-reduces in forward instead of nine, and over
#    nine steps the loss is off by up to 8%: each rank goes on with its own partial sum.</details>
#
# ## Sources
#
# Shoeybi et al., *Megatron-LM* (arXiv 1909.08053), section 3. Korthikanti et al. (arXiv 2205.05198): sequence
# parallelism; section 4.2.2 keeps a part of what torch keeps whole, and gathers it again in backward.
# torch/distributed/tensor/parallel.
