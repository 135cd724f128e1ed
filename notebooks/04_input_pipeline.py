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
# Before a step computes, its batch is read, decoded, put together and copied to the device. Whatever of that happens
# *while* the previous step computes costs nothing. The second article (002, lines 101-117) promises 10-20 % from
# `pin_memory` and `non_blocking`, and draws loading that overlaps with computing; but that is what workers do. You will
# predict what workers, prefetching and pinning can save, from two times and one size. Loading and computing only sleep
# here, so that their times are exact on busy cores, too.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
workers: int = 2  # loader processes of each rank, where there are several; at least 2
step_ms: int = 100  # loading and computing of one step, one after the other
batch_size: int = 128  # samples of a rank, where the article's CNN runs; 128 is the article's

# %%
import json

import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
N, W, ranks = nproc_per_node, workers, range(nproc_per_node)
claims = Claims("04_input_pipeline")

# %% [markdown]
# ## Predict: time
#
# Loading a batch takes *l*, computing a step *c*. Without workers the rank does both in turn. With *W* workers each of
# them loads every *W*-th batch while the rank computes:
#
# | | a step takes |
# |---|---|
# | `num_workers=0` | l + c |
# | `num_workers=W` | max(l / W, c) |
#
# So one worker saves min(l, c) of l + c, half of it at the very most. More workers can save up to *l*, all that loading
# takes, and never more. A step ends on all ranks at once, because they all-reduce: the rank with the slowest loader
# sets the pace of all.

# %%
SHARES = (0.15, 0.5, 0.8)  # of loading in l + c
WORKERS = (0, 1, W)


def step(load, compute, workers):
    return max(load / workers, compute) if workers else load + compute


def saved(share, workers):
    """Of a step, when loading is this share of it."""
    return 1 - step(share, 1 - share, workers)


whole = step_ms / 1000
for share in SHARES:
    for count in WORKERS:
        expected = step(share * whole, (1 - share) * whole, count)
        name = f"loading {share:.0%}, workers={count}: step"
        claims.predict(name, expected, "s", within=max(0.15, 0.01 / expected))  # 10 ms of it for Python and gloo
slow = "loading 50%, on one rank 3 times slower: step"
pace = claims.predict(slow, step(1.5 * whole, 0.5 * whole, 1), "s", within=0.15)
print(f"one rank's loader is 3 times slower: {pace * 1e3:.0f} ms a step for all, in place of {step_ms / 2:.0f}")

# %% [markdown]
# The article's "10-20 % faster training depending on data loading bottleneck" (line 117) is right about what it depends
# on. How much is it? With its two workers, 10-20 % of the time are saved where loading is 10-20 % of the step, and
# nowhere else. ("Allowed" is 6 % of a step here.)

# %%
SAID = {0.15: 0.15, 0.5: 0.2, 0.8: 0.2}  # the article's number that is nearest
for share in SHARES:
    claims.predict(
        f"loading {share:.0%}, workers={W}: saved",
        saved(share, W),
        "%",
        within=0.06 / saved(share, W),
        article="002, line 117: 10-20 %",
        said=SAID[share],
        timed=True,
    )

# %% [markdown]
# ## Predict: counts
#
# - **Ahead.** A loader hands `prefetch_factor` batches to each worker at once, and another one whenever it is given
#   one. While a step computes, workers × `prefetch_factor` batches wait for the next ones, in host memory.
# - **Streams.** A `Dataset` is asked for samples by number. An `IterableDataset` is copied into every worker of every
#   rank, and each copy reads *all* of it, unless it looks which worker of which rank it is.
# - **Processes.** Workers end with the epoch, unless `persistent_workers=True`.
# - **Pinned.** Without a GPU there is nothing to pin memory for: `pin_memory=True` changes nothing.

# %%
EPOCHS, BATCHES = 3, 2
AHEAD = ((0, None), (W, 2), (W + 1, 1))  # (workers, prefetch_factor); torch's default is 2
TIMES = {"nothing": W * N, "worker": N, "worker and rank": 1}
for count, factor in AHEAD:
    claims.predict(f"ahead: workers={count}, prefetch_factor={factor}", count * (factor or 0))
for looks_at, times in TIMES.items():
    claims.predict(f"stream by {looks_at}: times a sample comes", times)
claims.predict(f"processes in {EPOCHS} epochs", W * EPOCHS)
claims.predict(f"processes in {EPOCHS} epochs, persistent", W)
claims.predict(f"pinned, of {BATCHES} batches", 0 if on_cpu else BATCHES)
mnist = claims.predict("bytes of a batch of MNIST", batch_size * (28 * 28 * 4 + 8), "B")  # pixels, and a label

# %% [markdown]
# ## What the ranks run
#
# Data sets that sleep, and count:

# %%
import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, get_worker_info

SAMPLES = 4  # of a batch


class Slow(Dataset):
    """A sample takes a while to load; it is the number of the process that did it."""

    def __init__(self, batches, batch_seconds=0.0):
        self.seconds = batch_seconds / SAMPLES
        self.loaded = torch.zeros(batches * SAMPLES, dtype=torch.int64).share_memory_()  # workers write, the rank reads

    def __len__(self):
        return len(self.loaded)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        self.loaded[index] += 1
        return os.getpid()


class Stream(IterableDataset):
    """Numbers, as lines of a file would be: there is no asking for the fifth."""

    def __init__(self, samples, looks_at):
        self.samples, self.looks_at = samples, looks_at
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        worker = get_worker_info()
        part, parts = {
            "nothing": (0, 1),
            "worker": (worker.id, worker.num_workers),
            "worker and rank": (self.rank * worker.num_workers + worker.id, self.ranks * worker.num_workers),
        }[self.looks_at]
        yield from range(part, self.samples, parts)


# %%
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset


def step_seconds(load, compute, workers):
    """From step to step, when the loader is in its stride. Of W steps at once: W workers deliver W batches at once."""
    ends, w = [], max(1, workers)
    for _ in DataLoader(Slow(8, load), SAMPLES, num_workers=workers):
        time.sleep(compute)
        dist.all_reduce(torch.zeros(1))
        ends.append(time.monotonic())
    return statistics.median((later - earlier) / w for earlier, later in zip(ends[w:], ends[2 * w :], strict=False))


def batches_ahead(workers, factor):
    """Loaded and not yet asked for, in a first step that is long enough to load all there will be."""
    data = Slow(100)
    stream = iter(DataLoader(data, SAMPLES, num_workers=workers, prefetch_factor=factor))
    next(stream)
    before, loaded = 0, 1
    while before != loaded:
        time.sleep(0.4)
        before, loaded = loaded, data.loaded.sum().item()
    return loaded // SAMPLES - 1


def times_read(looks_at, workers):
    """The fewest and the most times that a sample of a stream came, on all ranks together."""
    seen = torch.zeros(60, dtype=torch.int64)
    for batch in DataLoader(Stream(len(seen), looks_at), SAMPLES, num_workers=workers):
        seen += torch.bincount(batch, minlength=len(seen))
    dist.all_reduce(seen)
    return [seen.min().item(), seen.max().item()]


def processes(epochs, workers, persistent):
    loader = DataLoader(Slow(4 * workers), SAMPLES, num_workers=workers, persistent_workers=persistent)
    return len({process for _ in range(epochs) for batch in loader for process in batch.tolist()})


def pinned_batches(batches, batch_size):
    """What a batch of MNIST's shape weighs, whether it is pinned, and what that does to its copy to a GPU."""
    n = batches * batch_size
    data = TensorDataset(torch.rand(n, 1, 28, 28), torch.randint(10, (n,)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = list(DataLoader(data, batch_size, pin_memory=True))
    gpu = torch.cuda.is_available()
    return {
        "bytes": sum(tensor.nbytes for tensor in loaded[0]),
        "pinned": sum(all(tensor.is_pinned() for tensor in batch) for batch in loaded),
        "warning": next((str(each.message) for each in said if "pin_memory" in str(each.message)), ""),
        "copy": [copy_seconds(loaded[0]), copy_seconds([t.clone() for t in loaded[0]])] if gpu else None,
    }


def copy_seconds(batch, times=20):
    """Of a batch, host to device, on the device's own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(-3, times):
        if number == 0:
            begin.record()
        for tensor in batch:
            tensor.to("cuda", non_blocking=True)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / times


def main():
    todo = json.loads(sys.argv[1])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")  # what is summed here is on the host
    last = dist.get_rank() == dist.get_world_size() - 1
    load, compute, factor = todo["slow"]
    told = {
        "steps": [step_seconds(*case) for case in todo["steps"]],
        "slow": step_seconds(load * factor if last else load, compute, 1),
        "ahead": [batches_ahead(*case) for case in todo["ahead"]],
        "times": [times_read(*case) for case in todo["times"]],
        "processes": [processes(*case) for case in todo["processes"]],
        "mnist": pinned_batches(*todo["mnist"]),
    }
    Path(os.environ["LABKIT_RUN_DIR"], f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# ## Measure

# %%
todo = {
    "steps": [(share * whole, (1 - share) * whole, count) for share in SHARES for count in WORKERS],
    "slow": (0.5 * whole, 0.5 * whole, 3),
    "ahead": AHEAD,
    "times": [(looks_at, W) for looks_at in TIMES],
    "processes": [(EPOCHS, W, False), (EPOCHS, W, True)],
    "mnist": (BATCHES, batch_size),
}
script = Script.of("loaders", data=Slow, main=main)
run = labkit.launch(script, nproc_per_node=N, args=[json.dumps(todo)], env=env)
run.wait()


# %%
def same(name, value):
    """What all ranks say alike; otherwise nothing, and the claim fails."""
    claims.measure(name, value[0] if all(each == value[0] for each in value) else float("nan"), run=run)


told = [json.loads((run.path / f"told-{rank}.json").read_text()) for rank in ranks]
seconds = dict(zip([(share, count) for share in SHARES for count in WORKERS], told[0]["steps"], strict=True))
for (share, count), found in seconds.items():
    claims.measure(f"loading {share:.0%}, workers={count}: step", found, run=run)
for share in SHARES:
    found = 1 - seconds[share, W] / seconds[share, 0]
    claims.measure(f"loading {share:.0%}, workers={W}: saved", found, run=run)
claims.measure(slow, told[0]["slow"], run=run)
for case, (count, factor) in enumerate(AHEAD):
    name = f"ahead: workers={count}, prefetch_factor={factor}"
    same(name, [each["ahead"][case] for each in told])
for case, looks_at in enumerate(TIMES):
    name = f"stream by {looks_at}: times a sample comes"
    same(name, [times for each in told for times in each["times"][case]])
for case, how in enumerate(("", ", persistent")):
    name = f"processes in {EPOCHS} epochs{how}"
    same(name, [each["processes"][case] for each in told])
same(f"pinned, of {BATCHES} batches", [each["mnist"]["pinned"] for each in told])
same("bytes of a batch of MNIST", [each["mnist"]["bytes"] for each in told])
print("torch says:", told[0]["mnist"]["warning"] or "nothing, the batches are pinned")

# %% [markdown]
# Lines are predictions, points are measured. The band is the article's 10-20 %.

# %%
shares = [each / 100 for each in range(101)]
figure = go.Figure()
figure.add_hrect(y0=0.1, y1=0.2, fillcolor="#888888", opacity=0.2, line_width=0, annotation_text="the article")
for count, colour in zip((1, W, 64), ("#4c8eda", "#e8883a", "#8a8f98"), strict=True):
    name = "as many as it takes" if count == 64 else f"{count} worker{'s' if count > 1 else ''}"
    line = {"color": colour, "dash": "dot" if count == 64 else "solid"}
    figure.add_scatter(x=shares, y=[saved(share, count) for share in shares], name=name, line=line)
    if count in WORKERS:
        points = [1 - seconds[share, count] / seconds[share, 0] for share in SHARES]
        marker = {"color": colour, "size": 11}
        figure.add_scatter(x=SHARES, y=points, mode="markers", marker=marker, name=f"{name}, measured")
figure.update_layout(
    title="What overlap saves",
    xaxis={"title": "share of loading in a step without workers", "tickformat": ".0%"},
    yaxis={"title": "time saved", "tickformat": ".0%"},
    template="plotly_white",
    width=760,
    height=380,
    margin={"t": 40, "b": 40},
)

# %% [markdown]
# ## A real step, and the article's copy
#
# The article's CNN under labkit's own `ddp` script, with the article's batch of 128 samples per rank. The images are
# made up, and each takes 2 ms to "decode". The script loads in the rank's own process; `workers=2` adds the extra
# `workers`, a `loader` cell with that option. labkit measures in every step how long it waits for its input: without
# workers that is the loading, with *W* workers at most loading / W.
#
# Then the copy. What `pin_memory` and `non_blocking` can hide is the copy from host to device, and no more than all of
# it. At 12 GB/s, which PCIe 3 x16 does, a batch of MNIST takes 34 µs. A step of the article's takes 6.94 s / 235
# (lines 765 and 214): 30 ms. So they save 0.1 % at most, not 10. (Without a GPU there is no copy to time:
# then only the step is measured, and its copy is still the computed one.)

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


# %%
import time

import torch
from torch.utils.data import Dataset

DECODING = 0.002  # seconds for one sample


class Decoded(Dataset):
    """Images of MNIST's shape. A sleep takes longer than it was asked to: the next ones are shorter by as much."""

    def __init__(self, samples, seconds):
        self.samples, self.seconds, self.late = samples, seconds, 0.0

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        began = time.monotonic()
        time.sleep(max(0.0, self.seconds - self.late))
        self.late += time.monotonic() - began - self.seconds
        return torch.full((1, 28, 28), index % 10 / 10), index % 10


def load_datasets(data_dir):
    return Decoded(60_000, DECODING), Decoded(16, 0.0)


# %%
load = batch_size * DECODING
article_step, bandwidth = 6.94 / 235, 12e9
claims.predict("CNN, no workers: input wait", load, "s", within=0.15)
claims.predict(f"CNN, {W} workers: input wait", load / W, "s", how="at most", within=0.15)
without_copy = f"CNN: step without its copy ({'12 GB/s' if on_cpu else 'timed'})"
claims.predict(
    without_copy,
    1 - mnist / bandwidth / article_step,
    "%",
    within=0.05,
    article="002, line 117: 10-20 %",
    said=0.9,
    timed=True,
)
cnn = Script.load("ddp").with_cells(model=Model, data=load_datasets)
options = {"nproc_per_node": N, "steps": 5, "global_batch_size": batch_size * N, "env": env}
runs = {}
for count in (0, W):
    runs[count] = labkit.launch(cnn, workers=count, **options)
    runs[count].wait()

# %%
rows = {count: each.metrics().query("step > 2")[["input", "step_seconds"]].median() for count, each in runs.items()}
claims.measure("CNN, no workers: input wait", rows[0]["input"], run=runs[0])
claims.measure(f"CNN, {W} workers: input wait", rows[W]["input"], run=runs[W])
compute = rows[0]["step_seconds"] - rows[0]["input"]
copies = told[0]["mnist"]["copy"]
# pageable less pinned; without a GPU the whole copy
hidden = copies[1] - copies[0] if copies else told[0]["mnist"]["bytes"] / bandwidth
claims.measure(without_copy, 1 - hidden / compute, run=runs[0])
how = "timed" if copies else "all of it, at 12 GB/s"
print(f"a step computes {compute * 1e3:.0f} ms; what pinning hides of its copy, {how}: {hidden * 1e6:.0f} µs")
took = {count: row["step_seconds"] for count, row in rows.items()}
print(f"with {W} workers a step takes {step(load, compute, W) * 1e3:.0f} ms where each process has a core to itself;")
print(f"here it took {took[W] * 1e3:.0f} ms, and {took[0] * 1e3:.0f} ms without workers")

# %%
claims.check()

# %% [markdown]
# `pin_memory=True` on a GPU is free and right; it is just not where the time is. Look at the input wait first (labkit's
# view says "input-bound" where it is high), then add workers until loading / workers is below a step.
#
# ## Try
#
# - `workers=4`: from which share of loading on does it save more than two workers do? Read it from the figure.
# - `nproc_per_node=4`: how often does each sample of a stream come now, and how many batches wait in host memory?
# - `DECODING = 0.01`: now loading, not computing, sets the pace of the CNN. How many workers does it need?
# - Make a claim fail: in `Stream`, let each rank forget that there are others: `"worker and rank": (worker.id,
#   worker.num_workers)`. Training goes on without any error, on every sample N times.
# - Make others fail: `num_workers=0` in `step_seconds`. Nothing is hidden any more.
