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
# You bring a model, its data and its loss as ordinary cells, train them under DDP and under FSDP by changing one name,
# and leave with a file that needs torch and nothing else. The claims: both strategies give the same losses; the file
# that ran is the file you take, byte by byte; started by bare `torchrun`, where labkit cannot even be imported, it
# gives the same losses again, to the last bit. Half of the model is frozen, which a plan by formulas does not expect:
# you will see how labkit reports that. The guide (001, line 208) expects that FSDP may need another learning rate.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
steps: int = 20  # optimizer steps of each run; up to the twentieth each one is reported, then ten a second
global_batch_size: int = 32  # samples per optimizer step, over all ranks

# %%
import ast
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("15_your_own_model")
N = nproc_per_node

# %% [markdown]
# ## What a script asks of your cells
#
# A script is a list of titled cells. These three are the task; the others (loader, optimizer, checkpoints, main …)
# only use the names that they define:
#
# | cell | defines | which |
# |---|---|---|
# | `model` | `Model` | `Model()` makes the model |
# | `data` | `load_datasets(data_dir)` | returns a training and a test set, of tensors in any nest of dict and tuple |
# | `task` | `outputs_of(model, batch)` | calls the model |
# | | `count_of(batch)` | returns how many predictions the loss is averaged over |
# | | `loss_of(outputs, batch)` | returns the sum of their losses, not their mean |
# | | `metrics_of(outputs, batch)` | returns sums and counts by name, for the test |
#
# labkit's own `task` cell already suits samples of (input, class) and a model that returns logits. Here only its
# `loss_of` is replaced. A cell brings its own imports. It is copied whole and as you typed it, so keep other things out
# of it.
#
# **Data**: noisy pictures of discs, squares, rings and crosses, drawn on the spot. Every rank draws them again, and all
# must have the same ones: hence a random generator of their own. (The global one differs between ranks by then.)

# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, samples=1280, size=24):
    """(train, test): pictures of 1 x 24 x 24 in four classes. `data_dir` is not used."""
    random = torch.Generator()
    random.manual_seed(0)
    y = torch.randint(4, (samples,), generator=random)
    radius = 5 + 4 * torch.rand(samples, 1, 1, generator=random)
    middle = 6 * torch.rand(2, samples, 1, 1, generator=random) - 3
    axis = torch.arange(size) - (size - 1) / 2
    across, down = (axis[None, None, :] - middle[0]).abs(), (axis[None, :, None] - middle[1]).abs()
    disc, square = across.hypot(down) < radius, (across < radius) & (down < radius)
    ring, cross = disc & (across.hypot(down) > radius / 2), square & ((across < radius / 3) | (down < radius / 3))
    x = torch.stack([disc, square, ring, cross], 1)[torch.arange(samples), y]
    x = (x + 0.2 * torch.randn(samples, size, size, generator=random))[:, None]
    cut = samples * 4 // 5
    return TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])


# %% [markdown]
# **Model**: convolutions with a residual path. As in fine-tuning, the stem and the first two blocks are frozen. (FSDP
# shards `model.blocks` one by one when there are such; with `embed` and `unembed` a pipeline could cut the model, too.)

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
    """Pictures of 1 x 24 x 24 in, four logits out."""

    def __init__(self, width=16, blocks=4, frozen=2, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.head = nn.Linear(width * 12 * 12, classes)
        for part in [self.stem, *self.blocks[:frozen]]:
            part.requires_grad_(False)

    def embed(self, x):
        return self.stem(x)

    def unembed(self, x):
        return self.head(x.flatten(1))

    def forward(self, x):
        return self.unembed(self.blocks(self.embed(x)))


# %% [markdown]
# **Loss**: cross entropy with smoothed labels, in 32 bits at least, whatever type the logits have. It is a sum: the
# script divides it by the number of predictions in the whole batch, on all ranks.

# %%
import torch
from torch.nn import functional as F


def loss_of(outputs, batch):
    logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return F.cross_entropy(logits, batch[1], label_smoothing=0.1, reduction="sum")


# %% [markdown]
# They are ordinary cells: try them here first.

# %%
train, test = load_datasets("")
x, y = train[:6]
before = loss_of(Model()(x), (x, y)).item() / len(x)
print(f"{len(train)} + {len(test)} pictures; mean loss of six of them before training: {before:.2f}")
figure, axes = plt.subplots(1, 6, figsize=(6, 1.1), dpi=48)
for axis, picture in zip(axes, x, strict=True):
    axis.imshow(picture[0], cmap="gray", interpolation="nearest")
    axis.axis("off")
plt.show()

# %% [markdown]
# ## One name makes the strategy
#
# The diff of your DDP and your FSDP script is that of labkit's own: the strategy cell, and nothing of yours. Your
# script differs from labkit's in three cells, `model`, `data` and `task`.
#
# The trainings below use two options that labkit's shortest script does not have, `precision` and `deterministic`.
# `launch` would add the extras that declare them by itself. They are named here, so that the file you take has them.

# %%
cells = {"model": Model, "data": load_datasets, "loss_of": loss_of}
shipped = {name: Script.load(name, "precision", "deterministic") for name in ("ddp", "fsdp")}
scripts = {name: script.with_cells(**cells) for name, script in shipped.items()}


def changed(after, before):
    """Titles of the cells that differ, and the lines that do."""
    titles = [title for title, cell in after.cells.items() if cell.text != before.cells[title].text]
    lines = [line for line in after.diff(before).lines()[2:] if line[0] in "+-"]
    return titles, len(lines)


_, shipped_lines = changed(shipped["fsdp"], shipped["ddp"])
claims.predict("cells in which the DDP script is not labkit's", len(cells))
claims.predict("cells that change from DDP to FSDP", 1)
claims.predict("lines that change from DDP to FSDP: as many as in labkit's own", shipped_lines)
mine, lines = changed(scripts["ddp"], shipped["ddp"])
claims.measure("cells in which the DDP script is not labkit's", len(mine))
print(f"the DDP script differs from labkit's in {', '.join(mine)}: {lines} lines")
mine, lines = changed(scripts["fsdp"], scripts["ddp"])
claims.measure("cells that change from DDP to FSDP", len(mine))
claims.measure("lines that change from DDP to FSDP: as many as in labkit's own", lines)
print(f"from DDP to FSDP these cells change: {', '.join(mine)}; {lines} lines, with the file's first one")

# %% [markdown]
# ## Predict: bytes
#
# By hand, from the sizes of the layers. In float64 (so that "the same" can mean *the same*) each number takes 8 bytes.
# Every parameter is held; only those that are trained have a gradient and AdamW's two moments, and its count of steps,
# 4 bytes for each tensor.

# %%
WIDTH, CLASSES = 16, 4
stem, block, head = 5 * 5 * WIDTH + WIDTH, 3 * 3 * WIDTH**2 + WIDTH + 2 * WIDTH, 12 * 12 * WIDTH * CLASSES + CLASSES
trained, frozen = 2 * block + head, stem + 2 * block
tensors = 2 * 4 + 2  # trained: weight and bias of conv and norm in two blocks, and of the head
claims.predict("parameters, as the ranks count them", trained + frozen)
claims.predict("DDP: parameters", 8 * (trained + frozen), "B")
claims.predict("DDP: gradients", 8 * trained, "B")
claims.predict("DDP: optimizer state", 16 * trained + 4 * tensors, "B")
claims.predict("FSDP: parameters of all ranks", 8 * (trained + frozen), "B")
claims.predict("FSDP: optimizer state of all ranks", 16 * trained + 4 * tensors * N, "B")
print(f"{trained:,} parameters are trained, {frozen:,} are frozen")

# %% [markdown]
# The peak is higher, and `labkit.plan` finds it in two independent ways. Here they disagree, and it says so: *formulas*
# assume that all of a model is trained, the *rehearsal* runs your own step on tensors without data and sees that
# nothing needs the activations of frozen blocks. Two ways that agree can be believed; where they do not, a plan says
# which one to believe.

# %%
options = {"global_batch_size": global_batch_size, "precision": "fp64", "deterministic": True}
plans = {name: labkit.plan(scripts[name], nproc_per_node=N, **options) for name in scripts}
assert any("trust the rehearsal" in problem for problem in plans["ddp"].problems)
for name, plan in plans.items():
    claims.predict(f"{name.upper()}: peak, as rehearsed", plan.rehearsed.bytes, "B", within=0.03)
over = plans["ddp"].formulas.bytes / plans["ddp"].rehearsed.bytes - 1
claims.predict("DDP: formulas give too much by", over, "%", within=0.05)
plans["ddp"]

# %% [markdown]
# ## Predict: losses, and train
#
# With one order of samples and equal shares of a batch, DDP and FSDP do the same arithmetic. Sums of two numbers do not
# even depend on the order; with more ranks they may differ in the last bit, and AdamW, which divides a gradient by its
# own size, may amplify that: hence 1e-6. The learning rate is the same for both.

# %%
same = "FSDP: largest relative difference to a loss of DDP"
claims.predict(same, 1e-6, how="at most", article="001, line 208: learning rate may need adjustment")
claims.predict("words of the command that change from DDP to FSDP", 0, article="002, line 752: same as DDP", said=0)
copied = "bytes in which what ran differs from the file to take along"
claims.predict(copied, 0)
bare_losses = "bare torchrun: largest difference in a loss"
claims.predict(bare_losses, 0)
claims.predict("bare torchrun: difference in the test loss", 0)
claims.predict("bare torchrun: exit code", 0)
claims.predict("exit code of `import labkit` there", 1)
claims.predict("imports of labkit in the script", 0)
display(claims)

# %%
runs = {}
for name, plan in plans.items():
    runs[name] = labkit.launch(plan, steps=steps, env=env)
    runs[name].wait()

# %%
labkit.compare(list(runs.values()))

# %%
held = {name: [rank.traced for rank in run.memory().ranks] for name, run in runs.items()}
ddp, fsdp = runs["ddp"], runs["fsdp"]
first = held["ddp"][0].categories
claims.measure("DDP: parameters", first["parameters"], run=ddp)
claims.measure("DDP: gradients", first["gradients"], run=ddp)
claims.measure("DDP: optimizer state", first["optimizer"], run=ddp)
for category, name in (("parameters", "parameters"), ("optimizer", "optimizer state")):
    found = sum(peak.categories[category] for peak in held["fsdp"])
    claims.measure(f"FSDP: {name} of all ranks", found, run=fsdp)
peaks = {name: max(peak.bytes for peak in ranks) for name, ranks in held.items()}
twice = "the float32 batch stays beside its float64 copy" if on_cpu else ""  # on a GPU, in the host's memory
for name, run in runs.items():
    claims.measure(f"{name.upper()}: peak, as rehearsed", peaks[name], run=run, because=twice)
over = plans["ddp"].formulas.bytes / peaks["ddp"] - 1
claims.measure("DDP: formulas give too much by", over, run=ddp, because="activations of frozen blocks")


def losses(metrics):
    """By rank and step."""
    return metrics.dropna(subset=["loss"]).drop_duplicates(["rank", "step"]).set_index(["rank", "step"])["loss"]


curves = {name: losses(run.metrics()) for name, run in runs.items()}
apart = ((curves["fsdp"] - curves["ddp"]) / curves["ddp"]).abs().dropna()
claims.measure(same, apart.max(), run=fsdp, because="one learning rate for both")
words = [run.command.replace(str(run.folder.script), "train.py").split() for run in runs.values()]
claims.measure("words of the command that change from DDP to FSDP", len(set(words[0]) ^ set(words[1])), run=fsdp)
claims.measure("parameters, as the ranks count them", labkit.compare([ddp]).table["parameters"].iloc[0], run=ddp)
print(f"{len(apart)} losses compared; largest relative difference {apart.max():.1e}")

# %% [markdown]
# ## Leave
#
# `script.write` gives you the file. It goes into a new folder, beside a `labkit.py` that refuses to be imported. Then
# comes the line that labkit printed, with this file's name and without any variable of labkit's.
#
# The script reports with the standard library's `logging`: every rank logs a dict of values to the logger `metrics`.
# Rank 0 prints six digits of them. For all digits, of all ranks, the next cell adds a handler from outside the script,
# in a `sitecustomize.py`, which Python imports when it starts.

# %%
HANDLER = """
import json, logging, os

class Keep(logging.Handler):
    def emit(self, record):
        with open(f"rank-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(record.args) + "\\n")

logging.getLogger("metrics").addHandler(Keep())
logging.getLogger("metrics").isEnabledFor = lambda level: True  # on ranks other than 0, too
"""
away = Path(tempfile.mkdtemp(prefix="away-"))
file = scripts["ddp"].write(away / "train.py")
(away / "hidden").mkdir()
(away / "hidden" / "labkit.py").write_text("raise ImportError('there is no labkit here')\n")
(away / "hidden" / "sitecustomize.py").write_text(HANDLER)
bare_env = {name: value for name, value in os.environ.items() if not name.startswith("LABKIT_")} | env
bare_env["PYTHONPATH"] = str(away / "hidden")
bare_env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{bare_env['PATH']}"  # where torchrun is


def away_from_labkit(command):
    words = ["env", *shlex.split(command)]  # env: the line may begin with variables
    return subprocess.run(words, cwd=away, env=bare_env, capture_output=True, text=True)


refused = away_from_labkit(f"{shlex.quote(sys.executable)} -c 'import labkit'")
print(refused.stderr.splitlines()[-1])
command = ddp.command.replace(shlex.quote(str(ddp.folder.script)), "train.py")
print("$", command)
bare = away_from_labkit(command)
print(bare.stderr if bare.returncode else f"exit code {bare.returncode}")


# %%
def read(rank):
    """What the script reported without labkit, as a table."""
    lines = (away / f"rank-{rank}.jsonl").read_text().splitlines()
    return pd.DataFrame(map(json.loads, lines)).assign(rank=rank)


alone = pd.concat([read(rank) for rank in range(N)])
curves["bare torchrun"] = losses(alone)
apart = (curves["bare torchrun"] - curves["ddp"]).abs().dropna()
claims.measure(bare_losses, apart.max(), run=ddp)
test_losses = [metrics["test_loss"].dropna().iloc[0] for metrics in (ddp.metrics(), alone)]
claims.measure("bare torchrun: difference in the test loss", test_losses[1] - test_losses[0], run=ddp)
claims.measure("bare torchrun: exit code", bare.returncode)
claims.measure("exit code of `import labkit` there", refused.returncode)
ran, taken = ddp.folder.script.read_bytes(), file.read_bytes()
claims.measure(copied, abs(len(ran) - len(taken)) + sum(a != b for a, b in zip(ran, taken, strict=False)), run=ddp)
imports = [node for node in ast.walk(ast.parse(taken)) if isinstance(node, ast.Import | ast.ImportFrom)]
claims.measure("imports of labkit in the script", sum("labkit" in ast.unparse(node) for node in imports))
print(f"{len(apart)} losses compared; test loss {test_losses[0]:.17g} and {test_losses[1]:.17g}")

# %% [markdown]
# Three curves that are one. (The lines lie on each other; that is the result.)

# %%
figure = go.Figure()
for (name, curve), dash, width in zip(curves.items(), ("solid", "dash", "dot"), (7, 4, 2), strict=True):
    curve = curve[0].sort_index()
    figure.add_scatter(x=curve.index, y=curve, name=name, mode="lines", line={"dash": dash, "width": width})
figure.update_layout(template="plotly_white", height=300, margin={"l": 50, "r": 20, "t": 40, "b": 40})
figure.update_layout(title="Loss of rank 0's samples", xaxis_title="step", yaxis_title="loss")
display(figure)

# %% [markdown]
# ## The other way round: a file of yours, as it is
#
# `labkit.launch` takes any script that torchrun would. This one has no cells and knows nothing of labkit; its ranks are
# watched all the same. Claimed: it runs unchanged, every step is counted, and each loss that labkit shows is one that
# the script had.

# %%
OWN = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(int(sys.argv[1])):
    x = torch.randn(256, 16)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
dist.barrier()
dist.destroy_process_group()
"""
own = away / "own.py"
own.write_text(OWN)
claims.predict("own file: bytes changed", 0)
claims.predict("own file: steps that labkit saw", steps)
claims.predict("own file: losses that labkit shows and the script did not have", 0)
run = labkit.launch(own, nproc_per_node=N, args=[steps], env=env)

# %%
run.wait()
ran = run.folder.script.read_bytes()
differ = abs(len(ran) - len(OWN)) + sum(a != b for a, b in zip(ran, OWN.encode(), strict=False))
claims.measure("own file: bytes changed", differ, run=run)
seen = run.metrics()
seen = seen[seen["rank"] == 0]
claims.measure("own file: steps that labkit saw", seen["step"].max(), run=run)
had, shown = set(map(float, run.logs(rank=0).split())), seen["loss"].dropna()
strange = "own file: losses that labkit shows and the script did not have"
claims.measure(strange, sum(loss not in had for loss in shown), run=run)
print(f"{len(shown)} of {len(had)} losses are shown: ten a second at most")

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `frozen=0` in `Model`: the two ways of planning agree, and the plan's warning is gone. The claims about bytes fail;
#   correct their arithmetic.
# - Put `random.seed()` in place of `random.manual_seed(0)` in `load_datasets`: each rank, and each run, draws pictures
#   of its own. Nothing crashes, the loss falls; which claims notice?
# - `self.spare = nn.Linear(8, 8)` in `Model`, unused: DDP stops after the first step and says which option it needs;
#   pass it to `labkit.launch`. What does FSDP say?
# - `nn.BatchNorm2d(width)` in place of `GroupNorm`: its statistics are those of a rank's own samples. Compare
#   `nproc_per_node` 1 and 2. (Lab 03 says why.)
# - `scripts["fsdp"].write("train.py")`, and take it to a machine that has torch and no labkit.
