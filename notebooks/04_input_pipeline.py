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
# # 04 · The input pipeline: a loader is worth what it hides
#
# **You will be able to** say how much loader workers save, from the times of loading and of computing, how many you
# need, and which data every rank reads twice. **20 minutes. You need** labs 01 and 03.
#
# Before a step computes, its batch is read, decoded and put together. Whatever of that happens *while* an earlier step
# computes costs nothing. That is what worker processes are for: each loads every W-th batch, ahead of the rank.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
workers: int = 2  # loader processes of each rank, where there are several; at least 2
step_ms: int = 100  # loading and computing of one step, one after the other

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized

lab, N, W, seconds = Lesson("04_input_pipeline", ranks=nproc_per_node), nproc_per_node, workers, step_ms / 1000
draw.loader(load=2, compute=1, workers=W, moving=True)

# %% [markdown]
# ## Your predictions
#
# Loading and computing are only sleeps here, so their times are right even on busy cores. A *stream* is an
# `IterableDataset`: the lines of a file, say, which cannot be requested by index. Every worker of every rank gets a
# copy of it.

# %%
saves = lab.ask(f"share of a step that {W} workers save, if half of it was loading", default=20, unit="%")
slower = lab.ask("a step when the loader of one rank takes 3 times as long, over one with equal loaders", default=1.5)
ahead = lab.ask(f"batches that wait in memory while a long first step computes, with {W} workers", default=1)
stream = lab.ask("times that each sample of a stream is read in an epoch, by all ranks together", default=1)

# %% [markdown]
# ## Run
#
# `Slow` is a data set that sleeps, and `step_seconds` the time from step to step; each step ends with an all-reduce, as
# in training. Loading is 15, 50 or 80% of a step, with 0, 1 and several workers.

# %%
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def paces(device, cases):
    def pace(load, compute, count, factor=1):  # the last rank's loader takes `factor` times as long
        seconds = load * factor if dist.get_rank() == dist.get_world_size() - 1 else load
        return step_seconds(DataLoader(Slow(16 * max(2, count), seconds / 4), batch_size=4, num_workers=count), compute)

    return [pace(*case) for case in cases]


# %%
def step(load, compute, workers):
    return max(load / workers, compute) if workers else load + compute


loads, half = {f"{share:.0%}": share * seconds for share in (0.15, 0.5, 0.8)}, seconds / 2
cases = {f"loading {s}, workers={n}": (load, seconds - load, n) for s, load in loads.items() for n in (0, 1, W)}
expected = {name: step(*case) for name, case in cases.items()}
lab.predict_each(expected, "s", within=0.25)
lab.predict(saves, 0.5, "%", within=0.15, timed=True)
lab.predict(slower, step(3 * half, half, 1) / step(half, half, 1), within=0.15, timed=True)
run, (results, *_) = lab.run(paces, [*cases.values(), (half, half, 1, 3)])

# %%
took = dict(zip(cases, results, strict=False))
equal = {n: took[f"loading 50%, workers={n}"] for n in (0, 1, W)}
lab.measure_each(took | {saves: 1 - equal[W] / equal[0], slower: results[-1] / equal[1]}, run=run)
draw.bars(took, expected, unit="s", title="a step")

# %% [markdown]
# ## Which data does a worker read?
#
# `Stream` shows three ways to share a stream out. Counted is what all workers of all ranks read in one epoch. And how
# many batches are loaded before the second is asked for?

# %%
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, looks_at):
        self.looks_at, self.rank, self.ranks = looks_at, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        worker = get_worker_info()
        part, parts = {
            "nothing": (0, 1),
            "worker": (worker.id, worker.num_workers),
            "worker and rank": (self.rank * worker.num_workers + worker.id, self.ranks * worker.num_workers),
        }[self.looks_at]
        yield from range(part, 60, parts)


def read(device, ways, workers):
    streams = [DataLoader(Stream(way), batch_size=4, num_workers=workers) for way in ways]
    counts = [torch.cat([*stream]).bincount(minlength=60).tolist() for stream in streams]
    return counts, batches_ahead(DataLoader(Slow(400), batch_size=4, num_workers=workers))


# %%
ways = {"nothing": stream, "worker": "the same by worker", "worker and rank": "the same by worker and rank"}
comes = dict(zip(ways.values(), (N * W, N, 1), strict=True))
lab.predict_each(comes | {ahead: 2 * W})  # prefetch_factor is 2 unless you set it
run, answers = lab.run(read, [*ways], W)
times = torch.tensor([counts for counts, *_ in answers]).sum(0)  # by way and sample, over all ranks
results = {name: each.unique().item() for name, each in zip(ways.values(), times, strict=True)}
lab.measure_each(results | {ahead: answers[0][1]}, run=run)
lab.score()

# %% [markdown]
# ## Why
#
# Loading a batch takes *l*, computing a step *c*. Without workers a step takes l + c, with W of them **max(l / W, c)**.
# So workers save at most *l*, all that loading takes, and one worker at most half of a step. "10-20%" is true where
# loading is 10-20% of the step, and nowhere else. A step ends on all ranks at once, for they all-reduce: **the slowest
# loader sets the pace of all**.
#
# Workers × `prefetch_factor` batches wait in host memory. Workers end with the epoch, unless `persistent_workers=True`.
# A stream is copied into every worker of every rank, and each copy reads *all* of it, unless it looks at which worker
# of which rank it is. No error tells you.
#
# `pin_memory` and `non_blocking` hide the copy to the device, not the loading. A batch of 128 MNIST images is 402,432
# bytes, 34 µs at 12 GB/s (PCIe 3 x16). A step of the CNN of lab 01 took an article's author 30 ms on a GPU: pinning
# saves 0.1% of it.
#
# Move the sliders: six batches, each with so much to load and to compute.

# %%
lab.explore(draw.loader, workers=[0, 1, 2, 4], load=[1, 2, 4], compute=[1, 2, 4])

# %% [markdown]
# ## A real step
#
# labkit's `ddp` script, with images that take 2 ms each to "decode". Without the extra `workers` it loads in the rank's
# own process. labkit measures in every step how long a rank waits for its input.

# %%
import time

import torch
from torch.utils.data import Dataset


class Decoded(Dataset):
    def __len__(self):
        return 60_000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((1, 8, 8), index % 10 / 10), index % 10


def load_datasets(data_dir):
    return Decoded(), torch.utils.data.Subset(Decoded(), range(16))


# %%
digits = Script.load("ddp", task="digits").with_cells(data=load_datasets)
names = {n: f"input wait for 64 samples of 2 ms, {n} workers" for n in (0, W)}
lab.predict(names[0], 64 * 0.002, "s", within=0.15)
lab.predict(names[W], 64 * 0.002 / W, "s", how="at most", within=0.15)
for n, name in names.items():
    run = lab.launch(digits, steps=6, global_batch_size=64 * N, workers=n)
    lab.measure(name, run.metrics().query("step > 2")["input"].median(), run=run)

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# The faster the device, the more workers it needs. A wider network of the same kind, with a global batch of 512 images
# that take 2 ms each to load. A rank needs (time to load its images) / (time of the planned step) workers.

# %%
wide = sized(Script.load("ddp", task="digits"), width=512, layers=16)
display(planned := lab.plans({"DDP": wide}, global_batch_size=512))
needed = {device: 512 / plan.ranks * 0.002 / plan.step.seconds for (_, device), plan in planned.plans.items()}
draw.bars(predicted=needed, title="workers that a rank needs (planned, not run)")

# %% [markdown]
# ## Try this
#
# 1. `workers = 4`: from which share of loading on do four workers save more than two? Read it from the formula, then
#    run.
#    <details><summary>Answer</summary>From two thirds on, where two workers take l / 2 = c. At 80% four take 22 ms of
#    100, two took 41.</details>
# 2. `nproc_per_node = 4`: how often is each sample of a stream read, and how many batches wait in memory?
#    <details><summary>Answer</summary>8 times if the stream looks at nothing, 4 times if it looks at the worker
#    only. 4 batches wait on each rank, so 16 on the machine.</details>
# 3. In `Stream`, let each rank forget that there are others: `"worker and rank": (worker.id, worker.num_workers)`.
#    <details><summary>Answer</summary>Every sample is read on both ranks, without any error: an epoch has twice the
#    steps, and both ranks compute the same gradients. The lab fails and names the claim "the same by worker and
#    rank".</details>
#
# ## Sources
#
# torch.utils.data's documentation: workers, `prefetch_factor`, `IterableDataset` and `get_worker_info`;
# torch/utils/data/dataloader.py.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002, lines 101-117) promises 10-20% from `pin_memory` and `non_blocking`, and draws loading that
# overlaps with computing. But that is what workers do, and "depending on data loading bottleneck" is the whole answer.

# %%
lab.check({saves: ("002, line 117: 10-20%", 0.2)})
