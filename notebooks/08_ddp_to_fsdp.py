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
# # 08 · From DDP to FSDP, and the five usual mistakes
#
# **You will be able to** move a DDP script to FSDP in three changes, let `labkit.check` look for what was forgotten,
# and say what each mistake does when nobody looks. **20 minutes. You need** labs 03 and 05.
#
# Your model has outgrown DDP: each rank would have to hold all of its states (lab 04). Moving to FSDP takes few lines,
# but some lines that were right under DDP are wrong now, and not all of them raise an error.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks
width: int = 512  # of the wide model at the end; in an article it is 16,384

# %%
from labkit_labs import Lesson

lab, N = Lesson("08_ddp_to_fsdp", ranks=nproc_per_node), nproc_per_node

# %% [markdown]
# ## Your predictions
#
# You will make five mistakes, each in a script that is right otherwise:
#
# 1. *moved first*: the model is moved to the GPU before it is sharded;
# 2. *optimizer first*: the line that makes the optimizer stays where it was, above those that shard;
# 3. *one unit*: only the whole model is passed to `fully_shard`;
# 4. *rank 0 saves*: rank 0 saves `model.state_dict()`, as under DDP;
# 5. *no barrier*: the barrier after saving is lost, and the other ranks read the file at once.

# %%
falls = lab.ask("optimizer first: share by which 10 steps lower the loss", default=10, unit="%")
saved = lab.ask("rank 0 saves: size of the file, as a share of the model's", default=100, unit="%")
largest = lab.ask("one unit: largest all-gather, as a share of the model", default=25, unit="%")
errors = lab.ask("mistakes of the five that end with an error", default=4)

# %% [markdown]
# ## A DDP script
#
# Ten steps on samples of its own for each rank, then a checkpoint that every rank reads.

# %%
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def net():
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)), nn.Linear(256, 10))


def train(device, path):
    model = net().to(device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    x, y, losses = torch.randn(16, 256, device=device), torch.randint(10, (16,), device=device), []
    for _ in range(10):
        began = time.time_ns()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    largest = collectives_since(began)["largest gather"]  # of the last step
    state = model.module.state_dict()
    if dist.get_rank() == 0:
        time.sleep(1)  # a large file takes its time
        torch.save(state, path)
    dist.barrier()
    torch.load(path, map_location="cpu", weights_only=True)
    return [float(each) for each in losses], largest


# %%
import tempfile

folder, env = tempfile.mkdtemp(), {"TORCH_FR_BUFFER_SIZE": "4000"}  # for torch's flight recorder, lab 05
run, answers = lab.run(train, f"{folder}/first.pt", env=env, options={"shown": False})
ddp = run.script
print(*(f"rank {rank}: loss {losses[0]:.3f} → {losses[-1]:.3f}" for rank, (losses, _) in enumerate(answers)), sep="\n")

# %% [markdown]
# ## Three changes
#
# The model is sharded instead of wrapped, and stays where it was built: `fully_shard` moves each unit to the GPU. There
# is no `.module` any more. And the state dict has to be gathered before rank 0 can save it, by a call on every rank.
#
# `replaced` replaces a piece of a script's text, which must be there once. `labkit.check(before, after)`
# reads both scripts, runs neither, and says what changed and what was forgotten:

# %%
import labkit
from labkit_labs.labs.broken_scripts import replaced

wrap = "    model = net().to(device)\n    model = nn.parallel.DistributedDataParallel(model)\n"
units = "    for unit in (*model, model):\n        fully_shard(unit)\n"
whole = "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
imports = (
    "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict\n"
    "from torch.distributed.fsdp import fully_shard\n"
)
fsdp = replaced(ddp, "from torch.nn import functional as F\n", f"{imports}from torch.nn import functional as F\n")
fsdp = replaced(replaced(fsdp, wrap, f"    model = net()\n{units}"), "model.module.state_dict()", whole)
display(fsdp.diff(ddp), labkit.check(ddp, fsdp))

# %% [markdown]
# ## Five mistakes, found by reading
#
# Each mistake is made in the sound FSDP script, and checked before anything runs:

# %%
made = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
mistakes = {
    "moved first": replaced(fsdp, "model = net()\n", "model = net().to(device)\n"),
    "optimizer first": replaced(fsdp, units + made, made + units),
    "one unit": replaced(fsdp, units, "    fully_shard(model)\n"),
    "rank 0 saves": replaced(fsdp, whole, "model.state_dict()"),
    "no barrier": replaced(fsdp, "    dist.barrier()\n    torch.load", "    torch.load"),
}
found = {name: labkit.check(ddp, script).forgotten for name, script in mistakes.items()}
for name, findings in found.items():
    print(name, *(f"  {finding.rule}: {finding.message}" for finding in findings), sep="\n")
    lab.verify(f"{name}: mistakes that labkit.check finds", 1, len(findings))

# %% [markdown]
# ## … and what they do
#
# Now run them all. The loss is the mean over ranks of the first step and the last.

# %%
import json
from pathlib import Path

import pandas as pd
from labkit.errors import RankFailedError


def attempt(name, script):
    path = Path(folder, f"{name}.pt")
    try:
        run = lab.launch(script, args=[json.dumps([str(path)])], env=env, shown=False)
    except RankFailedError as error:
        return {"ends with": error.exception}
    answers = [json.loads(run.logs(rank=rank, stream="stdout").splitlines()[-1]) for rank in range(N)]
    first, last = (sum(losses[step] for losses, _ in answers) / N for step in (0, -1))
    sizes = {"file, B": path.stat().st_size, "largest gather, B": answers[0][1]}
    found_after = "; ".join(finding.sentence for finding in run.findings())
    return {"ends with": "", "first loss": first, "last loss": last, **sizes, "labkit finds afterwards": found_after}


pd.options.display.max_colwidth = None
rows = {name: attempt(name, script) for name, script in {"ddp": ddp, "fsdp": fsdp, **mistakes}.items()}
pd.DataFrame(rows).T.fillna("")

# %%
size = sum(p.nbytes for p in net().parameters())
fall = {name: 1 - row["last loss"] / row["first loss"] for name, row in rows.items() if "first loss" in row}
lab.verify(falls, 0, fall["optimizer first"], "%")
lab.verify("fsdp: last loss, compared with DDP's", 1, rows["fsdp"]["last loss"] / rows["ddp"]["last loss"], within=1e-5)
lab.verify(saved, 1 / N, rows["rank 0 saves"]["file, B"] / rows["fsdp"]["file, B"], "%", within=0.1)
lab.verify(largest, 1, rows["one unit"]["largest gather, B"] / size, "%", within=0.01)
lab.verify(errors, 1, sum(bool(row["ends with"]) for row in rows.values()))
lab.score()

# %% [markdown]
# - **Moved first.** Nothing to see: the losses are those of FSDP. On a GPU the whole model in fp32 is there at once, 4
#   bytes per parameter. Training under FSDP holds 16 / N (lab 05), so up to four ranks the move is not the peak; with
#   more it is, and a model larger than the GPU ends here. Two articles on FSDP make this mistake in their own code
#   (`model = CNN().cuda()`), and a guide warns of it.
# - **Optimizer first.** The loss is the same in all ten steps, without an error. The optimizer has the parameters from
#   before sharding. They get no gradients, so there is nothing to step.
# - **One unit.** The losses are right. Every step gathers the whole model at once, and the memory that sharding should
#   save is lost while it computes (lab 05). FSDP1 with a threshold that no layer reaches does the same (lab 07), and
#   that `labkit.check` does not see: it does not count parameters.
# - **Rank 0 saves.** The file is there, and a quarter as large; only here labkit's look at the run finds something. It
#   has the shards of rank 0; the other three quarters are lost when the run ends. Under FSDP1 `state_dict()` gathers,
#   and the same line **hangs**, because only rank 0 calls it.
# - **No barrier.** The only one with an error, and only if rank 0 is slower than the others: a race.
#
# So a migration that runs through proves little. Compare the first losses with those of DDP, from the same seed, and
# load the checkpoint once.
#
# ## The memory, rank by rank
#
# An article compares DDP and FSDP1 on five linear layers of width 16,384: four ranks, Adam, and `torch.cuda.
# max_memory_allocated` printed by each. This is the same with labkit's scripts, small enough for a CPU, where labkit
# traces the allocations. The article's policy, `ModuleWrapPolicy({Linear})`, is `wrap="module"`.

# %%
from torch import nn


class Model(nn.Module):
    def __init__(self, width=16384, layers=5):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks[:-1]:
            x = block(x).relu()
        return self.blocks[-1](x)


# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, width=16384):
    x, y = torch.randn(64, width), torch.randint(width, (64,))
    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])


# %%
from labkit import Script
from labkit_labs import sized

wide = {name: Script.load(name).with_cells(model=Model, data=load_datasets) for name in ("ddp", "fsdp1", "fsdp")}
own = {name: {"precision": "fp32"} for name in wide}
own["fsdp1"]["wrap"] = "module"
for name, script in wide.items():
    small, options = sized(script, width=width), {"global_batch_size": 2 * N, **own[name]}
    run = lab.launch(small, steps=3, trace_memory=True, shown=False, **options)
    peaks = [each.traced.bytes for each in run.memory().ranks]
    print(name)
    for rank, peak in enumerate(peaks):
        print(f"  max memory allocated on rank {rank}: {peak / 2**20:.2f} MiB")
    planned = labkit.plan(small, nproc_per_node=N, **options)
    lab.verify(f"{name}: peak of rank 0, planned and measured", planned.peak.bytes, peaks[0], "B", within=0.05)
lab.score()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# The plans agree with the small runs, so plan the article's size: 1.34 billion parameters and 1,024 samples in a
# step, on four A100s, with 256 for each as there, and on the two usual machines.

# %%
full = {name: (script, own[name]) for name, script in wide.items()}
lab.plans(full, devices=("2xT4", "4xA100 80", "8xA100 80"), global_batch_size=1024)

# %% [markdown]
# DDP holds 16 bytes for each of the 1.34 billion parameters, 20 GiB; the bars name what else there is at its peak.
# Under FSDP four ranks hold 5 GiB each, and the rest is the unit in use: a fifth of the model, with its
# gradients.
#
# ## Try this
#
# 1. Make two mistakes at once: the optimizer first, and rank 0 saves. What does `labkit.check` say, and what does the
#    run?
#    <details><summary>Answer</summary><code>labkit.check</code> names both. The run ends without an error, with a loss
#    that never changed and a quarter of a model.</details>
# 2. Move the script to FSDP1 instead, with `auto_wrap_policy=ModuleWrapPolicy({nn.Linear})` and `device_id=device`.
#    What else changes?
#    <details><summary>Answer</summary>The import, and <code>model = FullyShardedDataParallel(model, …)</code>. The call
#    that gathers the state dict works for both.</details>
# 3. Check a script of your own: `labkit.check("ddp.py", "fsdp.py")`, or `labkit check --from ddp.py fsdp.py` in a
#    terminal.
#    <details><summary>Answer</summary>It compares wrapper, units, precision, where the model is moved, when the
#    optimizer is made, how gradients are clipped and accumulated, and what is saved by what.</details>
#
# ## Recap
#
# | | under DDP | under FSDP |
# |---|---|---|
# | the model | moved to the GPU, then wrapped | sharded unit by unit, which moves it |
# | the optimizer | before or after wrapping | after sharding |
# | a checkpoint | `model.module.state_dict()` on rank 0 | gathered on all ranks, then saved by rank 0 |
#
# ## Sources
#
# docs.pytorch.org: *Getting Started with Fully Sharded Data Parallel (FSDP2)*; *torch.distributed.checkpoint.
# state_dict*. The mistakes are those that a guide, *DDP vs FSDP*, warns of; the five wide layers are from *FSDP vs.
# DDP*.
