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
# A rank needs all parameters, but not all at the same time (lab 04). FSDP lets each rank keep 1/N of the states and
# fetch the rest when it is needed. What does that cost?
#
# **You will be able to** shard a model of your own, count what FSDP sends in a step, choose when it frees what it has
# gathered, and predict whether it will save memory. **35 minutes. You need** labs 02, 03 and 04.
#
# FSDP cuts a model into **units**, usually its blocks, and keeps a **shard** of every unit on each rank. Before a unit
# computes, an `all_gather` collects its shards from all ranks; afterwards the other ranks' shards are freed. In
# backward it is gathered again, and a `reduce_scatter` averages its gradients over all ranks and leaves each rank its
# own part.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
plans: bool = True  # plan GPT-2 large for GPUs: some 30 seconds more

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("05_fsdp", ranks=nproc_per_node)
draw.shards(4, nproc_per_node)

# %% [markdown]
# While a unit computes, FSDP already gathers the next one (**prefetching**), so that the rank does not wait. (In
# forward it can do so only on GPUs, for which the CPU queues work in advance.) One unit is special: the **root**,
# which has what is in no block, such as embeddings and an output layer. It is gathered first and by default stays
# whole until the end of backward. So usually the root and two other units are whole at once. *Holds* counts
# parameters and gradients; AdamW's moments, of a rank's own shards only, come on top.
#
# ## Your predictions
#
# The model is a tower of linear layers, 256 wide: 23 blocks and a last layer, 1.6 million parameters. Each rank has
# eight samples.
#
# An all-gather or a reduce-scatter is one phase of communication, and DDP's all-reduce is two: a reduce-scatter and
# an all-gather. In every phase each rank sends (N - 1)/N of its bytes (lab 02), so this lab compares the bytes of
# phases. (The picture counts them for four units; here there are 24.)

# %%
gathers = lab.ask("all-gathers in a step of FSDP, 23 blocks and the root", default=24)
traffic = lab.ask("bytes that FSDP sends: how many times those of DDP", default=1, unit="times")
tower_saves = lab.ask("share of DDP's memory that FSDP saves: this tower, 8 samples per rank", default=50, unit="%")

# %% [markdown]
# ## Shard a model
#
# `fully_shard` makes a module, or a list of modules, a unit: of its parameters each rank keeps only its shard. Call it
# on every block, then on the whole model, which takes what is left: the root. `reshard_after_forward` says whether the
# unit is freed after forward. This is **FSDP2**, the newer of PyTorch's two versions; the older one is the class
# `FullyShardedDataParallel` (lab 07).

# %%
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, width=256, layers=24):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers - 1))
        self.last = nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(F.layer_norm(x, x.shape[-1:]))


# %%
import torch
from torch.distributed.fsdp import fully_shard


def sharded(device, reshard=None, blocks=1):
    torch.manual_seed(0)  # the same weights on every rank
    model = Model()  # in host memory: fully_shard moves the shards, and nothing else, to the GPU
    for first in range(0, len(model.blocks), blocks):
        fully_shard([*model.blocks[first : first + blocks]], reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model


# %% [markdown]
# Try it by hand. `load` defines on waiting ranks what the cells of these definitions define, and `%%ranks` executes a
# cell on all of them (lab 02).

# %%
import labkit

ranks = labkit.ranks(nproc_per_node)
ranks.load(Model, sharded)

# %%
# %%ranks
model = sharded(device)
weight = model.last.weight
print(model)
print(type(weight).__name__, [*weight.shape], weight.placements, weight.device_mesh)
print("on this rank", [*weight.to_local().shape], "by full_tensor", [*weight.full_tensor().shape])

# %% [markdown]
# A module to which `fully_shard` was applied has got an `FSDP` in front of its class; what is inside belongs to its
# unit, or, outside of all blocks, to the root. Parameters have become **DTensors** (distributed tensors). A DTensor
# has the shape of the whole tensor, and its *placements* say what a rank holds of it: `Shard(dim=0)` is a slice of
# its rows. `device_mesh` is the arrangement of the ranks, here a single row of them. `to_local()` is this rank's
# slice; `full_tensor()` gathers the whole, and as a collective it has to be called by all ranks.
#
# Now one step, in two cells. What is whole after forward, and what is left of it after backward?

# %%
# %%ranks
x = torch.randn(8, 256, device=device)
loss = F.mse_loss(model(x), x.sin())
for name, module in {"block": model.blocks[0][0], "root": model.last}.items():
    print(name, "after forward:", type(module.weight).__name__, "gradient:", module.weight.grad)

# %%
# %%ranks
loss.backward()
weight = model.last.weight
print("root after backward:", type(weight).__name__, "gradient:", [*weight.grad.to_local().shape])

# %%
ranks.stop()

# %% [markdown]
# After forward the block is a shard again, and the root is still whole: an ordinary parameter. After backward the root
# is a shard, too, and so is its gradient: each rank has the averages of its own rows.
#
# ## Train and count
#
# Each rank trains on samples of its own. In every step the function notes what the rank holds: of the parameters at
# three moments, one of them in the middle of forward, and of the gradients after backward. `collectives_since` (in
# `labkit_labs/on_ranks/cells.py`) reads the collectives of the last step from torch's flight recorder, a log of all
# collectives. For each kind it returns the number of calls and the bytes of the whole arrays.
#
# Five models train one after another: DDP; FSDP with a unit freed after forward always, never, or, the default (auto),
# always except for the root; and FSDP with all blocks in one unit.

# %%
import time

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def bytes_held(tensors):
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.nbytes for t in local)


def trained(device, way, steps):
    torch.manual_seed(0)
    model = sharded(device, *way) if way else DistributedDataParallel(Model().to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # after sharding: it gets the shards
    torch.manual_seed(1 + dist.get_rank())
    x, losses, held = torch.randn(8, 256, device=device), [], {}
    middle = [module for module in model.modules() if isinstance(module, nn.ReLU)][11]
    middle.register_forward_hook(lambda *_: held.update({"in forward": bytes_held(model.parameters())}))
    for _ in range(steps):
        began, held["before forward"] = time.time_ns(), bytes_held(model.parameters())
        loss = F.mse_loss(model(x), x.sin())
        held["after forward"] = bytes_held(model.parameters())
        loss.backward()
        held["gradients"] = bytes_held(p.grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "held": held, **collectives_since(began)}


def each_way(device, ways, steps):
    return {name: trained(device, way, steps) for name, way in ways.items()}


# %%
# of FSDP: reshard_after_forward, and blocks per unit
ways = {"ddp": (), "always": (True, 1), "auto": (None, 1), "never": (False, 1), "one unit": (None, 23)}
own = {"model": Model, "sharded": sharded, "options": {"shown": False}}
run, (seen, *_) = lab.run(each_way, ways, 12, **own, env={"TORCH_FR_BUFFER_SIZE": "4000"})
draw.curves({name: enumerate(seen[name]["losses"], 1) for name in ("ddp", "auto")}, "loss of rank 0, DDP and FSDP")

# %% [markdown]
# The two curves are one: FSDP trains what DDP trains. But what a rank holds differs (in MiB; the model has 6.0):

# %%
import pandas as pd

table = pd.DataFrame({name: each["held"] for name, each in seen.items()})
(table / 2**20).round(1)

# %% [markdown]
# A popular article says that under FSDP an all-reduce in backward gives all GPUs identical averaged gradients. It makes
# no all-reduce, and no rank has the gradients of another's part: a **reduce-scatter** gives each rank the averages of
# its own rows. It needs no others, because it updates only these rows.
#
# With `one unit` all blocks are whole in the middle of forward. In backward they are, too, but the table has no moment
# there.
#
# `never` keeps the whole model from forward to backward, but only its own share of the gradients. FSDP's older name for
# it is SHARD_GRAD_OP, that of `always` is FULL_SHARD. (labkit calls `never` zero2. ZeRO-2 itself, lab 04, keeps all
# parameters between two steps as well.)
#
# ## What is sent
#
# These are the bytes of a step's phases, all-gathers (*gathers*) and reduce-scatters (*sums*):

# %%
half = seen["ddp"]["bytes"]["sums"]  # of an all-reduce, which is two phases
sent = {"ddp": {"gathers": half, "sums": half}} | {name: seen[name]["bytes"] for name in ("always", "auto", "never")}
draw.bars(sent, unit="B", title="bytes of a step's phases")

# %% [markdown]
# DDP passes the model's 6.0 MiB to an all-reduce once, which is two phases. `never` gathers each unit once and
# reduce-scatters its gradients: as many bytes as DDP. `always` frees and gathers again: 24 more gathers, 50% more
# bytes. The default saves one of these gathers, because it keeps the root: 2 × 23 + 1 = 47, and 1.48 times the bytes of
# DDP.
#
# **Which to choose?** Take `never` if it fits and a timeline shows waiting for gathers in backward; otherwise keep the
# default. (`reshard` in the pictures is `reshard_after_forward`.)

# %%
lab.explore(draw.shards, reshard=[True, False], units=[2, 4, 8], ranks=[2, 4, 8])

# %% [markdown]
# ## What is a unit?
#
# A unit is gathered by one call, and is whole while it computes. With small units a rank holds little at once and makes
# many calls, each with a latency of its own. With large ones it makes few calls, holds much, and less of the
# communication can overlap with computation. With all blocks in one unit FSDP saves almost no parameter memory in
# forward and backward (*in forward*, in the table), and nothing warns you. The usual unit is a transformer block. (The
# older FSDP finds its units by an *auto wrap policy*, lab 07.)
#
# ## What does it save?
#
# Train the tower twice more, with DDP and with FSDP. In one step each rank records all memory that torch allocates (lab
# 04):

# %%
own["options"] |= {"trace_memory": True}
traced = {name: lab.run(trained, ways[name], 4, **own)[0].memory().ranks[0].traced for name in ("ddp", "auto")}
draw.bars({name: peak.categories for name, peak in traced.items()}, unit="B", title="rank 0 at its peak")

# %% [markdown]
# Ask first what fills the memory. The tower has many parameters and few activations, so FSDP saves nearly the half that
# two ranks can save; what is missing are the units that are whole at the peak, and their gradients. The transformer of
# lab 04 is filled by activations, which FSDP does not divide. An estimate of the share saved is states × (1 - 1/N) /
# (states + activations).

# %%
WEIGHTS, UNIT = 4 * 24 * (256 * 256 + 256), 4 * (256 * 256 + 256)  # bytes: of the model, of a block or the root
off = max(abs(a / b - 1) for a, b in zip(seen["auto"]["losses"], seen["ddp"]["losses"], strict=True))
lab.verify("FSDP: largest relative difference of a loss to DDP's", 1e-4, off, how="at most")
calls = {"always": 48, "never": 24, "one unit": 3}
lab.verify(gathers, 2 * 23 + 1, seen["auto"]["calls"]["gathers"])
lab.verify_each({f"{name}: all-gathers": (n, seen[name]["calls"]["gathers"]) for name, n in calls.items()})
lab.verify(traffic, (3 * WEIGHTS - UNIT) / (2 * WEIGHTS), sum(seen["auto"]["bytes"].values()) / (2 * half), "times")
lab.verify("never: held before forward", WEIGHTS / lab.ranks, table["never"]["before forward"], "B")
lab.verify("never: gradients of a rank", WEIGHTS / lab.ranks, table["never"]["gradients"], "B")
lab.verify(tower_saves, 0.4, 1 - traced["auto"].bytes / traced["ddp"].bytes, "%", how="at least")
lab.score()

# %% [markdown]
# ## What does it cost?
#
# FSDP sends half as many bytes again as DDP, in two or three calls for each unit, each with its latency. Whether a step
# becomes slower depends on how much of that is hidden behind computation. It may become faster, because a rank makes
# only its part of the update. So measure, in the unit that matters for a language model. This is labkit's transformer
# of 0.9 million parameters, whose samples have 128 tokens; on a CPU the ranks' messages pass through its memory, so
# your GPUs may answer otherwise. `meta_device=True` lets FSDP initialize each rank's shards and nothing else (see *In
# your own code* below):

# %%
for name, options in {"ddp": {}, "fsdp": {"meta_device": True}}.items():
    speed = lab.launch(Script.load(name), steps=30, shown=False, **options).metrics()["throughput"].median()
    print(f"{name}: {speed * lab.ranks * 128:,.0f} tokens per second, on all {lab.ranks} ranks")

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# A model that plain DDP cannot train on two T4s: GPT-2 large with an output layer of its own (GPT-2 shares it with
# the embeddings), 838 million parameters, with eight samples of 256 tokens. Its states take 16 bytes each, 12.5 GiB.
# With **CPU offload** shards, their gradients and AdamW's moments stay in host memory; a shard is copied to the GPU
# when its unit is about to compute, and AdamW runs on the CPU.

# %%
large = {"vocabulary": 50257, "context": 256, "width": 1280, "heads": 20, "layers": 36}
gpt = {name.upper(): sized(Script.load(name), **large) for name in ("fsdp", "ddp")}
gpt["FSDP, CPU offload"] = gpt["FSDP"], {"cpu_offload": True}
lab.plans(gpt, devices=("2xT4", "8xA100 80"), global_batch_size=8) if plans else print("(skipped: set plans = True)")

# %% [markdown]
# Under DDP a T4 would need 19 GiB: 16 bytes per parameter for the states, 4 for the buckets of the first step (lab 04),
# and the activations. FSDP on two of them fits. With CPU offload it needs 3.9 GiB and not 8.6, if the host has room for
# 16 bytes per parameter, but a step takes 3.5 times as long, and on the A100s eight times. On the A100s FSDP is planned
# to be faster than DDP although it sends more, because each rank updates only its own part of the parameters. But the
# ranges overlap, so the plan cannot tell; a run of a few steps can.
#
# **GPU to GPU or CPU to GPU?** A popular article says that moving data between GPUs costs much less than between CPU
# and GPU. That is true of A100s: **NVLink**, the direct connection between them, carries some 300 GB/s each way, and
# **PCIe**, the bus to the host, some 25 (PCIe 4; a T4's PCIe 3 has half of that). T4s have no NVLink, so both go over
# PCIe. Either way most of the price of offloading is the update on the CPU, whose memory is many times slower than a
# GPU's: for each parameter of a shard the plan counts 0.8 ns for copies, over PCIe 3 whatever the GPU, and 6 ns for
# AdamW on the host. The latter is a guess, within a factor of 4.
#
# ## Recap
#
# For *N* ranks, and a model whose parameters take *P* bytes in fp32. All figures are per rank. What is sent is to be
# multiplied by (N - 1) / N; activations come on top of what is held.
#
# | | held | sent by each rank in a step | waits | use it if |
# |---|---|---|---|---|
# | one rank | 4 P | nothing | never | it is fast enough |
# | DDP | 4 P | 2 P: an all-reduce | for the last bucket, and for a slower rank | a step fits |
# | ZeRO-1, as in torch | 2 P + 2 P / N | 3 P: all-reduce, new parameters | as DDP, and for the update | lab 06 |
# | ZeRO-2 (DeepSpeed) | P + 3 P / N | 2 P: reduce-scatter, all-gather | as ZeRO-1 | lab 06 |
# | FSDP, `never` | as ZeRO-2, between steps as FSDP | 2 P | for the first gather, the last sum | FSDP waits a lot |
# | FSDP | 4 P / N, the root, a unit or two | nearly 3 P: two gathers, a sum | also for gathers not hidden | lab 06 |
#
# FSDP holds less than DDP, and it sends half as many bytes again in many more calls, for each of which a rank may have
# to wait. When is that worth it? Lab 06 puts all strategies on one map.
#
# ## Try this
#
# These changes break claims of the lab, so `lab.score()` raises an error; look at the tables and pictures.
#
# 1. Call `fully_shard` on the whole model only, not on its blocks. How many all-gathers are there, and what is held
#    after forward? (Column `auto`, and `print(seen["auto"]["calls"])`.)
#    <details><summary>Answer</summary>One gather
#    in forward instead of 24, and none in backward, because there is only the root. After forward a rank holds the
#    whole model, 6.0 MiB instead of 3.1. This is what happens to a model in which no blocks are found; labkit says
#    so.</details>
# 2. Set `layers=5` in `Model`, and `[2]` for `[11]` in `trained`. Does FSDP still save over 40%?
#    <details><summary>Answer</summary>No: 3.7 MiB instead of 5.5, a third less. A unit is now a fifth of the model,
#    and while it computes it is whole, as are its gradients. Many small units save more than few large
#    ones.</details>
# 3. Create the optimizer before the model is sharded: `model.early = torch.optim.AdamW(model.parameters(), lr=3e-4)`
#    in `sharded`, after `Model()`; `optimizer = model.early if way else …` in `trained`. What does the loss do?
#    <details><summary>Answer</summary>Nothing: it stays at 0.857. The shards are new parameters, and the optimizer
#    has the old ones, which never get a gradient. Nothing warns you.</details>
#
# **In your own code**, with pretrained weights, after `init_process_group` (lab 19 shows what comes before;
# `LOCAL_RANK` is the rank's number on its machine; lab 22 fine-tunes with FSDP):
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
# If not even the host's memory has room for a copy per rank, create the model on the **meta device**, where a tensor
# has a shape and no memory, and read the weights on one rank only:
#
# ```python
# with torch.device("meta"):
#     model = Model()
# for block in model.blocks:
#     fully_shard(block)
# fully_shard(model)
# model.to_empty(device=device)  # allocates the shards and nothing else
# weights = torch.load(path, mmap=True) if dist.get_rank() == 0 else {}
# options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
# set_model_state_dict(model, weights, options=options)  # both from torch.distributed.checkpoint.state_dict
# ```
#
# Without pretrained weights, each module has to fill its own shards after `to_empty`. This is what `meta_device=True`
# does (`scripts/extras/meta_device.py`; *Memory* in `docs/how_to/beyond.md` says what it asks of your modules).
#
# Transformers' `Trainer` (5.23) takes `fsdp=True`: that is FSDP2, with one unit per block of a class listed in the
# model's `_no_split_modules`. Accelerate's FSDP plugin uses the older FSDP unless `fsdp_version=2`.
#
# ## Sources
#
# Zhao et al., *PyTorch FSDP* (arXiv 2304.11277). torch/distributed/fsdp: `fully_shard`. Rajbhandari et al., *ZeRO*
# (arXiv 1910.02054), section 7: the communication of each stage.
