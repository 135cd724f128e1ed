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
# # 07 · FSDP1 and FSDP2: the same sharding, written twice
#
# **You will be able to** read code for either of torch's two FSDPs, translate each setting of the older one, and load
# the older one's checkpoints with the newer. **25 minutes. You need** lab 05.
#
# Lab 05 shards with `fully_shard`. Most code that you will find wraps the model in `FullyShardedDataParallel` instead:
# that is **FSDP1**, and `fully_shard` is **FSDP2**, the newer one. They do the same thing; they differ in how they cut
# parameters, and in how they look:
#
# | | FSDP1 | FSDP2 |
# |---|---|---|
# | you write | `model = FullyShardedDataParallel(model)` | `fully_shard(model)`, which changes it in place |
# | units | an `auto_wrap_policy` chooses submodules | one call for each unit, the model last |
# | a shard | a unit's parameters in one flat vector, cut into N equal parts | of each parameter some rows |
# | then a parameter is | that vector, or a view of it | a **DTensor**: the local part, and how the whole is cut |
#
# This lab runs both on four ranks, with the same model and samples, and compares what they hold, send and learn. Lab 08
# moves a DDP script to FSDP.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks; 4 or another even number above

# %%
from labkit_labs import Lesson, draw

lab, N = Lesson("07_fsdp1_and_fsdp2", ranks=nproc_per_node), nproc_per_node

# %% [markdown]
# ## Your predictions
#
# The model is the CNN of labs 01 and 03, with 405,898 parameters: three convolutions and two linear layers (147,584 and
# 1,290 parameters). An article on DDP and FSDP wraps it with FSDP1's `size_based_auto_wrap_policy` and
# `min_num_params=1_000_000`.
#
# In the second question four ranks form two groups of two, and FSDP1's strategy is `HYBRID_SHARD`: it shards within a
# group. In the third, a model trains for 3 steps under FSDP1 and is saved with its optimizer as a popular guide does
# it. FSDP2 loads the file and trains for 3 more. Adam counts its steps for each parameter.

# %%
units = lab.ask("units that the article's policy makes of this CNN", default=3)
hybrid = lab.ask("HYBRID_SHARD, two groups: share of the parameters that a rank holds", default=25, unit="%")
counted = lab.ask("saved by FSDP1, loaded by FSDP2: Adam's count after 3 + 3 steps, for a convolution", default=6)

# %% [markdown]
# ## What is a unit, and what does it look like?
#
# FSDP1 asks a policy for each submodule whether it becomes a unit. Here it is `ModuleWrapPolicy`, which chooses
# classes: each linear layer is a unit, and the convolutions are left to the root. FSDP2 has no policies; a loop does
# it. (On a CPU FSDP1 has to be told so by `device_id`. With a GPU, that is where it moves each unit before it shards
# it.)

# %%
import torch
from torch import nn


def cnn():
    torch.manual_seed(0)
    parts = [(nn.Conv2d(n, m, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)) for n, m in ((1, 32), (32, 64), (64, 128))]
    return nn.Sequential(*sum(parts, ()), nn.Flatten(), nn.Linear(1152, 128), nn.ReLU(), nn.Linear(128, 10))


# %%
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def fsdp1(device, strategy="FULL_SHARD", policy=None, **settings):
    policy = policy or ModuleWrapPolicy({nn.Linear})
    settings |= {"sharding_strategy": ShardingStrategy[strategy], "device_id": device}
    return FSDP(cnn(), auto_wrap_policy=policy, **settings)


def fsdp2(device, **settings):
    model = cnn()  # a large one is built on the meta device (lab 05)
    for unit in [layer for layer in model if isinstance(layer, nn.Linear)]:
        fully_shard(unit, **settings)
    return fully_shard(model, **settings)  # the same model


# %%
from functools import partial

from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy


def each_policy(device):
    policies = {
        "size_based, 1,000,000": partial(size_based_auto_wrap_policy, min_num_params=1_000_000),
        "size_based, 100,000": partial(size_based_auto_wrap_policy, min_num_params=100_000),
        "transformer, {Conv2d}": partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Conv2d}),
        "module, {Linear}": ModuleWrapPolicy({nn.Linear}),
    }
    models, new = {name: fsdp1(device, policy=policy) for name, policy in policies.items()}, fsdp2(device)
    whole = new[-1].bias.full_tensor()  # an all-gather, so every rank has to call it
    looks = models["module, {Linear}"], new, new[-1].bias, whole
    return {name: len(FSDP.fsdp_modules(m)) for name, m in models.items()}, [*map(str, looks)]


# %%
run, ((counts, looks), *_) = lab.run(each_policy, model=cnn, wrap=fsdp1, options={"shown": False})
display(draw.bars(counts, title="units by policy, the root included"))
print(*looks, sep="\n\n")

# %%
lab.verify(units, 1, counts["size_based, 1,000,000"])
lab.verify("units with a threshold of 100,000", 3, counts["size_based, 100,000"])

# %% [markdown]
# The article's threshold is above the size of its whole model, so 405,898 parameters become **one unit**, which is
# gathered whole: FSDP without its point (lab 05). Nothing warns you. With 100,000 there are three: the last
# convolution, the first linear layer and the root. A number of parameters fits models of one size; a class of layers
# fits all. `transformer_auto_wrap_policy` only looks at the class, too, and takes convolutions as well.
#
# FSDP1 shows its units as wrappers, and inserts `_fsdp_wrapped_module` into names. FSDP2 keeps all names and changes
# the class of a unit, `FSDPLinear`. A parameter says how it is laid out: `Shard(dim=0)` over a mesh of four ranks, and
# this rank has three of ten numbers. To debug, `print(p)` shows the local part; `p.full_tensor()`, called on every
# rank, the whole.
#
# ## Each setting of FSDP1, and its form in FSDP2
#
# A mesh with two axes makes groups of ranks: a model is sharded within each group, and every group holds all of it
# (*hybrid sharding*, HSDP). With groups of one rank nothing is sharded. `trained` notes what a rank holds between two
# steps, and the all-gathers of the last step, from torch's flight recorder (lab 05).

# %%
import time

import torch.distributed as dist
from torch.nn import functional as F


def trained(model, optimizer, device, seed):
    losses, random = [], torch.Generator().manual_seed(seed + dist.get_rank())  # samples of its own
    for _ in range(3):
        x, y = torch.rand(8, 1, 28, 28, generator=random), torch.randint(10, (8,), generator=random)
        began = time.time_ns()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)).float(), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    calls = collectives_since(began)["calls"]
    return {"held": held(model.parameters()), "gathers": calls["gathers"], "losses": [float(x) for x in losses]}


# %%
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy


def settings_of(device):
    ranks, axes, on_gpu = dist.get_world_size(), ("replicate", "shard"), device.type == "cuda"
    groups, alone = (init_device_mesh(device.type, (n, ranks // n), mesh_dim_names=axes) for n in (2, ranks))
    halves = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    bf16 = MixedPrecision(**halves, buffer_dtype=torch.bfloat16)
    two_axes = {"strategy": "_HYBRID_SHARD_ZERO2", "device_mesh": groups}
    return {  # of FSDP1, of FSDP2
        "FULL_SHARD": ({}, {"reshard_after_forward": None}),
        "SHARD_GRAD_OP": ({"strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
        "NO_SHARD": ({"strategy": "NO_SHARD"}, {"mesh": alone}),
        "HYBRID_SHARD": ({"strategy": "HYBRID_SHARD", "device_mesh": groups}, {"mesh": groups}),
        "_HYBRID_SHARD_ZERO2": (two_axes, {"mesh": groups, "reshard_after_forward": False}),
        "MixedPrecision": ({"mixed_precision": bf16}, {"mp_policy": MixedPrecisionPolicy(**halves)}),
        "CPUOffload": ({"cpu_offload": CPUOffload(True)}, {"offload_policy": CPUOffloadPolicy(pin_memory=on_gpu)}),
    }


def each_setting(device):
    results = {}
    for name, settings in settings_of(device).items():
        for shard, own in zip((fsdp1, fsdp2), settings, strict=True):
            try:
                model = shard(device, **own)
                result = trained(model, torch.optim.Adam(model.parameters(), lr=1e-3), device, seed=1)
            except RuntimeError as error:
                result = {"error": str(error)}
            results.setdefault(name, []).append(result)
    return results


# %%
import pandas as pd

recorded = {"env": {"TORCH_FR_BUFFER_SIZE": "4000"}, "options": {"shown": False}}
run, (seen, *_) = lab.run(each_setting, model=cnn, wrap=fsdp1, step=trained, **recorded)
rows = {(name, f"FSDP{i}"): result for name, both in seen.items() for i, result in enumerate(both, 1)}
pd.DataFrame(rows).T.dropna(axis=1, how="all").fillna("")

# %% [markdown]
# `held` is what rank 0 holds of the parameters, in bytes. The losses of the three steps are the same to the last digit,
# whatever is sharded, and so are the numbers of all-gathers: three for forward, one for each unit, and two more for
# backward, where the root is still whole. In bf16 the losses agree in three digits, which is what bf16 has.
#
# - `FULL_SHARD` is `reshard_after_forward=None` (or nothing: that is the default), `SHARD_GRAD_OP` is `False`.
# - `NO_SHARD` is deprecated. Use DDP; a mesh of groups of one rank does the same in FSDP2.
# - `MixedPrecision` has a dtype for buffers, such as BatchNorm's; FSDP2 leaves them as they are.
# - `CPUOffload` is what does not work on a CPU: FSDP1 pins memory for a GPU that is not there. FSDP2's policy can be
#   told not to.
#
# Only the bytes differ a little, because FSDP1 pads a unit's flat vector to a multiple of N and cuts it anywhere. FSDP2
# cuts by rows: the last layer has 10, so that four ranks get 3, 3, 3 and 1. For that price each parameter stays a
# tensor of its own, which can be frozen, quantized, saved under its name, or sharded by tensor parallelism as well
# (lab 15).

# %%
shares = {name: N if name == "NO_SHARD" else 2 if "HYBRID" in name else 1 for name in seen}  # groups that hold all
calls = {name: 0 if name == "NO_SHARD" else 3 if "GRAD_OP" in name or "ZERO2" in name else 5 for name in seen}
for name, (one, two) in seen.items():
    by_rows = sum(-(-len(p) * shares[name] // N) * p[0].nbytes for p in cnn().parameters())
    lab.verify(f"{name}, FSDP2: held by rank 0", by_rows, two["held"], "B")
    lab.verify(f"{name}, FSDP2: all-gathers", calls[name], two["gathers"])
    if "error" not in one:
        off = max(abs(x - y) for x, y in zip(one["losses"], two["losses"], strict=True))
        lab.verify(
            f"{name}: FSDP1 and FSDP2 differ in a loss by", 0.01 if "Mixed" in name else 1e-6, off, how="at most"
        )
        lab.verify(f"{name}, FSDP1: all-gathers", calls[name], one["gathers"])
lab.verify(hybrid, 0.5, seen["HYBRID_SHARD"][0]["held"] / seen["NO_SHARD"][0]["held"], "%", within=0.01)

# %% [markdown]
# ## Checkpoints
#
# A **full** state dict has every parameter whole, under the names of the bare model, so anything can load it. It takes
# an all-gather of everything, and one rank has to hold the whole model. A **sharded** one has only this rank's shards,
# and all ranks write at once (lab 16). In FSDP1 `StateDictType` chooses, in a way that is deprecated (hence the
# comments for `labkit.check`). Here is what the guide saves, and what it takes on each rank:

# %%
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType


def save1(model, adam, path):
    on_gpu = next(model.parameters()).is_cuda  # on a CPU, "offloading" would leave tensors without memory
    whole = FullStateDictConfig(offload_to_cpu=on_gpu, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, whole):  # labkit: ignore[replaced]
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, adam)}
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()  # nobody reads before it is written
    return state


def load1(model, adam, state):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):  # labkit: ignore[replaced]
        model.load_state_dict(state["model"])
        own = FSDP.optim_state_dict_to_load(model, adam, state["optimizer"])
    adam.load_state_dict(own)


def load2(model, adam, state):
    full = StateDictOptions(full_state_dict=True)
    set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=full)


def load2_apart(model, adam, state):
    for each in state["optimizer"]["state"].values():
        each["step"] = each["step"].clone()
    load2(model, adam, state)


# %%
from torch.distributed.device_mesh import init_device_mesh


def continued(device, path):
    mesh, holds = init_device_mesh(device.type, (dist.get_world_size(),)), {}
    model = fsdp1(device, device_mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    trained(model, adam, device, seed=1)
    state = save1(model, adam, path)
    holds["FSDP1, full: model"] = held(state["model"].values())
    holds["FSDP1, full: Adam"] = held(each for one in state["optimizer"]["state"].values() for each in one.values())
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):  # labkit: ignore[replaced]
        holds["FSDP1, sharded: model"] = held(model.state_dict().values())
    new, full = fsdp2(device), StateDictOptions(full_state_dict=True, cpu_offload=True)
    holds["FSDP2, full: model"] = held(get_model_state_dict(new, options=full).values())
    holds["FSDP2, sharded: model"] = held(new.state_dict().values())
    losses, counts = {"never stopped": trained(model, adam, device, seed=9)["losses"]}, {}
    for shard, load in ((fsdp1, load1), (fsdp2, load2), (fsdp2, load2_apart)):
        model = shard(device)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        load(model, adam, torch.load(path, map_location="cpu", weights_only=True))
        losses[load.__name__] = trained(model, adam, device, seed=9)["losses"]
        counts[load.__name__] = adam.state[next(model.parameters())]["step"].item()
    return holds, losses, counts


# %%
import tempfile

saved = f"{tempfile.mkdtemp()}/fsdp1.pt"
run, answers = lab.run(continued, saved, model=cnn, wrap=fsdp1, step=trained, ways=save1, options={"shown": False})
(holds, losses, adam_counts), (of_others, *_) = answers[:2]
display(pd.DataFrame({"rank 0 holds": holds, "rank 1 holds": of_others}))
display(pd.DataFrame(losses, index=["loss of step 4", "5", "6"]))
print("Adam's count for the first parameter after step 6:", adam_counts)

# %%
lab.verify(counted, 3 + 3 * 6, adam_counts["load2"])
lab.verify("the same, with a count for each parameter", 6, adam_counts["load2_apart"])
for load in ("load1", "load2_apart"):
    off = max(abs(x - y) for x, y in zip(losses["never stopped"], losses[load], strict=True))
    lab.verify(f"{load}: losses differ from those of a training that never stopped by", 1e-6, off, how="at most")
lab.score()

# %% [markdown]
# `rank0_only=True` leaves the model to rank 0. The optimizer's state has a configuration of its own, and the guide does
# not pass it: **every** rank collects all of Adam's moments, twice the model. Pass
# `FullOptimStateDictConfig(rank0_only=True)` as well. FSDP2's `get_model_state_dict` and `get_optimizer_state_dict`
# give the full state to rank 0 only; they and their `set_…` take models of FSDP1, too, and replace all of
# `state_dict_type`, which is deprecated.
#
# **The count.** FSDP1 has one flat vector per unit, and one count for it. In the file the six parameters of the
# convolutions share one tensor `step`, and `torch.load` restores that they share it. FSDP1 makes one vector of them
# again, and counts right. FSDP2 has six parameters, each of which adds 1 to the same tensor: 3 + 3 × 6 = 21. The losses
# differ from the second step on, because Adam's bias correction divides by 1 - β to the power of the count; no error,
# no warning. Give each parameter a count of its own before loading (`load2_apart`), and the training goes on as if it
# had never stopped.
#
# ## The table
#
# All rows but those marked * were run above (torch 2.13).
#
# | FSDP1 | FSDP2 |
# |---|---|
# | `auto_wrap_policy=…` | a loop of `fully_shard(unit)`, then `fully_shard(model)` |
# | `FULL_SHARD` | `reshard_after_forward=None` or `True` (which frees the root as well) |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False` |
# | `NO_SHARD` | DDP, or a mesh of groups of one rank |
# | `HYBRID_SHARD`, `_HYBRID_SHARD_ZERO2` | a mesh with two axes, and the above |
# | `MixedPrecision(param_dtype, reduce_dtype, …)` | `MixedPrecisionPolicy(param_dtype, reduce_dtype)` |
# | `CPUOffload(offload_params=True)` | `CPUOffloadPolicy()` |
# | `FULL_STATE_DICT` | `get_model_state_dict` with `StateDictOptions(full_state_dict=True, cpu_offload=True)` |
# | `SHARDED_STATE_DICT` | `model.state_dict()`, which has DTensors |
# | `optim_state_dict`, `optim_state_dict_to_load` | `get_optimizer_state_dict`, `set_optimizer_state_dict` |
# | `device_id=…` | the mesh's device; moves units by itself |
# | `use_orig_params=True` * | always: parameters keep their names |
# | `sync_module_states=True` * | `StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)` while loading |
# | `model.no_sync()` * | `model.set_requires_gradient_sync(False)` |
# | `model.clip_grad_norm_(1.0)` * | `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)` |
# | `ShardedGradScaler` * | `torch.amp.GradScaler` |
#
# `labkit.check(before, after)` compares two scripts in this way, and `labkit check --from fsdp1 accelerate.yaml`
# converts a file of Accelerate's settings.
#
# ## On 2 × T4 and 8 × A100
#
# Does it matter for memory or speed which of the two you take? This is labkit's script for each, with GPT-2's size (124
# million parameters, without tied weights 163) and eight samples of 1,024 tokens per step:

# %%
from labkit import Script
from labkit_labs import sized

gpt2 = {"vocabulary": 50257, "context": 1024, "width": 768, "heads": 12, "layers": 12}
lab.plans({name: sized(Script.load(name), **gpt2) for name in ("fsdp1", "fsdp")}, global_batch_size=8)

# %% [markdown]
# ## Try this
#
# 1. `optim_state_dict_to_load` had its arguments in another order in early versions of torch 2, and the guide still
#    passes them so: `(state["optimizer"], model, adam)`. Put that into `load1`.
#    <details><summary>Answer</summary>In torch 2.13: TypeError: unhashable type: 'dict'. <code>labkit.check</code>
#    finds it without running it (optim-state-dict-order).</details>
# 2. Use `SHARD_GRAD_OP` with the policy of one unit, `size_based_auto_wrap_policy` and 1,000,000. How many all-gathers
#    are there?
#    <details><summary>Answer</summary>One. With a single unit it makes no difference whether it is freed after forward:
#    the root is never freed there, so <code>FULL_SHARD</code> has one, too.</details>
# 3. Save with `FullOptimStateDictConfig(rank0_only=True)` as a fourth argument of `state_dict_type`. What does rank 1
#    hold?
#    <details><summary>Answer</summary>Nothing: 0 bytes of the model, and 0 of Adam.</details>
#
# ## Recap
#
# | | held between two steps | sent in a step | waits |
# |---|---|---|---|
# | FULL_SHARD | 1/N of all states | units gathered twice; gradients once | for a unit before it computes |
# | SHARD_GRAD_OP | the same | units gathered once; gradients once | the same, in forward only |
# | HYBRID_SHARD | 1/(ranks of a group) | the same within a group; all-reduces between groups | as FULL_SHARD |
#
# ## Sources
#
# docs.pytorch.org: *FullyShardedDataParallel*; *torch.distributed.fsdp.fully_shard*; *Getting Started with Fully
# Sharded Data Parallel (FSDP2)*, which has a guide from FSDP1. torch/distributed/fsdp/wrap.py: the policies. Zhao et
# al., *PyTorch FSDP* (arXiv 2304.11277). The policy is that of *Distributed Training with PyTorch: DDP vs FSDP*, the
# checkpoint that of a guide, *DDP vs FSDP*.
