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
# you leave it running. You ask every rank what it holds **at the same step**, pause them all, repair what is broken,
# and let them continue. The script knows nothing of it.
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
# Four linear layers learn to tell ten clusters apart. Nothing is shuffled, so a sample comes back at the same place of
# each epoch. The faults are marked.

# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEAD, BAD, BATCH, SAMPLES = 2, 1201, 16, 1280


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )
        nn.init.constant_(self.layers[DEAD].bias, -1e6)  # fault 1: nothing gets past the ReLU behind it

    def forward(self, x):
        return self.layers(x)


def load():
    random = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 32, generator=random)
    y = torch.randint(10, (SAMPLES,), generator=random)
    x = centres[y] + torch.randn(SAMPLES, 32, generator=random)
    x[BAD] = -5000  # fault 2: a sensor was stuck
    return TensorDataset(torch.arange(SAMPLES), x, y)


def deal(dataset, ranks, rank):
    return DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, ranks, rank, shuffle=False))


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
    for _epoch in range(1000):
        for numbers, x, y in batches:  # noqa: B007
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            print(loss.item().hex(), flush=True)  # to the last bit
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)  # as long as a small real step
    dist.destroy_process_group()


# %% [markdown]
# ## Predict
#
# - If nothing gets past a layer, everything behind its ReLU is zero. What is the gradient of the layers before it?
# - The broken sample does harm as soon as the layer lives. On which rank, and in which batch of an epoch?
#   `DistributedSampler` deals the samples out to the ranks in turn.

# %%
claims.predict("ask: steps at which the ranks answered", 1)
claims.predict("dead layer: share of zeros behind it", 1)
claims.predict("dead layer: gradient of the layers up to it", 0)
claims.predict("repaired layer: share of zeros behind it", 0.9, how="at most")

batches = [(rank, place, *batch) for rank in ranks for place, batch in enumerate(deal(load(), N, rank), 1)]
bad_rank, bad_place = next((rank, place) for rank, place, numbers, *_ in batches if BAD in numbers)
claims.predict("breakpoint: rank where the condition holds", bad_rank)
claims.predict("breakpoint: batch of the epoch", bad_place)
claims.predict("breakpoint: number of the broken sample", BAD)
claims.predict("learning rate: first step with it, after the step of the pause", 1)
claims.predict("after the repair: largest loss of any rank", 3, how="at most")

# %%
script = Script.of("train", model=Model, load=load, main=main)
options = {"nproc_per_node": N, "env": env, "wait": False}
run = labkit.launch(script, name="faulty", reachable=True, **options)

# %% [markdown]
# `reachable=True` because this notebook may run without you, in CI. A notebook that you work in needs no option.
#
# ## Ask: is a layer dead?
#
# `run.ask` evaluates an expression at the end of a step, on every rank, with the names of your loop.

# %%
zeros = "torch.stack([(model.module.layers[:end](x) == 0).float().mean() for end in (2, 4, 6)])"
norms = "torch.stack([model.module.layers[layer].weight.grad.norm() for layer in (0, 2, 4, 6)])"
dead = run.ask(f"loss.item(), {zeros}, {norms}")
dead.columns = ["rank", "step", "loss", "zeros behind each ReLU", "gradient norms"]
claims.measure("ask: steps at which the ranks answered", dead["step"].nunique(), run=run)
claims.measure("dead layer: share of zeros behind it", min(share[DEAD // 2] for share in dead.iloc[:, 3]), run=run)
claims.measure("dead layer: gradient of the layers up to it", max(norm[:2].max() for norm in dead.iloc[:, 4]), run=run)
display(dead)

# %% [markdown]
# The loss is that of guessing among ten classes, ln 10 = 2.3, and stays there: only the layers behind the dead one
# learn, and what reaches them is always the same. Ask as often as you like; each time all ranks answer at one step.

# %%
for _ in range(10):
    print("step {step:.0f}: the mean of the ranks' losses is {loss:.4f}".format(**run.ask("loss").mean()))

# %% [markdown]
# ## Repair the layer, and set a trap
#
# Pause the ranks, and go on to the end of an epoch. Then set the bias of the dead layer to zero, on all ranks.

# %%
per_epoch = len(deal(load(), N, 0))
repaired = run.step(per_epoch - run.pause() % per_epoch)
run.exec("with torch.no_grad():\n    model.module.layers[DEAD].bias.zero_()")
alive = run.ask(zeros)
alive.columns = ["rank", "step", "zeros behind each ReLU"]
claims.measure("repaired layer: share of zeros behind it", max(share[DEAD // 2] for share in alive.iloc[:, 2]), run=run)
display(alive)

# %% [markdown]
# The loss falls now. `run.until` lets the run continue to the end of the first step where a condition holds on any
# rank, and pauses all of them there. (`run.breakpoint` does the same without waiting for it.)

# %%
run.until("loss > 3")
caught = run.ask("loss.item(), int(numbers[x.abs().amax(1).argmax()]), x.abs().max().item()")
caught.columns = ["rank", "step", "loss", "sample", "its largest feature"]
worst = caught.loc[caught["loss"].idxmax()]
claims.measure("breakpoint: rank where the condition holds", worst["rank"], run=run)
claims.measure("breakpoint: batch of the epoch", (worst["step"] - 1) % per_epoch + 1, run=run)
claims.measure("breakpoint: number of the broken sample", worst["sample"], run=run)
display(caught)

# %% [markdown]
# One rank has the loss, but DDP averaged the gradients: the step has already damaged the weights of **all** ranks, and
# one step later each of them would have a huge loss. Why did the breakpoint not come earlier? It is
# looked at where a step ends.
#
# ## Take the step back
#
# SGD without momentum subtracts `lr * grad`, and the gradients are still there. So the step can be undone by adding it.
# Then the sample is repaired, on all ranks, because each of them has its own copy of the data.

# %%
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
print(f"paused at step {worst['step']:.0f}; lr=0.05 from step {first} on")

# %% [markdown]
# The next epoch tells whether that was all. `run.watch` records an expression from now on like any metric; the norm of
# the gradients is right under every strategy, also where they are sharded.

# %%
run.watch("grad_norm(model)", every=5)
while run.ask("0")["step"][0] < first + 2 * per_epoch:
    time.sleep(0.5)
run.stop()
table = run.metrics()
after = table[(table["step"] >= first) & table["loss"].notna()]
claims.measure("after the repair: largest loss of any rank", after["loss"].max(), run=run)
print(f"grad_norm(model) was recorded {table['grad_norm(model)'].count()} times")

# %% [markdown]
# ## Did asking change anything?
#
# Nobody can reach into the same script below. Until the first repair, its losses should be those of the run above, to
# the last bit.

# %%
claims.predict("asked or not: losses before the first repair that differ", 0)

alone = labkit.launch(script, name="alone", reachable=False, **options)
while len(alone.logs(rank=N - 1).split()) < repaired and not alone.status().is_final:
    time.sleep(0.5)
alone.stop()

# %%
losses = [(run.logs(rank=rank).split()[:repaired], alone.logs(rank=rank).split()[:repaired]) for rank in ranks]
pairs = [pair for asked, unasked in losses for pair in zip(asked, unasked, strict=True)]
claims.measure("asked or not: losses before the first repair that differ", sum(a != b for a, b in pairs), run=alone)
print(f"{len(pairs)} losses of {repaired} steps compared")

# %% [markdown]
# ## The whole story

# %%
events = [json.loads(line) for line in run.folder.events.read_text().splitlines()]
figure = go.Figure()
for rank in ranks:
    part = table[(table["rank"] == rank) & table["loss"].notna()]
    figure.add_scatter(x=part["step"], y=part["loss"], mode="lines", name=f"rank {rank}")
for kind, (colour, text) in {"exec": ("#2da44e", "repaired"), "hit": ("#d1495b", "breakpoint")}.items():
    for step in {event["step"] for event in events if event["kind"] == kind}:
        place = "top left" if kind == "hit" else "bottom right"
        figure.add_vline(step, line={"dash": "dot", "color": colour}, annotation_text=text, annotation_position=place)
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
