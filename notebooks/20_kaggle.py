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
# # 20 · Kaggle: a session ends, training need not
#
# **You will be able to** train your own script on Kaggle's two T4s, end a run at a deadline and go on in another
# session as if nothing had happened, and say how large a model two T4s can train and whether its checkpoints fit into
# 20 GB.
# **25 minutes. You need** labs 04, 05 and 16.
#
# Kaggle lends two T4s for free, at most twelve hours at a time. Each **session** is a new machine; only 20 GB in
# `/kaggle/working` outlive it. At a **deadline** all ranks finish the same step, save a checkpoint, and end without an
# error; the next session loads it. This notebook runs on a laptop and on Kaggle, cell for cell.
#
# ## On Kaggle: what to click, paste and expect
#
# This section needs no other lab. labkit itself has not yet run on Kaggle: the steps were tried in an image with
# Kaggle's versions, and what is said of Kaggle's pages is from others.
#
# Once: register at kaggle.com and verify a phone number in its settings, without which there are neither GPUs nor
# internet. Then, with your own script:
#
# 1. In a terminal here, `labkit kaggle dataset --user ME` writes labkit's wheel as a dataset and says how to upload it
#    (or in the browser: Datasets → New Dataset, and drop the wheel into it).
# 2. On Kaggle: Create → New Notebook. Settings → Accelerator → GPU T4 x2. Add Input → your dataset with the wheel.
#    Internet may stay off.
# 3. In a terminal here, `labkit kaggle cell` prints a cell. Paste it as the first one and run it. Expect, after some
#    seconds: `labkit 0.1.0 has all packages that it needs here.`
# 4. Write your script there with a cell that begins with `%%writefile train.py`, and launch it:
#    `run = labkit.launch("train.py", nproc_per_node=2)`. The call returns, and this view moves below the cell:
#
# ![The live view of a script on two ranks: charts, a row for each rank, its log, and buttons](attachment:view.webp)
#
# 5. Look at `labkit.doctor()`: how much time and disk the session has left. Stop with `run.stop()`.
# 6. Save Version → Save & Run All runs all of it again in a new session, also with the browser closed. There labkit
#    waits for each run, and a run that fails also fails the notebook. The Output tab then has `runs/`; with
#    `run.report()` as the last line, also a page about the run.
#
# **A notebook that you have here**, such as this lab, goes in one file, with labkit, the modules beside it, the scripts
# that it launches and its small data files:
#
#     labkit kaggle export notebooks/20_kaggle.ipynb --user ME -p plans False
#
# On Kaggle: Create → New Notebook, File → Import Notebook, and choose the file, which is in `labkit-20-kaggle` in the
# current folder; set the accelerator; then Run All, or cell by cell to answer the questions. None of the steps above is
# needed. (A lab pasted into a notebook of your own needs labkit's labs as well: `--labs` in steps 1 and 3.) Or let
# `labkit kaggle push notebooks/20_kaggle.ipynb -p plans False` do all of this: it sends the notebook to two T4s, prints
# here what it prints there, and puts its runs into `runs/` beside yours.
#
# The picture is from a real run on two CPU cores, in JupyterLab with Kaggle's versions (Python 3.12, torch 2.10,
# ipykernel 6.17.1, ipywidgets 8.1.5, IPython 7.34). *Docs* means copies of kaggle.com/docs/notebooks and
# /docs/efficient-gpu-usage that others have kept (August and September 2026):
#
# | | | from |
# |---|---|---|
# | two T4s | in the editor: Settings → Accelerator → GPU T4 x2; 4 cores, 29 GB of memory | docs |
# | internet | Settings → Internet, on in a new notebook; asks for a verified phone number | docs; a secondary source |
# | import | File → Import Notebook, which replaces the new notebook's cell | fastai/course22-web #47 |
# | a dataset | lies in `/kaggle/input/datasets/USER/NAME`, earlier in `/kaggle/input/NAME` | m45-imf-analysis #18 |
# | a session | 12 hours at most; when idle, 20 minutes (another page of theirs says 60) | docs |
# | Save & Run All | a new, clean session, goes on with the browser closed, the same 12 hours | docs |
# | quota | 30 hours of GPU a week "or sometimes higher"; two T4s count once | docs; staff, topic 361104 |
# | what is kept | 20 GB in `/kaggle/working`; all else goes | docs |
# | go on later | a version's output is input of the next (Add Input), read-only below `/kaggle/input` | docs |
# | software | Python 3.12, torch 2.10 with CUDA 12.8 | issue kaggle-cli #1151, July 2026 |
# | a T4's memory | torch sees 14.74 GiB; no bf16 | out-of-memory messages in issues |
#
# The rest of this lab is about the line "a session".

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the runs
steps: int = 16  # optimizer steps in all
deadline_seconds: float = 4.0  # of the first session; on Kaggle some 11.5 hours: 41_400
plans: bool = True  # plan for two T4s, too: some 40 seconds

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.other_runs import folders, losses, newest, size_of

lab = Lesson("20_kaggle", ranks=nproc_per_node)
draw.calls({"session 1": ["step 7", "step 8", "save"], "session 2": [""] * 3 + ["load", "step 9"]}, first=None).still()

# %% [markdown]
# ## Your predictions
#
# The run has 16 steps of half a second, in fp32 with AdamW and dropout; the first session's deadline comes 4 seconds
# after its first step. A third run, which is not interrupted, shows what should have come out.

# %%
done = lab.ask("session 1: steps until the deadline", default=16)
per_parameter = lab.ask("checkpoint: bytes for each parameter", default=4)
equal = {"not a bit": 0.0, "as by rounding": 1e-6, "visibly": 0.01}
apart = lab.ask("session 2: largest difference of a loss to the uninterrupted run", default=0.01, options=equal)

# %% [markdown]
# ## A session that ends
#
# The model sleeps in each training step, so that a step takes as long on busy cores. `checkpoint_dir` and
# `deadline_seconds` are options of the extra `checkpoints`, which `launch` adds when they are given. The ranks check
# together once a second whether it is time, so they may be a second late.

# %%
import time

import torch
from torch import nn

STEP_SECONDS = 0.5


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
options = {"steps": steps, "global_batch_size": 16, "deterministic": True}
first_folder = working[0] / "checkpoints"
one = lab.launch(script, checkpoint_dir=first_folder, deadline_seconds=deadline_seconds, **options)
last, path = newest(first_folder)
bytes_each = size_of(path) / sum(p.numel() for p in Model().parameters())
print(f"stopped after step {last}; the checkpoint has {bytes_each:.2f} bytes for each parameter")
lab.verify(done, deadline_seconds / STEP_SECONDS, last, within=1.5 / deadline_seconds, timed=True)
lab.verify(per_parameter, 3 * 4, bytes_each, within=0.05)

# %% [markdown]
# A checkpoint holds the weights and AdamW's two moments, 12 bytes per parameter in fp32. Gradients are not in it: the
# next step computes new ones.
#
# ## A session that resumes
#
# On Kaggle the next session adds the first one's output as input and copies it to where it can be written. The command
# is the same.

# %%
import shutil

shutil.copytree(working[0] / "checkpoints", working[1] / "checkpoints")
two = lab.launch(script, checkpoint_dir=working[1] / "checkpoints", shown=False, **options)
whole = lab.launch(script, shown=False, **options)

# %%
lab.verify("session 2: resumes after step", last, losses(two).index[0] - 1)
lab.verify(apart, 0, (losses(two) - losses(whole)).abs().max())
lines = {"uninterrupted": losses(whole).items(), "session 1": losses(one).items(), "session 2": losses(two).items()}
draw.curves(lines, "loss of rank 0", marks={last + 0.5: "the deadline"})

# %% [markdown]
# Not a bit differs, because the checkpoint also has the place in the data and every rank's random states, for dropout.
# Without one of these the loss would go on falling, but along another curve. A session that ends before its deadline
# loses what came after its last checkpoint, so save at intervals, too: `save_every=…`.
#
# **In your own loop** all ranks must stop after the same step. Their clocks differ, so one of them decides:
#
# ```python
# late = torch.tensor(float(time.monotonic() > deadline), device=device)
# dist.broadcast(late, src=0)  # rank 0's clock counts
# if late:
#     random_states = torch.get_rng_state(), torch.cuda.get_rng_state()
#     save(model, optimizer, scheduler, scaler, step, random_states)
#     break
# ```
#
# Random states differ from rank to rank, so each rank saves its own (lab 16 says how shards are saved).
#
# ## What fits
#
# **On the disk.** labkit keeps the two newest checkpoints while it writes the third, for which it requires 1.2 times
# its size: 3.2 × 12 bytes per parameter in all. So 20 GB are enough for 520 million parameters in fp32.
#
# **On the T4s.** Take GPT-2 large's width, and one sample of 1,024 tokens on each rank. The peak is where backward
# begins: all activations are there, and the loss needs three tensors as large as the logits. Without activation
# checkpointing a rank of DDP then holds 16 bytes per parameter (lab 04: its buckets are always there). A rank of FSDP
# holds half of 12, because no gradients exist yet, and the whole root (embeddings and head). (AdamW's update, 20 bytes
# per parameter and no activations, needs slightly less here.)

# %%
width, heads, context, vocabulary = 1280, 20, 1024, 50257
block, root = 12 * width**2 + 13 * width, (2 * vocabulary + context + 2) * width  # parameters
kept, loss = 4 * context * (16 * width + heads + 4), 3 * 4 * context * vocabulary  # bytes: of a block; for the loss
first = {"DDP": 16 * root + loss, "FSDP": (12 / 2 + 4) * root + loss}
further = {"DDP": 16 * block + kept, "FSDP": 12 / 2 * block + kept}
usable = 14.24 * 2**30  # of a T4 (lab 04)


def peak_of(blocks):
    held = {name: first[name] + blocks * further[name] for name in first}
    return draw.bars(predicted=held, unit="B", limit=usable, limit_name="a T4 has", title=f"{blocks} blocks")


lab.explore(peak_of, blocks=[8, 16, 32, 48, 64])
lab.score()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# This is the planner's answer, with one more block than DDP should hold on two T4s, and with as many as FSDP should:

# %%
most = {name: int((usable - first[name]) / further[name]) for name in first}
print(*(f"{name}: {n} blocks, {(root + n * block) / 1e6:.0f} million parameters" for name, n in most.items()), sep="\n")
if plans:
    sizes, blocks = {"width": width, "heads": heads, "context": context, "vocabulary": vocabulary}, most.copy()
    blocks["DDP"] += 1
    gpt = {name: sized(Script.load(name.lower()), **sizes, layers=count) for name, count in blocks.items()}
    display(*(lab.plans(gpt, devices=(device,), global_batch_size=n) for device, n in (("2xT4", 2), ("8xA100 80", 8))))
else:
    print("(the plan is skipped on this page: set plans = True)")

# %% [markdown]
# On two T4s FSDP trains almost twice as many parameters as DDP. But the disk is the tighter limit: for more than 520
# million parameters, upload checkpoints during the session and delete them.
#
# ## The next session
#
# On Kaggle one of labkit's scripts gets its deadline from the session: its end, less half an hour. For a run that
# outlives a session, push again with `--input` and the kernel's name, or add the earlier version with Add Input;
# `labkit.kaggle.previous_checkpoints()` is then the folder for `checkpoint_dir`.
#
# ## Try this
#
# 1. Let the second session forget the first: `(working[1] / "checkpoints").mkdir()` in place of `shutil.copytree(…)`.
#    <details><summary>Answer</summary>It runs without an error, and with the same seed even its losses are those of the
#    uninterrupted run. Only its first step shows it: it began with step 1 again. On Kaggle that costs hours.</details>
# 2. Give session 2 `Script.load("ddp").with_cells(model=Model, data=load_datasets)`.
#    <details><summary>Answer</summary>DDP loads what FSDP saved, and on two ranks goes on exactly, to the last bit: the
#    difference in a loss is 0.</details>
# 3. Give session 2 one rank (`ranks=1`).
#    <details><summary>Answer</summary>It loads. But the losses of rank 0 are now those of the whole batch, and one rank
#    draws other dropout masks than two, so the test loss differs a little as well. Without dropout a global batch has
#    the same gradient on any number of ranks.</details>
#
# ## Sources
#
# The table at the top. docs/how_to/kaggle.md; docs/evidence/memory.md.
