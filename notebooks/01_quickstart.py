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
# # 01 · Quickstart: one model, three ways to train it
#
# You will train the three-layer CNN of the article *Distributed Training with PyTorch: DDP vs FSDP* on handwritten
# digits: on one rank, on two with **DDP** (each rank keeps the whole model), on two with **FSDP** (each rank keeps
# half of it). Every run is a plain torchrun script that this notebook writes, starts and watches. At the end one
# table compares time, accuracy and memory, all of it measured on the machine in front of you.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the DDP and FSDP runs
epochs: int = 5  # passes over the training data
global_batch_size: int = 128  # samples per optimizer step, over all ranks
dataset: str = "digits"  # "digits" (scikit-learn, no download) or "mnist" (from disk, or fetched and checked)

# %%
import labkit

machine = labkit.doctor()
display(machine)

# %% [markdown]
# With a GPU per rank a rank is a GPU. Otherwise a rank is **one core**: each gets a single thread, so that two ranks
# have twice the hardware of one, as two GPUs would.

# %%
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}

# %% [markdown]
# ## The model and the data are ordinary cells
#
# Run them, change them, test them here. labkit copies the whole cell, as you typed it, into the script.

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
parameters = sum(p.numel() for p in Model().parameters())
print(f"{parameters:,} parameters (the article says 120 thousand)")
print("logits:", Model()(torch.zeros(2, 1, 28, 28)).shape)

# %% [markdown]
# The article decodes every image in Python, item by item. Here the images are decoded once, into one tensor, and a
# sample is a row of it. How long a step still waits for its batch is measured below.

# %%
import gzip
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def read_idx(folder, name):
    """One of MNIST's files, packed or not, as an array of bytes with its shape."""
    path = Path(folder, name)
    raw = path.read_bytes() if path.exists() else gzip.decompress(Path(folder, f"{name}.gz").read_bytes())
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())


def load_datasets(data_dir):
    """(train, test): MNIST when `data_dir` is given, otherwise scikit-learn's 1,797 digits, enlarged to 28 x 28."""
    if data_dir:
        parts = [(read_idx(data_dir, f"{p}-images-idx3-ubyte"), read_idx(data_dir, f"{p}-labels-idx1-ubyte"))
                 for p in ("train", "t10k")]  # fmt: skip
        return tuple(TensorDataset(images[:, None] / 255.0, labels.long()) for images, labels in parts)
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=28, mode="bilinear")
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[shuffled], torch.tensor(digits.target)[shuffled].long()
    return TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])


# %%
data_dir = str(labkit.fetch("mnist")) if dataset == "mnist" else ""
train, test = load_datasets(data_dir)
len(train), len(test), train[0][0].shape

# %% [markdown]
# ## Three scripts from the same cells
#
# A script is a list of titled cells. `Script.load("ddp")` returns a complete one, with a small model and data of its
# own; `with_cells` puts yours in their place. Click a title to read that cell: the ones that are open are DDP's and
# yours.

# %%
from labkit import Script

scripts = {name: Script.load(name).with_cells(model=Model, data=load_datasets) for name in ("single", "ddp", "fsdp")}
scripts["ddp"]

# %% [markdown]
# From DDP to FSDP one cell changes, `strategy`, and the file's first line, which says what it is:

# %%
scripts["fsdp"].diff(scripts["ddp"])

# %% [markdown]
# FSDP gathers a model block by block, when it has a list of blocks. This CNN has none, so FSDP treats it as one block
# and prints that.

# %% [markdown]
# ## Launch and watch
#
# `launch` returns at once: run the cells one by one, and while the picture moves run any other cell. `wait` blocks
# until the run has finished, so that *Run All* starts one run after the other; interrupting it stops the run.

# %%
options = {"epochs": epochs, "global_batch_size": global_batch_size, "env": env, "data_dir": data_dir or None}
single = labkit.launch(scripts["single"], nproc_per_node=1, **options)

# %%
single.wait()

# %%
ddp = labkit.launch(scripts["ddp"], nproc_per_node=nproc_per_node, **options)

# %%
ddp.wait()

# %%
fsdp = labkit.launch(scripts["fsdp"], nproc_per_node=nproc_per_node, **options)

# %%
fsdp.wait()

# %% [markdown]
# ## Compare
#
# *State held* is what a rank keeps of parameters, gradients and optimizer state, counted tensor by tensor inside the
# rank: FSDP divides it by the number of ranks. On the CPU the *resident set* is the whole process, Python and torch
# included, and says little about the model; on a GPU the column is torch's allocator.

# %%
comparison = labkit.compare([single, ddp, fsdp])
display(comparison)

# %% [markdown]
# **Is it the same training?** All three start from the same weights, and step *k* trains on the same samples whatever
# the number of ranks. The mean over the ranks of what they report is the loss of the whole batch. So the curves must
# agree, up to the order in which floating-point numbers are added: to about 7 digits at first, then less, because Adam
# amplifies rounding. (In float64, `precision="fp64"`, they agree to 9 digits for much longer; labkit's tests check
# that.)

# %%
curves = {run.id: run.losses() for run in (single, ddp, fsdp)}
reference = curves[single.id]
for run in (ddp, fsdp):
    difference = ((curves[run.id] - reference).abs() / reference).loc[1:20]
    first, last = difference.index[[0, -1]]
    print(f"{run.script.name}: relative difference to single at step {first}: {difference[first]:.1e}, "
          f"at step {last}: {difference[last]:.1e}")  # fmt: skip
    assert difference.loc[1:5].max() < 1e-3, "the strategies did not train the same model"

# %% [markdown]
# **How long does a step wait for data?**

# %%
for row in comparison.table.itertuples():
    print(f"{row.script:>7}: {row.input_share:.2%} of the step time is input wait")

# %% [markdown]
# ## Leave with a plain script
#
# The run folder holds the script. This line trains the same model without labkit:

# %%
print(ddp.command)
assert comparison.table["parameters"].eq(parameters).all()

# %% [markdown]
# ## Try
#
# - `epochs=20`, and run another cell while it trains; then restart the kernel and call `labkit.attach("latest")`.
# - `labkit.launch(scripts["ddp"], precision="bf16", save_every=10, **options)`: the options add the cells that declare
#   them. `run.script` shows the longer script; `Script.names()` lists all there is to add.
# - `global_batch_size=100` with three ranks: read the error message.
# - Put `if len(x) > 2: raise ValueError("boom")` into `Model.forward`, run the cells from there on, and see which
#   line of which cell is named.
