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
# # 03 · DDP from its parts
#
# DistributedDataParallel does four things: it starts from the same weights, gives each rank other samples, averages the
# gradients, and does that while backward still computes. You build the first three by hand and claim that they give the
# gradients of one process with the whole batch. Then you count what DDP sends. The second article (002, line 785) says
# "1 collective" for its CNN; DDP sends gradients in buckets, and their number and bytes follow from the sizes of the
# parameters.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 32  # samples per optimizer step, over all ranks; a multiple of the ranks times micro_batches
micro_batches: int = 4  # per step and rank, for gradient accumulation

# %%
import json

import pandas as pd

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
n, ranks = nproc_per_node, range(nproc_per_node)
claims = Claims("03_ddp")

# %% [markdown]
# ## The model: the article's CNN

# %%
import torch
from torch import nn


class Model(nn.Module):
    """The article's CNN. Images of 1 x 28 x 28 in, ten logits out."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(128 * 3 * 3, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        for conv in (self.conv1, self.conv2, self.conv3):
            x = self.pool(torch.relu(conv(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


# %% [markdown]
# ## The parts
#
# `by_hand` is DDP without its speed. Every rank seeds its weights differently on purpose: what makes them equal must be
# part of the method.

# %%
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def join_group():
    """This rank's device, after it has joined the group of all ranks."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


def whole_batch(samples, device, dtype):
    """The same on every rank."""
    random = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 1, 28, 28, generator=random, dtype=torch.float64)
    return x.to(device, dtype), torch.randint(10, (samples,), generator=random).to(device)


def mine(batch):
    """This rank's samples: every N-th one."""
    return batch[dist.get_rank() :: dist.get_world_size()]


def new_model(device, dtype, seed):
    torch.manual_seed(seed)
    return Model().to(device, dtype)


def by_hand(model, x, y):
    """Forward and backward as DDP does it, one parameter at a time, nothing overlapped."""
    for p in model.parameters():
        dist.broadcast(p.data, src=0)  # the same weights
    F.cross_entropy(model(mine(x)), mine(y)).backward()  # other samples
    for p in model.parameters():
        dist.all_reduce(p.grad)  # the same gradients: their sum,
        p.grad /= dist.get_world_size()  # divided


def replicated(model):
    """DDP around a model, and the list to which it adds the size of every bucket that it sends."""
    device = next(model.parameters()).device
    model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    sent = []

    def watched(state, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(state, bucket)  # what DDP does by itself

    model.register_comm_hook(None, watched)
    return model, sent


def accumulate(model, x, y, parts, quiet):
    """One step of `parts` micro-batches. `quiet`: all-reduce only in the last one's backward."""
    for number, (some_x, some_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), 1):
        with model.no_sync() if quiet and number < parts else nullcontext():
            (F.cross_entropy(model(some_x), some_y) / parts).backward()


# %% [markdown]
# ## Predict: the gradients
#
# A mean over *B* samples is the mean over *N* equal shares of the shares' means. So DDP, and the same by hand, must
# have the gradients of one process with the whole batch, up to the order in which numbers are added; in float64 that is
# far below 1e-9 of the largest one. Micro-batches that are accumulated are shares, too.
#
# ## Predict: the buckets
#
# DDP does not send one parameter at a time, nor all at once. It fills a bucket with gradients in the order in which
# backward makes them and sends it when it is full: 1 MiB for the first, so that sending begins early, 25 MiB for the
# others. (`bucket_cap_mb=25` is not the default: it drops the small first one.) The order is that of a backward here:

# %%
MIB = 2**20


def backward_order(model):
    """Names of parameters, as their gradients become ready."""
    order = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.zeros(2, 1, 28, 28)).sum().backward()
    return order


def buckets(sizes, first=MIB, others=25 * MIB):
    """Bytes of each bucket."""
    filled, limit = [0], first
    for size in sizes:
        if filled[-1] >= limit:
            filled, limit = [*filled, 0], others
        filled[-1] += size
    return filled


model = Model()
order = backward_order(model)
expected = buckets([model.get_parameter(name).nbytes for name in order])
size = sum(p.nbytes for p in model.parameters())
print(" → ".join(order))
print(f"{size // 4:,} parameters, {size:,} bytes; buckets of {' + '.join(f'{b:,}' for b in expected)}")

# %% [markdown]
# With gradient accumulation each micro-batch's backward would send all of them again, though only the sum is needed.
# `no_sync` keeps DDP quiet until the last one: the bytes of a step divided by the number of micro-batches.
#
# labkit's own `ddp` script makes one all-reduce more in a step, of a single number. Its loss is the mean over all
# predictions of the global batch, and ranks may have different numbers of them (think of texts of other lengths): so it
# sums their count over the ranks at the beginning of the step, and divides by that.
#
# The cell after the predictions is what the ranks run.

# %%
ways = ("by hand", "DDP", "DDP, accumulated")
for way in ways:
    claims.predict(f"gradients {way}: largest relative difference to one big batch", 1e-9, how="at most")
claims.predict("all-reduces in a backward", len(expected), article='"1 collective" (002, line 785)', said=1)
claims.predict("all-reduces in a step of the ddp script", len(expected) + 1)
claims.predict("bytes of the first bucket", expected[0], "B")
claims.predict("bytes in a backward", size, "B")  # those of the gradients
claims.predict("bytes in an accumulated step without no_sync", micro_batches * size, "B")
claims.predict("bytes in an accumulated step with no_sync", size, "B")

# %%
import json
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F


def gradients_of(device, samples, parts):
    """How far the gradients of each way are from those of one process: relative to the largest of each parameter."""
    rank, dtype = dist.get_rank(), torch.float64
    x, y = whole_batch(samples, device, dtype)
    alone = new_model(device, dtype, seed=0)
    F.cross_entropy(alone(x), y).backward()

    hand = new_model(device, dtype, seed=rank)
    by_hand(hand, x, y)
    ddp, _ = replicated(new_model(device, dtype, seed=rank))
    accumulate(ddp, mine(x), mine(y), 1, quiet=False)
    accumulated, _ = replicated(new_model(device, dtype, seed=rank))
    accumulate(accumulated, mine(x), mine(y), parts, quiet=True)

    def difference(model):
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)

    return {"by hand": difference(hand), "DDP": difference(ddp), "DDP, accumulated": difference(accumulated)}


def sizes_sent(device, samples, parts):
    """Bytes of every bucket that is sent: in one backward, in an accumulated step, and in one with no_sync."""
    x, y = whole_batch(samples, device, torch.float32)
    model, sent = replicated(new_model(device, torch.float32, seed=0))
    accumulate(model, mine(x), mine(y), 1, quiet=False)  # DDP sees the order and rebuilds its buckets
    answer = {}
    for name, some, quiet in (("one backward", 1, False), ("accumulated", parts, False), ("no_sync", parts, True)):
        sent.clear()
        accumulate(model, mine(x), mine(y), some, quiet)
        answer[name] = list(sent)
    return answer


def main():
    samples, parts = map(int, sys.argv[1:])
    device = join_group()
    print(json.dumps([gradients_of(device, samples, parts), sizes_sent(device, samples, parts)]))
    dist.barrier()
    dist.destroy_process_group()


# %%
script = Script.of("ddp-parts", model=Model, parts=by_hand, main=main)
run = labkit.launch(script, nproc_per_node=n, args=[global_batch_size, micro_batches], env=env)
run.wait()

# %%
told = [json.loads(run.logs(rank=rank).splitlines()[-1]) for rank in ranks]
for way in ways:
    found = max(differences[way] for differences, _ in told)
    claims.measure(f"gradients {way}: largest relative difference to one big batch", found, run=run)
sent = told[0][1]
assert all(each == sent for _, each in told), "every rank sends the same buckets"
claims.measure("all-reduces in a backward", len(sent["one backward"]), run=run)
claims.measure("bytes of the first bucket", sent["one backward"][0], run=run)
claims.measure("bytes in a backward", sum(sent["one backward"]), run=run)
claims.measure("bytes in an accumulated step without no_sync", sum(sent["accumulated"]), run=run)
claims.measure("bytes in an accumulated step with no_sync", sum(sent["no_sync"]), run=run)
display(pd.DataFrame(told[0][0], index=["largest relative difference"]).style.format("{:.1e}"))
display(pd.DataFrame({name: [len(each), sum(each)] for name, each in sent.items()}, index=["all-reduces", "bytes"]))

# %% [markdown]
# ## Overlap: look, do not claim
#
# The first bucket holds the last layers' gradients. They are ready while the first layers' are still to be computed, so
# it is sent meanwhile. The picture is of labkit's own `ddp` script with this model: where an all-reduce lies under
# backward, it costs no time. How much of it does depends on the machine, and nothing is claimed about it. The number of
# all-reduces in a step is claimed, and here torch's profiler counts them: the short one at the beginning of each step
# is the count of predictions.

# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    """(train, test): noise. Nothing here depends on what is learned."""
    x, y = torch.rand(2048, 1, 28, 28), torch.randint(10, (2048,))
    return TensorDataset(x, y), TensorDataset(x[:64], y[:64])


# %%
profiled = labkit.launch(
    Script.load("ddp").with_cells(model=Model, data=load_datasets),
    nproc_per_node=n,
    steps=9,
    global_batch_size=global_batch_size,
    profile=True,
    env=env,
)
profiled.wait()
timeline = profiled.timeline()
steps = timeline.steps[:-1]  # the last one's all-reduce may end after the profiler has
reduced = [span for span in timeline.spans if span.kind == "all_reduce" and span.step in steps]
claims.measure("all-reduces in a step of the ddp script", len(reduced) / len(steps) / n, run=profiled)
display(timeline)

# %% [markdown]
# ## Other samples on every rank, another order in every epoch
#
# `DistributedSampler` deals one permutation out like cards. It draws the permutation from `seed + epoch`, and it learns
# the epoch only from `set_epoch`. The second article calls it (002, line 362) and is right to: a loop that does not
# trains on the same order in every epoch, without any warning. No ranks are needed to see it. (labkit's scripts draw
# their own permutation from `seed + epoch`, in the cell `batches`.)

# %%
from torch.utils.data import DistributedSampler

EPOCHS, SAMPLES = 3, 1000
claims.predict("different orders in 3 epochs without set_epoch", 1)
claims.predict("different orders in 3 epochs with set_epoch", EPOCHS)
claims.predict("samples that all ranks together see in an epoch", SAMPLES // n * n)


def orders(calls_set_epoch):
    """For each epoch, the samples of all ranks in their order."""
    samplers = [DistributedSampler(range(SAMPLES), n, rank, drop_last=True) for rank in ranks]
    seen = []
    for epoch in range(EPOCHS):
        for sampler in samplers if calls_set_epoch else ():
            sampler.set_epoch(epoch)
        seen.append(tuple(index for sampler in samplers for index in sampler))
    return seen


claims.measure("different orders in 3 epochs without set_epoch", len(set(orders(calls_set_epoch=False))))
claims.measure("different orders in 3 epochs with set_epoch", len(set(orders(calls_set_epoch=True))))
claims.measure("samples that all ranks together see in an epoch", len(set(orders(calls_set_epoch=True)[0])))
print("rank 0 begins with", *(order[:6] for order in orders(calls_set_epoch=True)))

# %% [markdown]
# ## Where DDP is not one big batch: BatchNorm
#
# All of the above holds while a sample's result does not depend on the others. BatchNorm takes mean and variance over
# the samples *of its rank*. `SyncBatchNorm`, which the guide recommends (001, line 222), exchanges them in forward and
# backward; torch runs it on GPUs only (here: `labkit.launch(script, sync_batch_norm=True)`). GroupNorm and LayerNorm
# look at one sample at a time and need none of it:

# %%
claims.predict("BatchNorm: difference between shares and the whole batch", 0.01, how="at least")
claims.predict("GroupNorm: difference between shares and the whole batch", 1e-9, how="at most")
x = torch.randn(8 * n, 4, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
for name, norm in (("BatchNorm", nn.BatchNorm2d(4)), ("GroupNorm", nn.GroupNorm(2, 4))):
    norm = norm.double()
    shares = torch.cat([norm(share) for share in x.chunk(n)])
    claims.measure(f"{name}: difference between shares and the whole batch", (shares - norm(x)).abs().max().item())

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - In `by_hand`, leave the division out, or the broadcast: which of the claims fails, and by how much?
# - Leave `model.no_sync()` out of `accumulate`: the last claim about bytes is off by a factor of `micro_batches`.
# - Give DDP `bucket_cap_mb=0.25` in `replicated`, and `buckets` the same limits: how many all-reduces now? Then
#   `labkit.launch(..., bucket_mib=0.25, profile=True)` and compare the timelines.
# - Put only the backward into `no_sync`, not the forward, and count again: DDP decides in forward.
