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
# **You will be able to** end a training at a deadline and go on in another session as if nothing had happened, say how
# large a model two T4s can train, and whether its checkpoints fit into 20 GB. **20 minutes. You need** labs 06, 07 and
# 11.
#
# Kaggle lends two T4s for nothing, at most twelve hours at a time. This notebook runs on a laptop and on Kaggle, cell
# for cell. A **session** is a machine that is new each time; only 20 GB in `/kaggle/working` outlive it. At a
# **deadline** all ranks finish the same step, save, and leave with exit code 0; the next session loads what they have
# left.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the runs
steps: int = 16  # optimizer steps in all
deadline_seconds: float = 4.0  # of the first session; on Kaggle some 11.5 hours: 41_400
plans: bool = True  # plan for two T4s, too: some 40 seconds

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized
from labkit.lessons.labs.sessions import folders, losses, newest, size_of, steps_of, test_loss, twice

lab = Lesson("16_kaggle", ranks=nproc_per_node)
draw.calls({"session 1": ["step", "step", "save"], "session 2": ["", "", "", "load", "step", "step"]}, first=7)

# %% [markdown]
# ## Your predictions
#
# 16 steps of half a second; the first session's deadline comes 4 seconds after its first step.

# %%
done = lab.ask("session 1: steps until the deadline", default=16)
per_parameter = lab.ask("checkpoint: bytes for each parameter, in float64", default=8)
repeated = lab.ask("both sessions: steps taken twice", default=1)
apart = lab.ask("both sessions: largest difference in a loss to an uninterrupted run", default=1)

# %% [markdown]
# ## A session that ends
#
# The model sleeps in each training step; dropout makes resuming harder, since every rank's random numbers must
# continue. `checkpoint_dir` and `deadline_seconds` are options of the extra `checkpoints`, which `launch` adds when
# they are given. The ranks ask each other once a second whether it is time, so they are up to a second late.

# %%
import time

import torch
from torch import nn

STEP_SECONDS = 0.5  # it sleeps, so that a step takes as long on busy cores


class Model(nn.Module):
    def __init__(self, width=4096):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 8))

    def forward(self, x):
        if self.training:
            time.sleep(STEP_SECONDS)
        return self.layers(x)


# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    random = torch.Generator().manual_seed(0)
    x, directions = torch.randn(1280, 64, generator=random), torch.randn(64, 8, generator=random)
    y = (x @ directions).argmax(1)
    return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])


# %%
working = folders(2)  # each session's /kaggle/working
script = Script.load("fsdp").with_cells(model=Model, data=load_datasets)
options = {"steps": steps, "global_batch_size": 16, "precision": "fp64", "deterministic": True}
lab.predict(done, deadline_seconds / STEP_SECONDS, within=1.5 / deadline_seconds, timed=True)
lab.predict(per_parameter, 3 * 8, within=0.03)
first_folder = working[0] / "checkpoints"
one = lab.launch(script, checkpoint_dir=first_folder, deadline_seconds=deadline_seconds, **options)
last, path = newest(first_folder)
lab.measure_each({done: last, per_parameter: size_of(path) / sum(p.numel() for p in Model().parameters())}, run=one)

# %% [markdown]
# A checkpoint holds the weights and AdamW's two moments: 12 bytes a parameter in float32, 24 in the float64 used here,
# in which "the same" can mean to the last bit.
#
# ## A session that resumes
#
# On Kaggle the next session adds the first one's output as input and copies it to where it can be written. The command
# is the same. A third run, which nobody interrupts, says what should have come out.

# %%
import shutil

shutil.copytree(working[0] / "checkpoints", working[1] / "checkpoints")
resumes, whole_test = "session 2: resumes after step", "both sessions: difference in the test loss"
lab.predict_each({resumes: last, "both sessions: steps": steps, repeated: 0, apart: 0, whole_test: 0})
two = lab.launch(script, checkpoint_dir=working[1] / "checkpoints", **options)
whole = lab.launch(script, **options)

# %%
results = {
    "session 2: resumes after step": losses(two).index[0] - 1,
    "both sessions: steps": steps_of(one) + steps_of(two),
}
results |= {repeated: twice(one, two), apart: (losses(one, two) - losses(whole)).abs().max()}
results |= {whole_test: test_loss(two) - test_loss(whole)}
lab.measure_each(results, run=two)
lines = {"uninterrupted": losses(whole).items(), "session 1": losses(one).items(), "session 2": losses(two).items()}
display(draw.curves(lines, "loss of rank 0", marks={last + 0.5: "the deadline"}))
lab.score()

# %% [markdown]
# Besides weights and moments a checkpoint has the place in the data and every rank's random numbers. Without one of
# them the curve would go on, and be another one. A session that is cut without a deadline loses what came after its
# last checkpoint: `save_every=…`.
#
# ## What fits
#
# A checkpoint is written beside the two that are kept, and the script wants 1.2 times its size free before it starts to
# write. So 20 GB are full with 20 / (3.2 × 12) billion parameters in float32: 520 million. And the T4s? Take GPT-2
# large's width. In float32 a parameter, its gradient and AdamW's moments take 16 bytes. The peak is where backward
# begins. DDP holds 16 bytes per parameter then; FSDP on two ranks half of 12, for there are no gradients yet, and the
# root (embeddings and head) whole. Activations are divided by neither. By hand:

# %%
width, heads, context, vocabulary = 1280, 20, 1024, 50257  # one sample on each rank
block, root = 12 * width**2 + 13 * width, (2 * vocabulary + context + 2) * width  # parameters
kept, loss = 4 * context * (16 * width + heads + 4), 3 * 4 * context * vocabulary  # bytes: of a block; of the logits
first = {"DDP": 16 * root + loss, "FSDP": (12 / 2 + 4) * root + loss}
further = {"DDP": 16 * block + kept, "FSDP": 12 / 2 * block + kept}
usable = (14.74 - 0.5) * 2**30  # of a T4, without CUDA's context and NCCL's buffers: half a GiB, assumed


def peak_of(blocks):
    held = {name: first[name] + blocks * further[name] for name in first}
    return draw.bars(predicted=held, unit="B", limit=usable, limit_name="a T4 has", title=f"{blocks} blocks")


lab.explore(peak_of, blocks=[8, 16, 32, 48, 64])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# `labkit.plan` knows none of this arithmetic. It rehearses the very script, with one block more than DDP should hold on
# two T4s, and with as many as FSDP should.

# %%
if plans:
    most = {name: int((usable - first[name]) / further[name]) for name in first}
    blocks = {"DDP": most["DDP"] + 1, "FSDP": most["FSDP"]}
    sizes = {"width": width, "heads": heads, "context": context, "vocabulary": vocabulary}
    gpt = {name: sized(Script.load(name.lower()), **sizes, layers=count) for name, count in blocks.items()}
    planned = lab.plans(gpt, devices=("2xT4",), global_batch_size=2)
    larger = lab.plans(gpt, devices=("8xA100 80",), global_batch_size=8)
    display(planned, larger)
    for name, plan in ((name, planned.plans[name, "2xT4"]) for name in gpt):
        room = plan.device.usable_by(2) - plan.rehearsed.bytes
        lab.predict(f"{name} on 2 × T4: most blocks that fit", most[name])
        lab.calculated(f"{name} on 2 × T4: most blocks that fit", blocks[name] + int(room // further[name]))

# %% [markdown]
# ## There and back
#
#     labkit kaggle push 16_kaggle.ipynb -p plans False
#
# in a terminal sends this notebook to two T4s, prints here what it prints there, and puts its runs into `runs/` beside
# yours. There one of labkit's scripts gets its deadline from the session: its end, less half an hour. For a training
# that outlives a session, ask for what the version before has left, and push with `--input` and the kernel's name:
# `labkit.kaggle.previous_checkpoints()` is the folder for `checkpoint_dir`. "Save & Run All" is papermill: labkit waits
# for each run, keeps static figures, and a training that fails fails the notebook.
#
# None of the following was measured here. *Docs* are copies of kaggle.com/docs/notebooks and /docs/efficient-gpu-usage
# that others have kept (August and September 2026).
#
# | | | from |
# |---|---|---|
# | two T4s | in the editor: Settings → Accelerator → GPU T4 x2; 4 cores, 29 GB of memory | docs |
# | internet | Settings → Internet, on in a new notebook; asks for a verified phone number | docs; a secondary source |
# | a session | 12 hours at most; when idle, 20 minutes (another page of theirs says 60) | docs |
# | Save & Run All | a new, clean session, goes on with the browser closed, the same 12 hours | docs |
# | quota | 30 hours of GPU a week "or sometimes higher"; two T4s count once | docs; staff, topic 361104 |
# | what is kept | 20 GB in `/kaggle/working`; all else goes | docs |
# | go on later | a version's output is input of the next (Add Input), read-only below `/kaggle/input` | docs |
# | software | Python 3.12, torch 2.10 with CUDA 12.8 | issue kaggle-cli #1151, July 2026 |
# | a T4's memory | torch sees 14.74 GiB; no bf16 | out-of-memory messages in issues |
#
# ## Try this
#
# 1. Let the second session forget the first: `(working[1] / "checkpoints").mkdir()` in place of `shutil.copytree(…)`.
#    <details><summary>Answer</summary>It runs without an error, and with the same seed even its losses are those of the
#    uninterrupted run. Only the counts notice: 24 steps were made, and 8 of them twice. On Kaggle those are
#    hours.</details>
# 2. Give session 2 `Script.load("ddp").with_cells(model=Model, data=load_datasets)`.
#    <details><summary>Answer</summary>DDP loads what FSDP saved, and on two ranks goes on to the last bit: the
#    difference in a loss is 0.</details>
# 3. Give session 2 one rank (`ranks=1`).
#    <details><summary>Answer</summary>It loads. But the losses of rank 0 are now those of the whole batch (up to 0.41
#    away), and the test loss differs by 0.004: one rank draws other dropout than two. Without dropout a global batch
#    has the same gradient on any number of ranks.</details>
#
# ## Sources
#
# The table above. docs/kaggle.md; docs/memory.md.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002, lines 940-964) recommends Kaggle and says nothing about the end of a session. Its way to the
# accelerator (line 947, Runtime → Change Runtime Type) is the menu of Colab. It recommends DDP up to 1B parameters on
# two to four GPUs (line 882) and names no GPU there; on two T4s the plan says about a third of that without
# recomputed activations.

# %%
lab.check()
