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
# # 16 · Kaggle: a session ends, training need not
#
# Kaggle lends two T4s for nothing, at most twelve hours at a time. This notebook runs on a laptop and on Kaggle, cell
# for cell. You will predict the largest GPT that two T4s can train; find that checkpoints may be what does not fit; and
# have a deadline end a training in the middle, which a second session finishes **exactly** as if nothing had happened.
# The second article (002, lines 940-964) recommends Kaggle and says nothing about the end of a session.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the runs
steps: int = 16  # optimizer steps in all
step_seconds: float = 0.5  # what a step of the first session takes: it sleeps, so that this holds on busy cores, too
deadline_seconds: float = 4.0  # of the first session; on Kaggle some 11.5 hours: 41_400
plans: bool = True  # plan for two T4s, too: some 20 seconds

# %%
import os
import shutil
import tempfile
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("16_kaggle")
N = nproc_per_node
kind = os.environ.get("KAGGLE_KERNEL_RUN_TYPE")  # "Interactive" or "Batch"
print(f"on Kaggle, {kind}" if kind else "not on Kaggle: what is said of T4s below is planned, not measured")

# %% [markdown]
# ## What is known of Kaggle, and how well
#
# None of this was measured here. *Docs* are copies of kaggle.com/docs/notebooks and /docs/efficient-gpu-usage that
# others have kept (August and September 2026).
#
# | | | from |
# |---|---|---|
# | two T4s | in the editor: Settings → Accelerator → GPU T4 x2; 4 cores, 29 GB of memory | docs |
# | internet | Settings → Internet, on in a new notebook; asks for a verified phone number | docs; a secondary source |
# | a session | 12 hours at most; when idle, 20 minutes (another page of theirs says 60) | docs |
# | Save & Run All | a new, clean session, goes on with the browser closed, the same 12 hours | docs |
# | it is papermill | `papermill` in the metadata of executed notebooks | seen in public notebooks |
# | quota | 30 hours of GPU a week "or sometimes higher"; two T4s count once | docs; staff, topic 361104 |
# | what is kept | 20 GB in `/kaggle/working`; all else goes | docs |
# | go on later | a version's output is input of the next (Add Input), read-only below `/kaggle/input` | docs |
# | software | Python 3.12, torch 2.10 with CUDA 12.8 | issue kaggle-cli #1151, July 2026 |
# | a T4's memory | torch sees 14.74 GiB | out-of-memory messages in issues |
# | link between the T4s, disk's speed | nobody says; measure | |
#
# The article's way to the accelerator (line 947, Runtime → Change Runtime Type) is the menu of Colab. labkit comes in
# the first cell of what `labkit kaggle push` sends; otherwise by `pip install`, with internet on.

# %% [markdown]
# ## Predict: the largest GPT on two T4s
#
# Take GPT-2 large's width and add blocks. In fp32 a parameter takes 4 bytes, its gradient 4, AdamW's moments 8. The
# peak is where backward begins: all activations are there, and none is recomputed here. DDP holds 16 bytes per
# parameter then, as its buckets keep the gradients' place. FSDP on two ranks holds half of 12, for there are no
# gradients yet, and the root (embeddings and head) whole. Activations are divided by neither. The article (002,
# line 882) recommends DDP up to 1B parameters on two to four GPUs. It names no GPU there, and elsewhere (line 809) has
# 40 GB in mind; the two it sends its readers to are these.

# %%
GIB = 2**30
width, heads, context, vocabulary = 1280, 20, 1024, 50257  # one sample on each rank
usable = (14.74 - 0.5) * GIB  # without CUDA's context and NCCL's buffers: half a GiB, assumed
of_block = 12 * width**2 + 13 * width
of_root = (2 * vocabulary + context + 2) * width
activations = 4 * context * (16 * width + heads + 4)  # bytes, of a block: 16 numbers per position and width, and a few
loss = 3 * 4 * context * vocabulary  # logits, their softmax, their gradients

# bytes for the root and for each further block
first = {"ddp": 16 * of_root + loss, "fsdp": (12 / 2 + 4) * of_root + loss}
further = {"ddp": 16 * of_block + activations, "fsdp": 12 / 2 * of_block + activations}
most = {name: int((usable - first[name]) / further[name]) for name in first}
for name, blocks in most.items():
    print(f"{name}: {blocks} blocks, {(of_root + blocks * of_block) / 1e6:,.0f} million parameters")

# %% [markdown]
# `labkit.plan` knows none of this arithmetic. It rehearses the very script, with one block more than DDP should hold
# and with as many as FSDP should, on tensors without data. Nothing of it is run.

# %%
text = {name: Script.load("fsdp").cells[name].text for name in ("model", "data")}


def gpt(strategy, blocks):
    small = "vocabulary=256, context=128, width=128, heads=4, layers=4"
    large = f"vocabulary={vocabulary}, context={context}, width={width}, heads={heads}, layers={blocks}"
    cells = {"model": text["model"].replace(small, large), "data": text["data"].replace("context=128", "context=1024")}
    return Script.load(strategy).with_cells(**cells)


if plans:
    article = {"article": "002, line 882: DDP up to 1B parameters", "said": 1e9}
    for name, blocks in most.items():
        claims.predict(f"{name.upper()} on 2 x T4: most blocks that fit", blocks)
    claims.predict("DDP on 2 x T4: parameters of that", of_root + most["ddp"] * of_block, **article)
    planned = {"ddp": (most["ddp"] + 1, None), "fsdp": (most["fsdp"], None)}
    for name, (blocks, _) in planned.items():
        plan = labkit.plan(gpt(name, blocks), device="2xT4", global_batch_size=2)
        planned[name] = blocks, plan
        room = plan.device.usable_by(2) - plan.rehearsed.bytes
        found = blocks + int(room // further[name])  # room for more, or too little: in blocks
        claims.calculated(f"{name.upper()} on 2 x T4: most blocks that fit", found, because="planned, not run")
        if name == "ddp":
            parameters = plan.facts.elements - (blocks - found) * of_block
            claims.calculated("DDP on 2 x T4: parameters of that", parameters, because="planned, not run")
    display(planned["ddp"][1])

# %%
if plans:
    figure = go.Figure()
    for name, dash in (("ddp", "solid"), ("fsdp", "dash")):
        x = list(range(0, 81, 10))
        lines = {"x": x, "y": [(first[name] + blocks * further[name]) / GIB for blocks in x]}
        figure.add_scatter(**lines, name=f"{name.upper()}, by hand", mode="lines", line={"dash": dash})
        blocks, plan = planned[name]
        dots = {"x": [blocks], "y": [plan.rehearsed.bytes / GIB]}
        figure.add_scatter(**dots, name=f"{name.upper()}, rehearsed", mode="markers", marker={"size": 11})
    figure.add_hline(
        y=usable / GIB, line_dash="dot", annotation_text="a T4, less the framework", annotation_position="top left"
    )
    figure.update_layout(template="plotly_white", height=320, margin={"l": 50, "r": 20, "t": 40, "b": 40})
    figure.update_layout(title="Peak of a rank, GiB", xaxis_title="blocks of width 1280")
    display(figure)

# %% [markdown]
# ## Predict: 16 bits, and time
#
# A T4 has no bf16 (it is emulated, and slow); it has fp16, for which labkit's extra `precision` scales the loss. The
# article's CNN, asked for in bf16, must be refused for that reason and planned in fp16 instead.
#
# Time is shown and **not claimed**: nobody has measured it here, and the plan says what it assumes of a T4. The article
# reports 1.29x for the CNN on two GPUs (lines 765-766), and about 1.9x with DDP and 1.8x with FSDP for large models
# (lines 861 and 867). Where one T4 holds the GPT only by recomputing activations and two with FSDP need not, that is
# part of what the second one is worth.

# %%
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Model(nn.Module):
    """The article's CNN."""

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


def load_datasets(data_dir):
    """(train, test): noise, in MNIST's shapes."""
    x, y = torch.rand(1024, 1, 28, 28), torch.randint(10, (1024,))
    return TensorDataset(x, y), TensorDataset(x[:64], y[:64])


# %%
def shown(row):
    seconds = row.step.seconds
    took = f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"
    return ", ".join([took, *row.changes])


def faster(plan, strategy):
    """A step on one T4 and on two, in the quickest way that fits; and how many times as fast that is."""
    fits = {row.strategy: row for row in plan.advice.rows if row.fits}
    one, two = fits["single"], fits[strategy]
    ratio = one.step.seconds / two.step.seconds
    return {"one T4, a step": shown(one), "two T4s": shown(two), "plan": f"{ratio:.2f}x"}


if plans:
    claims.predict("T4: trains in bf16", 0)
    claims.predict("T4: what is planned instead is in fp16", 1)
    cnn = Script.load("ddp").with_cells(model=Model, data=load_datasets)
    plan = labkit.plan(cnn, device="2xT4", precision="bf16", global_batch_size=128)
    print(plan.advice.sentences[0])
    claims.calculated("T4: trains in bf16", plan.fits, because="planned, not run")
    instead = {row.parameters["precision"] for row in plan.advice.rows[1:]}
    claims.calculated("T4: what is planned instead is in fp16", instead == {"fp16"}, because="planned, not run")
    large = planned["ddp"][1]
    rows = [
        {"training": "the CNN, 128 samples, DDP", **faster(plan, "ddp"), "article": "1.29x (line 765)"},
        {"training": "the CNN, 128 samples, FSDP", **faster(plan, "fsdp"), "article": "1.29x (line 766)"},
        {"training": "the GPT, DDP", **faster(large, "ddp"), "article": "~1.9x (line 861)"},
        {"training": "the GPT, FSDP", **faster(large, "fsdp"), "article": "~1.8x (line 867)"},
    ]
    display(pd.DataFrame(rows).style.hide())

# %% [markdown]
# ## A session that ends
#
# From here on everything is measured, on whatever machine is in front of you. The model below sleeps in each training
# step, so that a step takes as long as `STEP_SECONDS` says; it has dropout to make resuming harder, since every rank's
# random numbers must continue, too.

# %%
import os
import time

import torch
from torch import nn


class Model(nn.Module):
    """64 numbers in, eight logits out."""

    def __init__(self, width=640):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)
        )

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return self.layers(x)


# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    """(train, test): points, and in which of eight directions each of them lies most."""
    random = torch.Generator().manual_seed(0)
    x, directions = torch.randn(1280, 64, generator=random), torch.randn(64, 8, generator=random)
    y = (x @ directions).argmax(1)
    return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])


# %% [markdown]
# By itself labkit's script neither saves nor stops early. `checkpoint_dir` and `deadline_seconds` are options of the
# extra `checkpoints`, which `launch` adds when they are given. At the deadline all ranks finish the same step, save and
# leave with exit code 0. They ask each other once a second whether it is time, so they are up to a second late; the
# first step may take half a second more. What they leave is the weights and AdamW's two moments: 12 bytes per parameter
# in fp32, 24 in the fp64 used here, in which "the same" can mean to the last bit.

# %%
script = Script.load("fsdp").with_cells(model=Model, data=load_datasets)
options = {"steps": steps, "global_batch_size": 16, "precision": "fp64", "nproc_per_node": N}
options |= {} if on_cpu else {"deterministic": True}
working = [Path(tempfile.mkdtemp(prefix=f"session-{number}-")) for number in (1, 2)]  # each one's /kaggle/working
P = sum(p.numel() for p in Model().parameters())

in_time = deadline_seconds / step_seconds
claims.predict("session 1: steps until the deadline", in_time, within=1.5 / deadline_seconds, timed=True)
claims.predict("session 1: exit code", 0)
claims.predict("checkpoint", 3 * 8 * P, "B", within=0.03)

one = labkit.launch(
    script,
    checkpoint_dir=working[0] / "checkpoints",
    deadline_seconds=deadline_seconds,
    env=env | {"STEP_SECONDS": str(step_seconds)},
    **options,
)

# %%
state = one.wait()
print(one.logs(rank=0).strip())
saved = {int(path.name.removeprefix("step-")): path for path in (working[0] / "checkpoints").glob("step-*")}
done = max(saved)
claims.measure("session 1: steps until the deadline", done, run=one, because="asked once a second")
claims.measure("session 1: exit code", state.exit_code, run=one)
size = sum(file.stat().st_size for file in saved[done].iterdir())
claims.measure("checkpoint", size, run=one, because="names, shapes, random states")
print(f"{size:,} bytes for {P:,} parameters")

# %% [markdown]
# ## A session that resumes
#
# On Kaggle the next session adds the first one's output as input and copies it to where it can be written. The command
# is the same. A third run, which nobody interrupts, says what should have come out.

# %%
shutil.copytree(working[0] / "checkpoints", working[1] / "checkpoints")
claims.predict("session 2: resumes after step", done)
claims.predict("both sessions: steps", steps)
claims.predict("both sessions: steps taken twice", 0)
claims.predict("both sessions: largest difference in a loss to an uninterrupted run", 0)
claims.predict("both sessions: difference in the test loss", 0)
two = labkit.launch(script, checkpoint_dir=working[1] / "checkpoints", env=env, **options)
two.wait()
whole = labkit.launch(script, env=env, **options)
whole.wait()


# %%
def of_rank_0(run):
    table = run.metrics()
    return table[table["rank"] == 0]


def losses(table):
    """By step."""
    return table.dropna(subset=["loss"]).groupby("step")["loss"].last()


tables = {name: of_rank_0(run) for name, run in (("session 1", one), ("session 2", two), ("uninterrupted", whole))}
curves = {name: losses(table) for name, table in tables.items()}
first_step, taken = curves["session 2"].index[0], [tables[name]["steps"].sum() for name in ("session 1", "session 2")]
claims.measure("session 2: resumes after step", first_step - 1, run=two)
claims.measure("both sessions: steps", sum(taken), run=two)
twice = curves["session 1"].index.intersection(curves["session 2"].index)
claims.measure("both sessions: steps taken twice", len(twice), run=two)
apart = (pd.concat([curves["session 1"], curves["session 2"]]) - curves["uninterrupted"]).abs()
claims.measure("both sessions: largest difference in a loss to an uninterrupted run", apart.max(), run=two)
test_loss = {name: tables[name]["test_loss"].dropna().iloc[0] for name in ("session 2", "uninterrupted")}
apart = test_loss["session 2"] - test_loss["uninterrupted"]
claims.measure("both sessions: difference in the test loss", apart, run=two)
print(f"{taken[0]:.0f} + {taken[1]:.0f} steps; test loss", " and ".join(f"{loss:.17g}" for loss in test_loss.values()))

# %%
figure = go.Figure()
for name, width, dash in (("uninterrupted", 8, "solid"), ("session 1", 3, "solid"), ("session 2", 3, "dot")):
    line = {"width": width, "dash": dash}
    figure.add_scatter(x=curves[name].index, y=curves[name], name=name, mode="lines+markers", line=line)
figure.add_vline(x=done + 0.5, line_dash="dot", annotation_text="the deadline")
figure.update_layout(template="plotly_white", height=300, margin={"l": 50, "r": 20, "t": 40, "b": 40})
figure.update_layout(title="Loss of rank 0's samples", xaxis_title="step", yaxis_title="loss")
display(figure)

# %% [markdown]
# ## What fits into 20 GB
#
# A new checkpoint is written beside the two that are kept, and the script wants 1.2 times its size free before it
# starts to write; when there is less it says so, trains on and keeps the old ones. So `/kaggle/working` is full before
# the T4s are:

# %%
per_parameter = 3 * 4  # bytes in fp32: weight and two moments
rows = {
    "the first checkpoint, into 20 GB": 20e9 / (1.2 * per_parameter),
    "the second checkpoint": 20e9 / ((1 + 1.2) * per_parameter),
    "the third, and all that follow": 20e9 / ((2 + 1.2) * per_parameter),
    "DDP, into the T4s": of_root + most["ddp"] * of_block,
    "FSDP, into the T4s": of_root + most["fsdp"] * of_block,
}
table = [
    {"what fits": what, "up to": f"{parameters / 1e6:,.0f} million parameters"} for what, parameters in rows.items()
]
display(pd.DataFrame(table).style.hide())

# %% [markdown]
# Beyond that: save less often and delete the older checkpoint yourself, or save outside of `/kaggle/working` and copy
# only the last. A session that is cut without a deadline loses what came after its last checkpoint: `save_every=…`.
#
# ## As a batch
#
# "Save & Run All" is papermill, and so is this, headless, with other parameters:
#
#     papermill 16_kaggle.ipynb out.ipynb -p nproc_per_node 2 -p steps 24
#
# labkit then waits for each run, keeps static figures, and a training that fails fails the notebook.
#
# ## There and back
#
#     labkit kaggle push 16_kaggle.ipynb -p plans False
#
# in a terminal sends this notebook to two T4s, whole, prints here what it prints there, and puts its runs into `runs/`
# beside yours. There one of labkit's scripts gets its deadline, and with it the extra `checkpoints`, from the session:
# its end, less half an hour. For a training that outlives a session, ask for what the version before has left, and push
# with `--input` and the kernel's name:

# %%
from labkit.kaggle import previous_checkpoints

folder = previous_checkpoints()  # for `labkit.launch(script, checkpoint_dir=folder)`
print(f"{folder}: {[path.name for path in folder.glob('step-*')] or 'nothing to resume from, so start'}")

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - Let the second session forget the first: `(working[1] / "checkpoints").mkdir()` in place of
#   `shutil.copytree(...)`. It runs without an error; which claims notice?
# - Give session 2 `Script.load("ddp").with_cells(...)`, or one rank: the checkpoint loads. Is the curve the same to the
#   last bit, or to 1e-9? And DDP in both sessions, with four ranks: it reorders its buckets after its first step, so
#   the sums' order changes with the session.
# - Leave `nn.Dropout` out and give session 2 `env | {"STEP_SECONDS": "0.1"}`: what has time to do with the loss?
# - `save_every=3` in `options`, and `one.stop()` in the middle: what is lost?
# - On Kaggle: `labkit.plan(gpt("fsdp", 66), device="2xT4", global_batch_size=2)` and `labkit.launch` of it, beside
#   `gpt("ddp", 32)`. The plan is wrong if both fit.
