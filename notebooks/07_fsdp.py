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
# # 07 · FSDP: gather, compute, free, scatter
#
# **You will be able to** count what FSDP sends in a step, choose when it frees what it has gathered, and tell
# beforehand whether it will save memory for your model. **25 minutes. You need** labs 03 and 06.
#
# Each rank keeps a **shard** of every unit, usually of every block. Before a unit computes, an `all_gather` collects
# its shards from all ranks; afterwards the others' parts are freed. In backward it is gathered again, and a
# `reduce_scatter` adds its gradients up and leaves each rank the sum for its own shard.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
flagship: bool = True  # plan a GPT of 838 million parameters, too: a minute

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized

lab = Lesson("07_fsdp", ranks=nproc_per_node)
draw.shards(4, nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# The model is a tower, a plain stack of linear layers: 23 blocks of 256 x 256 each, and a last layer. FSDP makes each
# block a unit, and what is left, the last layer, another one: the root.
#
# By default the root is not freed after forward, because backward needs it at once. DDP's all-reduce is a
# reduce-scatter followed by an all-gather, so it sends each byte twice.

# %%
gathers = lab.ask("all-gathers in a step of FSDP, 23 blocks and the root", default=24)
traffic = lab.ask("bytes that FSDP sends, over those of DDP", default=1, unit="times")
tower_saves = lab.ask("share of DDP's memory that FSDP saves on two ranks, for this tower", default=50, unit="%")
gpt_saves = lab.ask("the same for a small transformer with 16 samples a rank", default=50, unit="%")

# %% [markdown]
# ## Count
#
# The model is made on the *meta* device, which allocates nothing; memory is allocated only for the shards.
# `reshard_after_forward` says whether a unit is freed after forward: always, never, or (auto) always, except for the
# root. `fully_shard` is FSDP2. torch's flight recorder counts the collectives.

# %%
from torch import nn


class Model(nn.Module):
    def __init__(self, width=256, layers=24):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers - 1)))
        self.last = nn.Linear(width, width)

    def forward(self, x):
        return self.last(self.blocks(x))


# %%
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

LEVELS = {"always": True, "auto": None, "never": False}


def wrapped(level, device):
    if level == "ddp":
        return DistributedDataParallel(Model().to(device))
    with torch.device("meta"):
        model = Model()
    for module in [*model.blocks, model]:
        fully_shard(module, reshard_after_forward=LEVELS[level])
    return model.to_empty(device=device)  # uninitialized: fine for counting; to train, initialize or load here


def each_level(device):
    return {level: third_step(wrapped(level, device), torch.ones(8, 256, device=device)) for level in ("ddp", *LEVELS)}


# %%
L, P, root = 23, 4 * 24 * (256 * 256 + 256), 4 * (256 * 256 + 256)  # blocks, bytes of the model and of the root
calls = {"always": 2 * (L + 1), "auto": 2 * L + 1, "never": L + 1}
expected = {f"{level}: all-gathers": n for level, n in calls.items()}
lab.predict_each(expected | {gathers: calls["auto"], traffic: (2 * P - root + P) / (2 * P)})
run, (seen, *_) = lab.run(each_level, model=Model, env={"TORCH_FR_BUFFER_SIZE": "4000"})

# %%
auto, of_ddp = seen["auto"], 2 * seen["ddp"]["bytes"]["sums"]  # an all-reduce sends each byte twice
found = {f"{level}: all-gathers": seen[level]["calls"]["gathers"] for level in calls}
found |= {gathers: auto["calls"]["gathers"], traffic: sum(auto["bytes"].values()) / of_ddp}
lab.measure_each(found, run=run)
sent = {level: {"gathered": seen[level]["bytes"]["gathers"], "summed": seen[level]["bytes"]["sums"]} for level in calls}
draw.bars({"ddp": {"summed": of_ddp}} | sent, unit="B", title="bytes of a step (DDP's all-reduce counts twice)")

# %% [markdown]
# ## Why
#
# **Never** freeing sends what DDP sends; freeing and gathering again costs 50 % more. And what does a rank hold?
# Between two steps its shards, in all three modes. `never` (older: SHARD_GRAD_OP) keeps the whole model from forward
# to backward. Of the gradients a rank only ever keeps its own share.
#
# **Which to choose?** Never, if the whole parameters fit beside the activations or links are slow; otherwise the
# default.

# %%
never, share = seen["never"], P // lab.ranks
says = ("001, line 28: SHARD_GRAD_OP shards gradients, optimizer only", "002, line 560: identical averaged gradients")
lab.verify("never: held before forward", share, never["before forward"], "B", article=says[0], said=P)
lab.verify("never: gradients of a rank", share, never["gradients"], "B", article=says[1], said=P)
lab.explore(draw.shards, ranks=[2, 4, 8], units=[2, 4, 8], reshard=[False, True])

# %% [markdown]
# ## What does it save?
#
# FSDP divides states, not activations. The tower has many parameters and few activations, a small transformer with a
# large batch the opposite.

# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, width=256):
    torch.manual_seed(0)  # the same samples on every rank and in every run
    x, y = torch.randn(512, width), torch.randint(width, (512,))
    return TensorDataset(x[:448], y[:448]), TensorDataset(x[448:], y[448:])


# %%
lab.predict(tower_saves, 0.4, "%", how="at least")
lab.predict(gpt_saves, 0.2, "%", how="at most", article="001, line 38: 1/N of each")
tower = {name: Script.load(name).with_cells(model=Model, data=load_datasets) for name in ("ddp", "fsdp")}
cases = {f"tower, {name}": (script, 8) for name, script in tower.items()}
cases |= {f"transformer, {name}": (Script.load(name), 16) for name in ("ddp", "fsdp")}
peaks = {}
for name, (script, each) in cases.items():
    run = lab.launch(script, global_batch_size=each * lab.ranks, steps=3, trace_memory=True)
    peaks[name] = run.memory().ranks[0].traced.categories
total = {name: sum(parts.values()) for name, parts in peaks.items()}
saved = {model: 1 - total[f"{model}, fsdp"] / total[f"{model}, ddp"] for model in ("tower", "transformer")}
lab.measure_each({tower_saves: saved["tower"], gpt_saves: saved["transformer"]}, run=run)
display(draw.bars(peaks, unit="B", title="rank 0 at its peak"))
lab.score()

# %% [markdown]
# So ask first what fills the memory. States: shard them. Activations: recompute them
# (`activation_checkpointing=True`), or take fewer samples at a time. While the peak is in forward or backward, FSDP
# on two ranks does not save half, because one unit at a time is whole; where the optimizer's step is the peak, it
# does. An estimate of the share saved: states × (1 - 1/N) / (states + activations). That is near 1 - 1/N for the
# tower, and small for a transformer with a large batch.
#
# ## On 2 × T4 and 8 × A100
#
# The fifth article trains a tower of five layers of 16,384, and says that DDP takes more than 20 GB for it on each of
# four devices. Planned at that size:

# %%
wide = {name.upper(): sized(script, width=16384, layers=5) for name, script in tower.items()}
lab.plans(wide, devices=("2xT4", "4xA100 80", "8xA100 80"), global_batch_size=32)

# %% [markdown]
# 14.50 GiB do not fit a T4's 14.24. On the A100s FSDP waits for more of its step and sends 1.5 times as much, and its
# step is still shorter, by the planner: each rank updates only its own part of the parameters, and AdamW is most of
# DDP's step here.
#
# **A model that DDP cannot train on two T4s:** GPT-2 large with an untied LM head, 838 million parameters, one sample
# of 1,024 tokens on each rank. FSDP is one way that fits, not the only one: the table under the plan has ZeRO-1,
# ZeRO-2, tensor parallelism and a pipeline as well. Activation checkpointing alone does not save DDP: the peak moves to
# the optimizer's step.

# %%
if flagship:
    large = {"vocabulary": 50257, "context": 1024, "width": 1280, "heads": 20, "layers": 36}
    gpt = {name.upper(): sized(Script.load(name), **large) for name in ("ddp", "fsdp")}
    planned = lab.plans(gpt, devices=("2xT4",), global_batch_size=2)
    display(planned, planned.plans["DDP", "2xT4"])

# %% [markdown]
# ## Try this
#
# 1. Call `fully_shard` on the whole model only, not on its blocks. How many all-gathers, and what is held after
#    forward?
#    <details><summary>Answer</summary>One gather in forward instead of 24, and none in backward, because there is
#    only the root. After forward a rank holds the whole model, 6.3 MB instead of 3.3: FSDP on an unwrapped model
#    saves no parameters at the peak. This is what happens to a model in which no blocks are found; labkit says
#    so.</details>
# 2. `layers=5` in `Model`, as in the article. Does FSDP still save 40 %?
#    <details><summary>Answer</summary>No: 3.7 MiB instead of 5.5, a third less. A unit is now a fifth of the model, and
#    while it computes all of it is there, with buffers to gather it and to reduce its gradients. Many small units save
#    more than few large ones.</details>
# 3. Launch the transformer with `activation_checkpointing=True` under FSDP. Which part shrinks?
#    <details><summary>Answer</summary>Activations, from 68 to 3 MiB: a block keeps its input only. In their place
#    come 20 MiB of temporary tensors, because one block at a time is computed again, and the logits are large. The
#    peak falls from 77.6 to 31.4 MiB; FSDP alone saved 8.</details>
# 4. `labkit.plan(wide["FSDP"], device="2xT4", global_batch_size=32, cpu_offload=True)` keeps shards and AdamW in host
#    memory. Does the article's tower fit now?
#    <details><summary>Answer</summary>By the plan, yes: 6.0 GiB instead of 14.5. A step takes some 6 s instead of
#    1.7, because AdamW runs on the CPU and shards cross PCIe; both times are assumed, not measured.</details>
#
# **In your own code:** Transformers' `Trainer` takes `fsdp` and `fsdp_config`, Accelerate its FSDP plugin. Either way
# look up which class is wrapped: it decides how large a unit is.
#
# ## Sources
#
# Zhao et al., *PyTorch FSDP* (arXiv 2304.11277). torch/distributed/fsdp: `fully_shard`. Rajbhandari et al., *ZeRO*
# (arXiv 1910.02054), section 7: the communication of each stage.
#
# ### Appendix: what was claimed, and what the articles say
#
# The first article (000, line 64) puts the whole model on each GPU, by `.cuda()`, before it is divided; on the meta
# device it takes nothing. The third (003, line 420) calls the traffic of FSDP "medium".

# %%
lab.check()
