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
# **You will be able to** count what FSDP sends in a step, choose when it frees what it has gathered, and predict
# whether it will save memory for your model. **25 minutes. You need** labs 03 and 06.
#
# FSDP cuts a model into **units**, usually its blocks, and keeps a **shard** of every unit on each rank. Before a unit
# computes, an `all_gather` collects its shards from all ranks; afterwards the others' parts are freed. In backward it
# is gathered again, and a `reduce_scatter` averages its gradients over all ranks and leaves each rank its own part.
# (The marked unit computes.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized

lab = Lesson("07_fsdp", ranks=nproc_per_node)
draw.shards(4, nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# The model is a tower, a plain stack of linear layers: 23 blocks of 256 x 256 each, and a last layer. FSDP makes each
# block a unit; the rest, the last layer, is the **root** unit.
#
# By default the root is not freed after forward, because backward starts with it. (The picture above frees every unit.
# It also leaves out that FSDP gathers the next unit while one computes, so that usually two are whole, and the root.)
# DDP's all-reduce is a reduce-scatter followed by an all-gather. On N ranks each of the two sends (N - 1)/N of the
# bytes, so below both strategies are counted in such phases: an all-reduce is two. The transformer in the last question
# has four blocks, 128 wide, and 0.88 million parameters.

# %%
gathers = lab.ask("all-gathers in a step of FSDP, 23 blocks and the root", default=24)
traffic = lab.ask("bytes that FSDP sends: how many times those of DDP", default=1, unit="times")
tower_saves = lab.ask("share of DDP's memory that FSDP saves: this tower, 8 samples a rank", default=50, unit="%")
gpt_saves = lab.ask("the same: labkit's small transformer, 16 samples of 128 tokens a rank", default=50, unit="%")

# %% [markdown]
# ## Count
#
# The model is made on the *meta* device, which allocates nothing; memory is allocated only for the shards.
# `reshard_after_forward` says whether a unit is freed after forward: always, never, or (auto) always, except for the
# root. `fully_shard` is FSDP2, the newer of torch's two. torch's flight recorder, a log of its collectives, counts them
# in the third step, when all is warm (`third_step`, in `run.script`). Six models in turn, so the run's panel would mix
# them up: DDP, the three modes with a block as a unit, and two with larger units, for later.

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


def wrapped(device, level, blocks):  # blocks: how many per unit
    if level == "ddp":
        return DistributedDataParallel(Model().to(device))
    with torch.device("meta"):
        model = Model()
    units = [[*model.blocks[first : first + blocks]] for first in range(0, len(model.blocks), blocks)]
    for unit in [*units, model]:
        fully_shard(unit, reshard_after_forward={"always": True, "auto": None, "never": False}[level])
    return model.to_empty(device=device)  # uninitialized: fine for counting; to train, initialize or load here


def each_way(device, ways):
    return {name: third_step(wrapped(device, *way), torch.ones(8, 256, device=device)) for name, way in ways.items()}


# %%
L, P, root = 23, 4 * 24 * (256 * 256 + 256), 4 * (256 * 256 + 256)  # blocks, bytes of the model and of the root
units = {"auto": 1, "auto, 8 blocks a unit": 8, "auto, all blocks a unit": L}
calls = {"always": 2 * (L + 1), "never": L + 1} | {name: 2 * len(range(0, L, n)) + 1 for name, n in units.items()}
lab.predict_each({f"{name}: all-gathers": n for name, n in calls.items()} | {gathers: calls["auto"]})
lab.predict(traffic, (2 * P - root + P) / (2 * P), "times")
lab.predict_each({f"{name}: largest all-gather": blocks * root for name, blocks in units.items()}, "B")
ways = {name: (name.split(",")[0], units.get(name, 1)) for name in ("ddp", *calls)}
run, (seen, *_) = lab.run(each_way, ways, model=Model, env={"TORCH_FR_BUFFER_SIZE": "4000"}, options={"shown": False})

# %%
auto, of_ddp = seen["auto"], 2 * seen["ddp"]["bytes"]["sums"]  # an all-reduce is two phases
results = {f"{name}: all-gathers": seen[name]["calls"]["gathers"] for name in calls}
results |= {gathers: auto["calls"]["gathers"], traffic: sum(auto["bytes"].values()) / of_ddp}
largest = {name: seen[name]["largest gather"] for name in units}
lab.measure_each(results | {f"{name}: largest all-gather": size for name, size in largest.items()}, run=run)
sent = {level: seen[level]["bytes"] for level in ("always", "auto", "never")}
draw.bars({"ddp": {"sums": of_ddp}} | sent, unit="B", title="sizes handed over in a step, before the factor (N - 1)/N")

# %% [markdown]
# ## Why
#
# The model has 6.0 MiB. DDP hands it over once (lab 03), which counts as two phases. `never` sends as much; freeing and
# gathering again, `always`, sends 50% more. And what does a rank hold? Between two steps its shards, in all three
# modes. `never` keeps the whole model from forward to backward, and only its own share of the gradients: FSDP's older
# name for it is SHARD_GRAD_OP, and labkit's `zero2` does the same. It differs from the ZeRO-2 of lab 06, which keeps
# all parameters between two steps as well.

# %%
never, share = seen["never"], P // lab.ranks
lab.verify("never: held before forward", share, never["before forward"], "B")
lab.verify("never: gradients of a rank", share, never["gradients"], "B")
held = {f"{level}, {at}": seen[level][at] for at in ("before forward", "after forward", "gradients") for level in sent}
draw.bars(held, unit="B", title="what a rank holds of the parameters, and of the gradients after backward")

# %% [markdown]
# **Which to choose?** `never`, if all parameters fit beside the activations: the slower the links, the more it gains.
# Otherwise the default. (`reshard` in the pictures is `reshard_after_forward`.)

# %%
lab.explore(draw.shards, reshard=[True, False], units=[2, 4, 8], ranks=[2, 4, 8])

# %% [markdown]
# ## What is a unit?
#
# What you pass to `fully_shard`: a module, or a list of them. A unit is gathered by one call, and all of it is there
# while it computes. Small units hold little at once and take many calls, each with a latency of its own. Large ones
# take few calls and hold much, and leave less communication that could run while something computes. Counted above with
# 1, 8 and all 23 blocks in a unit:

# %%
draw.bars(largest, unit="B", title="the largest all-gather (auto: one block a unit)")

# %% [markdown]
# With all blocks in one unit FSDP saves almost no parameter memory in forward and backward. The usual unit is a
# transformer block.

# %% [markdown]
# ## What does it save?
#
# FSDP divides states, not activations. The tower has many parameters and few activations; a small transformer with a
# large batch, labkit's own, is the opposite.

# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, width=256):
    torch.manual_seed(0)  # the same samples on every rank and in every run
    x, y = torch.randn(1088, width), torch.randint(width, (1088,))
    return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])


# %%
lab.predict(tower_saves, 0.4, "%", how="at least")
lab.predict(gpt_saves, 0.2, "%", how="at most")
tower = {name: Script.load(name).with_cells(model=Model, data=load_datasets) for name in ("ddp", "fsdp")}
cases = {f"tower, {name}": (script, 8 * lab.ranks) for name, script in tower.items()}
cases |= {f"transformer, {name}": (Script.load(name), 16 * lab.ranks) for name in tower}
own = {"steps": 3, "trace_memory": True, "shown": False}
runs = {name: lab.launch(case, global_batch_size=n, **own) for name, (case, n) in cases.items()}
peaks = {name: run.memory().ranks[0].traced for name, run in runs.items()}
saved = {model: 1 - peaks[f"{model}, fsdp"].bytes / peaks[f"{model}, ddp"].bytes for model in ("tower", "transformer")}
lab.measure_each({tower_saves: saved["tower"], gpt_saves: saved["transformer"]})
display(draw.bars({name: peak.categories for name, peak in peaks.items()}, unit="B", title="rank 0 at its peak"))
lab.score()

# %% [markdown]
# So ask first what fills the memory. States: shard them. Activations: recompute them (`activation_checkpointing=True`),
# or take fewer samples at a time. An estimate of the share saved is states × (1 - 1/N) / (states + activations): for
# the two above 50% and 8%.
#
# **The tower** saves less, because its peak is late in backward. There a rank holds, beside its shards, six times a
# whole unit: the one in use and its gradients; the next one, gathered ahead; the gradients of the one before, which
# stay in the buffer of their `reduce_scatter` until the next `reduce_scatter`; the root, whole since forward, and its
# gradients, which FSDP reduces only when backward ends, although they appear first. The N-th part of the states
# includes a gradient shard of every unit, but three, the root, the one in use and the one before it, have none yet. So
# the peak is 6 - 3/N units above it: 4.5 units of 0.25 MiB on two ranks. Had the optimizer's step been the peak, FSDP
# would have saved half.
#
# **The transformer** saves a little more: its peak is the backward of the loss, where no block is whole, only the root
# (0.3 MiB), and no gradients exist yet, while DDP's buckets are there all the time.
#
# ## On 2 × T4 and 8 × A100, and on 4 × A100
#
# Now a tower of five layers of 16,384, as one of the articles in the appendix trains it, with 256 samples on each of
# four devices. Its states under DDP, 16 bytes for each of 1.34 billion parameters, are 21.5 GB, or 20 GiB. Planned at
# that size, with 1,024 samples:

# %%
wide = {name.upper(): sized(script, width=16384, layers=5) for name, script in tower.items()}
wide["FSDP, CPU offload"] = wide["FSDP"], {"cpu_offload": True}
lab.plans(wide, devices=("2xT4", "4xA100 80", "8xA100 80"), global_batch_size=1024)

# %% [markdown]
# DDP's peak is those 20 GiB and 5 more, which AdamW needs while it updates all parameters at once (lab 06). On two T4s
# FSDP needs 0.4 GiB too much, because each of its units is a fifth of the model, 1 GiB: 10 GiB of states, and 4.5 units
# above them. With CPU offload it fits, at a price: on the A100s, where both are planned, a step takes some fifteen
# times as long, because AdamW runs on the CPU and shards cross PCIe, the bus to the host (both speeds are assumed). On
# the A100s FSDP sends 1.4 times as much as DDP (of five units the root is not gathered twice), and its step is probably
# shorter all the same: each rank updates only its own part of the parameters.
#
# **A model that DDP cannot train on two T4s:** GPT-2 large with an output layer of its own, 838 million parameters, one
# sample of 1,024 tokens on each rank. FSDP is one way that fits, not the only one: the table under the plan has ZeRO-1,
# `zero2` (above: `never`), a pipeline (lab 08) and tensor parallelism (lab 09) as well. On two ranks backward hides the
# second gather, so `never` gains nothing here. ZeRO-1 is slow, because each parameter is broadcast after the
# optimizer's step, when nothing is left to hide it; a pipeline of a single micro-batch is no faster than one device,
# because its ranks take turns. Activation checkpointing alone is not enough for DDP: the peak moves to the optimizer's
# step, 20 bytes per parameter (lab 06) or 15.6 GiB.

# %%
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
#    only the root. After forward a rank holds the whole model, 6.0 MiB instead of 3.1. This is what happens to a model
#    in which no blocks are found; labkit says so.</details>
# 2. `layers=5` in `Model`, as in the large tower. Does FSDP still save over 40%?
#    <details><summary>Answer</summary>No: 3.7 MiB instead of 5.5, a third less. A unit is now a fifth of the model, and
#    while it computes all of it is there, with buffers to gather it and to reduce its gradients. Many small units save
#    more than few large ones.</details>
# 3. Launch the transformer with `activation_checkpointing=True` under FSDP. Which part shrinks?
#    <details><summary>Answer</summary>Activations, from 68 to 3 MiB: a block keeps only its input. In their place
#    come 20 MiB of temporary tensors, because one block at a time is computed again, and the logits are large. The
#    peak falls from 77.6 to 31.4 MiB; FSDP alone saved 8.</details>
#
# **In your own code:** Transformers' `Trainer` takes `fsdp` and `fsdp_config`, Accelerate its FSDP plugin. Either way
# check which class is wrapped, since it decides how large a unit is: `fsdp_config={"transformer_layer_cls_to_wrap":
# ["GPT2Block"]}`.
#
# ## Sources
#
# Zhao et al., *PyTorch FSDP* (arXiv 2304.11277). torch/distributed/fsdp: `fully_shard`. Rajbhandari et al., *ZeRO*
# (arXiv 1910.02054), section 7: the communication of each stage.
#
# ### Appendix: what was claimed, and what the articles say
#
# The first article (000, line 64) puts the whole model on each GPU, by `.cuda()`, before it is divided; on the meta
# device it takes nothing. The third (003, line 420) calls the traffic of FSDP "medium". The fourth (004) prints the
# largest memory of each rank.

# %%
says = {"never: held before forward": ("001, line 28: SHARD_GRAD_OP shards gradients, optimizer only", P)}
lab.check(says | {"never: gradients of a rank": ("002, line 560: identical averaged gradients", P)})
