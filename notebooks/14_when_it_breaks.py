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
# # 14 · When it breaks: who is to blame?
#
# Ranks wait for each other, so the one that complains is often not the one at fault, and the one at fault often says
# nothing. Below is a sound script. You change one place at a time, predict which rank must be named, at which step, in
# which line or call, and provoke it on real ranks: a bad sample, a missing sampler, an evaluation on rank 0 alone, a
# barrier with four spaces too many, a tensor that does not fit. The second article's FAQ (002, lines 1013 to 1036)
# warns of one of them, rightly, and recommends another.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
watchdog: int = 60  # seconds without progress after which a run is ended, should nobody stop it

# %%
import json
import os
import re
import subprocess
import sys
import time

import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

N, ranks = nproc_per_node, range(nproc_per_node)
# gloo notices at once that a rank is gone; NCCL would wait for its time limit, ten minutes
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
claims = Claims("14_when_it_breaks")

# %% [markdown]
# ## A sound script
#
# FSDP over two linear layers, eight steps, samples that have numbers. Plain PyTorch; each rank prints which samples it
# has trained on.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH = 8, 4


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def load(ranks):
    """Samples with their numbers: one less than all ranks take in eight steps."""
    samples = STEPS * BATCH * ranks - 1
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(samples, 32, generator=random), torch.randint(10, (samples,), generator=random)
    return TensorDataset(torch.arange(samples), x, y)


def deal(dataset, ranks, rank):
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, ranks, rank))


# %%
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn import functional as F


def train(model, optimizer, loader):
    """Eight steps. Returns the numbers of the samples that were seen."""
    seen = []
    for step, (numbers, x, y) in enumerate(islice(loader, STEPS), 1):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += numbers.tolist()
        if step == STEPS // 2:
            if dist.get_rank() == 0:
                print("here rank 0 would write a file", flush=True)
            dist.barrier()  # nobody goes on before it is there
        time.sleep(0.12)  # as long as a small real step: labkit keeps at most ten records a second
    return seen


@torch.no_grad()
def evaluate(model, dataset):
    """The share of right answers."""
    _, x, y = dataset[:]
    return (model(x).argmax(1) == y).float().mean().item()


# %%
import json

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model, mesh = Model(), init_device_mesh("cpu", (ranks,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    dataset = load(ranks)
    seen = train(model, torch.optim.AdamW(model.parameters()), deal(dataset, ranks, rank))
    print(json.dumps(seen), flush=True)
    print("accuracy", evaluate(model, dataset))
    dist.destroy_process_group()


# %%
sound = Script.of("train", model=Model, train=train, main=main)


def changed(script, cell, before, after):
    """A script with one place of one cell changed."""
    text = script.cells[cell].text
    assert text.count(before) == 1, before
    return script.with_cells(**{cell: text.replace(before, after)})


def attempt(script, name):
    """Run a script to its end, whatever that is: the run, and the error if it failed."""
    run = labkit.launch(script, nproc_per_node=N, env=env, name=name, watchdog=watchdog, wait=False)
    try:
        run.wait()
    except labkit.RankFailedError as error:
        return run, error
    return run, None


def seen(run):
    """The numbers of the samples that all ranks printed, one list."""
    lines = [line for rank in ranks for line in run.logs(rank=rank).splitlines()]
    return [number for line in lines if line.startswith("[") for number in json.loads(line)]


# %% [markdown]
# ## A bad sample: nothing fails
#
# The features of one sample are NaN. In the step in which a rank meets it that rank's loss is NaN, nobody else's. Then
# the ranks average their gradients. Who meets it, and when? `DistributedSampler` draws its order from a seed and needs
# no ranks to tell: take the sample that opens the third batch of the last rank.
#
# It "ensures non-overlapping data splits", says the article (002, line 1171). But all ranks must make as many steps,
# and here is one sample less than they take: it deals one twice.

# %%
orders = [[n for numbers, *_ in deal(load(N), N, rank) for n in numbers.tolist()] for rank in ranks]
bad = orders[-1][2 * BATCH]
bad_sample = changed(sound, "model", "    return TensorDataset", f"    x[{bad}] = torch.nan\n    return TensorDataset")
claims.predict("bad sample: errors", 0)
claims.predict("bad sample: rank whose loss is NaN first", N - 1)
claims.predict("bad sample: step of that", 3)
claims.predict("bad sample: ranks with a NaN one step later", N)
claims.predict("with a sampler: different samples seen", STEPS * BATCH * N - 1)
twice = "with a sampler: samples seen twice"
claims.predict(twice, 1, article='"non-overlapping data splits" (002, line 1171)', said=0)
display(bad_sample.diff(sound))

# %%
silent, error = attempt(bad_sample, "bad-sample")

# %%
losses = silent.metrics().pivot(index="step", columns="rank", values="loss")
nan = losses.isna()
first = nan.index[nan.any(axis=1)][0]
claims.measure("bad sample: errors", int(error is not None), run=silent)
claims.measure("bad sample: rank whose loss is NaN first", nan.loc[first].idxmax(), run=silent)
claims.measure("bad sample: step of that", first, run=silent)
claims.measure("bad sample: ranks with a NaN one step later", nan.loc[first + 1].sum(), run=silent)
dealt = seen(silent)
claims.measure("with a sampler: different samples seen", len(set(dealt)), run=silent)
claims.measure(twice, len(dealt) - len(set(dealt)), run=silent, because="all ranks make as many steps")
display(losses.T.rename(index=lambda rank: f"loss, rank {rank}"))

# %% [markdown]
# The run *succeeded*. Only its view says that the loss is not a number, on which rank first, and at which step.
#
# ## Two lines of a FAQ
#
# "My code works on single GPU but fails with DDP/FSDP", so the FAQ. "Common causes": a forgotten sampler (line 1013).
# That is right: with `shuffle=True` and one seed all ranks train on the same samples, an N-th as many, and nothing says
# so. Then `if rank == 0: evaluate(…)`, marked as correct (line 1031; again in the best practices, line 1178). That
# depends. It is safe where rank 0 has the whole model, as `model.module` under DDP. Under FSDP a forward *gathers*:
# rank 0 waits for ranks that have left. (The article's own FSDP example, line 709, evaluates on all ranks: right.)

# %%
faq = changed(sound, "model", "sampler=DistributedSampler(dataset, ranks, rank))", "shuffle=True)")
faq = changed(faq, "main", '    print("accuracy"', '    if rank == 0:\n        print("accuracy"')
claims.predict("without a sampler: different samples seen", STEPS * BATCH)
advice = '"evaluation only on rank 0", marked as correct (002, line 1031)'
claims.predict("rank 0 evaluates alone: runs that end well", 0, article=advice, said=1)
claims.predict("rank 0 evaluates alone: rank that labkit names, the first to have left", 1)
claims.predict("rank 0 evaluates alone: last step of that rank", STEPS)
claims.predict("rank 0 evaluates alone: rank that torchrun names, who waits", 0)
display(faq.diff(sound))

# %%
alone, error = attempt(faq, "rank-0-evaluates")
print(error)

# %% [markdown]
# The same script under torchrun, without labkit. It names the rank that it saw end with an error code:

# %%
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={N}"]
options = {"env": {**os.environ, **env}, "capture_output": True, "text": True, "timeout": 180}
bare = subprocess.run([*torchrun, alone.path / "script.py"], **options)
blamed = re.search(r"Root Cause.*?rank\s*: (\d+)", bare.stderr, re.DOTALL)
cause = error.cause if error else {}

claims.measure("without a sampler: different samples seen", len(set(seen(alone))), run=alone)
claims.measure("rank 0 evaluates alone: runs that end well", int(error is None), run=alone)
claims.measure(
    "rank 0 evaluates alone: rank that labkit names, the first to have left", cause.get("rank", -1), run=alone
)
claims.measure("rank 0 evaluates alone: last step of that rank", cause.get("step", -1), run=alone)
claims.measure("rank 0 evaluates alone: rank that torchrun names, who waits", int(blamed[1]) if blamed else -1)
print(bare.stderr[blamed.start() :] if blamed else "no error")

# %% [markdown]
# ## Four spaces: a hang
#
# `dist.barrier()` slips into the `if` above it. Now rank 0 calls a barrier while the others begin the next step with an
# all-gather: both wait, for ever or for the process group's time limit (30 minutes with gloo). torch's flight recorder
# numbers each rank's calls. In a step, two layers are gathered for forward and again for backward, and two gradients
# are scattered: six calls. So after four steps the ranks must part at number 25.

# %%
four_spaces = changed(sound, "train", "            dist.barrier()", "                dist.barrier()")
LAYERS = 2
claims.predict("hang: number of the call at which ranks part", STEPS // 2 * 3 * LAYERS + 1)
claims.predict("hang: rank that called barrier", 0)
claims.predict("hang: last step of all ranks", STEPS // 2)
display(four_spaces.diff(sound))

# %% [markdown]
# `launch` reads a script of your own before it starts it: `labkit.check` names the line, and the launch goes on, for it
# may be wrong. Then a run that does not move says so by itself, within some seconds; no need to kill it first. (A run
# that nobody watches is ended by `watchdog`.)

# %%
hang = labkit.launch(four_spaces, nproc_per_node=N, env=env, name="four-spaces", watchdog=watchdog, wait=False)
while not hang.status().is_final and "barrier" not in (hang.status().notice or ""):
    time.sleep(0.2)
told = hang.status().notice or str(hang.status())
hang.stop()

number = re.search(r"collective #(\d+)", told)
caller = re.search(r"rank (\d+) called barrier", told)
steps = hang.metrics().groupby("rank")["step"].max()
claims.measure("hang: number of the call at which ranks part", int(number[1]) if number else -1, run=hang)
claims.measure("hang: rank that called barrier", int(caller[1]) if caller else -1, run=hang)
claims.measure("hang: last step of all ranks", steps.max() if steps.nunique() == 1 else -1, run=hang)
print(told)

# %% [markdown]
# ## Too large, on one rank
#
# One rank meets a sample of ten million tokens, and its matrix of attention scores would have 400 TB. It dies; the
# others lose their neighbour in the middle of a collective and raise errors, too. Which came first?

# %%
attention = "            torch.ones(10**7, 10**7)"
planted = f"        if dist.get_rank() == {N - 1} and step == 3:\n{attention}\n        loss.backward()"
too_large = changed(sound, "train", "        loss.backward()", planted)
claims.predict("too large: rank that is named", N - 1)
claims.predict("too large: steps it had made", 2)
claims.predict("too large: line of the script", str(too_large).splitlines().index(attention) + 1)
claims.predict("too large: explained as out of memory", 1)
display(too_large.diff(sound))

# %%
full, error = attempt(too_large, "too-large")
cause = error.cause if error else {}
claims.measure("too large: rank that is named", cause.get("rank", -1), run=full)
claims.measure("too large: steps it had made", cause.get("step", -1), run=full)
claims.measure("too large: line of the script", cause.get("line", -1), run=full)
claims.measure("too large: explained as out of memory", int("out_of_memory" in cause), run=full)
complained = sum("Error" in full.logs(rank=rank, stream="stderr") for rank in ranks)
print(f"{complained} of {N} ranks printed an error")

# %% [markdown]
# On a GPU the error is `torch.OutOfMemoryError`, and labkit's is that, too: `except torch.OutOfMemoryError:` round
# `launch` works as it would round a training in the notebook itself.
#
# ## How they ended
#
# Each dot is a step of a rank. Two runs stop in mid training, and from the outside both look the same.

# %%
figure = go.Figure()
runs = {"bad sample": silent, "rank 0 evaluates": alone, "four spaces": hang, "too large": full}
for name, run in runs.items():
    table = run.metrics().dropna(subset="step")
    began = table["time"].min()
    for broken, colour in ((False, "#4c8eda"), (True, "#d1495b")):
        part = table[table["loss"].isna() == broken]
        rows = [f"{name}, rank {rank}" for rank in part["rank"]]
        label = "the loss is NaN" if broken else "a step"
        marker = {"color": colour, "symbol": "x" if broken else "circle", "size": 8}
        figure.add_scatter(x=part["time"] - began, y=rows, mode="markers", name=label, legendgroup=label,
                           showlegend=name == "bad sample", marker=marker)  # fmt: skip
figure.update_layout(height=140 + 45 * N * len(runs) // 2, template="plotly_white", title="Steps made, by run and rank")
figure.update_layout(margin={"l": 10, "r": 10}, legend={"orientation": "h", "y": -0.3})
figure.update_xaxes(title="seconds since the first step")
figure.update_yaxes(range=[N * len(runs) - 0.5, -0.5])
display(figure)

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - In `changed(sound, "train", "            dist.barrier()", …)` leave the barrier where it was, twelve spaces to the
#   right. The claims about the hang fail: the ranks do not part.
# - `labkit.launch(four_spaces, nproc_per_node=2, env=env, watchdog=10)`: what is the error's `cause["kind"]`? And while
#   it hangs: `labkit.attach("latest").stacks()` in another notebook.
# - Let rank 0 evaluate alone under DDP, with `model.module`: does it end well? And with a `BatchNorm1d` in the model,
#   and `model` instead of `model.module`?
# - `nproc_per_node = 4`: who is named now, and how many ranks print an error in the last run?
# - Give `labkit.launch` in `attempt` `retries=1`, and run what is too large again: what does `full.status().earlier`
#   hold?
