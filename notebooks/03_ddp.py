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
# **You will be able to** build DDP yourself, say how many bytes it sends and in how many pieces, send less
# when you accumulate gradients, and name the cases in which two ranks are not one rank with a bigger batch. **20
# minutes. You need** labs 01 and 02.
#
# DistributedDataParallel averages the gradients of all ranks. It does not wait for the end of backward: gradients are
# packed into **buckets** as they appear, and a bucket is sent as soon as it is full, while backward goes on. (The
# picture sets `bucket_cap_mb=3` for all of them.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 32  # samples per step, over all ranks; a multiple of the ranks times micro_batches
micro_batches: int = 4  # per step and rank, for gradient accumulation

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized

lab = Lesson("03_ddp", ranks=nproc_per_node)
draw.buckets({f"layer{9 - i}": 2**20 for i in range(9)}, bucket_cap_mb=3)

# %% [markdown]
# ## Your predictions
#
# The model below is the CNN of lab 01: 405,898 parameters in ten tensors, 1.5 MiB. DDP closes its first bucket as soon
# as it has 1 MiB or more, the others at 25 MiB. In the third question, `DistributedSampler` deals out the samples, and
# a call of its method `set_epoch(n)` at the start of epoch *n* is meant to reshuffle them.

# %%
pieces = lab.ask("all-reduces in one backward of this CNN", default=10)
times = lab.ask("bytes sent in the backwards of 4 micro-batches under plain DDP, over those of one", default=1)
orders = lab.ask("different orders of the samples in 3 epochs, if nobody calls sampler.set_epoch", default=3)

# %% [markdown]
# ## DDP by hand
#
# It takes two collectives. `broadcast` gives every rank the weights of rank 0; `all_reduce` replaces a tensor on every
# rank by the sum over all ranks. Every rank below seeds its weights differently, on purpose: so the method itself has
# to make them equal. `lab.run` calls a function on every rank. It writes a script for that; `run.script` shows it, and
# where `gradients_differ` comes from.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def new_model(seed):
    torch.manual_seed(seed)
    layers = []
    for channels, more in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(channels, more, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1152, 128), nn.ReLU(), nn.Linear(128, 10))


def by_hand(model, x, y):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # the same weights
    F.cross_entropy(model(x), y).backward()  # other samples
    for p in model.parameters():
        dist.all_reduce(p.grad)  # the sum of all ranks' gradients,
        p.grad /= dist.get_world_size()  # divided: their mean


def compared(device, samples):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.rand(samples, 1, 28, 28).double().to(device), torch.randint(10, (samples,)).to(device)
    alone, shared = new_model(0).double().to(device), new_model(seed=rank).double().to(device)
    F.cross_entropy(alone(x), y).backward()  # one process, the whole batch
    by_hand(shared, x[rank::ranks], y[rank::ranks])
    return gradients_differ(shared, alone)


# %%
lab.predict("gradients by hand: largest relative difference to one big batch", 1e-9, how="at most")
run, off = lab.run(compared, global_batch_size)
lab.measure_each({"gradients by hand: largest relative difference to one big batch": max(off)}, run=run)

# %% [markdown]
# A mean over *B* samples is the mean of the means of equal shares. So the two ranks have the gradients of one process
# with the whole batch; in float64 only rounding error remains.
#
# ## What DDP sends
#
# Now the real DDP, with a hook (`buckets_of`) that notes the size of every bucket in a list. `no_sync` keeps DDP quiet
# during all micro-batches of a step but the last.

# %%
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel


def accumulate(model, parts, quiet, device):
    for number in range(1, parts + 1):
        with model.no_sync() if quiet and number < parts else nullcontext():
            x, y = torch.rand(8, 1, 28, 28, device=device), torch.randint(10, (8,), device=device)
            (F.cross_entropy(model(x), y) / parts).backward()


def sizes_sent(device, parts):
    model = DistributedDataParallel(new_model(0).to(device))
    sent, answer = buckets_of(model), {}
    accumulate(model, 1, False, device)  # the first backward shows DDP the order; then it arranges its buckets
    for name, some, quiet in (("one backward", 1, False), ("accumulated", parts, False), ("no_sync", parts, True)):
        sent.clear()
        accumulate(model, some, quiet, device)
        answer[name] = list(sent)
    return answer


# %%
backward = {name: p.nbytes for name, p in reversed([*new_model(0).named_parameters()])}
size, single, quiet = sum(backward.values()), "bytes in a backward", "bytes in an accumulated step with no_sync"
lab.predict_each({pieces: len(draw.filled(backward)), times: micro_batches})
lab.predict_each({single: size, quiet: size}, "B")
run, (sent, *_) = lab.run(sizes_sent, micro_batches, cnn=new_model)
total = {name: sum(each) for name, each in sent.items()}
once = total["one backward"]
results = {pieces: len(sent["one backward"]), times: total["accumulated"] / once, single: once, quiet: total["no_sync"]}
lab.measure_each(results, run=run)
draw.bars(total, unit="B", title=f"handed to all_reduce: one backward, and a step of {micro_batches} micro-batches")

# %% [markdown]
# A gradient is sent in its parameter's dtype, here fp32, so one backward hands the model to `all_reduce` once (lab 02
# counts what that puts on the wire). Every micro-batch's backward would send it again, though only the sum is needed:
# always use `no_sync` when you accumulate, as Hugging Face's Trainer does for you, and Accelerate within
# `accelerator.accumulate`. Run forward inside the `with` as well: DDP decides there whether to send.
#
# How large should a bucket be? Small ones start early, large ones cost fewer calls; leave the default unless a timeline
# shows a gap. Move the slider: this is the same CNN, with `bucket_cap_mb` (an option of DistributedDataParallel). Once
# it is set, it is the limit of the first bucket, too.

# %%
lab.explore(draw.buckets, backward, bucket_cap_mb=[0.1, 0.25, 0.5, 1, 25])

# %% [markdown]
# ## Is the communication hidden?
#
# A timeline of labkit's own `ddp` script with a transformer of 3.3 million parameters, 12.7 MiB of gradients in buckets
# of 3 MiB. Time runs to the right; above, what a rank computes; below, what it sends. Look for all-reduces below a
# piece of backward: they run at the same time, and nobody waits for them. The last one has nothing to hide behind,
# because its gradients are the last that backward computes. A bar starts when its rank is ready and ends when both are
# done, so the shorter of two is nearer to the time of sending, and the rest of the longer one is waiting for the other
# rank. The first all-reduce of a step adds up how many predictions the ranks have, a single number. How much is hidden
# depends on the machine, so nothing is claimed about it.

# %%
options = {"steps": 9, "global_batch_size": 16, "bucket_mib": 3, "profile": True}
lab.launch(sized(Script.load("ddp"), width=256), **options).timeline()

# %% [markdown]
# ## Where two ranks are not one bigger batch
#
# **The order.** `DistributedSampler` deals out one permutation like cards. It draws it from `seed + epoch`, and learns
# the epoch only from `set_epoch`. Without that, every epoch has the same order, and nothing warns you. No ranks are
# needed to see it.

# %%
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(1000), lab.ranks, rank=0)
lab.verify(orders, 1, len({tuple(sampler) for epoch in range(3)}))
print("with set_epoch:", len({sampler.set_epoch(epoch) or tuple(sampler) for epoch in range(3)}))

# %% [markdown]
# **BatchNorm.** All of the above holds while a sample's result does not depend on the others. BatchNorm computes mean
# and variance over the samples of its own rank, so two ranks with 16 samples each are not one with 32. `SyncBatchNorm`
# shares these statistics among the ranks, a few numbers per channel. Turn it on with `labkit.launch(script,
# sync_batch_norm=True)`, or `nn.SyncBatchNorm.convert_sync_batchnorm(model)` in your own code. torch has it for GPUs
# only, so the cell below does it by hand, from the mean of each rank's means and mean squares. GroupNorm and LayerNorm
# look at one sample at a time and do not need it.
#
# **Unequal shares.** Texts differ in length, so ranks differ in the number of tokens that they predict, and a mean of
# their means is not the mean. labkit's scripts add up the numbers of all ranks first, and weight each rank's loss by
# its own number.

# %%
x, norm = torch.randn(16 * lab.ranks, 4, 5, 5), nn.BatchNorm2d(4)
off = torch.cat([norm(share) for share in x.chunk(lab.ranks)]) - norm(x)
lab.verify("BatchNorm: largest difference of the shares from the batch", 0.01, off.abs().max().item(), how="at least")
mean, square = (torch.stack([(share**k).mean((0, 2, 3), True) for share in x.chunk(lab.ranks)]).mean(0) for k in (1, 2))
off = (x - mean) / (square - mean**2 + norm.eps).sqrt() - norm(x)
lab.verify("SyncBatchNorm by hand: largest difference from the batch", 1e-4, off.abs().max().item(), how="at most")
lab.score()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# The same question for a decoder-only transformer of 25 million parameters: how much of a step is waiting for the
# all-reduces that backward does not hide?

# %%
lab.plans({"DDP": sized(Script.load("ddp"), width=512, layers=8, heads=8)}, global_batch_size=64)

# %% [markdown]
# ## Try this
#
# 1. Leave the division out of `by_hand`. Which number changes, and to what?
#    <details><summary>Answer</summary>The difference to one big batch is 1.0 instead of 6e-15: the gradients are twice
#    as large. With SGD that is a doubled learning rate. Adam, which divides by the gradients' size, hides it, unless
#    you clip them.</details>
# 2. Leave out the broadcast.
#    <details><summary>Answer</summary>The difference is 2.3. Each rank has the gradients of a different model, and
#    their mean belongs to none of them. DDP broadcasts when it wraps the model.</details>
# 3. Put only the backward into `no_sync`, not the forward.
#    <details><summary>Answer</summary>Eight all-reduces and 6.2 MiB for four micro-batches, as without `no_sync`:
#    nothing is gained, and nothing warns you.</details>
# 4. You go from one rank to four. Must the learning rate change? (Goyal et al., arXiv 1706.02677.)
#    <details><summary>Answer</summary>Four ranks with the same samples per rank have a global batch four times as
#    large. The usual rule for SGD multiplies the learning rate by four as well, with a warm-up (lab 17 tries it). It
#    stops helping at some batch size, which only a sweep tells: `labkit.sweep(script, lr=[…])`. If you keep the global
#    batch, change nothing.</details>
#
# ## Sources
#
# Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (arXiv 2006.15704): buckets,
# overlap, `no_sync`. torch/nn/parallel/distributed.py: the limits of 1 and 25 MiB.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002) says "1 collective" for this CNN in line 785, and rightly calls `set_epoch` in line 362. The
# guide (001, line 222) recommends SyncBatchNorm.

# %%
lab.check({pieces: ('"1 collective" (002, line 785)', 1)})
