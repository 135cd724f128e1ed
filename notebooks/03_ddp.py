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
# # 03 · Building DDP from two collectives
#
# **You will be able to** build DDP yourself, say how many bytes it sends, in how many pieces and when a rank waits for
# them, send less when you accumulate gradients, and name the cases in which two ranks do not equal one rank with a
# bigger batch. **35 minutes. You need** labs 01 and 02.
#
# Lab 02 ended with an `all_reduce` whose cost hardly grows with the number of ranks. But nobody computes while it is
# under way, so a training that calls it after every backward waits for it in every step. This lab starts with just
# that, and removes the waiting piece by piece until it has built **DDP**, DistributedDataParallel.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 32  # samples per step, over all ranks; a multiple of the ranks

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("03_ddp", ranks=nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# The model is the CNN of lab 01: five layers, each with a weight and a bias, together 405,898 parameters or 1.5 MiB.
# DDP packs gradients into **buckets**, in the order in which backward makes them, and sends a bucket when it is full:
# the first one at 1 MiB, each later one at 25 MiB. In the second question, the gradients of four batches
# (**micro-batches**) accumulate before one step, and DDP is not told. In the third, `DistributedSampler` gives each
# rank its samples, and a call to its method `set_epoch(n)` at the start of epoch *n* is meant to reshuffle them. The
# fourth is about MNIST: 60,000 images, two ranks, and a `DataLoader` with `batch_size=128` on each of them.

# %%
pieces = lab.ask("all-reduces in one backward of this CNN", default=10)
times = lab.ask("four micro-batches, one step: how many times as many bytes as in one backward", default=1)
orders = lab.ask("different orders of the samples in 3 epochs, if nobody calls sampler.set_epoch", default=3)
per_epoch = lab.ask("steps in an epoch of MNIST on two ranks with 128 samples each (on one rank: 469)", default=469)

# %% [markdown]
# ## By hand
#
# It takes two collectives. `broadcast` gives every rank the weights of rank 0; `all_reduce` replaces a tensor on every
# rank with the sum over all ranks. The picture is a step of DDP in its simplest form: wait for the end of backward,
# then average one gradient after another. Press *play*, or go through it one moment at a time.

# %%
draw.ddp(nproc_per_node, overlap=False)

# %% [markdown]
# `naive` is this step as code; `loss()` is the forward pass. To test it, every rank seeds its weights differently, on
# purpose, so that the broadcast has to make them equal. Each rank takes its share of one batch, and the gradients are
# compared with those of one process that has the whole batch. (`lab.run`, as in lab 02; `cnn=new_model` adds the cell
# that defines `new_model`. `gradients_differ`, which labkit adds, returns the largest difference between the gradients
# of two models, relative to the largest gradient of the same tensor.)

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def new_model(seed):
    torch.manual_seed(seed)
    parts = [(nn.Conv2d(n, m, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)) for n, m in ((1, 32), (32, 64), (64, 128))]
    return nn.Sequential(*sum(parts, ()), nn.Flatten(), nn.Linear(1152, 128), nn.ReLU(), nn.Linear(128, 10))


def naive(model, loss):
    loss().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # the sum of all ranks' gradients,
        p.grad /= dist.get_world_size()  # divided by their number: the mean


# %%
def compared(device, samples):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, alone = new_model(seed=rank).double().to(device), new_model(seed=0).double().to(device)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # the same weights; DDP does this once, when it wraps the model
    torch.manual_seed(0)
    x, y = torch.rand(samples, 1, 28, 28).double().to(device), torch.randint(10, (samples,)).to(device)
    naive(model, lambda: F.cross_entropy(model(x[rank::ranks]), y[rank::ranks]))
    F.cross_entropy(alone(x), y).backward()  # one process, the whole batch
    return gradients_differ(model, alone)


# %%
run, off = lab.run(compared, global_batch_size, cnn=new_model)
print("largest relative difference of a gradient, on each rank:", off)
lab.verify("gradients by hand: largest relative difference to one big batch", 1e-9, max(off), how="at most")

# %% [markdown]
# **Why the mean, and not the sum?** The loss is a mean over samples, and a mean over *B* samples is the mean of the
# means of equal shares. So both ranks have the gradient of the whole batch, whatever their number; in float64 only
# rounding is left. With the sum, the gradient, and with SGD the step, would grow with the number of ranks.
#
# **And the learning rate?** It belongs to the global batch. Keep 32 samples in all, 16 per rank, and nothing about the
# training changes. Keep 32 *per rank*, and the global batch is 64: half as many steps per epoch, each with less noise,
# for which a larger learning rate is usual (exercise 4).
#
# ## Three steps to DDP
#
# `flat` copies all gradients into one tensor: one all-reduce instead of ten. `overlap` does not wait for the end of
# backward: PyTorch calls a **hook**, a function that is registered for this, as soon as a gradient is complete, and
# `async_op=True` returns while the all-reduce is still under way, so that backward goes on. DDP does both: it packs
# gradients into buckets and sends a bucket as soon as it is full.
#
# With gradient accumulation, the gradients of several micro-batches are added up before one step, and only the sum has
# to be sent. Within `no_sync` DDP sends nothing; use it for all micro-batches except the last.
#
# The picture has one all-reduce for each layer, sent while backward goes on.

# %%
draw.ddp(nproc_per_node)

# %%
MICRO_BATCHES = 4


def flat(model, loss):
    loss().backward()
    gradients = [p.grad for p in model.parameters()]
    packed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(packed)
    means = (packed / dist.get_world_size()).split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def overlap(model, loss):
    under_way = []

    def send(p):
        under_way.append(dist.all_reduce(p.grad, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(send) for p in model.parameters()]
    loss().backward()
    for work, hook in zip(under_way, hooks, strict=True):
        work.wait()
        hook.remove()
    for p in model.parameters():
        p.grad /= dist.get_world_size()


def ddp(model, loss):  # the model is wrapped in DistributedDataParallel
    loss().backward()


def accumulated(model, loss):
    for _ in range(MICRO_BATCHES):
        (loss() / MICRO_BATCHES).backward()


def with_no_sync(model, loss):
    with model.no_sync():
        for _ in range(MICRO_BATCHES - 1):
            (loss() / MICRO_BATCHES).backward()
    (loss() / MICRO_BATCHES).backward()


# %% [markdown]
# `timed_steps`, which labkit adds, lets them take turns, 25 times. It replaces `dist.all_reduce` by a function that
# calls it and notes the bytes, when it was called and when the sum had arrived;
# `print(run.script.cells["timed"].text)` shows how. This runs on CPUs, even where there are GPUs. Two ranks on two
# cores have no core to spare for sending; a GPU leaves the CPU free for it. So in backward each layer also sleeps for
# 5 ms, which stands for a GPU that computes. Other programs can only make a wait longer, so for each way you see the
# step with the shortest wait after backward. `steps[way]["spans"]` has the parts of that step: forward, backward,
# each all-reduce and the waiting, each with its begin and end in seconds.

# %%
from torch.nn.parallel import DistributedDataParallel


def measured(device):
    models = {way: new_model(0).to(device) for way in (naive, flat, overlap)}
    models |= {way: DistributedDataParallel(new_model(0).to(device)) for way in (ddp, accumulated, with_no_sync)}
    torch.manual_seed(dist.get_rank())  # samples of its own
    x, y = torch.rand(2, 1, 28, 28, device=device), torch.randint(10, (2,), device=device)
    return timed_steps(models, lambda model: F.cross_entropy(model(x), y))


# %%
import os

import pandas as pd

from labkit.spans import Span

on_cpu = {"env": lab.env | {"CUDA_VISIBLE_DEVICES": ""}, "options": {"shown": False}}
run, (steps, *_) = lab.run(measured, cnn=new_model, ways=flat, **on_cpu)
table = pd.DataFrame.from_dict(steps, orient="index")
display(table[["all-reduces", "bytes", "ms after backward"]].round(1))
busy = os.getloadavg()[0] / os.cpu_count()  # processes that want to run; the two ranks themselves are 1 per core
print(f"load {busy:.1f} per core:", "too busy to read the last column" if busy > 4 else "all columns can be read")
ways = dict(enumerate(("naive", "flat", "overlap", "ddp")))
draw.lanes([Span(row, *span) for row, way in ways.items() for span in steps[way]["spans"]], "one step", names=ways)

# %% [markdown]
# The picture is one step of rank 0, in four ways. Time runs to the right. For each way, the upper bar is what the
# rank computes and the lower bars what it sends, from the call until the sum has arrived. Grey is waiting: from the
# end of backward until the last gradient is averaged.
#
# - **naive → flat:** the same bytes in one call instead of ten. Each call has a price of its own, whatever it
#   sends, so ten cost more. On the other hand, packing copies all gradients, twice.
# - **flat → overlap:** all gradients but those of the first layer, the last that backward makes, are called for while
#   backward goes on. Whatever has arrived by the end of backward has cost no time. If sending is slower than
#   backward, because of the link or because other programs have the cores, the rest is still waited for. And there
#   are ten calls again; a language model has hundreds of parameters.
# - **overlap → ddp:** two calls. Backward begins at the end of the model: fc2, fc1 and the weight of conv3 reach 1 MiB
#   and close the first bucket, which backward can hide. All the rest, from conv3's bias on, stays below 25 MiB and is
#   sent at the end: 0.2 of 1.5 MiB, which nothing hides. (DDP can store the gradients inside the buckets, which saves
#   the copies: `gradient_as_bucket_view=True`, as in lab 01.)
# - **accumulated → with_no_sync:** without `no_sync` each of the four micro-batches sends all gradients, and waits for
#   them, though only the sum is needed. (The last column has only the wait after the fourth.) Hugging Face's Trainer
#   uses `no_sync` for you, and Accelerate within `accelerator.accumulate`. Run forward inside the `with` as well: that
#   is where DDP decides whether to send.
#
# A gradient is sent in its parameter's dtype, here fp32, so one backward hands as many bytes to `all_reduce` as the
# model has, S. On the wire each rank sends 2 (N - 1) / N S (lab 02): S with two ranks. On a busy machine the times vary
# by a factor; the numbers of calls and bytes do not.

# %%
sizes = (p.nbytes for p in reversed([*new_model(0).parameters()]))  # each layer's bias and weight
backward = {layer: next(sizes) + next(sizes) for layer in ("fc2", "fc1", "conv3", "conv2", "conv1")}
lab.explore(draw.buckets, backward, bucket_cap_mb=[0.1, 0.5, None, 3, 25])

# %% [markdown]
# **How large should a bucket be?** Small ones start early, large ones need fewer calls. The picture shows the CNN in
# whole layers for several values of `bucket_cap_mb`, an option of DistributedDataParallel; `None`, the default, is what
# was measured; a number is also the size of the first bucket, instead of 1 MiB. Keep the default
# unless a timeline shows long waiting at the end of backward on all ranks.

# %%
calls, handed, late = (table[name] for name in ("all-reduces", "bytes", "ms after backward"))
lab.verify(pieces, len(draw.filled(backward)), calls["ddp"])
lab.verify(times, MICRO_BATCHES, handed["accumulated"] / handed["ddp"])
size = sum(backward.values())
lab.verify("bytes in a backward", size, int(handed["ddp"]), "B")
lab.verify("bytes in a step with no_sync", size, int(handed["with_no_sync"]), "B")
lab.verify("largest difference between the ways' gradients", 1e-3, table["difference"].max(), how="at most")
lab.verify("ms after backward: overlap, against flat", late["flat"], late["overlap"], how="at most", timed=True)

# %% [markdown]
# ## The same in a real run
#
# This is a timeline of labkit's own `ddp` script with a transformer of 3.3 million parameters, 12.7 MiB of gradients,
# in five buckets: four that are closed when they reach 3 MiB, and the rest, 0.4 MiB. Here both ranks really compute.

# %%
script = sized(Script.load("ddp"), width=256)
lab.launch(script, steps=9, global_batch_size=16, bucket_mib=3, profile=True).timeline()

# %% [markdown]
# Read it as above, now with two ranks. (The panel's shares are those of the whole run, the timeline's those of one
# step.) Backward is dotted, so that prints show it, too. Grey is any waiting: also before and after forward, or
# within backward, when a rank is not served. The first all-reduce of a step adds up the ranks' numbers of
# predictions; the others are the buckets. Compare bars of the same number on both ranks: the shorter bar is nearly
# the sending time, the longer one includes waiting for the other rank. A long grey bar at the end of backward on only
# one rank means that it has finished and waits for the other; smaller buckets do not help against that. You get such
# a timeline of any run with `profile=True` (lab 17).
#
# ## Where two ranks are not one bigger batch
#
# **The order.** `DistributedSampler` shuffles all samples and gives them to the ranks in turn. It seeds the shuffle
# with `seed + epoch`, and learns the epoch only from `set_epoch`. Without that, every epoch has the same order, and
# nothing warns you. You need no ranks to see this.

# %%
from torch.utils.data import DataLoader, DistributedSampler

sampler = DistributedSampler(range(1000), lab.ranks, rank=0)
lab.verify(orders, 1, len({tuple(sampler) for epoch in range(3)}))
print("with set_epoch:", len({sampler.set_epoch(epoch) or tuple(sampler) for epoch in range(3)}), "orders in 3 epochs")

# %% [markdown]
# **The number of steps.** A `DataLoader`'s batch size is that of its rank. Two ranks with 128 each have a global batch
# of 256, so an epoch has half as many steps, and the weights are updated half as often. To train as one rank with 128
# does, give each of them 64.

# %%
images = range(60_000)  # as many as MNIST has
half = DistributedSampler(images, 2, rank=0)
print("one rank, batches of 128:", len(DataLoader(images, 128)), "steps")
for batch_size in (128, 64):
    print(f"two ranks, {batch_size} each:", len(DataLoader(images, batch_size, sampler=half)), "steps")
odd = {drop_last: DistributedSampler(range(1797), 2, rank=0, drop_last=drop_last) for drop_last in (False, True)}
print("1,797 samples on two ranks:", len(odd[False]), "each; with drop_last", len(odd[True]))
lab.verify(per_epoch, -(-60_000 // 256), len(DataLoader(images, 128, sampler=half)))

# %% [markdown]
# All ranks must make the same number of steps, or the last all-reduce waits forever. An odd number of samples cannot be
# divided by two: the sampler repeats one, so that it counts twice, or with `drop_last=True` leaves one out. In
# training that is harmless; in an evaluation the repeated sample falsifies the mean. Besides, the last batch of an
# epoch is smaller (60,000 / 128 = 468.75, so it has 96 samples), and each of them weighs more;
# `DataLoader(drop_last=True)` leaves it out.
#
# **BatchNorm.** All of the above holds while a sample's result does not depend on the others. BatchNorm computes mean
# and variance over the samples of its own rank, so two ranks with 16 samples each are not one with 32. `SyncBatchNorm`
# shares these statistics among the ranks, a few numbers per channel. Turn it on with `labkit.launch(script,
# sync_batch_norm=True)`, or `nn.SyncBatchNorm.convert_sync_batchnorm(model)` in your own code. torch has it for GPUs
# only, so the cell below does it by hand: from the mean of *x* and that of *x*² on each rank. GroupNorm and LayerNorm
# look at one sample at a time and do not need it.

# %%
x, norm = torch.randn(16 * lab.ranks, 4, 5, 5), nn.BatchNorm2d(4, affine=False)  # four channels
whole_batch, shares = norm(x), x.chunk(lab.ranks)
each_alone = torch.cat([norm(share) for share in shares])
mean = sum(share.mean((0, 2, 3), keepdim=True) for share in shares) / lab.ranks  # in SyncBatchNorm, a collective
square = sum((share**2).mean((0, 2, 3), keepdim=True) for share in shares) / lab.ranks
synchronized = (x - mean) / (square - mean**2 + norm.eps).sqrt()
alone, synced = (float((result - whole_batch).abs().max()) for result in (each_alone, synchronized))
print(f"largest difference from the whole batch: BatchNorm {alone:.2g}, with shared statistics {synced:.2g}")
lab.verify("BatchNorm: largest difference from the batch", 0.01, alone, how="at least")
lab.verify("SyncBatchNorm by hand: largest difference from the batch", 1e-4, synced, how="at most")

# %% [markdown]
# **Unequal shares.** Texts differ in length, so ranks differ in the number of tokens that they predict, and a mean of
# their means is not the mean. labkit's scripts correct this, as your own loop must: `count` is a tensor with this
# rank's number of tokens; `dist.all_reduce(count)` turns it into the total over all ranks; then `loss = sum_of_losses *
# dist.get_world_size() / count`, because DDP divides by the world size. With accumulation, `count` is the tokens of all
# micro-batches of the step, counted before the first backward. Hugging Face's Trainer does it with
# `average_tokens_across_devices`.
#
# ## DataParallel, the older relative
#
# `torch.nn.DataParallel` needs one line and no torchrun, and you will still find it in old code:
#
# | `model = nn.DataParallel(model)` | `model = DistributedDataParallel(model)` |
# |---|---|
# | `python train.py` | `torchrun --nproc-per-node=2 train.py` |
# | one process with a thread for each GPU; Python runs one thread at a time | a process for each GPU |
# | in each step GPU 0 sends weights and samples to the others | weights go out once; each rank loads its samples |
# | the others send outputs and gradients to GPU 0, which alone updates | all-reduces in backward; every rank updates |
# | GPU 0 holds more than the others, and waits for all | all hold the same |
# | one machine | any number of machines |
#
# There is nothing to measure here: without GPUs, `nn.DataParallel` simply calls the model. PyTorch's documentation
# advises against it even on one machine.

# %%
lab.score()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# A transformer of 25 million parameters trains in fp32 on 64 samples of 128 tokens per step, however many
# devices there are. How much does a second T4 gain, and how much of a step is spent waiting for all-reduces that
# backward does not hide?

# %%
lab.plans({"DDP": sized(script, width=512, layers=8, heads=8)}, devices=("1xT4", "2xT4", "8xA100 80"))

# %% [markdown]
# A second T4 makes a step 1.9 times as fast with the same global batch: backward hides nearly all of the sending. The
# gap to 2 is mostly the optimizer's step, which every rank does in full.
#
# ## Recap
#
# For *N* ranks, and a model whose parameters take *P* bytes in fp32. All figures are per rank. What is sent is to be
# multiplied by (N - 1) / N.
#
# | | held | sent by each rank in a step | waits | use it if |
# |---|---|---|---|---|
# | one rank | 4 P: parameters, gradients, two moments of AdamW | nothing | never | it is fast enough |
# | DDP | 4 P | 2 P: all-reduces of gradients, in buckets | for the last bucket, and for a slower rank | a step fits |
#
# DDP repeats everything on every rank. Lab 04 counts what that costs.
#
# ## Try this
#
# 1. Leave the division out of `naive`. Which number changes, and to what?
#    <details><summary>Answer</summary>The difference to one big batch is 1.0 instead of 6e-16: the gradients are twice
#    as large. With SGD that is a doubled learning rate. Adam, which divides by the gradients' size, hides it, unless
#    you clip them.</details>
# 2. Leave out the broadcast.
#    <details><summary>Answer</summary>The difference is 2.3. Each rank has the gradients of a different model, and
#    their mean belongs to none of them. DDP broadcasts when it wraps the model.</details>
# 3. In `with_no_sync`, move the forward out of the `with`: for each of the first three micro-batches, `value = loss() /
#    MICRO_BATCHES`, then `with model.no_sync(): value.backward()`.
#    <details><summary>Answer</summary>Eight all-reduces and 6.2
#    MiB for four micro-batches, as without <code>no_sync</code>: nothing is gained, and nothing warns you.</details>
# 4. You go from one rank to four. Must the learning rate change? (Goyal et al., arXiv 1706.02677.)
#    <details><summary>Answer</summary>Four ranks with the same samples per rank have a global batch four times as
#    large. The usual rule for SGD multiplies the learning rate by four as well, with a warm-up (lab 21 tries it). It
#    stops helping at some batch size, which only a sweep can find: <code>labkit.sweep(script, lr=[…])</code>. For
#    AdamW the usual factor is the square root, here 2 (Malladi et al., arXiv 2205.10287). If you keep the global batch,
#    change nothing.</details>
#
# ## Sources
#
# Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (arXiv 2006.15704): buckets,
# overlap, `no_sync`. torch/nn/parallel/distributed.py: the limits of 1 and 25 MiB. torch/nn/parallel/data_parallel.py.
