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
# # 11 · Mixed precision: range, digits, bytes
#
# **You will be able to** train in fp16 and in bf16, say which bytes 16 bits halve and which they do not, what fp16 does
# to gradients and how a scaler saves a training from it, and why ranks must skip a step together. **25 minutes.
# You need** labs 03, 04 and 05.
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

lab, ranks = Lesson("11_mixed_precision", ranks=nproc_per_node), nproc_per_node
draw.formats()

# %% [markdown]
# ## Your predictions
#
# The model is labkit's small transformer. In fp32 a rank holds 13.4 MiB of states and 17 MiB of activations. `autocast`
# casts weights on their way into a matrix product; FSDP can gather them in 16 bits.

# %%
peak = lab.ask("DDP's peak memory in 16 bits, as a share of fp32's", default=50, unit="%")
traffic = lab.ask("bytes that FSDP sends with weights in 16 bits and sums in 32, over all in 32", default=50, unit="%")
moves = lab.ask("how far 100 steps of 0.001 move a bf16 weight of 1", default=0.1, options={"0.1": 0.1, "0": 0.0})
digits = lab.ask("share of this model's gradients that lose digits in fp16, not scaled", default=1, unit="%")
survives = lab.ask("fp16: is the loss finite 50 steps after an absurd label", default=1, options={"yes": 1, "no": 0})
skips = lab.ask("ranks that skip a step under FSDP, when only one of them has an infinite gradient", default=1)

# %% [markdown]
# ## Which bytes halve?
#
# Run DDP in fp32 and in 16 bits. Meanwhile every rank records what torch allocates.

# %%
sizes = {"nproc_per_node": ranks, "global_batch_size": global_batch_size}
plans = {bits: plan("ddp", precision=bits, **sizes) for bits in ("fp32", lab.half)}
runs = {bits: lab.launch(each, steps=4, shown=False) for bits, each in plans.items()}
held = {bits: run.memory().ranks[0].traced for bits, run in runs.items()}
planned = {bits: each.peak for bits, each in plans.items()}
shares = [at[lab.half].bytes / at["fp32"].bytes for at in (planned, held)]
lab.verify(peak, *shares, "%", within=0.04)
draw.bars({b: at.categories for b, at in held.items()}, {b: at.categories for b, at in planned.items()}, unit="B")

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
    print(f"{dtype}: {weight.item():.3f}")
    lab.verify(name, expected, 1 - weight.item(), within=0.001)

# %% [markdown]
# Below 1 the numbers of bf16 are 2^-8 = 0.004 apart, so 1 - 0.001 is rounded back to 1, every time.
#
# ## What fp16 does to small gradients
#
# The picture shows the gradients of the same model in its first step, by exponent. Below 2^-25 a gradient becomes zero,
# below 2^-14 it loses digits, and from 2^16 it is infinite. So the loss is multiplied by a **scale** before backward,
# which moves all gradients to the right, and the gradients are divided by it afterwards, in fp32. The scale in
# the pictures is 2 to the `power`. The first goes the other way: each loss is divided by 256, as it is when a step
# accumulates the gradients of 256 micro-batches.

# %%
torch.manual_seed(0)
ours = defined(Script.load("ddp"), "model", "data")
model, (x, y) = ours.Model(), ours.load_datasets("")[0][:8]
torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
gradients = torch.cat([p.grad.flatten() for p in model.parameters()]).abs()
shares, fp16 = draw.exponents(gradients), gradients[gradients > 0].half()
fewer = sum(share for exponent, share in shares.items() if -25 <= exponent < -14)
lab.verify(digits, fewer, ((fp16 > 0) & (fp16 < 2**-14)).double().mean().item(), "%", within=0.001)
lab.explore(lambda power: draw.gradients(shares, 2.0**power), power=[-8, -4, 0, 16, 24])

# %% [markdown]
# Few vanish at a scale of 1. In other models more do: one that the authors of the method trained (SSD) diverged without
# a scale.
#
# ## What fp16 does to large gradients
#
# `GradScaler` finds the scale by itself. It starts at 2^16; a step with an infinite gradient is skipped and the scale
# halved; after `growth_interval` good steps (2,000) it is doubled. What does that save you from? A linear layer learns
# to return two of its eight inputs. In step 50 one of 64 labels is 9,999,999, as some data sets write "missing".
# Gradients are clipped to a norm of 1. Autocast computes in real fp16 and bf16 on a CPU, too.

# %%
from torch.nn.functional import mse_loss


def trained(model, dtype, scaled, bad_steps=(50,), steps=100, **scale):
    device, seen = next(model.parameters()).device.type, []
    random, optimizer = torch.Generator().manual_seed(0), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, enabled=scaled, **scale)
    for step in range(steps):
        x = torch.randn(64, 8, generator=random).to(device)
        truth = x[:, :2]
        labels = truth.clone()
        if step in bad_steps:
            labels[0, 1] = 9_999_999
        with torch.autocast(device, dtype):
            answers = model(x)
            loss = mse_loss(answers, labels)
        scaler.scale(loss).backward()
        mine = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
        finite = all(bool(grad.isfinite().all()) for grad in mine)  # of the gradients that this rank has
        scaler.unscale_(optimizer)  # divides them by the scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # skips the step if any is infinite
        scaler.update()
        optimizer.zero_grad()
        seen.append((finite, scaler.get_scale(), mse_loss(answers.float(), truth).detach()))
    return [(finite, scale, loss.item()) for finite, scale, loss in seen]


def linear(device):
    torch.manual_seed(0)
    return torch.nn.Linear(8, 2).to(device)


# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
ways = {"bf16": (torch.bfloat16, False), "fp16 with a scaler": (torch.float16, True), "fp16": (torch.float16, False)}
losses = {way: [loss for *_, loss in trained(linear(device), *of)] for way, of in ways.items()}
for way, line in losses.items():
    lab.verify(survives if way == "fp16" else f"{way}: is it finite", int(way != "fp16"), int(line[-1] < float("inf")))
lines = {way: [*enumerate(line)] for way, line in losses.items()}
draw.curves(lines, "loss against the true labels", log=True, marks={50: "a label of 9,999,999"})

# %% [markdown]
# The label makes the loss' gradient infinite in fp16. Clipping divides all gradients by their norm, which is infinite,
# too, and ∞/∞ is not a number: the weights are lost, and with them the training; its line ends. The scaler sees the
# infinity and skips the step. In bf16 the gradient is large but finite, and clipping makes it a normal one, as in fp32.
#
# ## What ranks must agree on
#
# Under DDP the all-reduce carries an infinity to all ranks. Under FSDP a rank has only its own shard of the gradients:
# what if the infinity is in another rank's shard? `on_ranks` trains in fp16 with a scaler, and in steps 4 and 6 the
# last rank has an absurd label for the second output, whose weights are one row of the layer, in one shard. The scale
# is doubled after 3 good steps here. The run also counts what FSDP sends in a step, with weights and sums in 32 and in
# 16 bits.

# %%
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


def on_ranks(device):
    bad_steps = (4, 6) if dist.get_rank() == dist.get_world_size() - 1 else ()
    models = {"DDP": DistributedDataParallel(linear(device)), "FSDP": fully_shard(linear(device))}
    scale = {"init_scale": 2.0**15, "growth_interval": 3}
    seen = {way: trained(model, torch.float16, True, bad_steps, 10, **scale) for way, model in models.items()}
    full, half, sent = torch.float32, torch.float16 if device.type == "cuda" else torch.bfloat16, []
    for weights, sums in ((full, full), (half, full), (half, half)):
        model, policy = tower(64, 5, device), MixedPrecisionPolicy(weights, sums)
        for module in [*model, model]:
            fully_shard(module, mp_policy=policy)
        sent.append(sum(third_step(model, torch.ones(4, 64, device=device))["bytes"].values()))
    return seen, sent


# %%
run, answers = lab.run(on_ranks, loop=trained, options={"shown": False})
sent, owners = answers[0][1], {}
for way, expected, name in (("DDP", ranks, "DDP: ranks that skip"), ("FSDP", 1, skips)):
    steps = [seen[way] for seen, _ in answers]  # of all ranks
    for rank, of_rank in enumerate(steps):
        owners.setdefault(tuple(scale for _, scale, _ in of_rank), []).append(f"{way} rank {rank}")
    saw = sum(not of_rank[4][0] for of_rank in steps)
    skipped = sum(of_rank[4][1] == of_rank[3][1] / 2 for of_rank in steps)
    print(f"{way}, step 4: {saw} of {ranks} ranks see an infinity, {skipped} skip the step")
    lab.verify(f"{way}: ranks that see one's infinity", expected, saw)
    lab.verify(name, ranks, skipped)
lines = {", ".join(who): [*enumerate(scales)] for scales, who in owners.items()}
draw.curves(lines, f"the scale of {'; of '.join(lines)}", log=True, stairs=True, marks={4: "overflow", 6: "overflow"})

# %% [markdown]
# All ranks skip the step and have the same scale, although under FSDP only one saw the infinity: FSDP2's gradients are
# `DTensor`s, and torch's check for infinities asks all ranks that hold a part of them. A rank that skipped alone would
# have different weights from then on. (The older FSDP needs `ShardedGradScaler` for that.)
#
# **Bytes that are sent.** DDP sends only gradients, in fp32, with autocast or without. FSDP gathers its weights twice
# in a step and reduces its gradients once (lab 05), and the weights can travel in 16 bits. Reducing in 16 bits halves
# the rest, but rounds each sum to two or three decimal digits: keep `reduce_dtype` at fp32.

# %%
lab.verify(traffic, (2 * 2 + 4) / (2 * 4 + 4), sent[1] / sent[0], "%")  # bytes of a number: gathered twice, summed once
lab.verify("the same with sums in 16 bits", (2 * 2 + 2) / (2 * 4 + 4), sent[2] / sent[0], "%")
lab.score()

# %% [markdown]
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
#   the place of autocast. With fp16 it needs the scaler, too.
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
# ## Recap
#
# | | fp32 | bf16, mixed | fp16, mixed |
# |---|---|---|---|
# | held for a parameter | 16 bytes | 16 bytes | 16 bytes |
# | activations | 4 bytes a number | 2, some 4 | 2, some 4 |
# | DDP sends | 4 bytes a gradient | 4 | 4 |
# | FSDP sends | 4 bytes a weight, twice, and 4 a gradient | 2, twice, and 4 | 2, twice, and 4 |
# | needs | nothing | Ampere or later | a scaler, and ranks that skip a step together |
#
# ## Try this
#
# 1. `global_batch_size = 64`: is DDP's peak in 16 bits nearer to half of fp32's?
#    <details><summary>Answer</summary>Nearer: 65% instead of 82 (103 and 158 MiB, planned). The larger the share of
#    activations, the more 16 bits save; they save nothing of the states.</details>
# 2. In `trained`, clip before `unscale_`. What happens to the gradients?
#    <details><summary>Answer</summary>They are still multiplied by the scale, so all of them are far above 1: once they
#    are clipped to a norm of 1 and divided by the scale, almost nothing is left. The loss with a scaler stays above 1,
#    where it began; it should be below 0.000001. AdamW, which divides by the gradients' size, would hide the
#    mistake.</details>
# 3. Start the scaler of `on_ranks` with `init_scale` at `2.0**40`.
#    <details><summary>Answer</summary>All ten steps are skipped; after the last the scale is 2^30, still too large. A
#    run that resumes without the scaler's state may begin with such skipped steps, because its scale is 2^16
#    again.</details>
#
# ## Sources
#
# Micikevicius et al., *Mixed Precision Training* (arXiv 1710.03740): the scale of the loss, weights in fp32.
# torch/amp/grad_scaler.py; torch/distributed/fsdp: `MixedPrecisionPolicy`.
