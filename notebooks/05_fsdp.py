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
# # 05 · FSDP: gather, compute, free, scatter
#
# **You will be able to** count what FSDP sends in a step, choose when it frees what it has gathered, and predict
# whether it will save memory for your model. **25 minutes. You need** labs 03 and 04.
#
# FSDP cuts a model into **units**, usually its blocks, and keeps a **shard** of every unit on each rank. Before a unit
# computes, an `all_gather` collects its shards from all ranks; afterwards the other ranks' shards are freed. In
# backward it is gathered again, and a `reduce_scatter` averages its gradients over all ranks and leaves each rank its
# own part. (In the picture the last unit is the **root**: it is not freed after forward, because backward starts with
# it. An all-gather collects the next unit while one computes.)

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("05_fsdp", ranks=nproc_per_node)
draw.shards(4, nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# The model is a tower, a plain stack of linear layers: 23 blocks of 256 x 256 each, and a last layer. FSDP makes each
# block a unit; the rest, the last layer, is the root.
#
# DDP's all-reduce is a reduce-scatter followed by an all-gather, and on N ranks each of the two sends (N - 1)/N
# of the bytes. So this lab counts phases: an all-gather or a reduce-scatter is one, an all-reduce two. The transformer
# in the last question has four blocks, 128 wide, and 0.88 million parameters.

# %%
gathers = lab.ask("all-gathers in a step of FSDP, 23 blocks and the root", default=24)
traffic = lab.ask("bytes that FSDP sends: how many times those of DDP", default=1, unit="times")
tower_saves = lab.ask("share of DDP's memory that FSDP saves: this tower, 8 samples per rank", default=50, unit="%")
gpt_saves = lab.ask("the same: labkit's small transformer, 16 samples of 128 tokens per rank", default=50, unit="%")

# %% [markdown]
# ## Count
#
# The model is created on the *meta* device, which allocates nothing; memory is allocated only for the shards.
# `reshard_after_forward` says whether a unit is freed after forward: always, never, or (auto) always, except for the
# root. `fully_shard` is FSDP2, the newer of torch's two FSDPs. torch's flight recorder, a log of its collectives,
# counts them in the third step, after warm-up (`third_step`, in `run.script`). Six models run one after another: DDP,
# the three modes with a block as a unit, and two with larger units, for later. The panel would mix them up, so it is
# hidden.

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
    for unit in [*units, model]:  # the model last: that call takes what is in no unit yet, the root
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
draw.bars({"ddp": {"gathers": of_ddp / 2, "sums": of_ddp / 2}} | sent, unit="B", title="sizes handed over in a step")

# %% [markdown]
# ## Why
#
# The model takes 6.0 MiB. DDP passes that to a collective once (lab 03), which counts as two phases, all-gather
# (*gathers*) and reduce-scatter (*sums*). (All sizes leave out the factor (N - 1)/N.) `never` sends as much; `always`,
# which frees and gathers again, sends 50% more. And what does a rank hold? Between two steps it holds its shards, in
# all three modes. `never` keeps the whole model from forward to backward, but only its own share of the gradients.
# FSDP's older name for this mode is SHARD_GRAD_OP; labkit's is `zero2`, although the ZeRO-2 of lab 04 keeps all
# parameters between two steps as well.

# %%
never, share = seen["never"], P // lab.ranks
lab.verify("never: held before forward", share, never["before forward"], "B")
lab.verify("never: gradients of a rank", share, never["gradients"], "B")
held = {f"{level}, {at}": seen[level][at] for at in ("before forward", "after forward", "gradients") for level in sent}
draw.bars(held, unit="B", title="what a rank holds of the parameters, and of the gradients after backward")

# %% [markdown]
# **Which to choose?** Take `never` if it fits and a timeline shows waiting for gathers in backward; otherwise keep the
# default. (`reshard` in the pictures is `reshard_after_forward`.)

# %%
lab.explore(draw.shards, reshard=[True, False], units=[2, 4, 8], ranks=[2, 4, 8])

# %% [markdown]
# ## What is a unit?
#
# A unit is what you pass to `fully_shard`: a module, or a list of modules. It is gathered by one call, and is whole
# while it computes. With small units a rank holds little at once and makes many calls, each with a latency of its own.
# With large ones it makes few calls and holds much, and less of the communication can overlap with computation. These
# are the counts from above, with 1, 8 and all 23 blocks in a unit:

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
# So ask first what fills the memory. If it is states, shard them. If it is activations, recompute them
# (`activation_checkpointing=True`), or take fewer samples at a time. An estimate of the share saved is states × (1 -
# 1/N) / (states + activations): 50% and 8% for the two models above.
#
# **The tower** saves less than the estimate, because its peak is late in backward. At that point a rank holds, on top
# of its shards, six tensors as large as a whole unit:
#
# 1. the unit in use;
# 2. its gradients;
# 3. the next unit, prefetched;
# 4. the gradients of the unit before, which stay in the buffer of their `reduce_scatter` until the next one;
# 5. the root, whole since forward;
# 6. its gradients, which FSDP reduces only when backward ends, although they appear first.
#
# Three gradient shards, 1/N of a unit each, do not exist yet: those of the root, the unit in use and the next one. So
# on two ranks the peak is half of the states, 16 bytes × 1.58 million / 2 = 12 MiB, and 6 - 3/2 = 4.5 units of 0.25
# MiB: 13.2 MiB, as measured. Had the optimizer's step been the peak, FSDP would have saved half.
#
# **The transformer** saves a little more: its peak is in the backward of the loss, where only the root (0.3 MiB) is
# whole and no gradients exist yet, while DDP's buckets are always there.
#
# ## On 2 × T4 and 8 × A100
#
# Now take a tower of five layers of width 16,384, which an article in the appendix trains with 256 samples on each of
# four devices. Its states under DDP, 16 bytes for each of 1.34 billion parameters, are 21.5 GB, or 20 GiB. This is the
# plan at that size, with 1,024 samples:

# %%
wide = {name.upper(): sized(script, width=16384, layers=5) for name, script in tower.items()}
wide["FSDP, CPU offload"] = wide["FSDP"], {"cpu_offload": True}
lab.plans(wide, devices=("2xT4", "4xA100 80", "8xA100 80"), global_batch_size=1024)

# %% [markdown]
# DDP's peak is those 20 GiB and 5 more, which AdamW needs while it updates all parameters at once (lab 04). On two T4s
# FSDP needs 0.4 GiB too much, because each of its units is a fifth of the model, 1 GiB: it holds 10 GiB of states, and
# 4.5 units on top of them. With CPU offload it fits, if the host has room for the states, but at a price: on the A100s,
# where both are planned, a step takes twelve to fourteen times as long, because AdamW runs on the CPU and shards cross
# PCIe, the bus to the host (both speeds are assumed). On the A100s FSDP sends 1.4 times as much as DDP (four of its
# five units are gathered twice, the root once), and its step is probably shorter all the same: each rank updates only
# its own part of the parameters.
#
# **A model that plain DDP cannot train on two T4s** is GPT-2 large with an output layer of its own: 838 million
# parameters, with one sample of 1,024 tokens on each rank. FSDP is not the only strategy that fits; the table below the
# plan has others:
#
# - `zero2`: FSDP with `never`. On two ranks backward hides the second gather, so it gains little here.
# - `zero1`: torch's ZeRO-1 (`ZeroRedundancyOptimizer`). It is slow, because it broadcasts each parameter after the
#   optimizer's step, when nothing is left to hide that.
# - `pipeline` (lab 12), `tensor_parallel` (lab 13), `hybrid` (lab 14), `context_parallel` (lab 24). `fsdp1` is torch's
#   older FSDP.
# - `ddp`, second row: with activation checkpointing alone it needs 15.6 GiB, 20 bytes per parameter at the optimizer's
#   step (lab 04); with fused AdamW as well it just fits. Recomputing takes about as long as fused AdamW
#   saves, so both rows are equally fast.
#
# **What to try, in this order:** 16 bits (fp16 on a T4, lab 10); DDP; fused AdamW; activation checkpointing; FSDP with
# a unit per block, which takes more setting up but may be faster: compare the plan's step times. Then read lab 06.

# %%
large = {"vocabulary": 50257, "context": 1024, "width": 1280, "heads": 20, "layers": 36}
gpt = {name.upper(): sized(Script.load(name), **large) for name in ("ddp", "fsdp")}
planned = lab.plans(gpt, devices=("2xT4",), global_batch_size=2)
display(planned, planned.plans["DDP", "2xT4"])

# %% [markdown]
# ## Try this
#
# 1. Call `fully_shard` on the whole model only, not on its blocks. How many all-gathers are there, and what is held
#    after forward?
#    <details><summary>Answer</summary>One gather in forward instead of 24, and none in backward, because there is
#    only the root. After forward a rank holds the whole model, 6.0 MiB instead of 3.1. This is what happens to a model
#    in which no blocks are found; labkit says so.</details>
# 2. Set `layers=5` in `Model`, as in the large tower. Does FSDP still save over 40%?
#    <details><summary>Answer</summary>No: 3.7 MiB instead of 5.5, a third less. A unit is now a fifth of the model, and
#    while it computes it is whole, as are its gradients. Many small units save more than few large ones.</details>
# 3. Launch the transformer with `activation_checkpointing=True` under FSDP. Which part shrinks?
#    <details><summary>Answer</summary>Activations, from 68 to 3 MiB: only each block's input is kept. In their place
#    there are 20 MiB of temporary tensors, because one block at a time is recomputed. The peak falls from 77.6 to 31.4
#    MiB; FSDP alone saved 8.</details>
#
# **In your own code**, with pretrained weights (after `init_process_group`; lab 21 fine-tunes with FSDP):
#
# ```python
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)  # on every rank, in the host's memory
# for block in model.model.layers:  # of a Llama or a Qwen; in a GPT-2, model.transformer.h
#     fully_shard(block)  # moves the block to this rank's GPU, too
# fully_shard(model)
# optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # after sharding: the shards are new parameters
# ```
#
# Transformers' `Trainer` (5.23) takes `fsdp=True`: that is FSDP2, with one unit per block of a class listed in the
# model's `_no_split_modules`. To choose another class, pass `fsdp_config={"transformer_layer_cls_to_wrap":
# ["GPT2Block"]}`. In versions before 5.13, `fsdp="full_shard auto_wrap"` gives FSDP1; without `auto_wrap` the class is
# ignored. Accelerate's FSDP plugin uses FSDP1 unless `fsdp_version=2`.
#
# ## Sources
#
# Zhao et al., *PyTorch FSDP* (arXiv 2304.11277). torch/distributed/fsdp: `fully_shard`. Rajbhandari et al., *ZeRO*
# (arXiv 1910.02054), section 7: the communication of each stage.
#
# ### Appendix: what was claimed, and what the articles say
#
# *FSDP vs. DDP* (004) trains the large tower.

# %%
says = {"never: held before forward": ("001, line 28: SHARD_GRAD_OP shards gradients, optimizer only", P)}
lab.check(says | {"never: gradients of a rank": ("002, line 560: identical averaged gradients", P)})
