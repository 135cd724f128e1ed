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
# **You will be able to** say what a rank is, train your own model on two of them, read what the live panel shows, find
# the line that failed on one rank, and name a strategy for a model that is too large for your GPUs. **20 minutes.
# You need** to have trained a PyTorch or Hugging Face model on one device.
#
# Training on several devices means running several ordinary processes. Each has a number, its **rank**, counted from 0;
# the process itself is also called a rank. All ranks run the same script, each on samples of its own. With a GPU for
# each rank, such as Kaggle's two T4s, each rank uses its own; with fewer, all ranks compute on the CPU, each on one
# core. The code is the same.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks of the DDP and FSDP runs
epochs: int = 5  # passes over the training data
global_batch_size: int = 128  # samples per step, over all ranks

# %%
import labkit
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("01_quickstart", ranks=nproc_per_node)
draw.replicas(nproc_per_node)

# %% [markdown]
# In every step the batch is divided among the ranks. Each rank computes gradients for its own samples. Then the ranks
# average their gradients, so that all of them take the same step. This is **DDP** (distributed data parallel): every
# rank holds the whole model.
#
# ## Your model is an ordinary cell
#
# Run it, change it, test it here. When you launch, labkit copies the cell as it stands into the training script, which
# calls `Model()` without arguments and applies cross-entropy to the scores that it returns. (Lab 22 does this with a
# Hugging Face model.)

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
# ## Three lines to a live run
#
# `Script.load("ddp", task="digits")` is a complete training script of plain PyTorch, made of titled cells;
# `with_cells` puts your model into it. `launch` starts it on two ranks and returns at once, so you can run other cells
# while it trains. A panel appears below the cell. From top to bottom it has
#
# - the state of the run, and how far it is. When the run has ended, labkit adds what it concludes from the records: was
#   the loss still falling, what did the time go into, were other programs in the way?
# - four charts with a line for each rank: the loss, the samples per second, the time of a step, the memory of the
#   process. The losses of the ranks differ a little because each has different samples.
# - a table with a row for each rank. *Input wait* is the share of its time in which it waits for samples,
#   *communication* that in which it exchanges tensors with other ranks, waiting for them included. *State held* is
#   what it keeps from step to step: parameters, gradients and the optimizer's state. *Peak resident set* is the whole
#   process, mostly Python and torch; on GPUs there are *peak allocated*, the most that tensors have taken, and
#   *reserved*, what torch has taken from the GPU for them.
# - the machine, where *busy* includes all other programs, and the end of the log of rank 0.

# %%
script = Script.load("ddp", task="digits").with_cells(model=Model)
options = {"epochs": epochs, "global_batch_size": global_batch_size, "env": lab.env}  # env: without GPUs, one core each
ddp = labkit.launch(script, nproc_per_node=nproc_per_node, **options)

# %%
ddp.wait()

# %% [markdown]
# `wait` blocks until the run has ended, and raises an error if it failed.
#
# ## What DDP changes in a script
#
# labkit has the same script for one rank: `single`. Your model, the data, the loss and the training loop are the same;
# a dozen lines differ. (Exercise 5 changes the loss and the optimizer.)

# %%
alone = Script.load("single", task="digits").with_cells(model=Model)
script.diff(alone)

# %% [markdown]
# - **The first line** says how to start the script. `torchrun` is PyTorch's program that starts the ranks, here
#   two (`--nproc-per-node=2`) on this machine only (`--standalone`), and tells each of them its number.
# - **`make_mesh`** arranges the ranks. Ranks that know how to reach each other form a **process group**, which both
#   scripts start; `dist.get_world_size()` is the number of its ranks. A **mesh** arranges them in a grid whose axes
#   have names. Here it is a single row, once of one rank, once of all. Its axis is called `data`, because the ranks
#   along it have different data. (Of the three lines that go, two are `single`'s refusal to run on more than one rank.)
# - **`DistributedDataParallel`** is the line that matters. Each rank now has a copy of the model, a **replica**, and
#   backward averages the gradients of all replicas. It does so by **collectives**: calls in which all ranks take part
#   (lab 02). Gradients are sent together in **buckets** (lab 03); with `gradient_as_bucket_view=True` they are stored
#   inside the buckets, which saves a copy of all gradients.
#
# ## Your predictions
#
# Now that you have seen a run, write down what you expect of the next ones. A wrong prediction teaches you more than a
# right one. **FSDP** (fully sharded data parallel) is another strategy, which divides the batch as DDP does; this lab
# runs it after DDP.

# %%
parts = {"all of it": 1.0, "half of it": 0.5, "nothing: rank 0 has the model": 0.0}
losses = {"the same": 0.0, "a little higher": 0.05, "half": 0.5}
of_both = "The loss on two ranks is the mean of theirs; the global batch is the same."
question = "the loss on two ranks, compared with one rank, in the first steps"
loss = lab.ask(question, default=0.05, options=losses, about=of_both)
of_fsdp = lab.ask("how much of the model a rank keeps with FSDP", default=0.5, options=parts)
speed = lab.ask("samples per second on two ranks: at best how many times those of one", default=1.5, unit="times")

# %% [markdown]
# ## Break one rank
#
# An ordinary mistake: somebody knows that each rank gets 64 samples in a step, and writes this number into the model,
# `x.view(64, -1)` instead of `x.flatten(1)`. All training steps succeed. After training, the script evaluates the model
# on 360 test samples, in batches of at most 64 that the ranks take in turns.

# %%
ranks = {"rank 0": 0, "rank 1": 1, "both at once": -1}
failing = lab.ask("the rank that fails", default=-1, options=ranks)

# %%
size = global_batch_size // nproc_per_node
mistake = script.cells["model"].text.replace("x.flatten(1)", f"x.view({size}, -1)")
wrong = script.with_cells(model=mistake)
broken = labkit.launch(wrong, nproc_per_node=nproc_per_node, **(options | {"epochs": 1}), wait=False)

# %%
try:
    broken.wait()
except labkit.RankFailedError as error:
    failure = error
print(failure.message.splitlines()[0])

# %% [markdown]
# The sentence names the rank, the error, and the line, both in the script and in the cell that you wrote. 360 samples
# are five batches of 64 and one of 40. Rank 0 takes the first, the third and the fifth, rank 1 the others; the batch of
# 40 is the last of rank 1. Rank 0 made no mistake. It either waits for rank 1 at the next exchange until it is stopped,
# or sees that the connection was closed and fails, too; labkit names the rank that failed first. (Lab 18 breaks a
# training in more ways. In every lab, skip the lines with `lab.verify`: they test the lab's own formulas against what
# was measured.)

# %%
lab.verify(failing, (-(-360 // size) - 1) % nproc_per_node, failure.rank)

# %% [markdown]
# ## On 2 × T4 and 8 × A100: a model that does not fit
#
# Here is labkit's transformer, a model of text, with 24 blocks of width 2,048, as in GPT-3 XL: 1.2 billion
# parameters. A sample is a text of 128 **tokens**, here bytes (the plan calls them *positions*). Each token is a
# vector of 2,048 numbers (the **width**), and passes through 24 equal groups of layers (the **blocks**). In a block,
# *attention* mixes the tokens' vectors, in several *heads* that each see a part of the width, and an **MLP**, two
# linear layers, transforms each of them. From the last block's vectors the model scores every possible next token. A
# T4 has 16 GB, of which 14.24 GiB are left for a rank. `labkit.plan` works out memory and time from the script
# itself; nothing is run. The first line is the answer, and the bars show what fills the memory. In the table of
# strategies read only the rows `ddp` and `fsdp`; later labs explain the others, and the options that the plan
# proposes.

# %%
large = {name: sized(Script.load(name), width=2048, layers=24, heads=16) for name in ("ddp", "fsdp")}
labkit.plan(large["ddp"], device="2xT4", global_batch_size=16)

# %% [markdown]
# DDP keeps 16 bytes per parameter on every rank: the weight, its gradient, and the state of the optimizer (AdamW). For
# 1.2 billion parameters that alone is 18 GiB, and more T4s would not change it. The rest of the bar is what forward
# keeps for backward (activations) and buckets (communication, 4 bytes per parameter; hence the plan's 20 instead of
# 16): after the first step DDP puts the gradients into new buckets, and on a GPU the old ones may stay until the second
# backward, beside the new ones.
# You need a strategy that divides the model, and the plan recommends one.
#
# **FSDP** cuts the model up: each rank keeps a part of every layer, a **shard**. Every rank still computes all layers:
# for each of them it gathers the shards of the other ranks, and frees them afterwards (lab 05). The picture leaves that
# out; it shows what a rank keeps from step to step.

# %%
draw.replicas(nproc_per_node, share=1 / nproc_per_node)

# %%
lab.plans({"DDP": large["ddp"], "FSDP": large["fsdp"]}, global_batch_size=16)

# %% [markdown]
# The bars show one moment, the peak of a step. On eight A100s with 80 GB both fit; the ranges of the two step times
# overlap, so this plan cannot tell which is faster (lab 06 compares strategies).
#
# To train with FSDP, load another script. Your small model does not need it, and has no list of layers, so
# it is gathered as a whole; but it shows what FSDP changes.

# %%
sharded = Script.load("fsdp", task="digits").with_cells(model=Model)
fsdp = labkit.launch(sharded, nproc_per_node=nproc_per_node, **options)

# %%
fsdp.wait()

# %% [markdown]
# ## One rank and two, compared
#
# The last run is the one on a single rank, with the same global batch of 128 samples.

# %%
single = labkit.launch(alone, nproc_per_node=1, **options)

# %%
single.wait()

# %%
comparison = labkit.compare([single, ddp, fsdp])
display(comparison)

# %%
table = comparison.table.set_index("script")
first = {run.script.name: run.losses().loc[1:5] for run in (single, ddp, fsdp)}
off = max(((first[name] - first["single"]).abs() / first["single"]).max() for name in ("ddp", "fsdp"))
print(f"losses of the first five steps: the largest relative difference is {off:.0e}")
frames = [run.metrics().fillna({"communication": 0}) for run in (single, ddp)]
alone_ms, ddp_ms = [1e3 * (frame.step_seconds - frame.communication).median() for frame in frames]
print(f"computing in a step: {alone_ms:.0f} ms on one rank, {ddp_ms:.0f} ms on each of {lab.ranks} with DDP")

held, rate = table.held_bytes / table.held_bytes["single"], table.throughput / table.throughput["single"]
lab.verify(loss, 1e-4, off, how="at most")
of_ddp = "how much of the model a rank keeps with DDP"
lab.verify_each({of_ddp: (1, held["ddp"]), of_fsdp: (1 / nproc_per_node, held["fsdp"])}, within=0.02)
lab.verify(speed, nproc_per_node, rate["ddp"], "times", how="at most", within=0.1, timed=True)
lab.score()

# %% [markdown]
# **The same loss.** The three runs start from the same weights, and step *k* trains on the same 128 samples. A mean
# over 128 samples is the mean of two means over 64. Only the order of the additions differs, so the losses of the first
# steps agree to about seven digits, as many as fp32 has; later they drift apart a little because the optimizer
# amplifies rounding. Each rank logs the loss of its own 64 samples; it is the mean over both ranks that agrees.
#
# **Whole or sharded.** *State held* is 16 bytes per parameter. DDP repeats it on every rank; FSDP divides it by the
# number of ranks.
#
# **At most twice as fast.** Each rank has half of the samples, so at best it computes for half as long. Compare the two
# times of *computing in a step*: what is above half is lost because the ranks share caches, memory and cores, with each
# other and with other programs. The rest of the lost time goes into communication: of the two ranks' shares, the
# smaller is sending, the difference is waiting for the other rank.
#
# **When is such a measurement worth nothing?** If the panel of a run says that other programs used these cores, or
# that two runs overlapped, its times say as much about those programs as about DDP. A factor of 1.2 then does not mean
# that DDP is slow, nor one of 2.1 that it is more than twice as fast: the run on one rank was disturbed more. Repeat
# both runs when the machine is quiet, or draw no conclusion. *State held* and the losses do not depend on the load.
#
# ## Leave with a plain script
#
# The folder of a run holds its script. It is plain PyTorch, and the command below trains the same model without labkit.
# The settings before `torchrun`, if any, are for the CPU: `CUDA_VISIBLE_DEVICES=''` hides GPUs, `GLOO_SOCKET_IFNAME=lo`
# keeps messages between ranks on this machine, and `OMP_NUM_THREADS=1` gives each rank one thread. On GPUs, leave them
# out.

# %%
print(ddp.command.replace(" --", " \\\n    --"))

# %% [markdown]
# `labkit.launch("my_trainer.py", nproc_per_node=2)` starts a script of your own, unchanged, and watches it in the same
# way. But torchrun only starts it twice. A Hugging Face Trainer does the rest by itself; its batch size is per device,
# so two ranks double the global batch. A loop of your own must start the process group, choose its GPU, wrap the model
# and give each rank different samples (lab 03), as labkit's script does; lab 19 has a larger model of your own.
#
# ## Recap
#
# The core of this course, labs 01 to 06, asks three questions about every strategy: what does each rank hold, what does
# it send, when does it wait? So far, for *N* ranks, and a model whose parameters take *P* bytes in fp32:
#
# | | held | sent by each rank in a step | waits |
# |---|---|---|---|
# | one rank | 4 P: parameters, gradients, two running means of AdamW (its *moments*) | nothing | never |
# | DDP | 4 P | gradients (lab 02) | for the other ranks' gradients (lab 03) |
# | FSDP | 4 P / N | shards of the parameters, and gradients (lab 05) | for the other ranks' shards (lab 05) |
#
# ## Where next?
#
# - **30 minutes on Kaggle's two T4s:** [*A lab on Kaggle*](README.md#a-lab-on-kaggle) says what to click. Run this lab
#   there; with a quarter of an hour more, lab 03 up to *The same in a real run*.
# - **An afternoon:** labs 02 to 06, in order. Each answers what the one before leaves open: what ranks say to each
#   other, DDP, memory, FSDP, which strategy to take. Then lab 19 with a model, a loss and a metric of
#   your own.
# - **A lecture:** `make slides` turns the figures and questions of labs 01 to 06 into slides; *Try this* in each lab
#   has exercises.
#
# `README.md`, beside this notebook in the clone, is the page of the course: all labs, and what each of them needs.
#
# ## Try this
#
# 1. Set `options["global_batch_size"] = 100` and launch DDP with `nproc_per_node=3`. What do you expect?
#    <details><summary>Answer</summary>Nothing is started: "global_batch_size=100 cannot be split evenly into 3 data
#    ranks; the nearest sizes are 99 or 102".</details>
# 2. Put `if len(x) == 64: raise ValueError("boom")` into `Model.forward`, and launch DDP. Which rank fails now, and
#    when?
#    <details><summary>Answer</summary>Both, in the first step: "ranks 0, 1 failed: ValueError: boom", and then the
#    cell, <code>model</code>, and the line in it. The run on one rank trains, for its batches have 128
#    samples.</details>
# 3. Launch DDP with `precision="bf16", save_every=10` in addition to the options ("fp16" on a T4, lab 11). What has
#    changed in the script?
#    <details><summary>Answer</summary>It has two cells more, <code>precision</code> and <code>checkpoints</code> (and
#    the small <code>notes</code>), and the lines that call them. It contains only what you ask for.</details>
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
# 5. Everything that you may want to change is a function in a cell: `print(script.cells["task"].text)` has the loss
#    and the metrics, `script.cells["optimizer"].text` the optimizer. Write functions of the same names, each in a
#    cell of its own, with its imports, and launch `script.with_cells(loss_of=loss_of, optimizer_of=optimizer_of)`
#    with `lr=0.02`. Why does `loss_of` return a sum?
#
#    ```python
#    from torch.nn import functional as F
#
#
#    def loss_of(outputs, batch):  # of this rank's samples
#        return F.cross_entropy(outputs, batch[1], label_smoothing=0.1, reduction="sum")
#    ```
#
#    ```python
#    import torch
#
#
#    def optimizer_of(parameters, args):
#        return torch.optim.SGD(parameters, lr=args.lr, momentum=0.9)
#    ```
#
#    <details><summary>Answer</summary>The script divides the sum of all ranks by the number of their samples, so that
#    ranks may have different numbers of them. With a mean it would divide twice, and gradients would be 64 times too
#    small (a rank's samples in a step), without an error; <code>labkit.check</code> and <code>launch</code> say so.
#    Metrics are sums, too: <code>metrics_of</code> returns {name: (sum, count)} (lab 19). After five epochs the mean
#    loss is 1.3, and without these two functions 0.05: smoothed labels have no loss of 0, and SGD is slower
#    here.</details>
#
# ## Sources
#
# The model comes from an article, *Distributed Training with PyTorch: DDP vs FSDP*, which trains it on MNIST. Li et
# al., *PyTorch Distributed* (2020, arXiv 2006.15704), describes DDP; Zhao et al., *PyTorch FSDP* (2023, arXiv
# 2304.11277), FSDP; Brown et al., *Language Models are Few-Shot Learners* (2020, arXiv 2005.14165), GPT-3 XL.
