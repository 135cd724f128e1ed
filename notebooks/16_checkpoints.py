# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 · Checkpoints: killed, and nothing lost
#
# **You will be able to** say what a checkpoint must hold so that a resumed run is the same as an uninterrupted one,
# save it in shards and load it on any number of ranks, and choose how often to save. **20 minutes. You need** labs 03
# and 05.
#
# With FSDP no rank has the whole model, so each writes the tensors that it holds: a **shard** of the checkpoint. All
# files go into a folder `step-8.tmp`. When all files are there, rank 0 writes `COMMIT.json`, with a checksum of each,
# and renames the folder to `step-8`. If a rank is killed before this, the older checkpoints are as they were. You will
# kill rank 0 right before it writes `COMMIT.json`.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the FSDP runs
disk_seconds: float = 0.5  # how long a slow disk takes for a checkpoint

# %%
from labkit import Script
from labkit_labs import Lesson, defined, draw, saving, sized

lab = Lesson("16_checkpoints", ranks=nproc_per_node)
draw.calls(
    {0: ["step 8", "copy", "write shard", "COMMIT.json", "rename"], 1: ["step 8", "copy", "write shard"]}, first=None
)

# %% [markdown]
# ## Your predictions
#
# A run has 14 steps, of which ten are an epoch, and saves a checkpoint after every fourth step and after the last. Rank
# 0 is killed while step 8 is being saved; then the same command is started again. In the second question, steps whose
# result was lost do not count. Training is in float64; two ranks share what is written.

# %%
again_trained = lab.ask("killed: steps that are trained again", default=8)
wrong = lab.ask("resumed: samples of the first epoch that are skipped or trained on twice", default=32)
by_rank_0 = lab.ask("bytes that rank 0 writes", default=1.3, unit="MB", about="163,848 parameters, trained with AdamW.")
flipped = lab.ask(
    "one bit of step 14 flipped: step that is resumed from", default=14, options={"14": 14, "12": 12, "0": 0}
)

# %% [markdown]
# ## Uninterrupted
#
# This small model prints the number of each sample that it is trained on, and the time. It sleeps, so that a step takes
# as long on busy cores. `async_save` copies what is to be saved, and a thread writes the copy while training continues.
# To make that visible, a checkpoint takes half a second to write.

# %%
import time

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, width), nn.Flatten(), nn.Linear(8 * width, 8))

    def forward(self, x):
        if self.training:
            print([time.monotonic(), x[:, 0].tolist()], flush=True)  # the numbers of its samples
            time.sleep(0.2)
        return self.layers(x)


# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, samples=80):
    x = torch.randint(256, (samples + 16, 8), generator=torch.Generator().manual_seed(0))
    y = x[:, 1] % 8
    x[:samples, 0] = torch.arange(samples)  # each sample begins with its number
    return TensorDataset(x[:samples], y[:samples]), TensorDataset(x[samples:], y[samples:])


# %%
SAVED, KILLED = 4, 8  # steps
own = {"model": Model, "data": load_datasets}
script, single = (Script.load(name, "checkpoints", "precision").with_cells(**own) for name in ("fsdp", "single"))
options = {"global_batch_size": 8, "precision": "fp64", "deterministic": True, "steps": 14}
slow = saving.on_slow_disk(script, disk_seconds)
uninterrupted = lab.launch(slow, save_every=SAVED, async_save=True, shown=False, **options)

# %% [markdown]
# ## Killed
#
# Now the disk hangs at step 8. As soon as all files of that checkpoint are there, rank 0 gets a SIGKILL. Nothing can
# catch it; it is also what the system sends when memory runs out.

# %%
killed = saving.killed_while_saving(lab, script, KILLED, save_every=SAVED, **options)
folder = killed.path / "checkpoints"
print("\n".join(f"{file.stat().st_size:9,} {file.relative_to(folder)}" for file in sorted(folder.glob("*/*"))))
lab.verify("killed: checkpoints marked as complete", 1, len([*folder.glob("step-*/COMMIT.json")]))

# %% [markdown]
# The files of step 8 may well be whole, but nothing says so. One dead rank ends the run of all, under DDP as under
# FSDP: only a checkpoint survives a failure, not a strategy.
#
# ## Resumed, twice
#
# The same command runs in the same folder, now saving synchronously. Then `single` resumes from a copy, with one rank
# and no FSDP. In float64, curves that should be equal are equal to 12 digits.
#
# A checkpoint holds three numbers for each parameter, the weight and AdamW's two moments: 12 bytes in float32, 24 here.
# (AdamW also counts the steps of each tensor, in 4 bytes; rank 0 writes what is the same on all ranks.)

# %%
copy = saving.copied(folder, "for one rank")
options |= {"shown": False}
again = lab.launch(slow, save_every=SAVED, checkpoint_dir=folder, **options)
alone = lab.launch(single, ranks=1, checkpoint_dir=copy, full_checkpoints=True, **options)

# %%
runs = {"uninterrupted": uninterrupted, "killed": killed, "resumed": again, "on one rank": alone}
lines = {name: run.losses().items() for name, run in runs.items()}
display(draw.curves(lines, "loss", marks={SAVED: "the last complete checkpoint", KILLED: "killed"}))
still = {"synchronous": saving.still_at(again, SAVED), "asynchronous": saving.still_at(uninterrupted, SAVED)}
display(draw.bars(still, unit="s", title="how long training stands still"))
shards = [[24 * part.numel() for part in parameter.chunk(lab.ranks)] for parameter in Model().parameters()]
formula = {f"rank {r}": sum(shard[r] for shard in shards) + 4 * len(shards) * (r == 0) for r in range(lab.ranks)}
written = {f"rank {r}": size for r, size in saving.tensor_bytes(folder / "step-14").items()}
draw.bars(written, formula, unit="B", title="what a rank writes")

# %%
lab.verify(again_trained, KILLED - SAVED, saving.trained_again(killed, again))
lab.verify(wrong, 0, saving.not_once(80, (killed, SAVED), (again, 10 - SAVED)))  # ten steps are an epoch
lab.verify("resumed: loss: difference", 1e-12, saving.apart(again, uninterrupted), how="at most")
lab.verify("on one rank: loss: difference", 1e-9, saving.apart(alone, uninterrupted), how="at most")
lab.verify_each({f"bytes that {rank} writes": (formula[rank], written[rank]) for rank in formula}, "B")
name = "an asynchronous save stops training, compared with a synchronous one, for"
lab.verify(name, 0.5, still["asynchronous"] / still["synchronous"], "%", how="at most", timed=True)

# %% [markdown]
# ## What a checkpoint holds
#
# - **Weights and the optimizer's moments.** The shards carry the names and places of tensors in the *whole* model, so
#   any number of ranks can load them, under another strategy or none.
# - **The step.** It says where in the epoch to go on; without it some samples are trained on twice and others never.
#   The order of the samples follows from the sampler's seed and the epoch (lab 03).
# - **Each rank's random states**, or dropout draws other masks than it would have without the interruption.
# - **Whatever else your loop remembers:** the learning-rate schedule, the scaler (lab 11), the best metric so far.
#
# A sharded checkpoint can be converted into a file for `torch.load` without ranks, and without labkit:

# %%
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

dcp_to_torch_save(folder / "step-14", killed.path / "one.pt")
one, other = (torch.load(f, weights_only=True)["model"] for f in (killed.path / "one.pt", copy / "step-14" / "full.pt"))
differences = {name: (one[name] - other[name]).abs().max().item() for name in one}
print("the largest difference to the file that one rank wrote:", max(differences.values()))
lab.verify("file: weights: difference", 1e-9, max(differences.values()), how="at most")

# %% [markdown]
# A disk may damage a file long after it was written. Flip one bit of the newest checkpoint, and let the script choose
# what to resume from:

# %%
damaged = saving.copy_with_a_bit_flipped(folder, "step-14/__0_0.distcp")
chosen = defined(script, "checkpoints").newest_whole(damaged).name
print("resumes from", chosen)
lab.verify(flipped, 12, int(chosen.removeprefix("step-")))
lab.score()

# %% [markdown]
# ## How often?
#
# A save that takes *c* seconds every *t* seconds costs c / t of the time. A failure loses half an interval on average;
# with one every *M* seconds that is t / 2M of the time. The sum is least at t = √(2 c M). For an asynchronous save *c*
# is only the time for which training stands still. (Llama 3 was trained on 16,384 GPUs with 419 unexpected
# interruptions in 54 days: one every three hours.)

# %%
lab.explore(saving.lost, save_every_minutes=[5, 20, 120], hours_between_failures=[1, 3, 24], save_seconds=[5, 60, 300])

# %% [markdown]
# ## In your own code
#
# With one device, or under DDP, `torch.save` on rank 0 is enough. A sharded model needs `torch.distributed.checkpoint`.
# Both functions are called on every rank; `load` needs a model and an optimizer created as for a new run, on any number
# of ranks:
#
# ```python
# import torch.distributed.checkpoint as dcp
# from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
#
#
# def save(folder, model, optimizer, step):
#     weights, moments = get_state_dict(model, optimizer)
#     state = {"model": weights, "optimizer": moments, "step": step}
#     dcp.save(state, checkpoint_id=f"{folder}/step-{step}.tmp")  # returns when all ranks have written
#     if dist.get_rank() == 0:
#         os.rename(f"{folder}/step-{step}.tmp", f"{folder}/step-{step}")
#
#
# def load(checkpoint, model, optimizer):
#     weights, moments = get_state_dict(model, optimizer)
#     state = {"model": weights, "optimizer": moments, "step": 0}
#     dcp.load(state, checkpoint_id=checkpoint)  # into the tensors of this rank
#     set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
#     return state["step"]
# ```
#
# `dcp.async_save` returns a future: wait for it before the next save, and only then rename. Hugging Face's
# `trainer.train(resume_from_checkpoint=True)` resumes from the newest checkpoint with optimizer, schedule, random
# states and the place in the epoch; Accelerate has `save_state` and `load_state`.
#
# ## On 2 × T4 and 8 × A100
#
# The model is a transformer of 203 million parameters. Under DDP all ranks have the same, so rank 0 writes all of it
# and the others wait; under FSDP all write at the same time. How long that takes depends on your disk. Meanwhile an
# asynchronous save holds its copy in host memory: as many bytes as all ranks of a host write.

# %%
gpt = {name.upper(): sized(Script.load(name), width=1024, layers=16, heads=16) for name in ("ddp", "fsdp")}
planned = lab.plans(gpt, global_batch_size=16)
total = 3 * planned.plans["DDP", "2xT4"].peak.categories["parameters"]
each = {"DDP: rank 0": total, "FSDP: each of 2": total / 2, "FSDP: each of 8": total / 8}
display(planned, draw.bars(predicted=each, unit="B", title="planned, not run: bytes that a rank writes"))

# %% [markdown]
# ## Try this
#
# 1. Resume as if the checkpoint did not have the place in the epoch: after `script` is made, `script =
#    script.with_cells(main=script.cells["main"].text.replace("divmod(step, per_epoch)", "(step // per_epoch, 0)"))`.
#    <details><summary>Answer</summary>After ten steps 32 of the 80 samples have been trained on twice and 32 not at
#    all; steps 11 to 14 make up for those. Nothing fails. The loss ends at 2.3 instead of 0.29, because after step 14
#    the second epoch has not begun.</details>
# 2. Put `nn.Dropout(0.1)` before the last layer. Which difference is no longer 0?
#    <details><summary>Answer</summary>The difference on one rank: its losses are off by up to 11%, because one rank
#    draws other masks than two. On two ranks the difference is still 0, since each rank's random state is in the
#    checkpoint.</details>
# 3. Before you resume, rename the folder by hand: `(folder / "step-8.tmp").rename(folder / "step-8")`.
#    <details><summary>Answer</summary>It is ignored, because it has no <code>COMMIT.json</code>: training resumes after
#    step 4. The mark counts, not the name.</details>
# 4. `disk_seconds = 2`: is an asynchronous save still almost free?
#    <details><summary>Answer</summary>No: training stood still for more than half of the time that a synchronous save
#    takes. Four steps take 0.8 s, so each save has to wait for the one before it.</details>
#
# ## Sources
#
# torch/distributed/checkpoint: `save`, `async_save`, `FileSystemReader`. Young, *A first order approximation to the
# optimum checkpoint interval* (CACM 17, 1974). *The Llama 3 Herd of Models* (arXiv 2407.21783), section 3.3.4.
