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
# # 02 · Collectives: what ranks say to each other
#
# **You will be able to** name the five calls that distributed training is made of, say what each leaves on every rank
# and what it costs, and write the most important one yourself. **20 minutes. You need** lab 01.
#
# Lab 01's DDP averages all gradients in every step. Two ranks can simply send theirs to each other. If each of a
# thousand ranks sent its gradients to all others, it would send them 999 times, and each further rank would make
# every step slower. So DDP needs a better way to add up what all ranks have, and this lab looks for it.
#
# Ranks that can talk to each other form a **process group**. A **collective** is a call that all ranks of a group make
# together, in the same order. (If one rank leaves it out, the others wait for it.) The picture is an `all_reduce`,
# which leaves the sum of all ranks' tensors on every rank. Each rank has cut its tensor into chunks; the stripes of a
# chunk show which ranks' numbers it contains. Chunks go around the ring: first the sums grow, then the finished sums
# are passed on.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks; on two cores, too

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("02_collectives", ranks=nproc_per_node)
hidden = {"shown": False}  # runs without a panel
draw.ring(nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# Each rank has a tensor, for example its gradients, of *S* bytes. In the first question rank 0 has 10 11 12 13, rank
# 1 has 20 21 22 23, and so on; a `reduce_scatter` is the first half of the picture (play it from its beginning),
# which leaves chunk *r* on rank *r*; the first chunk is on the left. In the second, count chunks: each is *S*/4. A
# `broadcast` gives every rank the tensor of rank 0.

# %%
left = lab.ask("reduce_scatter: the number that is left on rank 1", default=20)
sends = lab.ask("what each of four ranks sends in a ring all_reduce: how many times S", default=3)
alone = lab.ask("how much of its neighbor's gradient rank 0 receives unchanged, not in a sum", default=100, unit="%")
ratio = lab.ask("bytes of an all_reduce, over all ranks: how many times a broadcast's", default=1, unit="times")

# %% [markdown]
# ## One collective, by hand
#
# `labkit.ranks` starts ranks that wait for your cells, and `%%ranks` executes a cell on all of them, at once. Each has
# `torch`, `dist` (torch.distributed), its `rank` and a process group. What ranks print or return is shown below the
# cell, and once if it is the same.

# %%
import labkit

ranks = labkit.ranks(nproc_per_node, timeout=5)

# %%
# %%ranks
x = torch.full((2,), 10.0 * (rank + 1))
dist.all_reduce(x)
x

# %% [markdown]
# ## Five collectives
#
# You know `all_reduce`, `reduce_scatter` and `broadcast`. An `all_gather` gives every rank all tensors, one after
# another. In an `all_to_all` each rank cuts its tensor into chunks and sends chunk *r* to rank *r*. What does each of
# the five leave on rank 0, and on rank 1? Write it down before you run them.

# %%
import torch
import torch.distributed as dist


def broadcast(x):
    out = x.clone()
    dist.broadcast(out, src=0)  # in place, as all_reduce
    return out


def all_reduce(x):
    out = x.clone()
    dist.all_reduce(out)
    return out


def all_gather(x):
    out = x.new_empty(len(x) * dist.get_world_size())
    dist.all_gather_into_tensor(out, x)
    return out


def reduce_scatter(x):
    out = x.new_empty(len(x) // dist.get_world_size())
    dist.reduce_scatter_tensor(out, x)
    return out


def all_to_all(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


FIVE = (broadcast, all_reduce, all_gather, reduce_scatter, all_to_all)

# %%
ranks.load(broadcast)  # its cell: all five

# %%
# %%ranks
x = 10.0 * (rank + 1) + torch.arange(world_size, device=device)
for call in FIVE:
    print(f"{call.__name__:15}", *call(x).int().tolist())

# %%
seen = ranks.pull("reduce_scatter(x).item()")
lab.verify(left, sum(10 * (rank + 1) + 1 for rank in range(lab.ranks)), seen[1])

# %% [markdown]
# Compare `reduce_scatter` and `all_reduce`: an `all_reduce` is a `reduce_scatter` followed by an `all_gather`. DDP
# needs the whole of it; FSDP needs its two halves, at different times. `all_to_all` turns rows into columns. Mixtures
# of experts need it: in such a layer each token goes to a few of many MLPs, on whichever ranks these are (lab 27).
#
# All ranks have to make the call. If rank 1 leaves it out, the others wait, here for the 5 seconds of `timeout`. In a
# training they would wait for minutes, and its GPUs would look busy.

# %%
try:
    ranks.exec("if rank != 1: dist.all_reduce(x)")
except labkit.LabError as error:
    print(error)
ranks.stop()

# %% [markdown]
# ## What does it cost?
#
# What each rank has at the end determines the least that all *N* ranks together must send, if each passes a tensor of
# *S* bytes to the call. A broadcast has to reach *N - 1* others, which takes (N - 1) S bytes. Adding up a tensor takes
# as many, and distributing the sum as many again. In an `all_gather` every rank's tensor has to reach all others,
# which takes N (N - 1) S. In an `all_to_all` a rank keeps 1/N of its tensor and sends the rest, so all ranks together
# send (N - 1) S.
#
# The bytes are moved by a **backend**. On GPUs that is **NCCL**, the NVIDIA Collective Communications Library; on CPUs
# it is **gloo**, a library that Facebook wrote, which uses ordinary network connections. The operating system counts
# the bytes that go through them; `sent_by(call)`, a function that labkit adds to the script, makes a call and returns
# this rank's count.
#
# `lab.run` calls a function on every rank and returns the run, and what each rank has returned. For that it writes a
# script with the function's cell; a keyword, such as `five=all_reduce`, adds the cell that defines `all_reduce`.


# %%
def traffic(device):
    x = torch.ones(65_536 * dist.get_world_size(), device=device)
    return {call.__name__: sent_by(lambda call=call: call(x)) for call in FIVE}


# %%
size = lab.ranks * 2**18  # S
factors = zip(FIVE, (1, 2, lab.ranks, 1, 1), strict=True)
costs = {call.__name__: factor * (lab.ranks - 1) * size for call, factor in factors}
if lab.counts_bytes:
    run, seen = lab.run(traffic, five=all_reduce, options=hidden)
    total = {name: sum(each[name] for each in seen) for name in costs}
    title = f"sent by {lab.ranks} ranks together, for S = {size / 2**20:g} MiB"
    display(draw.bars(total, costs, unit="B", title=title))
    lab.verify(ratio, 2, total["all_reduce"] / total["broadcast"], "times", within=0.02)

# %% [markdown]
# Each pair of bars is the formula, paler, and the bytes that were counted. They differ for one call: a
# `reduce_scatter` takes (N - 1) S, but gloo carries it out as an `all_reduce` and discards most of the result. That is
# a property of this backend, not of the method: NCCL sends (N - 1) S.
#
# ## The ring, by hand
#
# In the first *N - 1* steps a rank adds what arrives to its own chunk and passes the sum on. Then one chunk on each
# rank is finished, and *N - 1* more steps pass the finished ones around. So every rank sends 2 (N - 1) chunks of S / N:
# less than 2 S, however many ranks there are. (`exchange`, which labkit adds too, sends its first argument to the next
# rank while the second is filled by the previous one, with `dist.batch_isend_irecv`; `run.script` shows it.)


# %%
def ring_all_reduce(x):
    rank, n, received = dist.get_rank(), dist.get_world_size(), []
    chunks = x.chunk(n)
    for step in range(2 * (n - 1)):
        outgoing, mine = chunks[(rank - 1 - step) % n], chunks[(rank - 2 - step) % n]
        arrived = torch.empty_like(mine)
        exchange(outgoing, arrived)
        if step < n - 1:
            mine += arrived  # reduce_scatter: a sum that grows on its way
        else:
            mine.copy_(arrived)  # all_gather: it is finished
        received.append(arrived)
    return received


def by_hand(device):
    rank, n = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(64.0 * n, device=device)
    gradient, expected, neighbors = numbers * (rank + 1), numbers * (rank + 1), numbers * ((rank - 1) % n + 1)
    dist.all_reduce(expected)
    received = ring_all_reduce(gradient)
    unchanged = sum(any(arrived.equal(chunk) for chunk in neighbors.chunk(n)) for arrived in received)
    return (gradient - expected).abs().max().item(), len(received) / n, unchanged / n


# %%
run, answers = lab.run(by_hand, options=hidden)
lab.verify("ring: largest difference to dist.all_reduce", 0, max(each[0] for each in answers))
lab.verify(sends, 2 * (lab.ranks - 1) / lab.ranks, answers[0][1])
lab.verify(alone, 1 / lab.ranks, answers[0][2], "%")
lab.score()

# %% [markdown]
# A rank sees only one chunk of its neighbor's gradient unchanged, in the first step. All others arrive in a sum.
#
# ## Why a ring
#
# If every rank sent its gradients to all others, it would send (N - 1) S: 63 S on 64 ranks. In the ring it is
# 2 (N - 1) / N S: 1.97 S on 64 ranks, nearly the same as on a thousand.
#
# ## Who makes which call
#
# Each rank passes S bytes to the call.
#
# | call | leaves on rank r | of size | all ranks send | made by |
# |---|---|---|---|---|
# | `broadcast` | rank 0's tensor | S | (N - 1) S | DDP, when it wraps the model |
# | `all_reduce` | the sum | S | 2 (N - 1) S | DDP in backward; you, for metrics |
# | `all_gather` | all tensors | N S | N (N - 1) S | FSDP, before a layer computes |
# | `reduce_scatter` | chunk r of the sum | S / N | (N - 1) S | FSDP, after a layer's backward |
# | `all_to_all` | chunk r of every tensor | S | (N - 1) S | mixtures of experts |
#
# In the row of `all_gather`, S is only a shard: with FSDP each rank passes 1/N of a layer, so gathering all weights, P
# bytes, takes (N - 1) P. Scattering the sums of their gradients takes (N - 1) P, too. Together that is what DDP's
# `all_reduce` takes. (FSDP gathers most weights twice in a step; lab 05 counts.)
#
# **In your own code** the strategy makes these calls for you. You make one yourself when you need a value over all
# ranks, such as the mean loss. Keep it outside `if rank == 0`, or rank 0 waits forever:
#
# ```python
# mean = loss.detach().clone()
# dist.all_reduce(mean)  # on every rank
# mean /= dist.get_world_size()
# if dist.get_rank() == 0:
#     print(mean.item())
# ```
#
# ## On 2 × T4 and 8 × A100
#
# Two GPUs of a machine are connected by **PCIe**, the bus that also connects them to the CPU, or by **NVLink**,
# NVIDIA's direct connection between GPUs. In each direction, a T4's PCIe 3 carries 16 GB/s and an A100's NVLink 300
# by their data sheets. A collective reaches less, and over PCIe much less, because the data pass through the memory
# of the **host** (the machine with its CPUs) on their way: the plans below assume 5 and 225 GB/s. Between machines
# there is Ethernet or **InfiniBand**, a network for clusters, often with 25 GB/s.
#
# DDP all-reduces the same gradients in every step, however many samples the step has, and does so while backward goes
# on (lab 03). A transformer of 25 million parameters has 100 MB of them. How much of a step is spent waiting, with 64
# samples in it and with 8?

# %%
script = sized(Script.load("ddp"), width=512, layers=8, heads=8)
lab.plans({f"{samples} samples": (script, {"global_batch_size": samples}) for samples in (64, 8)})

# %% [markdown]
# The bytes are the same. With 8 samples, backward is too short to hide them where PCIe carries them; NVLink is fast
# enough. So the number of bytes does not decide alone: what matters is how long they take on this link, and how much is
# computed meanwhile.
#
# ## Recap
#
# For *N* ranks, and a model whose parameters take *P* bytes in fp32. All figures are per rank. What is sent is to be
# multiplied by (N - 1) / N.
#
# | | held | sent by each rank in a step | waits |
# |---|---|---|---|
# | one rank | 4 P: parameters, gradients, two moments of AdamW | nothing | never |
# | DDP | 4 P | 2 P: an all-reduce of the gradients | lab 03 |
# | FSDP | 4 P / N | all-gathers and reduce-scatters (lab 05) | lab 05 |
#
# An all-reduce hardly costs a rank more when there are more ranks. But it takes its time, and a rank that calls it and
# waits for the sum does not compute meanwhile. Lab 03 builds a DDP that waits for less and less.
#
# ## Try this
#
# 1. `nproc_per_node = 2`: what does each rank send in the ring, and how much of its neighbor's gradient arrives as
#    such?
#    <details><summary>Answer</summary>S, and half of the gradient. In a ring of two nothing looks different from plain
#    sending back and forth; that is why this lab has four ranks.</details>
# 2. Move `ranks.stop()` to the end and add a cell: `%%ranks`, `out = torch.empty(2 * world_size)`,
#    `dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))`, `out`. Which rank's numbers come first?
#    <details><summary>Answer</summary>Those of rank 0, on every rank: the order is that of the ranks, not that in which
#    they come to the call.</details>
# 3. In `ring_all_reduce`, replace `mine += arrived` with `mine.copy_(arrived)`, and print `answers` (`lab.score()` then
#    raises an error, because a claim of the lab no longer holds).
#    <details><summary>Answer</summary>The largest difference is 2,295. No chunk is a sum any more; each is the gradient
#    of one rank, and not of the same rank everywhere.</details>
# 4. Run only `n - 1` steps. What is left on each rank?
#    <details><summary>Answer</summary>One finished chunk on each rank, chunk r on rank r; the others are sums of one,
#    two or three ranks. That is a reduce_scatter.</details>
#
# ## Sources
#
# Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009). The documentation
# of torch.distributed. NVIDIA's data sheets of the T4 and the A100; 25 GB/s is InfiniBand HDR's 200 Gbit/s.
