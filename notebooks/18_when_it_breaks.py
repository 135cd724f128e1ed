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
# # 18 · When it breaks: who is to blame?
#
# **You will be able to** say which rank failed first when another one complains, find the call at which a run hangs,
# and avoid five mistakes that one GPU does not show. **20 minutes. You need** labs 03 and 05.
#
# Ranks wait for each other in **collectives**, which are matched by their order, not by their names: the 25th call of
# one rank meets the 25th call of the others. If these calls differ, or one rank makes fewer, all wait. So the rank that
# complains is often not the one at fault, and the one at fault often says nothing.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks

# %%
from labkit_labs import Lesson, draw
from labkit_labs.labs.broken_scripts import attempt, replaced

lab, last = Lesson("18_when_it_breaks", ranks=nproc_per_node), nproc_per_node - 1
draw.calls(
    {0: ["all_gather", "reduce_scatter", "barrier"], 1: ["all_gather", "reduce_scatter", "all_gather"]}, first=23
)

# %% [markdown]
# ## Your predictions
#
# The script below is sound: it runs FSDP over two linear layers on two ranks, for eight steps of 4 samples each. In a
# step each rank gathers both layers for forward and again for backward, and scatters two gradients: six calls. Then
# comes a barrier. You will break the script in one place at a time:
#
# - *Bad sample*: in step 3 one sample of the last rank is NaN.
# - *Rank 0 evaluates alone*: after training the other rank ends, and rank 0 calls the model once more. The sampler is
#   forgotten, too: the loader has `shuffle=True`, with the same seed on both ranks. They draw 64 samples in all.
# - *Four spaces*: the barrier slips into an `if rank == 0`.

# %%
lab.ask("bad sample: ranks with a NaN one step later", default=1)
lab.ask("rank 0 evaluates alone: different samples seen", default=64)
lab.ask("rank 0 evaluates alone: rank that torchrun names", default=1, options={"0, it waits": 0, "1, it has left": 1})
_ = lab.ask("four spaces: number of the call at which the ranks part", default=6)

# %% [markdown]
# ## A sound script
#
# `lab.run` calls the function on every rank; `run.script` is the file that ran. Samples are numbered, so that you can
# see which rank was trained on what.

# %%
import time

import torch
from torch import distributed as dist, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 8, 4


def train(device):
    rank, samples = dist.get_rank(), STEPS * BATCH * dist.get_world_size()
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
sound = replaced(run.script, "    dist.barrier()\n    dist.destroy", "    dist.destroy")  # a rank that is done leaves

# %% [markdown]
# ## A bad sample: nothing fails
#
# One sample is NaN: the first in the last rank's third batch. (`DistributedSampler` draws its order from a seed, so
# this process can ask it for the sample's number.) `replaced` replaces one piece of the script's text.

# %%
bad = [*DistributedSampler(range(STEPS * BATCH * lab.ranks), lab.ranks, last)][2 * BATCH]
poisoned = replaced(sound, "    data = Ten", f"    x[{bad}] = torch.nan\n    data = Ten")
display(poisoned.diff(sound))
_ = attempt(lab, "bad sample", poisoned, errors=0, nan_rank=last, nan_step=3, nan_ranks=lab.ranks)

# %% [markdown]
# The run *succeeded*. The mean of a number and NaN is NaN, so after one step the weights are lost on every rank, and
# from then on all losses look alike. Only the losses of the individual ranks say whose data to look at. In your own
# script let every rank check its own loss before backward spreads it:
#
# ```python
# if not torch.isfinite(loss):
#     raise ValueError(f"rank {rank}, step {step}: {loss=}, samples {numbers.tolist()}")
# ```
#
# ## Rank 0 evaluates alone
#
# This run has two mistakes: the sampler is forgotten, and only rank 0 evaluates. The FAQ of a popular article marks `if
# rank == 0: evaluate(…)` as correct. It is, if rank 0 has the whole model, as in `model.module` under DDP. Under FSDP
# forward gathers shards, which takes all ranks.

# %%
faq = replaced(sound, "sampler=DistributedSampler(data)", "shuffle=True")
faq = replaced(faq, '    print("accuracy"', '    if rank == 0:\n        print("accuracy"')
display(faq.diff(sound))
_ = attempt(lab, "rank 0 evaluates alone", faq, errors=1, rank=1, step=STEPS, different=STEPS * BATCH, blamed=0)

# %% [markdown]
# The forgotten sampler raises nothing: both ranks train on the same half of the samples, at twice the cost of one rank.
# (With different seeds on the ranks they would draw different orders, and meet some samples twice and some never.)
#
# The evaluation does raise an error. The last lines above are torchrun's, from the same script without labkit: it names
# the rank whose error it saw first. That is the rank that waited for another, which had left without an error. gloo
# notices at once that a rank is gone. With NCCL rank 0 would wait for the process group's time limit, ten minutes.
#
# ## Four spaces: a hang
#
# `dist.barrier()` slips into the `if` above it. Rank 0 calls the barrier while the others begin the next step with an
# all-gather. All wait until the time limit: 30 minutes with gloo, 10 with NCCL. (labkit checks a script before starting
# it. Its warning is right, but ignored here.)

# %%
four_spaces = replaced(sound, "        dist.barrier()", "            dist.barrier()")
display(four_spaces.diff(sound))
hang = attempt(lab, "four spaces", four_spaces, until="collective #", parted=6 + 1, caller=0)
print(hang.notice)

# %% [markdown]
# The numbers are those of torch's **flight recorder**, a list of the latest collectives of each rank, which labkit
# reads while the run hangs. It does not say which of the two calls is wrong; the line of each does. Without labkit
# set `TORCH_FR_BUFFER_SIZE=2000` and `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, wait for the time limit, and let `torchfrtrace`
# compare what the ranks have dumped. `py-spy dump --pid …` shows the line at which any process waits.
#
# ## Too large on one rank
#
# One rank gets a sample of ten million tokens, whose attention scores would take 400 TB, and raises an error. The
# others lose their neighbor in the middle of a collective and raise errors about a connection.

# %%
planted = f"        if rank == {last} and step == 3:\n            torch.ones(10**7, 10**7)\n        loss.backward()"
large = replaced(sound, "        loss.backward()", planted)
_ = attempt(lab, "too large", large, errors=1, rank=last, step=2)

# %% [markdown]
# ## A layer that nobody uses
#
# This script has DDP instead of FSDP, and a parameter on which no output depends. Its gradient never comes, so the
# bucket that waits for it is never sent. DDP says so when the next step begins; on one GPU nobody would notice.

# %%
wrap = "    for part in (model[0], model[2], model):\n        fully_shard(part)\n"
spare = '    model.register_parameter("spare", nn.Parameter(torch.zeros(8)))\n'
unused = replaced(sound, wrap, f"{spare}    model = nn.parallel.DistributedDataParallel(model)\n")
display(unused.diff(sound))
attempt(lab, "unused parameter", unused, errors=1, step=1)
lab.score()

# %% [markdown]
# Remove or freeze the layer. If the data determine which layers are used, pass `find_unused_parameters=True`: DDP then
# looks for unused parameters in every step.
#
# ## What you see, and where to look
#
# | you see | it may be | look at |
# |---|---|---|
# | NaN on all ranks | one rank's data, or the learning rate | the first rank and step in the logs of all ranks |
# | an error about a connection or a peer | another rank ended first | the rank that ended first, even without one |
# | a process is gone, without a message | the host was out of memory | `dmesg`: "Out of memory: Killed process" |
# | no progress, GPUs perhaps at 100% | different calls, or one is missing | flight recorder, `py-spy dump` |
# | "Expected to have finished reduction" | a parameter without a gradient | `TORCH_DISTRIBUTED_DEBUG=INFO`: its name |
# | two ranks learn no faster than one | all draw the same samples | the numbers of the samples, on each rank |
#
# GPUs are at 100% because NCCL's kernels spin while they wait. torchrun lists the errors of all ranks;
# `torch.multiprocessing.spawn` raises only that of the first process that it finds dead, which may be a rank that
# waited.
#
# **Slow rather than broken?** `NCCL_DEBUG=INFO` makes every rank print how it reaches the others. (Not run here; the
# lines are from NCCL's issues 952 and 1817.)
#
#     [7] NCCL INFO Channel 03/0 : 15[7] -> 6[6] [send] via NET/Socket/3
#     [2] NCCL INFO Channel 00/0 : 10[2] -> 9[1] via P2P/IPC/read
#     [3] NCCL INFO Channel 00 : 3[3] -> 7[7] via SHM/direct/direct
#
# Rank 15, on GPU 7 of its host, sends to rank 6 by TCP: if you have paid for InfiniBand, that is the problem. `P2P`
# means directly from GPU to GPU, `SHM` through host memory.
#
# ## On 2 × T4 and 8 × A100
#
# One of these failures can be seen before a GPU is rented: out of memory, on the rank with the longest sample. The
# plans are for a transformer of 203 million parameters under FSDP, and 16 texts per step, of 512 or of 2,048 tokens:

# %%
from labkit import Script
from labkit_labs import sized

sizes = {"width": 1024, "layers": 16, "heads": 16}
texts = {f"{tokens} tokens": sized(Script.load("fsdp"), **sizes, context=tokens) for tokens in (512, 2048)}
lab.plans(texts, global_batch_size=16)

# %% [markdown]
# If texts differ in length, put the longest ones into the first step: a run that survives it will not run out of memory
# hours later.
#
# ## Try this
#
# 1. Let rank 0 evaluate alone under DDP, with `model.module(x)`.
#    <details><summary>Answer</summary>It ends well: rank 0 has the whole model, and <code>model.module</code> calls no
#    collective. The others have left by then, and need not wait.</details>
# 2. Use four ranks, with the sample that is too large on rank 3. Which ranks print an error?
#    <details><summary>Answer</summary>Three of the four did. Rank 1 did not: it was ended before it could. labkit names
#    rank 3, which ran out of memory after two steps. The number of errors says nothing.</details>
# 3. Pass `find_unused_parameters=True` although every parameter is used.
#    <details><summary>Answer</summary>Nothing fails. DDP warns once that it "did not find any unused parameters", and
#    that the flag costs a traversal of the graph in every step. Remove it again.</details>
# 4. `attempt(lab, "watched", four_spaces, watchdog=10, errors=1)`: what ends a hang when nobody is there?
#    <details><summary>Answer</summary>labkit's watchdog, after 10 seconds without progress, with both calls in the
#    message: "as collective #7 rank 0 called barrier(), rank 1 called all_gather". `attempt` sets 60 seconds
#    if you do not; `labkit.launch` has no watchdog unless you pass one.</details>
#
# ## Sources
#
# torch/distributed/elastic: how torchrun chooses the root cause. torch/nn/parallel/distributed.py: unused parameters.
# docs.pytorch.org, *Flight Recorder*: hangs.
