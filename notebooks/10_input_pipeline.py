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
# # 10 · The input pipeline: a loader is worth what it hides
#
# **You will be able to** work out how much loader workers save from the times of loading and computing, find out how
# many you need, divide a stream so that nothing is read twice, and say when `pin_memory` matters.
# **25 minutes. You need** labs 01 and 03.
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

lab, N, W, seconds = Lesson("10_input_pipeline", ranks=nproc_per_node), nproc_per_node, workers, step_ms / 1000
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
run, (results, *_) = lab.run(paces, [*cases.values(), (half, half, 1, 3)], options={"shown": False})

# %%
took = dict(zip(cases, results, strict=False))
expected = {name: max(load / n, compute) if n else load + compute for name, (load, compute, n) in cases.items()}
draw.bars(took, expected, unit="s", title="a step")

# %% [markdown]
# Loading a batch takes *l*, computing a step *c*. Without workers a step takes l + c, with W of them **max(l / W, c)**.
# So workers save at most *l*, and more of them help only until l / W is less than *c*. All ranks end a step together,
# because they all-reduce: **the slowest loader sets the pace of all**.

# %%
none, one, several = (took[f"loading 50%, workers={n}"] for n in (0, 1, W))
lab.verify_each({name: (expected[name], took[name]) for name in cases}, "s", within=0.25)
lab.verify(saves, 0.5, 1 - several / none, "%", within=0.15, timed=True)
lab.verify(slower, 3, results[-1] / one, within=0.15, timed=True)
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
run, answers = lab.run(read, [*ways], W, options={"shown": False})
times = torch.tensor([counts for counts, *_ in answers]).sum(0)  # by way and sample, over all ranks
read_by = {f"looks at {way}": each.unique().item() for way, each in zip(ways, times, strict=True)}
display(draw.bars(read_by, title="times a sample is read"))
print("batches that wait in memory:", answers[0][1])

# %% [markdown]
# A stream that does not look at both is read several times, and no error tells you. Nor does any error tell you that
# the shares differ in length: a rank with one more batch waits forever in its last all-reduce. Stop all ranks after the
# same number of steps. Workers × `prefetch_factor` batches of each rank wait in the host's memory.

# %%
by = dict(zip(ways.values(), zip((N * W, N, 1), read_by.values(), strict=True), strict=True))
lab.verify_each(by | {ahead: (2 * W, answers[0][1])})  # prefetch_factor is 2

# %% [markdown]
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
parts = {}
for n in (0, W):
    run = lab.launch(digits, steps=16, global_batch_size=8 * N, workers=n, shown=False)
    mean = run.metrics().query("step > 4").mean(numeric_only=True)
    parts[f"workers={n}"] = {"waits for its batch": mean["input"], "the rest": mean["step_seconds"] - mean["input"]}
draw.bars(parts, unit="s", title="a step")

# %%
waited = [each["waits for its batch"] for each in parts.values()]
lab.verify("input wait for 8 samples of 20 ms, workers=0", 8 * 0.02, waited[0], "s", within=0.15)
most = f"input wait for 8 samples of 20 ms, workers={W}"
lab.verify(most, 8 * 0.02 / W, waited[1], "s", how="at most", within=0.15)
lab.score()

# %% [markdown]
# ## From the host to the GPU
#
# One more thing happens to a batch: it is copied to the GPU, and `pin_memory` and `non_blocking` are about that. The
# operating system may move or swap out any page of ordinary (**pageable**) memory, so the GPU cannot read it by itself.
# **Page-locked** (*pinned*) memory stays where it is, and the GPU fetches it by **DMA** (direct memory access): its
# copy engine reads the host's memory while the CPU does something else. From pageable memory CUDA copies piece by piece
# into a small pinned buffer of its own, and the CPU has to do that and wait.
#
# - `pin_memory=True`: a thread of the DataLoader copies each batch into pinned memory before it hands it out.
# - `x.to(device, non_blocking=True)` returns at once, and the copy goes on. **That takes pinned memory**: from pageable
#   memory the call still has to wait until the batch is in CUDA's buffer.
#
# ```
# pageable, blocking     CPU  | copy 1, piece by piece | launch 1 | copy 2, piece by piece | launch 2 |
#                        GPU  | copy 1                 | compute 1 ... | copy 2            | compute 2 ...
#
# pinned, non_blocking   CPU  | launch 1 | launch 2 | launch 3 ...
#                        GPU  | copy 1 | compute 1 | copy 2 | compute 2 | copy 3 | compute 3
#
# and a second stream    GPU  | copy 1 | compute 1       | compute 2       | compute 3
#                                      | copy 2 |        | copy 3 |
# ```
#
# The second row is what most code does, and it is less than is often said: a **stream** of CUDA keeps its order, and
# copies and kernels are in the same one by default. So copy 2 waits for compute 1. What is saved is the CPU's waiting,
# and the piecewise copy. To copy *while* the GPU computes, the next batch is fetched on a stream of its own.
#
# How much is there to save? It depends on the size. PCIe 3 x16, a T4's bus, carries some 12 GB/s:

# %%
batches = {"128 images of MNIST": (128, 1, 28, 28), "256 images of ImageNet": (256, 3, 224, 224)}
for name, shape in batches.items():
    batch = torch.empty(shape)
    print(f"{name}, float32: {batch.nbytes / 1e6:.1f} MB, {batch.nbytes / 12e9 * 1000:.3g} ms at 12 GB/s")


# %%
def copied(batch, pinned, other_stream):
    """Seconds of a step that copies a batch to the GPU and computes, after the first."""
    host, weight = batch.pin_memory() if pinned else batch, torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream() if other_stream else torch.cuda.current_stream()
    for step in range(11):
        if step == 1:
            torch.cuda.synchronize()
            began = time.monotonic()
        with torch.cuda.stream(stream):
            host.to("cuda", non_blocking=pinned)
        for _ in range(4):
            weight @ weight
    torch.cuda.synchronize()
    return (time.monotonic() - began) / 10


ways = {"pageable": (False, False), "pinned, non_blocking": (True, False), "and a second stream": (True, True)}
if torch.cuda.is_available():
    display(draw.bars({name: copied(batch, *way) for name, way in ways.items()}, unit="s", title="copy and compute"))
else:
    print("No GPU here, so there is nothing to copy to, and none of the three ways can be measured.")

# %% [markdown]
# A batch of MNIST takes 33 µs: pinned or not, nobody will notice. A batch of ImageNet takes 13 ms in every
# step: worth pinning, and worth sending as bytes (`uint8`, a quarter of the size), to be made float on the GPU. An
# article promises 10 to 20% from the two options for a CNN on MNIST; of its step with DDP, 6.94 s / 235 = 30 ms, the
# copy is a tenth of a percent. Pinned memory cannot be swapped out: do not pin more than the batches that wait.
#
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
# - **`pin_memory` and `non_blocking`** take the copy to the GPU off the CPU's time, and hide no loading.
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
# torch/utils/data/dataloader.py. NVIDIA, *How to Overlap Data Transfers in CUDA C/C++*. pytorch.org, *A guide on good
# usage of non_blocking and pin_memory()*.
