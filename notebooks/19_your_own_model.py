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
# # 19 · Your own model, and a plain script to leave with
#
# **You will be able to** bring a model, its data and its loss as ordinary cells, train them under any strategy by
# changing one name, and leave with a file that needs nothing but torch. **20 minutes. You need** labs 01 and 05.
#
# A labkit script is a list of titled cells. Three are yours, one is the strategy, and the others, which never change,
# only use the names that these define.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 20  # optimizer steps of each run; up to the twentieth each one is logged
global_batch_size: int = 32  # samples per optimizer step, over all ranks

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.other_runs import by_torchrun, changed

lab = Lesson("19_your_own_model", ranks=nproc_per_node)
draw.cells([*Script.load("ddp").cells], {"yours": ["model", "data", "task"], "the strategy": ["strategy"]})

# %% [markdown]
# ## Your predictions
#
# The model below is a small convolutional network, partly frozen, as in fine-tuning: its last layer, which has about
# half of the parameters, is trained, and so is half of the rest. AdamW keeps two numbers for each parameter that is
# trained.

# %%
cells = lab.ask("cells that change from DDP to FSDP, of all of them", default=5)
moments = lab.ask("DDP: AdamW's state, how many times the size of the parameters", default=2, unit="times")
apart = {"rounding, below 0.1%": 1e-4, "about 1%": 0.01, "10% or more": 0.1}
same = lab.ask("FSDP: largest relative difference to a loss of DDP", default=0.01, options=apart)

# %% [markdown]
# ## Your cells
#
# | cell | defines | what it returns |
# |---|---|---|
# | `data` | `load_datasets(data_dir)` | a training and a test set; samples are tensors, or dicts and tuples of them |
# | `model` | `Model()` | the model |
# | `task` | `outputs_of(model, batch)` | what the model returns for a batch |
# | | `loss_of(outputs, batch)` | the *sum* of the batch's losses |
# | | `count_of(batch)` | how many losses that are |
# | | `metrics_of(outputs, batch)` | `{"accuracy": (sum, count), …}` |
#
# Why a sum? Ranks may have different counts, of tokens for example, and the mean of their means is then not the mean
# over the batch. The script adds up sums and counts over all ranks, and divides once.
#
# A cell is copied whole and as you typed it, so keep other things out of it. The data are images with a bright stripe
# in one of four places. Every rank generates them itself, and all must get the same images; hence the seeded generator.

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


# %% [markdown]
# Try it on one rank first: is everything right, and does the loss fall?

# %%
first = lab.launch(Script.load("single").with_cells(model=Model, data=load_datasets), ranks=1, steps=steps)

# %% [markdown]
# ## Your loss, and one name for the strategy
#
# The `task` cell is labkit's, with cross-entropy and accuracy; here one of its functions is replaced by cross-entropy
# with smoothed labels. `diff` shows what changes if you replace the name "ddp" with "fsdp".

# %%
from torch.nn import functional as F


def loss_of(outputs, batch):
    return F.cross_entropy(outputs, batch[1], label_smoothing=0.1, reduction="sum")


# %%
own = {"model": Model, "data": load_datasets, "loss_of": loss_of}
scripts = {name: Script.load(name).with_cells(**own) for name in ("ddp", "fsdp")}
print("cells that change:", changed(scripts["fsdp"], scripts["ddp"]))
lab.verify(cells, 1, len(changed(scripts["fsdp"], scripts["ddp"])))
scripts["fsdp"].diff(scripts["ddp"])

# %% [markdown]
# FSDP's units are the `blocks` of your model, and the model for what is outside them. A model that does not list its
# layers under this name gets one more cell, in which `blocks_of` looks for modules of one class, one after another.
#
# ## Train under both

# %%
options = {"steps": steps, "global_batch_size": global_batch_size, "trace_memory": True, "shown": False}
ddp, fsdp = (lab.launch(script, **options) for script in scripts.values())
peaks = {name: run.memory().ranks[0].traced.categories for name, run in (("DDP", ddp), ("FSDP", fsdp))}
draw.bars(peaks, unit="B", title="rank 0 at its peak")

# %%
parameters = [*Model().parameters()]
trained = sum(p.numel() for p in parameters if p.requires_grad)
state = 2 * trained / sum(p.numel() for p in parameters)
lab.verify(moments, state, peaks["DDP"]["optimizer"] / peaks["DDP"]["parameters"], "times", within=0.001)
lab.verify(same, 1e-3, (fsdp.losses() / ddp.losses() - 1).abs().max(), how="at most")

# %% [markdown]
# Frozen parameters have neither gradients nor AdamW's state. FSDP divides parameters, gradients and state; in a small
# convolutional network activations are most of the memory, so it saves little (lab 05).
#
# ## Leave
#
# `script.write` gives you the file. It is the one that ran: torchrun starts it in any folder, and labkit need not be
# installed there.

# %%
import tempfile
from pathlib import Path

file = Path(tempfile.mkdtemp(), "train.py")
scripts["ddp"].write(file)
logged = by_torchrun(file, ddp)
first_rank = {
    name: run.metrics().query("rank == 0").set_index("step").loss for name, run in (("DDP", ddp), ("FSDP", fsdp))
}
lines = {name: losses.items() for name, losses in first_rank.items()} | {"bare torchrun": logged.items()}
display(draw.curves(lines, "loss of rank 0: three lines that are one"))
lab.score()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# Plan your model before you rent a GPU, with 32 times the width and 512 images per step:

# %%
wide = {name.upper(): sized(script, width=512) for name, script in scripts.items()}
lab.plans(wide, global_batch_size=512, precision="fp16")

# %% [markdown]
# Both fit easily, so take DDP. FSDP saves more on eight ranks, where each has fewer activations and an eighth of the
# states.
#
# ## Which way for your training?
#
# - **A model that fits these cells:** use labkit's script. You change strategy, precision or checkpoints by a name.
# - **A script that you have:** `labkit.launch("my_train.py", nproc_per_node=2)` takes whatever torchrun would start,
#   and watches it. A Hugging Face Trainer needs no change; its batch size is per device. A loop of your own needs these
#   lines:
#
# ```python
# dist.init_process_group()  # torchrun's environment variables say which rank this is
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# model = DistributedDataParallel(Model().cuda())
# sampler = DistributedSampler(data)  # each rank gets other samples
# loader = DataLoader(data, global_batch_size // dist.get_world_size(), sampler=sampler)
# for epoch in range(epochs):
#     sampler.set_epoch(epoch)  # or every epoch has the same order
#     ...  # as before
# if dist.get_rank() == 0:
#     torch.save(model.module.state_dict(), "model.pt")
# dist.destroy_process_group()
# ```
#
# ## Try this
#
# 1. Set `frozen=0` in `Model`: how large is AdamW's state now, and what else grows?
#    <details><summary>Answer</summary>Twice the parameters. Gradients become as large as the parameters. Activations
#    grow, too: backward needed nothing of the frozen blocks, because they come first.</details>
# 2. Write `random = torch.Generator()` and `random.seed()` in `load_datasets`: each rank, and each run, draws its own
#    images.
#    <details><summary>Answer</summary>Nothing crashes, and the loss falls. Only the claim about equal losses fails:
#    those of DDP and FSDP then differ by up to 80%.</details>
# 3. Put `self.spare = nn.Linear(8, 8)`, which no output uses, into `Model`.
#    <details><summary>Answer</summary>DDP stops after the first step with "Expected to have finished reduction in the
#    prior iteration", and names the option <code>find_unused_parameters</code>. FSDP trains: a unit's gradients are
#    reduced when its backward ends, whichever of them exist.</details>
#
# ## Sources
#
# docs/how_to/scripts.md: what each cell defines. docs.pytorch.org, *torchrun*.
