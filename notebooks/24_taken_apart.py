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
# # 24 · A training run that goes wrong, taken apart while it runs
#
# **You will be able to** ask every rank what it holds at the same step, stop all of them where a condition holds,
# repair what is broken, and go on. **15 minutes. You need** lab 03.
#
# The loss does not fall. Usually you stop the run, add a `print`, start again, and wait until it happens again. Here
# you leave it running. All ranks evaluate what you ask at the end of the same step; the script needs no extra line for
# it.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
plans: bool = True  # plan for GPUs: some seconds more

# %%
import labkit
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.other_runs import done_to, loss_lines

lab = Lesson("24_taken_apart", ranks=nproc_per_node)
draw.calls({rank: ["step", "step, answer", "paused", "exec", "step"] for rank in range(lab.ranks)}, first=41)

# %% [markdown]
# ## Your predictions
#
# Two things are wrong with the script below: a layer is dead, so nothing gets past its ReLU, and one sample, number
# 1201 of 1280, is broken. Nothing is shuffled; `DistributedSampler` deals the samples out in turn. There are two ranks:

# %%
before = lab.ask("dead layer: gradient norm of the layers before it", default=1)
meets = lab.ask("broken sample: rank whose loss it raises", default=0, options={"0": 0, "1": 1, "both": 2})
damaged = lab.ask("broken sample: ranks whose gradients it is in", default=1)

# %%
import time

import torch
from torch import distributed as dist, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEAD, BAD, BATCH, SAMPLES = 2, 1201, 16, 1280


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    y = torch.randint(10, (SAMPLES,))
    x = torch.randn(10, 32)[y] + torch.randn(SAMPLES, 32)
    x[BAD] = -5000  # fault 2: a sensor was stuck
    dataset = TensorDataset(torch.arange(SAMPLES), x, y)
    batches = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    nn.init.constant_(layers[DEAD].bias, -1e6)  # fault 1: nothing gets past the ReLU behind it
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(1000):
        for numbers, x, y in batches:  # noqa: B007
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)  # as long as a small real step
    dist.destroy_process_group()


# %% [markdown]
# ## Ask: why does it not learn?
#
# The loss is that of guessing among ten classes, ln 10 = 2.3. Is a layer dead? `run.ask` evaluates an expression on
# every rank, with the names of your loop. (`reachable=True` is for notebooks that are executed without a reader; a
# notebook in which you work needs no option.)

# %%
script = labkit.Script.of("train", main=main)
per_epoch = SAMPLES // lab.ranks // BATCH
run = labkit.launch(script, nproc_per_node=lab.ranks, env=lab.env, wait=False, reachable=True)

# %%
zeros, norm = f"(model.module[:{DEAD + 2}](x) == 0).float().mean().item()", "model.module[0].weight.grad.norm().item()"
dead = run.ask(f"loss.item(), {zeros}, {norm}")
dead.columns = ["rank", "step", "loss", "zeros behind the layer", "gradient norm before it"]
lab.verify(before, 0, dead["gradient norm before it"].max())
display(dead)

# %% [markdown]
# Everything after the layer is zero. No gradient gets back through a ReLU that is zero, so nothing before it learns;
# the layers after it get the same input whatever the sample is.
#
# ## Repair the layer, and set a trap
#
# Pause the ranks, go on to the end of an epoch, and set the bias of the dead layer to zero on all of them. The loss
# falls. `run.until` lets the run go on to the end of the first step in which a condition holds on any rank, and then
# pauses all ranks. Which sample is it?

# %%
run.step(per_epoch - run.pause() % per_epoch)
run.exec("with torch.no_grad():\n    model.module[DEAD].bias.zero_()")
run.until("loss > 3")
caught = run.ask(f"loss.item(), int(numbers[x.abs().amax(1).argmax()]), {norm}")
caught.columns = ["rank", "step", "loss", "sample", "gradient norm"]
worst = caught.loc[caught["loss"].idxmax()]
lab.verify(meets, BAD % lab.ranks, worst["rank"])
lab.verify(damaged, lab.ranks, (caught["gradient norm"] > 50).sum())
display(caught)

# %% [markdown]
# Only one rank has the high loss, but DDP averaged the gradients: the step has damaged the weights of **all** ranks.
# One step later each of them would have a huge loss, and the sample could no longer be found.
#
# ## Take the step back
#
# SGD without momentum subtracts `lr * grad`, and the gradients are still there, so add it back. Then repair the sample
# on all ranks, because each has its own copy of the data, lower the learning rate, and go on.

# %%
repair = """
with torch.no_grad():
    for parameter in model.parameters():
        parameter += 0.2 * parameter.grad
    batches.dataset.tensors[1][BAD] = 0
"""
run.exec(repair)
first = run.set(lr=0.05)
run.resume()
run.watch("grad_norm(model)", every=5)  # from now on a metric
while run.ask("0")["step"][0] < first + 2 * per_epoch:
    time.sleep(0.5)
run.stop()

# %%
after = run.metrics().query(f"step >= {first}")["loss"].max()
lab.verify("after the repair: largest loss of any rank", 3, after, how="at most")
marks = done_to(run, exec="repaired", hit="caught")
display(draw.curves(loss_lines(run, caught), "loss", log=True, marks=marks))
lab.score()

# %% [markdown]
# ## What to use when
#
# | you want | labkit | plain PyTorch |
# |---|---|---|
# | a value on every rank, now | `run.ask("loss.item()")` | a `print` with the rank, and start again |
# | to stop where it goes wrong | `run.until("loss > 3")` | `torch.distributed.breakpoint`, below |
# | a metric from now on | `run.watch("grad_norm(model)")` | log it from the start |
# | another learning rate | `run.set(lr=0.05)` | a checkpoint, and start again |
# | to look, step by step | `run.pause()`, `run.step(1)`, `run.resume()` | pdb |
#
# pdb on one rank leaves the others in their next collective until the time limit. `torch.distributed.breakpoint` makes
# them wait, for up to an hour. All ranks have to call it, so they must agree on the condition:
#
# ```python
# bad = (loss.detach() > 3).float()
# dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # on any rank
# if bad:
#     torch.distributed.breakpoint(rank=1)  # pdb on rank 1, in a terminal
# ```
#
# To survive such a batch when nobody watches, clip the gradients: `clip_grad_norm_(model.parameters(), 1.0)` would have
# divided that step by the norm of all gradients, which is larger than the last column of the table shows. Log the norm
# that it returns.
#
# ## On 2 × T4 and 8 × A100
#
# An answer comes at the end of a step, so you wait for at most about one. How long is that for a transformer of 113
# million parameters?

# %%
if plans:
    display(lab.plans({"DDP": sized(labkit.Script.load("ddp"), width=768, layers=16, heads=12)}, global_batch_size=32))

# %% [markdown]
# ## Try this
#
# 1. Leave `run.until` and the repair out: what is left of the training after the bad batch?
#    <details><summary>Answer</summary>Nothing. One step after a loss of some hundreds on rank 1 the losses of both
#    ranks are above 10,000. Twenty steps later both are near 2.2 again, as if guessing.</details>
# 2. Use `optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)`: can you still take the step back?
#    <details><summary>Answer</summary>Not by adding <code>lr * grad</code>. You could compute AdamW's update from its
#    moments and add that, but both moments now contain the huge gradient: go back to a checkpoint.</details>
# 3. Four ranks: which of them meets the sample, and in which batch of the epoch?
#    <details><summary>Answer</summary>1201 = 4 × 300 + 1, so it is sample 300 of rank 1, in its batch 300 // 16 + 1 =
#    19. With two ranks it is sample 600 of rank 1, in batch 38.</details>
#
# ## Sources
#
# labkit's docs/how_to/reach.md. torch/distributed/\_\_init\_\_.py: `breakpoint`.
