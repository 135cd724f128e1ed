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
# # 20 · A training that goes wrong, taken apart while it runs
#
# *About a minute on a laptop's CPU. You should know what DDP (lab 03) does.*
#
# The loss does not fall. Usually you stop the run, add a `print`, start again, and wait until it happens again. Here
# you leave it running. You ask every rank what it holds **at the same step**, pause them all, repair what is broken, and
# let them continue. The script knows nothing of it.
#
# Two things are wrong with the script below: a layer is dead, and one sample, which only one rank ever sees, is broken.
# You find both, repair both, and lower the learning rate, without a restart.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks

# %%
import json
import time

import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

N, ranks = nproc_per_node, range(nproc_per_node)
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
claims = Claims("20_taken_apart")

# %% [markdown]
# ## The script
#
# Four linear layers learn to tell ten clusters apart. Every epoch has the same order, so a sample comes back at the
# same place of each epoch. The faults are marked.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEAD, BAD, BATCH, SAMPLES = 2, 77, 16, 1280


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        nn.init.constant_(self[DEAD].bias, -10_000.0)  # fault 1: nothing gets past the ReLU behind it


def load():
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 32, generator=random)
    y = torch.randint(10, (SAMPLES,), generator=random)
    x = centres[y] + torch.randn(SAMPLES, 32, generator=random)
    x[BAD] = 500  # fault 2: a sensor was stuck
    return TensorDataset(torch.arange(SAMPLES), x, y)


def deal(dataset, ranks, rank):
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, ranks, rank))


# %%
import time

import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = load()
    batches = deal(dataset, dist.get_world_size(), dist.get_rank())
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    while True:
        for numbers, x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)  # as long as a small real step


# %%
script = Script.of("train", model=Model, load=load, main=main)
options = {"nproc_per_node": N, "env": env, "wait": False}
run = labkit.launch(script, name="faulty", reachable=True, **options)

# %% [markdown]
# `reachable=True` because this notebook may run without you, in CI. A notebook that you work in needs no option.
#
# ## Ask: is a layer dead?
#
# `run.ask` evaluates an expression at the end of a step, on every rank, with the names of your loop. If nothing gets
# past a layer, everything behind its ReLU is zero. What is the gradient of the layers before it?

# %%
claims.predict("ask: steps at which the ranks answered", 1)
claims.predict("dead layer: share of zeros behind it", 1)
claims.predict("dead layer: gradient of the layers up to it", 0)

zeros = "[(model.module[:end](x) == 0).float().mean() for end in (2, 4, 6)]"
norms = "[model.module[layer].weight.grad.norm() for layer in (0, 2, 4, 6)]"
dead = run.ask(f"loss.item(), torch.stack({zeros}), torch.stack({norms})")
dead.columns = ["rank", "step", "loss", "zeros behind each ReLU", "gradient norms"]
display(dead)

# %%
claims.measure("ask: steps at which the ranks answered", dead["step"].nunique(), run=run)
claims.measure("dead layer: share of zeros behind it", min(share[DEAD // 2] for share in dead.iloc[:, 3]), run=run)
claims.measure("dead layer: gradient of the layers up to it", max(norm[:2].max() for norm in dead.iloc[:, 4]), run=run)

# %% [markdown]
# The loss is that of guessing among ten classes, ln 10 = 2.3, and stays there: only the layers behind the dead one
# learn, and what reaches them is always the same.
#
# ## Set a trap, then repair the layer
#
# As soon as the layer lives, the broken sample will do harm. When, and on which rank? `DistributedSampler` draws its
# order from a seed, so you can tell without a rank.
#
# A breakpoint pauses all ranks at the end of the first step where its condition holds on any of them.

# %%
places = {
    place: rank for rank in ranks for place, (numbers, *_) in enumerate(deal(load(), N, rank), 1) if BAD in numbers
}
(place,) = places
claims.predict("breakpoint: rank where the condition holds", places[place])
claims.predict("breakpoint: batch of the epoch", place)
claims.predict("breakpoint: number of the broken sample", BAD)
claims.predict("repaired layer: share of zeros behind it", 0.9, how="at most")

run.breakpoint("loss > 3")
run.exec("with torch.no_grad():\n    model.module[DEAD].bias.zero_()")  # on all ranks after the same step
alive = run.ask(zeros.replace("[(", "torch.stack([(") + ")")
claims.measure("repaired layer: share of zeros behind it", max(share[DEAD // 2] for share in alive.iloc[:, 2]), run=run)

# %% [markdown]
# The loss falls now, until the ranks pause. The view says so, and `run.status()`:

# %%
while "paused" not in (run.status().notice or ""):
    assert not run.status().is_final, run.status()
    time.sleep(0.2)
print(run.status().notice)
caught = run.ask("loss.item(), int(numbers[x.abs().amax(1).argmax()]), x.abs().max().item()")
caught.columns = ["rank", "step", "loss", "sample", "its largest feature"]
display(caught)

# %%
worst = caught.loc[caught["loss"].idxmax()]
claims.measure("breakpoint: rank where the condition holds", worst["rank"], run=run)
claims.measure("breakpoint: batch of the epoch", (worst["step"] - 1) % len(deal(load(), N, 0)) + 1, run=run)
claims.measure("breakpoint: number of the broken sample", worst["sample"], run=run)

# %% [markdown]
# One rank has the loss, but DDP averaged the gradients: the step has already damaged the weights of **all** ranks, and
# one step later each of them would have a loss of a hundred thousand. Why did the breakpoint not come earlier? It is
# looked at where a step ends.
#
# ## Take the step back
#
# SGD without momentum subtracts `lr * grad`, and the gradients are still there. So the step can be undone by adding it.
# Then the sample is repaired, on all ranks, because each of them has its own copy of the data.

# %%
claims.predict("after the repair: largest loss of any rank in an epoch", 3, how="at most")
claims.predict("learning rate: first step with it, after the step of the pause", 1)

repair = """
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.2 * parameter.grad
    dataset.tensors[1][BAD] = 0
print(f"loss of this batch with the weights of before: {F.cross_entropy(model(x.clamp(-5, 5)), y):.3f}")
"""
run.exec(repair)
first = run.set(lr=0.05)
run.resume()
claims.measure("learning rate: first step with it, after the step of the pause", first - worst["step"], run=run)

# %% [markdown]
# The next epoch tells whether that was all. `run.watch` records an expression from now on like any metric; the norm of
# the gradients is right under every strategy, also where they are sharded.

# %%
run.watch("grad_norm(model)", every=5)
while run.ask("0")["step"][0] < first + 2 * len(deal(load(), N, 0)):
    time.sleep(0.5)
run.stop()
table = run.metrics()
after = table[(table["step"] >= first) & table["loss"].notna()]
claims.measure("after the repair: largest loss of any rank in an epoch", after["loss"].max(), run=run)
print(f"grad_norm(model) was recorded {table['grad_norm(model)'].count()} times")

# %% [markdown]
# ## Did asking change anything?
#
# Nobody can reach into the same script below. Until the first repair, its losses should be those of the run above, to
# the last bit.

# %%
claims.predict("asked or not: largest difference of a loss before the first repair", 0)
claims.predict("asked or not: steps compared", 20, how="at least")

alone = labkit.launch(script, name="alone", reachable=False, **options)
while alone.metrics()["step"].max() < 100 and not alone.status().is_final:
    time.sleep(0.5)
alone.stop()

# %%
events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
repaired = next(event["step"] for event in events if event["kind"] == "exec")
both = (run.losses() - alone.losses()).loc[:repaired].abs().dropna()
claims.measure("asked or not: largest difference of a loss before the first repair", both.max(), run=alone)
claims.measure("asked or not: steps compared", len(both), run=alone)

# %% [markdown]
# ## The whole story

# %%
figure = go.Figure()
for rank in ranks:
    part = table[(table["rank"] == rank) & table["loss"].notna()]
    figure.add_scatter(x=part["step"], y=part["loss"], mode="lines", name=f"rank {rank}")
for kind, colour in {"ask": "#8b949e", "exec": "#2da44e", "hit": "#d1495b", "set": "#8250df"}.items():
    for number, step in enumerate(sorted({event["step"] for event in events if event["kind"] == kind})[:4]):
        label = {"annotation_text": kind} if number == 0 else {}
        figure.add_vline(step, line={"dash": "dot", "color": colour}, **label)
figure.update_layout(title="Loss of each rank, and what was asked and changed", template="plotly_white", height=340)
figure.update_xaxes(title="step")
figure.update_yaxes(title="loss", type="log")
display(figure)

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - Leave out `run.breakpoint` and watch the loss: what is left of the training ten steps after the bad batch?
# - `optimizer = torch.optim.AdamW(…)`: can you still take the step back? What would you need?
# - A cell that starts with `%%ranks` is executed on all ranks of the newest run, after `%load_ext labkit`.
# - The live view has a *Pause* button and a slider for the learning rate. Launch the script, and use them.
# - `run.pause()` and `run.step()`: go through an epoch step by step and ask for `numbers`.
