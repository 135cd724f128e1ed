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
# # 10 · Mixed precision: range, digits, bytes
#
# **You will be able to** train in fp16 and in bf16, say which bytes 16 bits halve and which they do not, which
# gradients fp16 loses and how a scaler saves them, and why ranks must skip a step together. **25 minutes. You need**
# labs 03, 04 and 05.
#
# Sixteen bits have to choose. fp16 has more digits but little range: small gradients become zero, large ones infinite.
# bf16 has the range of fp32 but few digits: a weight that is stored in it stops learning. So with both you compute in
# 16 bits and keep weights and optimizer state in 32: that is **mixed precision**.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 8  # samples per optimizer step, over all ranks; a multiple of the ranks

# %%
from labkit import Script, plan
from labkit_labs import Lesson, defined, draw, sized

lab, N = Lesson("10_mixed_precision", ranks=nproc_per_node), nproc_per_node
draw.formats()

# %% [markdown]
# ## Your predictions
#
# The model is labkit's small transformer. In fp32 a rank holds 13.4 MiB of states and 17 MiB of activations. `autocast`
# casts weights on their way into a matrix product; FSDP can gather them in 16 bits. (It gathers a unit twice in a step
# and reduces its gradients once, lab 05.)

# %%
peak = lab.ask("DDP's peak memory in 16 bits, as a share of fp32's", default=50, unit="%")
traffic = lab.ask("bytes that FSDP sends with weights in 16 bits and sums in 32, over all in 32", default=50, unit="%")
moves = lab.ask("how far 100 steps of 0.001 move a bf16 weight of 1", default=0.1, options={"0.1": 0.1, "0": 0.0})
digits = lab.ask("share of this model's gradients that lose digits in fp16, not scaled", default=1, unit="%")
skips = lab.ask("ranks that skip a step under FSDP, when only one of them has an infinite gradient", default=1)

# %% [markdown]
# ## Which bytes halve?
#
# Run DDP in fp32 and in 16 bits. Meanwhile every rank records what torch allocates.

# %%
sizes = {"nproc_per_node": N, "global_batch_size": global_batch_size}
plans = {bits: plan("ddp", precision=bits, **sizes) for bits in ("fp32", lab.half)}
lab.predict(peak, plans[lab.half].peak.bytes / plans["fp32"].peak.bytes, "%", within=0.04)
runs = {bits: lab.launch(each, steps=4, shown=False) for bits, each in plans.items()}

# %%
traced = {bits: run.memory().ranks[0].traced for bits, run in runs.items()}
lab.measure(peak, traced[lab.half].bytes / traced["fp32"].bytes, run=runs[lab.half])
held = {bits: each.categories for bits, each in traced.items()}
planned = {bits: each.peak.categories for bits, each in plans.items()}
draw.bars(held, planned, unit="B", title="rank 0 at its peak")

# %% [markdown]
# Weights, gradients and AdamW's state stay in fp32, 16 bytes per parameter. Activations shrink, but not by half: the
# inputs of norms, the logits and the loss are in fp32, and `autocast` keeps a 16-bit copy of the weights for backward.
# What 16 bits really buy is speed: matrix products are several times as fast on tensor cores (see the plan below).
#
# ## Why 32 bits for the states
#
# A number is ± 1.fraction · 2^exponent. fp32 has 23 bits of fraction, fp16 10, bf16 only 7. (The picture above counts
# the leading 1, too.) Move a weight a hundred times, as an optimizer would:

# %%
import torch

for name, dtype, expected in (("the same in fp32", torch.float32, 0.1), (moves, torch.bfloat16, 0.0)):
    weight = torch.ones((), dtype=dtype)
    for _ in range(100):
        weight -= 0.001
    lab.verify(name, expected, 1 - weight.item(), within=0.001)

# %% [markdown]
# Below 1 the numbers of bf16 are 2^-8 = 0.004 apart, so 1 - 0.001 is rounded back to 1, every time.
#
# ## What fp16 does to gradients
#
# The picture shows the gradients of the same model in its first step, by exponent. Below 2^-25 a gradient becomes zero,
# below 2^-14 it loses digits, and from 2^16 it is infinite. So the loss is multiplied by a **scale** before backward,
# which moves all gradients to the right, and the gradients are divided by it afterwards, in fp32.

# %%
ours = defined(Script.load("ddp"), "model", "data")
model, (x, y) = ours.Model(), ours.load_datasets("")[0][:8]
torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
g = torch.cat([p.grad.flatten() for p in model.parameters()]).abs()
shares, fp16 = draw.exponents(g), g[g > 0].half()
fewer = sum(share for exponent, share in shares.items() if -25 <= exponent < -14)
lab.verify(digits, fewer, ((fp16 > 0) & (fp16 < 2**-14)).double().mean().item(), "%", within=0.001)
lab.explore(draw.gradients, shares, scale=[1, 2**8, 2**16, 2**24])

# %% [markdown]
# Few vanish here. In other models more do: one that the authors of the method trained (SSD) diverged without a scale.
#
# ## What ranks must agree on
#
# `GradScaler` finds the scale by itself. It starts at 2^16; a step with an infinite gradient is skipped and the scale
# halved; after `growth_interval` good steps (2,000, here 3) it is doubled. Under DDP the all-reduce carries an infinity
# to all ranks. Under FSDP a rank has only its own shard of the gradients: what if the infinity is in another rank's
# shard? Below, the last rank overflows in steps 4 and 6: under DDP its loss is too large, under FSDP its shard gets an
# infinity. The run also counts what FSDP sends in a step, with weights and sums in 32 and in 16 bits.

# %%
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def sharded(model, gather="float32", reduce="float32"):
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, gather), reduce_dtype=getattr(torch, reduce))
    for module in [*model, model]:
        fully_shard(module, mp_policy=policy)
    return model


def overflowing(model, x, *, in_shard=False):
    optimizer, finite, scales = torch.optim.AdamW(model.parameters()), [], []
    scaler = torch.amp.GradScaler(x.device.type, init_scale=2.0**15, growth_interval=3)
    for step in range(10):
        overflows = step in (4, 6) and dist.get_rank() == dist.get_world_size() - 1
        with torch.autocast(x.device.type, torch.float16):
            loss = model(x).float().square().mean() * (1e9 if overflows and not in_shard else 1)
        scaler.scale(loss).backward()
        if overflows and in_shard:
            next(model.parameters()).grad.to_local()[0] = float("inf")
        finite.append(all_finite(model))  # of what this rank has
        scaler.step(optimizer)  # divides the gradients by the scale; skips the step if any is infinite
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return finite, scales


def on_ranks(device, policies):
    x = torch.ones(4, 64, device=device)
    sent = [sum(third_step(sharded(tower(64, 5, device), *each), x)["bytes"].values()) for each in policies]
    ddp = overflowing(DistributedDataParallel(tower(64, 5, device)), x)
    return {"DDP": ddp, "FSDP": overflowing(sharded(tower(64, 5, device)), x, in_shard=True)}, sent


# %%
half = {"bf16": "bfloat16", "fp16": "float16"}[lab.half]
saw = {"DDP": "DDP: ranks that see one's infinity", "FSDP": "FSDP: ranks that see one's infinity"}
lab.predict_each({saw["DDP"]: N, saw["FSDP"]: 1, "DDP: ranks that skip": N, skips: N})
lab.predict(traffic, (2 * 2 + 4) / (2 * 4 + 4), "%")  # gathered twice, summed once
lab.predict(both := "the same with sums in 16 bits", (2 * 2 + 2) / (2 * 4 + 4), "%")
run, answers = lab.run(on_ranks, [("float32",) * 2, (half, "float32"), (half, half)], options={"shown": False})

# %%
ways, bytes_sent = [each for each, _ in answers], answers[0][1]
lab.measure_each({name: sum(not rank[way][0][4] for rank in ways) for way, name in saw.items()}, run=run)
for way, name in (("DDP", "DDP: ranks that skip"), ("FSDP", skips)):
    lab.measure(name, sum(scales[4] == scales[3] / 2 for _, scales in (rank[way] for rank in ways)), run=run)
lab.measure_each({traffic: bytes_sent[1] / bytes_sent[0], both: bytes_sent[2] / bytes_sent[0]}, run=run)
lines = {f"{way}, rank {r}": [*enumerate(rank[way][1])] for way in saw for r, rank in enumerate(ways)}
display(draw.curves(lines, "the scale after each step", log=True, marks={4: "overflow", 6: "overflow"}))
lab.score()

# %% [markdown]
# All ranks skip the step and have the same scale, although under FSDP only one saw the infinity: FSDP2's gradients are
# `DTensor`s, and torch's check for infinities asks all ranks that hold a part of them. A rank that skipped alone would
# have different weights from then on. (The older FSDP needs `ShardedGradScaler` for that.)
#
# **Bytes that are sent.** DDP sends only gradients, in fp32, with autocast or without. FSDP sends weights, too, and
# those can travel in 16 bits. Reducing in 16 bits halves the rest, but rounds each sum to two or three decimal digits:
# keep `reduce_dtype` at fp32.
#
# ## In your own code
#
# ```python
# bf16 = torch.cuda.is_bf16_supported(including_emulation=False)  # a T4 emulates it, slower than fp32
# half = torch.bfloat16 if bf16 else torch.float16
# scaler = torch.amp.GradScaler("cuda", enabled=not bf16)  # bf16 has fp32's range and needs none
# for x, y in loader:
#     with torch.autocast("cuda", dtype=half):  # forward and loss, not backward
#         loss = F.cross_entropy(model(x), y)
#     scaler.scale(loss).backward()
#     scaler.unscale_(optimizer)  # only if you clip
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     scaler.step(optimizer)
#     scaler.update()
#     optimizer.zero_grad()
# ```
#
# - **Ampere and later (A100, L4, H100): bf16.** Older GPUs (T4, V100): **fp16 with a scaler**, whose `state_dict()`
#   belongs in the checkpoint.
# - **FSDP:** `fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32))` takes
#   the place of autocast.
# - **Hugging Face:** `bf16=True` or `fp16=True` in `TrainingArguments`. Load the model in fp32 (`from_pretrained(name,
#   dtype=torch.float32)`): with fp16 weights the scaler stops with "Attempting to unscale FP16 gradients".
#
# ## On 2 × T4 and 8 × A100
#
# The model is a transformer of 25 million parameters. A T4 has no bf16 in its hardware, so the plan refuses it.

# %%
gpt = sized(Script.load("ddp"), width=512, layers=8, heads=8)
lab.plans({bits: (gpt, {"precision": bits}) for bits in ("fp32", "fp16", "bf16")}, global_batch_size=64)

# %% [markdown]
# ## Try this
#
# 1. `global_batch_size = 64`: is DDP's peak in 16 bits nearer to half of fp32's?
#    <details><summary>Answer</summary>Nearer: 65% instead of 82 (103 and 158 MiB, planned). The larger the share of
#    activations, the more 16 bits save; they save nothing of the states.</details>
# 2. In the loop above, clip before `unscale_`. What happens to the gradients?
#    <details><summary>Answer</summary>They are still multiplied by the scale, so all of them are far above 1: once they
#    are clipped to a norm of 1 and divided by the scale, almost nothing is left. A linear model that SGD trains to a
#    loss of 0.01 stays at 71, where it began. AdamW, which divides by the gradients' size, hides the mistake.</details>
# 3. Start the scaler of `overflowing` with `init_scale=2.0**40`.
#    <details><summary>Answer</summary>All ten steps are skipped; after the last the scale is 2^30, still too large. A
#    run that resumes without the scaler's state may begin with such skipped steps, because its scale is 2^16
#    again.</details>
#
# ## Sources
#
# Micikevicius et al., *Mixed Precision Training* (arXiv 1710.03740): the scale of the loss, weights in fp32.
# torch/amp/grad_scaler.py; torch/distributed/fsdp: `MixedPrecisionPolicy`.
#
# ### Appendix: what was claimed, and what the articles say
#
# The first article (000, lines 75-77) trains in fp16 without a scaler. The guide (001, line 96) sums gradients in bf16;
# it rightly prefers bf16 on Ampere and later (line 225). It counts mixed precision among FSDP's advantages (line 32),
# as the third article does (003, line 431). DDP has it as well.

# %%
lab.check({both: ("001, line 96: bf16 for both", None)})
