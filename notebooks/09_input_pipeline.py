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
# # 09 · The input pipeline: a loader is worth what it hides
#
# **You will be able to** work out how much loader workers save from the times of loading and computing, find out how
# many you need, and divide a stream so that nothing is read twice. **20 minutes. You need** labs 01 and 03.
#
# Before a step computes, its batch is read, decoded and put together. Any of this that happens *while* an earlier step
# computes costs nothing. That is what the worker processes of a `DataLoader` are for: each of W workers loads every
# W-th batch, ahead of the rank. In the picture loading takes twice as long as computing, and two workers hide all of it
# but the first batch.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
workers: int = 2  # loader processes of each rank, where there are several; at least 2
step_ms: int = 100  # loading and computing of one step, one after the other

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab, N, W, seconds = Lesson("09_input_pipeline", ranks=nproc_per_node), nproc_per_node, workers, step_ms / 1000
draw.loader(load=2, compute=1, workers=W)

# %% [markdown]
# ## Your predictions
#
# In the first two questions, loading a batch takes as long as computing a step. In the second, each rank has one
# worker, and each step ends with an all-reduce, as in training. A *stream* in the last one is an `IterableDataset`, for
# example the lines of a file, which cannot be requested by index. Every worker of every rank gets a copy of it.

# %%
saves = lab.ask(f"share of a step that {W} workers save, compared with none", default=20, unit="%")
slower = lab.ask("the loader of one rank takes 3 times as long: how many times as long is a step", default=1.5)
ahead = lab.ask(f"batches that wait in memory while a long first step computes, with {W} workers", default=1)
stream = lab.ask("times that each sample of a stream is read in an epoch, by all ranks together", default=1)

# %% [markdown]
# ## What do workers save?
#
# Loading and computing are only sleeps here, so their times are right even on busy cores. `Slow` is a dataset that
# sleeps, and `step_seconds` measures the time from step to step. Without workers, loading is 15, 50 or 80% of a step.

# %%
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def paces(device, cases):
    def pace(load, compute, workers, factor=1):
        seconds = load * factor if dist.get_rank() == dist.get_world_size() - 1 else load
        dataset = Slow(16 * max(2, workers), seconds / 4)  # samples, seconds for each
        return step_seconds(DataLoader(dataset, batch_size=4, num_workers=workers), compute)

    return [pace(*case) for case in cases]


# %%
loads, half = {f"{share:.0%}": share * seconds for share in (0.15, 0.5, 0.8)}, seconds / 2
cases = {f"loading {s}, workers={n}": (load, seconds - load, n) for s, load in loads.items() for n in (0, 1, W)}
expected = {name: max(load / n, compute) if n else load + compute for name, (load, compute, n) in cases.items()}
lab.predict_each(expected, "s", within=0.25)
lab.predict(saves, 0.5, "%", within=0.15, timed=True)
lab.predict(slower, 3, within=0.15, timed=True)
run, (results, *_) = lab.run(paces, [*cases.values(), (half, half, 1, 3)], options={"shown": False})

# %%
took = dict(zip(cases, results, strict=False))
equal = {n: took[f"loading 50%, workers={n}"] for n in (0, 1, W)}
lab.measure_each(took | {saves: 1 - equal[W] / equal[0], slower: results[-1] / equal[1]}, run=run)
draw.bars(took, expected, unit="s", title="a step")

# %% [markdown]
# Loading a batch takes *l*, computing a step *c*. Without workers a step takes l + c, with W of them **max(l / W, c)**.
# So workers save at most *l*, and more of them help only until l / W is less than *c*. All ranks end a step together,
# because they all-reduce: **the slowest loader sets the pace of all**.

# %%
lab.explore(draw.loader, workers=[0, 1, 2, 4], load=[1, 2, 4], compute=[1, 2, 4])

# %% [markdown]
# ## Which data does a worker read?
#
# An indexed dataset needs no care: `DistributedSampler` gives each rank its indices, and the `DataLoader` passes them
# to its workers. A stream has to divide itself. Here are three ways; how often is each sample read, by all workers of
# all ranks? And how many batches are loaded before the second is requested?

# %%
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, looks_at):  # the rank is asked for here: worker processes are not in the process group
        self.looks_at, self.rank, self.ranks = looks_at, dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        worker = get_worker_info()
        by_worker = worker.id, worker.num_workers
        by_both = self.rank * worker.num_workers + worker.id, self.ranks * worker.num_workers
        part, parts = {"nothing": (0, 1), "worker": by_worker, "worker and rank": by_both}[self.looks_at]
        yield from range(part, 60, parts)


def read(device, ways, workers):
    streams = [DataLoader(Stream(way), batch_size=4, num_workers=workers) for way in ways]
    counts = [torch.cat([*stream]).bincount(minlength=60).tolist() for stream in streams]
    return counts, batches_ahead(DataLoader(Slow(400), batch_size=4, num_workers=workers))


# %%
ways = {"nothing": stream, "worker": "the same by worker", "worker and rank": "the same by worker and rank"}
lab.predict_each(dict(zip([*ways.values(), ahead], (N * W, N, 1, 2 * W), strict=True)))  # prefetch_factor is 2
run, answers = lab.run(read, [*ways], W, options={"shown": False})
times = torch.tensor([counts for counts, *_ in answers]).sum(0)  # by way and sample, over all ranks
results = {name: each.unique().item() for name, each in zip(ways.values(), times, strict=True)}
lab.measure_each(results | {ahead: answers[0][1]}, run=run)
display(draw.bars({f"looks at {way}": results[name] for way, name in ways.items()}, title="times a sample is read"))
lab.score()

# %% [markdown]
# A stream that does not look at both is read several times, and no error tells you. Nor does any error tell you that
# the shares differ in length: a rank with one more batch waits forever in its last all-reduce. Stop all ranks after the
# same number of steps. Workers × `prefetch_factor` batches of each rank wait in the host's memory.
#
# ## A real training run
#
# Run labkit's `ddp` script with images that take 20 ms each to "decode", eight of them per rank and step. The bars show
# the part of a step in which a rank waits for its batch:

# %%
import time

import torch
from torch.utils.data import Dataset


class Decoded(Dataset):
    def __len__(self):
        return 60_000

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((1, 8, 8), index % 10 / 10), index % 10


def load_datasets(data_dir):
    return Decoded(), torch.utils.data.Subset(Decoded(), range(2))


# %%
digits = Script.load("ddp", task="digits").with_cells(data=load_datasets)
waits, parts = {n: f"input wait for 8 samples of 20 ms, workers={n}" for n in (0, W)}, {}
lab.predict(waits[0], 8 * 0.02, "s", within=0.15)
lab.predict(waits[W], 8 * 0.02 / W, "s", how="at most", within=0.15)
for n, name in waits.items():
    run = lab.launch(digits, steps=16, global_batch_size=8 * N, workers=n, shown=False)
    mean = run.metrics().query("step > 4").mean(numeric_only=True)
    lab.measure(name, mean["input"], run=run)
    parts[f"workers={n}"] = {"waits for its batch": mean["input"], "the rest": mean["step_seconds"] - mean["input"]}
draw.bars(parts, unit="s", title="a step")

# %% [markdown]
# **In your own code:**
#
# ```python
# loader = DataLoader(
#     dataset,
#     batch_size=32,
#     sampler=DistributedSampler(dataset),  # lab 03: set_epoch
#     num_workers=4,  # of each rank
#     persistent_workers=True,  # otherwise they are started again in every epoch
#     pin_memory=True,
# )
# for x, y in loader:
#     x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
# ```
#
# - **How many workers?** At most the host's cores divided by its ranks, because every rank has its own workers. Measure
#   how long a step waits for the loader's next batch (labkit's *input wait*): if that is near 0, more workers gain
#   nothing.
# - **Cores are all busy, and a rank still waits?** Do less in `__getitem__`: decode and resize once, before training.
# - **`pin_memory` and `non_blocking`** hide the copy to the GPU, not the loading. That is little: 128 MNIST images are
#   0.4 MB, 34 µs over PCIe 3 x16.
# - **Hugging Face:** `Trainer` takes `dataloader_num_workers` (default 0) and pins memory. For a stream of `datasets`,
#   `datasets.distributed.split_dataset_by_node(stream, rank, world_size)` gives each rank its part.
#
# ## On 2 × T4 and 8 × A100
#
# The faster the device, the more workers it needs. Take a wider network of the same kind, and a global batch of 512
# images that take 2 ms each to load. A rank needs (time to load its images) / (time of the planned step) workers,
# rounded up.

# %%
wide = sized(Script.load("ddp", task="digits"), width=512, layers=16)
display(planned := lab.plans({"DDP": wide}, global_batch_size=512))
needed = {device: round(512 / p.ranks * 0.002 / p.step.seconds, 1) for (_, device), p in planned.plans.items()}
draw.bars(predicted=needed, title="workers that a rank needs (planned, not run)")

# %% [markdown]
# ## Try this
#
# 1. `workers = 4`: from what share of loading do four workers save more than two? Work it out from the formula, then
#    run it.
#    <details><summary>Answer</summary>From two thirds, where l / 2 = c. At 80%, four workers take 22 ms of 100; two
#    took 41.</details>
# 2. `nproc_per_node = 4`: how often is each sample of a stream read, and how many batches wait in memory?
#    <details><summary>Answer</summary>8 times if the stream looks at nothing, 4 times if it looks at the worker
#    only. 4 batches wait on each rank, so 16 on the machine.</details>
# 3. In `Stream`, let each rank forget that there are others: `by_both = worker.id, worker.num_workers`.
#    <details><summary>Answer</summary>Every sample is read on both ranks, without any error: an epoch has twice as many
#    steps, and both ranks compute the same gradients.</details>
#
# ## Sources
#
# torch.utils.data's documentation: workers, `prefetch_factor`, `IterableDataset` and `get_worker_info`;
# torch/utils/data/dataloader.py.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002, lines 101-117) promises 10-20% from `pin_memory` and `non_blocking`. Its step took 30 ms, of
# which the copy is 0.1%. Workers save 10-20% where loading is 10-20% of the step, and nowhere else.

# %%
lab.check({saves: ("002, line 117: 10-20%", 0.2)})
