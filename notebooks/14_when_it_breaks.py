# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · When it breaks: who is to blame?
#
# **You will be able to** say which rank failed first when another one complains, recognize a hang and the call at which
# it began, and avoid five mistakes that a script on one GPU does not show. **20 minutes. You need** labs 03 and 07.
#
# Ranks wait for each other in **collectives**. torch numbers a rank's calls; call 25 of one rank meets call 25 of the
# others, whatever they are called. Where the names differ, or one rank is missing, all wait. So the rank that complains
# is often not the one at fault, and the one at fault often says nothing.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks

# %%
from labkit.lessons import Lesson, draw
from labkit.lessons.labs.broken_scripts import attempt, broken

lab, last = Lesson("14_when_it_breaks", ranks=nproc_per_node), nproc_per_node - 1
draw.calls(
    {0: ["all_gather", "reduce_scatter", "barrier"], 1: ["all_gather", "reduce_scatter", "all_gather"]}, first=23
)

# %% [markdown]
# ## Your predictions
#
# The script below is sound: FSDP over two linear layers, eight steps of 4 samples on each rank. You will break one
# place of it at a time. Two ranks; the second line is about `shuffle=True` in place of a sampler.

# %%
lab.ask("bad sample: ranks with a NaN one step later", default=1, about="One rank meets a sample that is NaN.")
lab.ask("rank 0 evaluates alone: different samples seen", default=64, about="There is no sampler either.")
lab.ask("rank 0 evaluates alone: rank that torchrun names", default=1, options={"0, it waits": 0, "1, it has left": 1})
_ = lab.ask("four spaces: number of the call at which the ranks part", default=5, about="In the second step.")

# %% [markdown]
# ## A sound script
#
# `lab.run` calls the function on every rank; `run.script` is the file that ran. Samples have numbers, so that you can
# see who was trained on what. There is one sample less than all ranks take.

# %%
import time

import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 8, 4


def train(device):
    rank, samples = dist.get_rank(), STEPS * BATCH * dist.get_world_size() - 1
    torch.manual_seed(0)  # the same weights and samples on every rank
    x, y = torch.randn(samples, 32), torch.randint(10, (samples,))
    data = TensorDataset(torch.arange(samples), x, y)
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer, seen = torch.optim.AdamW(model.parameters()), []
    for step, (numbers, inputs, targets) in zip(range(1, STEPS + 1), loader, strict=False):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers.tolist()
        if rank == 0:
            print("after step", step)
        dist.barrier()  # as if rank 0 had written a file
        time.sleep(0.12)  # as long as a small real step
    print(seen, flush=True)
    print("accuracy", (model(x).argmax(1) == y).float().mean().item())


# %%
run, _ = lab.run(train, env={"CUDA_VISIBLE_DEVICES": ""})
sound = broken(run.script, "    dist.barrier()\n    dist.destroy", "    dist.destroy")  # who is done, leaves

# %% [markdown]
# ## A bad sample: nothing fails
#
# The features of one sample are NaN. Which rank meets it, and when? `DistributedSampler` draws its order from a seed
# and needs no ranks to tell. Take the sample that opens the third batch of the last rank.

# %%
bad = [*DistributedSampler(range(STEPS * BATCH * lab.ranks - 1), lab.ranks, last)][2 * BATCH]
poisoned = broken(sound, "    data = Ten", f"    x[{bad}] = torch.nan\n    data = Ten")
expected = {"errors": 0, "nan_rank": last, "nan_step": 3, "nan_ranks": lab.ranks, "repeated": 1}
silent = attempt(lab, "bad sample", poisoned, **expected)

# %% [markdown]
# The run *succeeded*: FSDP averaged the gradients of all ranks, and the mean of a number and NaN is NaN. Only the run's
# view says on which rank the loss was lost first, and at which step. And one sample was dealt twice: all ranks must
# make as many steps.
#
# ## Two lines of a FAQ
#
# "My code works on single GPU but fails with DDP/FSDP", says the FAQ of a popular article. First cause: a forgotten
# sampler. With one seed all ranks then draw the same samples, and nothing says so. Then `if rank == 0: evaluate(…)`,
# marked as correct. That is correct where rank 0 has the whole model, as `model.module` under DDP. Under FSDP a forward
# *gathers*.

# %%
faq = broken(sound, "sampler=DistributedSampler(data)", "shuffle=True")
faq = broken(faq, '    print("accuracy"', '    if rank == 0:\n        print("accuracy"')
expected = {"errors": 1, "rank": 1, "step": STEPS, "different": STEPS * BATCH, "blamed": 0}
alone = attempt(lab, "rank 0 evaluates alone", faq, **expected)

# %% [markdown]
# torchrun names the rank that ended with an error first. That is the one that waited, for a rank that left without one.
#
# ## Four spaces: a hang
#
# `dist.barrier()` slips into the `if` above it. Rank 0 now calls a barrier while the others begin the next step with an
# all-gather. Both wait: without labkit for the process group's time limit, 30 minutes with gloo, 10 with NCCL. A step
# gathers two layers for forward, gathers them again for backward, and scatters two gradients: six calls.

# %%
four_spaces = broken(sound, "        dist.barrier()", "            dist.barrier()")
hang = attempt(lab, "four spaces", four_spaces, until="barrier", parted=6 + 1, caller=0)
print(hang.notice)

# %% [markdown]
# labkit reads torch's flight recorder, which has these numbers, while the run hangs. (Without it, set
# `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, wait for the time limit, and let `torchfrtrace` read
# what NCCL's ranks have dumped.)
#
# ## Too large on one rank, and a layer that nobody uses
#
# One rank meets a sample of ten million tokens, whose attention scores would take 400 TB. It dies; the others lose
# their neighbor in the middle of a collective, and raise errors, too. And DDP instead of FSDP, with a parameter that no
# output depends on: its gradient never comes, so the bucket that waits for it is never sent.

# %%
scores = "            torch.ones(10**7, 10**7)"
planted = f"        if rank == {last} and step == 3:\n{scores}\n        loss.backward()"
large = broken(sound, "        loss.backward()", planted)
line = str(large).splitlines().index(scores) + 1
full = attempt(lab, "too large", large, errors=1, rank=last, step=2, line=line)

wrap = "    for part in (model[0], model[2], model):\n        fully_shard(part)\n"
spare = '    model.register_parameter("spare", nn.Parameter(torch.zeros(8)))\n'
unused = broken(sound, wrap, f"{spare}    model = nn.parallel.DistributedDataParallel(model)\n")
spared = attempt(lab, "unused parameter", unused, errors=1, step=1)
cured = broken(unused, "Parallel(model)", "Parallel(model, find_unused_parameters=True)")
attempt(lab, "find_unused_parameters", cured, errors=0)
runs = {"bad sample": silent, "rank 0 alone": alone, "four spaces": hang, "too large": full, "unused": spared}
display(draw.bars({name: each.run.metrics()["step"].max() for name, each in runs.items()}, title="steps made"))
lab.score()

# %% [markdown]
# A run that has failed looks from the outside like one that hangs, or one that has ended. Ask three things: which rank
# was first, at which step, in which call.
#
# ## Other launchers, and what NCCL says
#
# `torch.multiprocessing.spawn` starts ranks from a Python program and raises **one** error, that of the first process
# that it finds dead. Four gloo ranks, of which the last raises in step 3: in 2 of 13 tries it raised the lost
# connection of rank 2, and the cause was not in it. torchrun listed all four, and rank 3 as the root cause, in 5 of 5.
#
# `nn.DataParallel` has no ranks: one process, a thread for each GPU, and in every forward the model is copied to all of
# them and the outputs are gathered on one. So nothing can hang between ranks, but torch recommends DDP even on one
# machine.
#
# With NCCL, `NCCL_DEBUG=INFO` makes every rank print how it reaches the others (not run here; these lines are from
# NCCL's issues 952 and 1817):
#
#     [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
#     [2] NCCL INFO Channel 00/0 : 10[2] -> 9[1] via P2P/IPC/read
#     [3] NCCL INFO Channel 00 : 3[3] -> 7[7] via SHM/direct/direct
#
# Rank 15, on GPU 7 of its host, sends to rank 6 by TCP: where you have paid for InfiniBand, that is the fault. `P2P` is
# directly from GPU to GPU, `SHM` through the host's memory.
#
# ## On 2 × T4 and 8 × A100
#
# One of these failures can be seen before a GPU is rented: out of memory, on the rank with the longest sample. A
# transformer of 203 million parameters under FSDP, 16 texts a step, of 512 or of 2,048 tokens:

# %%
from labkit import Script
from labkit.lessons import sized

sizes = {"width": 1024, "layers": 16, "heads": 16}
texts = {f"{tokens} tokens": sized(Script.load("fsdp"), **sizes, context=tokens) for tokens in (512, 2048)}
lab.plans(texts, global_batch_size=16)

# %% [markdown]
# ## Try this
#
# 1. Let rank 0 evaluate alone under DDP, with `model.module(x)`.
#    <details><summary>Answer</summary>It ends well: rank 0 has the whole model, and `model.module` calls no collective.
#    The others have left by then, and need not wait.</details>
# 2. Four ranks, and the sample that is too large on rank 3. Which ranks print an error?
#    <details><summary>Answer</summary>Three of four did, and rank 1 none: it was ended before it could. labkit names
#    rank 3, which ran out of memory at line 44 after two steps. Count the errors, and you learn nothing.</details>
# 3. `find_unused_parameters=True` although every parameter is used.
#    <details><summary>Answer</summary>Nothing fails. DDP warns once that it "did not find any unused parameters", and
#    that the flag costs a traversal of the graph in every step. Take it away again.</details>
# 4. `attempt(lab, "watched", four_spaces, watchdog=10, errors=1)`: what ends a hang when nobody is there?
#    <details><summary>Answer</summary>The watchdog, after 10 seconds without progress, with both calls in the message:
#    "as collective #7 rank 0 called barrier(), rank 1 called all_gather". Before the launch `labkit.check` had already
#    named line 49: "`barrier` needs all ranks, but not all of them get here".</details>
#
# ## Sources
#
# torch/distributed/elastic: how torchrun chooses the root cause. torch/nn/parallel/distributed.py: unused parameters.
# docs.pytorch.org, *Flight Recorder*: hangs.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002) calls evaluation on rank 0 alone correct in line 1031, and again in the best practices (line
# 1178); its own FSDP example (line 709) evaluates on all ranks. Line 1013 warns of the forgotten sampler, rightly.

# %%
splits, rank_0 = ('"non-overlapping data splits" (002, line 1171)', 0), ("correct (002, line 1031)", 0)
lab.check({"bad sample: samples seen twice": splits, "rank 0 evaluates alone: errors": rank_0})
