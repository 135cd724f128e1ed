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
# # 05 · Mixed precision: range, digits, bytes
#
# **You will be able to** say which bytes 16 bits halve and which they do not, which gradients fp16 loses and how a
# scaler saves them, and why ranks must skip a step together. **25 minutes. You need** labs 03, 06 and 07.
#
# Sixteen bits have to choose. fp16 has digits and little range: small gradients become zero, large ones infinite. bf16
# has the range of fp32 and few digits: a weight that is stored in it stops learning. So both compute in 16 bits and
# keep weights and optimizer state in 32.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 8  # samples per optimizer step, over all ranks; a multiple of the ranks

# %%
from labkit import Script, plan
from labkit.lessons import Lesson, defined, draw, sized

lab, N = Lesson("05_mixed_precision", ranks=nproc_per_node), nproc_per_node
draw.formats()

# %% [markdown]
# ## Your predictions
#
# The model is labkit's small transformer, 0.8 million parameters. `autocast` casts weights on their way into a matrix
# product; FSDP can gather them in 16 bits.

# %%
peak = lab.ask("DDP's peak memory in 16 bits, as a share of fp32's", default=50, unit="%")
traffic = lab.ask("bytes that FSDP sends with weights in 16 bits and sums in 32, over all in 32", default=50, unit="%")
moves = lab.ask("how far 100 steps of 0.001 move a bf16 weight of 1", default=0.1, options={"0.1": 0.1, "0": 0.0})
digits = lab.ask("share of this model's gradients that lose digits in fp16, not scaled", default=1, unit="%")
skips = lab.ask("ranks that skip a step under FSDP, when only one of them has an infinite gradient", default=1)

# %% [markdown]
# ## Which bytes halve?

# %%
precisions, parts = ("fp32", lab.half), ("parameters", "gradients", "optimizer", "activations")
options = {"nproc_per_node": N, "global_batch_size": global_batch_size}
plans = {bits: plan("ddp", precision=bits, **options) for bits in precisions}
planned = {bits: plans[bits].formulas.categories for bits in precisions}
lab.predict_each({f"{bits}: {part}": planned[bits][part] for bits in precisions for part in parts}, "B", within=0.03)
lab.predict(peak, plans[lab.half].formulas.bytes / plans["fp32"].formulas.bytes, "%", within=0.04)
runs = {bits: lab.launch(each, steps=4) for bits, each in plans.items()}

# %%
traced = {bits: run.memory().ranks[0].traced for bits, run in runs.items()}
held = {bits: traced[bits].categories for bits in precisions}
lab.measure_each({f"{bits}: {part}": held[bits][part] for bits in precisions for part in parts})
lab.measure(peak, traced[lab.half].bytes / traced["fp32"].bytes, run=runs[lab.half])
draw.bars(held, planned, unit="B", title="rank 0 at its peak")

# %% [markdown]
# Weights, gradients and AdamW's state stay in fp32, 16 bytes per parameter. Activations shrink, but not by half: the
# inputs of norms, the logits and the loss are in fp32, and the weights that were cast are there twice.
#
# ## Why 32 bits for the states
#
# A number is ± 1.fraction · 2^exponent. fp32 has 23 bits of fraction, fp16 10, bf16 only 7. A weight is moved a hundred
# times, as an optimizer would:

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
# ## What fp16 makes of gradients
#
# The gradients of the same model in its first step, in fp32. Counted by their exponents: below 2^-25 a gradient becomes
# zero, below 2^-14 it loses digits, from 2^16 on it is infinite. Then really cast to fp16. Move the slider: this is why
# the loss is multiplied by a **scale** before backward, and the gradients are divided by it afterwards.

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
# ## What ranks must agree on
#
# `GradScaler` finds the scale by itself: a step with an infinite gradient is skipped and the scale halved; after
# `growth_interval` good steps it is doubled. Under DDP the all-reduce carries an infinity to all ranks. Under FSDP a
# rank sees its own shard only. Below, one rank overflows in steps 4 and 6: under DDP its loss is too large, under FSDP
# its shard gets an infinity. And what FSDP sends in a step is counted, under three policies.

# %%
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def sharded(model, gather="float32", reduce="float32"):
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, gather), reduce_dtype=getattr(torch, reduce))
    for module in [*model, model]:
        fully_shard(module, mp_policy=policy)
    return model


def overflowing(model, x, *, in_shard=False):
    optimizer, saw, skipped = torch.optim.AdamW(model.parameters()), [], []
    scaler = torch.amp.GradScaler(x.device.type, init_scale=2.0**15, growth_interval=3)
    for step in range(10):
        guilty, scale = step in (4, 6) and dist.get_rank() == dist.get_world_size() - 1, scaler.get_scale()
        with torch.autocast(x.device.type, torch.float16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * (1e9 if guilty and not in_shard else 1)).backward()
        if guilty and in_shard:
            next(model.parameters()).grad.to_local()[0] = float("inf")
        saw += [] if all_finite(model) else [step]
        scaler.step(optimizer)
        scaler.update()
        skipped += [step] if scaler.get_scale() < scale else []
    return saw == [4, 6], skipped == [4, 6]


def on_ranks(device, policies):
    x = torch.ones(4, 64, device=device)
    sent = [sum(third_step(sharded(tower(64, 5, device), *each), x)["bytes"].values()) for each in policies]
    of_ddp = overflowing(DistributedDataParallel(tower(64, 5, device)), x)
    return *of_ddp, *overflowing(sharded(tower(64, 5, device)), x, in_shard=True), *sent


# %%
half = {"bf16": "bfloat16", "fp16": "float16"}[lab.half]
names = ("DDP: ranks that see one's infinity", "DDP: ranks that skip", "FSDP: ranks that see one's infinity", skips)
lab.predict_each(dict(zip(names, (N, N, 1, N), strict=True)))
lab.predict(traffic, (2 * 2 + 4) / (2 * 4 + 4), "%")  # gathered twice, summed once
lab.predict("the same with sums in 16 bits", (2 * 2 + 2) / (2 * 4 + 4), "%")
run, answers = lab.run(on_ranks, [("float32", "float32"), (half, "float32"), (half, half)])

# %%
results = {name: sum(rank[i] for rank in answers) for i, name in enumerate(names)}
whole, gathered, both = answers[0][len(names) :]
lab.measure_each(results | {traffic: gathered / whole, "the same with sums in 16 bits": both / whole}, run=run)
lab.score()

# %% [markdown]
# All ranks skip, although under FSDP only one saw the infinity: `GradScaler` asks the others when gradients lie on all
# ranks (`DTensor`). A rank that skipped alone would have other weights and another scale from then on. (The older FSDP
# needs `ShardedGradScaler` for that.)
#
# Under DDP no weights travel, and gradients are sent in fp32 all the same. What only FSDP has are weights that travel
# in 16 bits. Sums in 16 bits halve the rest, too, and round each sum to two or three decimal digits.
#
# ## On 2 × T4 and 8 × A100
#
# A transformer of 25 million parameters. A T4 has no bf16 in its hardware: torch emulates it, slower than fp32, and
# says nothing. The plan says it.

# %%
gpt = sized(Script.load("ddp"), width=512, layers=8, heads=8)
lab.plans({bits: (gpt, {"precision": bits}) for bits in ("fp32", "fp16", "bf16")}, global_batch_size=64)

# %% [markdown]
# ## Try this
#
# 1. `global_batch_size = 64`: is DDP's peak in 16 bits nearer to half of fp32's?
#    <details><summary>Answer</summary>Nearer: 65% instead of 82 (103 and 158 MiB, planned). The more of it is
#    activations, the more 16 bits save; of the states they save nothing.</details>
# 2. `labkit.launch("ddp", nproc_per_node=2, precision="fp16")` without a GPU: what happens?
#    <details><summary>Answer</summary>Both ranks stop with one sentence, "--precision fp16 needs a GPU; use fp32 or
#    bf16 on the CPU": it would gain nothing there.</details>
# 3. Start the scaler with `init_scale=2.0**40`. What does it cost to find the scale?
#    <details><summary>Answer</summary>On one rank the first 18 steps are skipped, until the scale is 2^22;
#    later some more whenever it has grown again. A checkpoint should hold the scale.</details>
#
# ## Sources
#
# Micikevicius et al., *Mixed Precision Training* (arXiv 1710.03740): the scale of the loss, weights in fp32.
# torch/amp/grad_scaler.py; torch/distributed/fsdp: `MixedPrecisionPolicy`.
#
# ### Appendix: what was claimed, and what the articles say
#
# The first article (000, lines 75-77) trains in fp16 without a scaler. The guide (001, line 96) sums gradients in bf16;
# it prefers bf16 on Ampere and later (line 225), and rightly. It counts mixed precision among FSDP's advantages (line
# 32), as the third article does (003, line 431). DDP has it as well.

# %%
lab.check({"the same with sums in 16 bits": ("001, line 96: bf16 for both", None)})
