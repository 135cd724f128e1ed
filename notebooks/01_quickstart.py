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
# # 01 · One model, two ranks
#
# **You will be able to** say what a rank is, train your own model on two of them in two ways, watch them, and say what
# each way costs. **10 minutes. You need** to have trained a PyTorch or Hugging Face model on one device.
#
# Training on several devices means running several ordinary processes. Each has a number, its **rank**, counted from 0;
# the process itself is also called a rank. All ranks run the same script; each works on different samples. With a GPU
# for each rank, such as Kaggle's two T4s, each rank of this lab uses its own; with fewer, all ranks compute on the CPU,
# each on one core. The code is the same.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the DDP and FSDP runs
epochs: int = 5  # passes over the training data
global_batch_size: int = 128  # samples per step, over all ranks

# %%
import labkit
from labkit_labs import Lesson, draw

lab = Lesson("01_quickstart", ranks=nproc_per_node)
draw.replicas(nproc_per_node)

# %% [markdown]
# In every step the batch is split among the ranks. Each rank computes gradients for its own samples. Then the ranks
# average their gradients, so that all take the same step. That is all that **DDP** (distributed data parallel) does.
#
# ## Your model is an ordinary cell
#
# Run it, change it, test it here. When you launch, labkit copies the cell as it stands into the script, which calls
# `Model()` without arguments and applies cross-entropy to the scores that it returns. (Lab 21 does this with a Hugging
# Face model.)

# %%
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):  # images of handwritten digits in, ten scores out
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.fc1 = nn.Linear(128 * 3 * 3, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.interpolate(x, size=28)  # these digits have 8 x 8 pixels, MNIST's 28 x 28
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(torch.relu(conv(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


# %% [markdown]
# ## Your predictions
#
# Write down what you think before you run anything. A wrong prediction teaches you more than a right one. **DDP** is
# what the picture above shows; **FSDP** splits the batch in the same way, and the model as well.

# %%
parts = {"all of it": 1.0, "half of it": 0.5, "nothing: rank 0 has the model": 0.0}
losses = {"the same": 0.0, "a little higher": 0.05, "half": 0.5}
loss = lab.ask("the loss on two ranks, compared with one rank, in the first steps", default=0.05, options=losses)
of_fsdp = lab.ask("how much of the model a rank keeps with FSDP", default=0.5, options=parts)
speed = lab.ask("samples per second on two ranks with DDP: how many times those of one", default=2, unit="times")

# %% [markdown]
# ## Train on one rank
#
# `Script.load("single")` is a complete training script of about 370 lines, made of titled cells; `with_cells` puts your
# model into it. `launch` starts it and shows it live: you can run other cells while it trains. `wait` blocks until it
# has ended. In every lab, skip the lines with `lab.predict`, `lab.measure` and `lab.check`: they test the lab's own
# formulas.

# %%
from labkit import Script

options = {"epochs": epochs, "global_batch_size": global_batch_size, "env": lab.env}  # env: without GPUs, one core each
scripts = {name: Script.load(name, task="digits").with_cells(model=Model) for name in ("single", "ddp", "fsdp")}
of_ddp = "how much of the model a rank keeps with DDP"
lab.predict(loss, 1e-4, how="at most")
lab.predict_each({of_ddp: 1, of_fsdp: 1 / nproc_per_node}, within=0.02)
lab.predict(speed, nproc_per_node, "times", within=0.5, timed=True)
single = labkit.launch(scripts["single"], nproc_per_node=1, **options)

# %%
single.wait()

# %% [markdown]
# ## Train on two, with DDP
#
# Besides its first line, one cell of labkit's script changes, and the line that matters is the one with
# `DistributedDataParallel`. The rest was there already: `single`, too, starts a process group, chooses its device and
# splits every batch, but there is only one rank to split it among. The new terms are explained below.

# %%
scripts["ddp"].diff(scripts["single"])

# %% [markdown]
# - **torchrun**: PyTorch's program that starts the ranks. Their number is the **world size**.
# - **process group**: ranks that know how to reach each other. A **mesh** arranges ranks in a grid, here a single row.
# - **replica**: a whole copy of the model. `placed()` moves it to the rank's device.
# - **collective**: an operation in which all ranks take part. An **all-reduce** adds up a tensor over all ranks; DDP
#   also divides by their number.
# - **bucket**: several gradients sent together (lab 03). `gradient_as_bucket_view` only saves memory: the gradients are
#   stored inside the buckets instead of being copied there.

# %%
ddp = labkit.launch(scripts["ddp"], nproc_per_node=nproc_per_node, **options)

# %%
ddp.wait()

# %% [markdown]
# **How to read this.** The time beside *succeeded* includes starting Python and torch. *Communication* is the time that
# a rank spends in collectives. The faster rank waits in them for the slower one, so the smaller of the two shares is
# the cost of sending, which the headline and the table below show; the rest of the larger share is lost time. *State
# held* is the parameters, gradients and optimizer state that a rank keeps; *peak resident set* covers the whole
# process, mostly Python and torch, and says little about a model this small. *Busy* covers the whole machine, including
# other programs.
#
# ## Train on two, with FSDP
#
# DDP keeps the whole model on every rank. **FSDP** (fully sharded data parallel) cuts the model up: each rank keeps a
# part, a **shard**. Every rank still computes all layers: for each layer it gathers the shards of the other ranks, and
# frees them afterwards (lab 05 draws this).

# %%
draw.replicas(nproc_per_node, share=1 / nproc_per_node)

# %%
fsdp = labkit.launch(scripts["fsdp"], nproc_per_node=nproc_per_node, **options)

# %%
fsdp.wait()

# %% [markdown]
# ## Compare
#
# Ranks that share cores vary in speed from run to run: FSDP may even look faster than DDP. Here only *state held* can
# be compared safely; if each rank has its own GPU, so can times.

# %%
comparison = labkit.compare([single, ddp, fsdp])
display(comparison)

# %%
table = comparison.table.set_index("script")
first = {run.script.name: run.losses().loc[1:5] for run in (single, ddp, fsdp)}
off = max(((first[name] - first["single"]).abs() / first["single"]).max() for name in ("ddp", "fsdp"))
held, rate = table.held_bytes / table.held_bytes["single"], table.throughput / table.throughput["single"]
results = {loss: off, of_ddp: held["ddp"], of_fsdp: held["fsdp"], speed: rate["ddp"]}
lab.measure_each(results, run=ddp)
print(f"losses of the first five steps: the largest relative difference is {off:.0e}")
frames = [run.metrics().fillna({"communication": 0}) for run in (single, ddp)]
alone, beside = [1e3 * (frame.step_seconds - frame.communication).median() for frame in frames]
print(f"computing in a step: {alone:.0f} ms on one rank, {beside:.0f} ms on each of {lab.ranks} with DDP")
lab.score()

# %% [markdown]
# ## Why
#
# **The same loss.** The three runs start from the same weights, and step *k* trains on the same 128 samples. A mean
# over 128 samples is the mean of two means over 64. Only the order of the additions differs, so the losses of the first
# steps agree to about seven digits, as many as fp32 has; later they drift apart a little because the optimizer
# amplifies rounding. Each rank logs the loss of its own 64 samples; it is the mean over both ranks that agrees.
#
# **Whole or sharded.** *State held* is 16 bytes per parameter: 4 for the weight, 4 for its gradient, 8 for Adam's
# state. DDP repeats it on every rank; FSDP divides it by the number of ranks.
#
# **Less than twice as fast.** Each rank has half of the samples, so at best it computes for half as long. *Computing in
# a step*, printed above, is the time that it took: anything above half is lost because the ranks share caches, memory
# and cores with each other and with other programs (on two cores, if *busy* in the single run's panel is well above
# 50%, the other core was not free). The rest of the lost time is spent sending and waiting for the other rank. With a
# GPU for each rank, the first part disappears. (The table covers whole runs, the panels only the last steps.)
#
# ## On 2 × T4 and 8 × A100
#
# The planner works out memory and time from the script itself; nothing is run.

# %%
lab.plans({"DDP": scripts["ddp"], "FSDP": scripts["fsdp"]}, global_batch_size=global_batch_size)

# %% [markdown]
# A model this small fits everywhere, so the few MiB that FSDP saves do not matter, and its step is longer: on two T4s
# because it waits more; on eight A100s because the CPU takes longer to launch its many small operations than the GPU
# takes to run them. Labs 04 and 05 have models that need FSDP. The bars show one moment, the peak of a step. At that
# moment an FSDP rank also holds gathered parameters and gradients that are not yet reduced; both are shown as
# *communication*.
#
# ## Leave with a plain script
#
# The folder of a run holds its script. It is plain PyTorch, and the command below trains the same model without labkit.
# The settings before `torchrun`, if any, are for the CPU: `CUDA_VISIBLE_DEVICES=''` hides GPUs, `GLOO_SOCKET_IFNAME=lo`
# keeps gloo, which carries messages between CPUs, on this machine, and `OMP_NUM_THREADS=1` gives each rank one thread.
# On GPUs, leave them out.
#
# `labkit.launch("my_trainer.py", nproc_per_node=2)` runs a script of your own and watches it. But torchrun only starts
# it twice. A Hugging Face Trainer does the rest by itself; its batch size is per device, so two ranks double the global
# batch. A loop of your own must start the process group, choose its GPU, wrap the model and give each rank different
# samples (`DistributedSampler`), as labkit's script does; lab 18 has a larger model of your own.

# %%
lab.check()
print(ddp.command.replace(" --", " \\\n    --"))

# %% [markdown]
# ## Try this
#
# 1. Set `options["global_batch_size"] = 100` and launch DDP with `nproc_per_node=3`. What do you expect?
#    <details><summary>Answer</summary>Nothing is started: "global_batch_size=100 cannot be split evenly into 3 data
#    ranks; the nearest sizes are 99 or 102".</details>
# 2. Put `if len(x) == 64: raise ValueError("boom")` into `Model.forward`, and run the cells from there on. Which run
#    fails, and what does labkit say?
#    <details><summary>Answer</summary>DDP and FSDP fail: each of their two ranks gets 64 samples, the single rank all
#    128. "ranks 0, 1 failed: ValueError: boom", and then the cell, <code>model</code>, and the line in it.</details>
# 3. Launch DDP with `precision="bf16", save_every=10` in addition to the options ("fp16" on a T4, lab 10). What has
#    changed in the script?
#    <details><summary>Answer</summary>Two cells, <code>precision</code> and <code>checkpoints</code>, have replaced
#    trivial ones. The script has about twice as many lines; it contains only what you ask for.</details>
# 4. Train on MNIST instead: run the cell below, then `Script.load(name, task="digits").with_cells(model=Model,
#    data=load_datasets)`, and pass `data_dir=labkit.fetch("mnist")` to `launch`.
#    <details><summary>The cell</summary>
#
#    ```python
#    import gzip
#    from pathlib import Path
#
#    import numpy as np
#    import torch
#    from torch.utils.data import TensorDataset
#
#
#    def read_idx(folder, name):  # one of MNIST's files, packed or not
#        path = Path(folder, name)
#        raw = path.read_bytes() if path.exists() else gzip.decompress(Path(folder, f"{name}.gz").read_bytes())
#        shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
#        return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape).copy())
#
#
#    def load_datasets(data_dir):  # (train, test)
#        parts = [(read_idx(data_dir, f"{p}-images-idx3-ubyte"), read_idx(data_dir, f"{p}-labels-idx1-ubyte"))
#                 for p in ("train", "t10k")]
#        return tuple(TensorDataset(images[:, None] / 255.0, labels.long()) for images, labels in parts)
#    ```
#
#    </details>
#
# ## Sources
#
# The model comes from an article, *Distributed Training with PyTorch: DDP vs FSDP*, which trains it on MNIST. Li et
# al., *PyTorch Distributed* (2020, arXiv 2006.15704), describes DDP; Zhao et al., *PyTorch FSDP* (2023, arXiv
# 2304.11277), FSDP.
#
# **Where next?** 02: what ranks say to each other. 03: one T4 against two. 05: fp16 and its scaler, which a T4 needs.
# 11: checkpoints. 12: which strategy. 16: Kaggle's two T4s. 18: a Hugging Face model, fine-tuned.
