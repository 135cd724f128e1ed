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
# # 15 · Your own model, and a plain script to leave with
#
# **You will be able to** bring a model, its data and its loss as ordinary cells, train them under any strategy by
# changing one name, and leave with a file that needs torch and nothing else. **20 minutes. You need** labs 01 and 07.
#
# A script is a list of titled cells. Three are yours; one is the strategy; the others only use the names that these
# define, and never change.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 20  # optimizer steps of each run; up to the twentieth each one is reported, then ten a second
global_batch_size: int = 32  # samples per optimizer step, over all ranks

# %%
import labkit
from labkit.lessons import Lesson, draw, sized
from labkit.lessons.labs.without_labkit import Away, changed, largest_difference

lab, load = Lesson("15_your_own_model", ranks=nproc_per_node), labkit.Script.load
draw.cells([*load("ddp").cells], {"yours": ["model", "data", "task"], "the strategy": ["strategy"]})

# %% [markdown]
# ## Your predictions
#
# As in fine-tuning, half of the model's blocks are frozen. AdamW keeps two moments for each number that is trained.

# %%
moments = lab.ask("DDP: optimizer state, how many times the parameters", default=2, unit="times")
EXACT = {"not a bit": 0, "the last digits": 1e-16, "visibly": 0.01}
same = lab.ask("FSDP: largest relative difference to a loss of DDP, in float64", default=0.01, options=EXACT)
alone = lab.ask("bare torchrun: largest relative difference to a loss of DDP", default=1e-16, options=EXACT)

# %% [markdown]
# ## Your cells
#
# | cell | defines | which |
# |---|---|---|
# | `data` | `load_datasets(data_dir)` | a training and a test set, of tensors in any nesting of dicts and tuples |
# | `model` | `Model` | `Model()` makes the model |
# | `task` | `loss_of(outputs, batch)` … | the *sum* of the losses; `outputs_of`, `count_of`, `metrics_of` |
#
# A cell is copied whole and as you typed it, so keep other things out of it. The data are pictures with a bright stripe
# in one of four places. Every rank generates them itself, and all must get the same ones: hence a seeded generator.

# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, samples=1280):
    random = torch.Generator().manual_seed(0)
    y = torch.randint(4, (samples,), generator=random)
    x = torch.randn(samples, 1, 24, 24, generator=random)
    for kind in range(4):
        x[y == kind, :, 6 * kind : 6 * kind + 6] += 0.3
    return TensorDataset(x[256:], y[256:]), TensorDataset(x[:256], y[:256])


# %%
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Model(nn.Module):
    def __init__(self, width=16, frozen=2):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, width, 5, stride=2, padding=2), nn.Linear(width * 144, 4)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))
        for part in [self.stem, *self.blocks[:frozen]]:
            part.requires_grad_(False)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).flatten(1))


# %%
first = lab.launch(load("single").with_cells(model=Model, data=load_datasets), ranks=1, steps=steps)

# %% [markdown]
# ## Your loss, and one name for the strategy
#
# Cross entropy with smoothed labels replaces one function of labkit's `task` cell. The extras `precision` and
# `deterministic` are named, so that the file you take has them.

# %%
from torch.nn import functional as F


def loss_of(outputs, batch):
    return F.cross_entropy(outputs, batch[1], label_smoothing=0.1, reduction="sum")


# %%
plain = {name: load(name, "precision", "deterministic") for name in ("ddp", "fsdp")}
scripts = {name: script.with_cells(model=Model, data=load_datasets, loss_of=loss_of) for name, script in plain.items()}
lab.verify("cells that change from DDP to FSDP", 1, len(changed(scripts["fsdp"], scripts["ddp"])))
lab.verify("cells in which your script is not labkit's", 3, len(changed(scripts["ddp"], plain["ddp"])))
scripts["fsdp"].diff(scripts["ddp"])

# %% [markdown]
# ## Two strategies, the same losses
#
# In float64, so that "the same" can mean *the same*. With one order of samples DDP and FSDP do the same arithmetic.
# `labkit.plan` finds the peak in two independent ways. Here they disagree, and it says so: formulas assume that all of
# a model is trained; the rehearsal runs your own step on tensors without data.

# %%
options = {"global_batch_size": global_batch_size, "precision": "fp64", "deterministic": True}
plan = labkit.plan(scripts["ddp"], nproc_per_node=lab.ranks, **options)
counts = {p.requires_grad: 0 for p in Model().parameters()}
for p in Model().parameters():
    counts[p.requires_grad] += p.numel()
trained, whole = counts[True], sum(counts.values())
lab.predict("DDP: parameters", 8 * whole, "B")
lab.predict("DDP: peak, as rehearsed", plan.rehearsed.bytes, "B", within=0.03)
lab.predict(moments, 2 * trained / whole, "times", within=0.001)
lab.predict(same, 1e-6, how="at most")
lab.predict_each({alone: 0, "bare torchrun: exit code": 0, "bare torchrun: exit code of `import labkit`": 1})
ddp, fsdp = (lab.launch(script, steps=steps, trace_memory=True, **options) for script in scripts.values())
print(*plan.problems, sep="\n")

# %%
peaks = [run.memory().ranks[0].traced for run in (ddp, fsdp)]
held = peaks[0].categories
results = {"DDP: parameters": held["parameters"], moments: held["optimizer"] / held["parameters"]}
lab.measure_each(results | {"DDP: peak, as rehearsed": peaks[0].bytes}, run=ddp)
lab.measure(same, largest_difference(ddp, fsdp), run=fsdp)
draw.bars({"DDP": held, "FSDP": peaks[1].categories}, unit="B", title="rank 0 at its peak")

# %% [markdown]
# ## Leave
#
# `script.write` gives you the file. It goes into a new folder, beside a `labkit.py` that refuses to be imported. Then
# comes the line that labkit printed, without any variable of labkit's. The script reports by the standard library's
# `logging`; a handler from outside it keeps all digits.

# %%
away = Away(scripts["ddp"], ddp, lab.env)
codes = {"bare torchrun: exit code": away.exit_code}
codes |= {"bare torchrun: exit code of `import labkit`": away.exit_code_of_import}
lab.measure_each(codes | {alone: largest_difference(ddp, away)}, run=ddp)
runs = {"DDP": ddp, "FSDP": fsdp, "bare torchrun": away}
losses = {name: run.metrics().query("rank == 0").set_index("step")["loss"].items() for name, run in runs.items()}
display(draw.curves(losses, "loss of rank 0: three lines that are one"))
lab.score()

# %% [markdown]
# The file that ran is the file you take. And the other way round: `labkit.launch("train.py", nproc_per_node=2)` takes
# any script that torchrun would, and watches it.
#
# ## On 2 × T4 and 8 × A100
#
# Your model, planned before a GPU is rented, with 32 times the width:

# %%
wide = {name.upper(): sized(script, width=512) for name, script in scripts.items()}
lab.plans(wide, global_batch_size=512, precision="fp16")

# %% [markdown]
# ## Try this
#
# 1. `frozen=0` in `Model`: what do the two ways of planning say now?
#    <details><summary>Answer</summary>They agree, and the plan's warning is gone: all of the model is trained, as
#    formulas assume.</details>
# 2. `random = torch.Generator()` and `random.seed()` in `load_datasets`: each rank, and each run, draws pictures of its
#    own.
#    <details><summary>Answer</summary>Nothing crashes, and the loss falls. Only the claims about equal losses notice:
#    DDP and FSDP then differ by up to 80%.</details>
# 3. `self.spare = nn.Linear(8, 8)` in `Model`, which no output uses.
#    <details><summary>Answer</summary>DDP stops after the first step with "Expected to have finished reduction in the
#    prior iteration", and names the option `find_unused_parameters`. FSDP trains: a unit's gradients are reduced when
#    its backward ends, whichever of them are there.</details>
#
# ## Sources
#
# docs/scripts.md: what each cell defines. docs.pytorch.org, *torchrun*.
#
# ### Appendix: what was claimed, and what the articles say
#
# The guide (001, line 208) expects that FSDP may need another learning rate; its gradients are DDP's. The second
# article (002, line 752) is right that the command stays the same.

# %%
lab.check({same: ("001, line 208: the learning rate may need adjustment", None)})
