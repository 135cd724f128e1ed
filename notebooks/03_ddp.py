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
# **You will be able to** build DDP yourself, say how many bytes it sends and in how many pieces, send less when you
# accumulate gradients, and name the cases in which two ranks do not equal one rank with a bigger batch. **20 minutes.
# You need** labs 01 and 02.
#
# DistributedDataParallel averages the gradients of all ranks with all-reduces. The first picture sends them after
# backward, and every rank waits. DDP does not wait for the end of backward, as the second picture shows: gradients are
# packed into **buckets** as they appear, and a bucket is sent as soon as it is full, while backward goes on. (The third
# picture sets `bucket_cap_mb=3`, and sending everything takes half as long as backward.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 32  # samples per step, over all ranks; a multiple of the ranks times micro_batches
micro_batches: int = 4  # per step and rank, for gradient accumulation

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("03_ddp", ranks=nproc_per_node)
display(draw.ddp(nproc_per_node, overlap=False), draw.ddp(nproc_per_node))
draw.buckets({f"layer{9 - i}": 2**20 for i in range(9)}, bucket_cap_mb=3)

# %% [markdown]
# ## Your predictions
#
# The model below is the CNN of lab 01: 405,898 parameters in ten tensors, 1.5 MiB. DDP closes its first bucket as soon
# as it has 1 MiB or more, the others at 25 MiB. In the second question, the gradients of four batches
# (**micro-batches**) accumulate before one step, and DDP is not told. In the third, `DistributedSampler` gives each
# rank its samples, and a call to its method `set_epoch(n)` at the start of epoch *n* is meant to reshuffle them.

# %%
pieces = lab.ask("all-reduces in one backward of this CNN", default=10)
times = lab.ask("four micro-batches, one step: how many times as many bytes as in one backward", default=1)
orders = lab.ask("different orders of the samples in 3 epochs, if nobody calls sampler.set_epoch", default=3)

# %% [markdown]
# ## DDP by hand
#
# It takes two collectives. `broadcast` gives every rank the weights of rank 0; `all_reduce` replaces a tensor on every
# rank with the sum over all ranks. Every rank below seeds its weights differently, on purpose, so that the method has
# to make them equal. `lab.run` calls a function on every rank. It writes a script for that; `run.script` shows it, and
# where `gradients_differ` comes from.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def new_model(seed):
    torch.manual_seed(seed)
    parts = [(nn.Conv2d(n, m, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)) for n, m in ((1, 32), (32, 64), (64, 128))]
    return nn.Sequential(*sum(parts, ()), nn.Flatten(), nn.Linear(1152, 128), nn.ReLU(), nn.Linear(128, 10))


def by_hand(model, x, y):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # the same weights; DDP does this once, when it wraps the model
    F.cross_entropy(model(x), y).backward()  # its own samples
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
# Now use the real DDP, with a hook (`buckets_of`) that records the size of every bucket in a list. Within `no_sync` DDP
# sends nothing; use it for all micro-batches of a step except the last.

# %%
from contextlib import nullcontext

from torch.nn.parallel import DistributedDataParallel


def accumulate(model, parts, only_last, device):
    for number in range(1, parts + 1):
        with model.no_sync() if only_last and number < parts else nullcontext():
            x, y = torch.rand(8, 1, 28, 28, device=device), torch.randint(10, (8,), device=device)
            (F.cross_entropy(model(x), y) / parts).backward()


def sizes_sent(device, parts):
    model = DistributedDataParallel(new_model(0).to(device))
    sent, answer = buckets_of(model), {}
    accumulate(model, 1, False, device)  # the first backward shows DDP the order; then it arranges its buckets
    for name, some, only_last in (("one backward", 1, False), ("accumulated", parts, False), ("no_sync", parts, True)):
        sent.clear()
        accumulate(model, some, only_last, device)
        answer[name] = list(sent)
    return answer


# %%
sizes = (p.nbytes for p in reversed([*new_model(0).parameters()]))  # each layer's bias and weight
backward = {layer: next(sizes) + next(sizes) for layer in ("fc2", "fc1", "conv3", "conv2", "conv1")}
size, sent_once, with_no_sync = sum(backward.values()), "bytes in a backward", "bytes in a step with no_sync"
lab.predict_each({pieces: len(draw.filled(backward)), times: micro_batches})
lab.predict_each({sent_once: size, with_no_sync: size}, "B")
run, (sent, *_) = lab.run(sizes_sent, micro_batches, cnn=new_model)
total = {name: sum(each) for name, each in sent.items()}
lab.measure_each({pieces: len(sent["one backward"]), times: total["accumulated"] / total["one backward"]}, run=run)
lab.measure_each({sent_once: total["one backward"], with_no_sync: total["no_sync"]}, run=run)
draw.bars(total, unit="B", title=f"handed to all_reduce: one backward, and a step of {micro_batches} micro-batches")

# %% [markdown]
# **Two all-reduces:** backward starts at the end of the model. fc2, fc1 and the weight of conv3 reach 1 MiB and close
# the first bucket; all the rest, from conv3's bias on, stays below 25 MiB and is sent at the end. A gradient is sent in
# its parameter's dtype, here fp32, so one backward passes as many bytes as the model has to `all_reduce` (lab 02 counts
# what that puts on the wire). Without `no_sync` every micro-batch's backward sends them again, though only the sum is
# needed. So use it when you accumulate, as Hugging Face's Trainer does for you, and Accelerate within
# `accelerator.accumulate`. (With `gradient_as_bucket_view=True` this costs 4 bytes per parameter, because the
# accumulated gradients cannot lie in the buckets; without it, as above, they never do.) Run forward inside the `with`
# as well: that is where DDP decides whether to send.
#
# How large should a bucket be? Small ones start early, and large ones need fewer calls; keep the default unless a
# timeline shows a long grey wait at the end of backward on all ranks. The picture shows the same CNN, in whole layers,
# for several values of `bucket_cap_mb`, an option of DistributedDataParallel. `None`, the default, is what was
# measured: 1 MiB, then 25. A number limits the first bucket, too.

# %%
lab.explore(draw.buckets, backward, bucket_cap_mb=[0.1, 0.5, None, 3, 25])

# %% [markdown]
# ## Is the communication hidden?
#
# This is a timeline of labkit's own `ddp` script with a transformer of 3.3 million parameters and 12.7 MiB of gradients
# in four buckets: each is closed when it has 3 MiB or more. Time runs to the right; the upper bar is what a rank
# computes (orange with dots: backward), the lower bar what it sends.
#
# - The first all-reduce of a step adds up the ranks' numbers of predictions; a rank that starts early waits there. The
#   others are the buckets, in the same order on both ranks.
# - All-reduces below a piece of forward or backward are hidden: nobody waits for them. Little or no backward is left to
#   hide the last one.
# - Compare one bucket on both ranks: the shorter bar is nearly the sending time, the longer one includes waiting.
# - Grey is waiting: the rank does nothing but communicate. A long grey bar at the end of backward on only one rank
#   means that it has finished and waits for the other's gradients; smaller buckets do not help.
#
# The title's shares are means over both ranks and three steps; the last of the three is drawn. The panel's shares are
# means over all steps except the first ones, so the two may disagree on which rank waits; the panel's *other* is mostly
# the profiler's own work, which its step time includes.

# %%
script = sized(Script.load("ddp"), width=256)
lab.launch(script, steps=9, global_batch_size=16, bucket_mib=3, profile=True).timeline()

# %% [markdown]
# ## Where two ranks are not one bigger batch
#
# **The order.** `DistributedSampler` shuffles all samples and gives them to the ranks in turn. It seeds the shuffle
# with `seed + epoch`, and learns the epoch only from `set_epoch`. Without that, every epoch has the same order, and
# nothing warns you. You need no ranks to see this.

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

# %%
x, norm = torch.randn(16 * lab.ranks, 4, 5, 5), nn.BatchNorm2d(4)
off = {"BatchNorm": torch.cat([norm(share) for share in x.chunk(lab.ranks)]) - norm(x)}
mean, square = (torch.stack([(share**k).mean((0, 2, 3), True) for share in x.chunk(lab.ranks)]).mean(0) for k in (1, 2))
off["SyncBatchNorm by hand"] = (x - mean) / (square - mean**2 + norm.eps).sqrt() - norm(x)
for (name, each), limit, how in zip(off.items(), (0.01, 1e-4), ("at least", "at most"), strict=True):
    lab.verify(f"{name}: largest difference from the batch", limit, each.abs().max().item(), how=how)
    print(f"{name}: largest difference from the whole batch {each.abs().max():.2g}")

# %% [markdown]
# **Unequal shares.** Texts differ in length, so ranks differ in the number of tokens that they predict, and a mean of
# their means is not the mean. labkit's scripts correct this, as your own loop must: `count` is a tensor with this
# rank's number of tokens; `dist.all_reduce(count)` turns it into the total over all ranks; then `loss = sum_of_losses *
# dist.get_world_size() / count`, because DDP divides by the world size. With accumulation, `count` is the tokens of all
# micro-batches of the step, counted before the first backward. Hugging Face's Trainer does it with
# `average_tokens_across_devices`.

# %%
lab.score()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# A decoder-only transformer of 25 million parameters trains in fp32 on 64 samples of 128 tokens per step, however many
# devices there are. How much does a second T4 gain, and how much of a step is spent waiting for all-reduces that
# backward does not hide?

# %%
lab.plans({"DDP": sized(script, width=512, layers=8, heads=8)}, devices=("1xT4", "2xT4", "8xA100 80"))

# %% [markdown]
# A second T4 makes a step 1.9 times as fast with the same global batch: backward hides nearly all of the sending. The
# gap to 2 is mostly the optimizer's step, which every rank does in full.

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
#    <details><summary>Answer</summary>Eight all-reduces and 6.2
#    MiB for four micro-batches, as without <code>no_sync</code>: nothing is gained, and nothing warns you.</details>
# 4. You go from one rank to four. Must the learning rate change? (Goyal et al., arXiv 1706.02677.)
#    <details><summary>Answer</summary>Four ranks with the same samples per rank have a global batch four times as
#    large. The usual rule for SGD multiplies the learning rate by four as well, with a warm-up (lab 20 tries it). It
#    stops helping at some batch size, which only a sweep can find: <code>labkit.sweep(script, lr=[…])</code>. For AdamW
#    the usual factor is the square root, here 2 (Malladi et al., arXiv 2205.10287). If you keep the global batch,
#    change nothing.</details>
#
# ## Sources
#
# Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (arXiv 2006.15704): buckets,
# overlap, `no_sync`. torch/nn/parallel/distributed.py: the limits of 1 and 25 MiB.
#
# ### Appendix: what was claimed, and what the articles say
#
# *Distributed Training with PyTorch: DDP vs FSDP* (002) says "1 collective" for this CNN in line 785.

# %%
lab.check({pieces: ('"1 collective" (002, line 785)', 1)})
