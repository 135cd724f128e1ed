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
# Sixteen bits have to choose. fp16 has the digits and not the range: small gradients become zero, large ones infinite,
# and a scaler has to keep them between. bf16 has the range and not the digits: a weight kept in it stops learning. So
# both compute in 16 bits and keep the states in 32; some bytes shrink, most do not. You will predict which gradients
# vanish, which steps a scaler skips and on which ranks, and which bytes halve. The first article (000, lines 75-77)
# trains in fp16 without a scaler; the guide (001, line 225) prefers bf16 where there is hardware for it.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks
global_batch_size: int = 8  # samples per optimizer step, over all ranks; a multiple of the ranks
steps: int = 10  # of each short training; at least 3

# %%
import json

import pandas as pd
import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
half = "bf16" if on_cpu else machine.hardware.precision  # fp16 on GPUs without bf16, such as T4
N, ranks = nproc_per_node, range(nproc_per_node)
claims = Claims("05_mixed_precision")

# %% [markdown]
# ## Sixteen bits
#
# A number is ± 1.fraction · 2^exponent. From the number of bits follow the largest number, the smallest that is not
# zero (a *subnormal*, 0.fraction, which has lost digits), and the distance from 1 to the next number:
#
# | | exponent | fraction | largest | smallest | next to 1 |
# |---|---|---|---|---|---|
# | fp32 | 8 bits | 23 bits | 3.4e38 | 1.4e-45 | 1 + 2^-23 |
# | fp16 | 5 bits | 10 bits | 65504 | 6.0e-8 | 1 + 2^-10 |
# | bf16 | 8 bits | 7 bits | 3.4e38 | 9.2e-41 | 1 + 2^-7 |
#
# What lies between two numbers is rounded to the nearer one. Below 1 the numbers of bf16 are 2^-8 apart, so a weight of
# 1 that an optimizer wants to move by lr = 0.001 stays where it is, every time, for ever.

# %%
import torch


def limits(exponent_bits, fraction_bits):
    """(largest, smallest, distance from 1 to the next) of a floating-point format."""
    bias = 2 ** (exponent_bits - 1) - 1
    return (2 - 2.0**-fraction_bits) * 2.0**bias, 2.0 ** (1 - bias - fraction_bits), 2.0**-fraction_bits


def moved(dtype, steps=100, lr=0.001):
    """How far a weight of 1 moves when an optimizer takes lr from it in each step, as AdamW does at first."""
    weight = torch.ones((), dtype=dtype)
    for _ in range(steps):
        weight -= lr
    return 1 - weight.item()


for name, dtype, bits in (("fp16", torch.float16, (5, 10)), ("bf16", torch.bfloat16, (8, 7))):
    largest, smallest, next_to_1 = limits(*bits)
    of = 1 if name == "fp16" else limits(8, 23)[0]  # bf16's are as large as fp32's, nearly
    claims.predict(f"{name}: largest number{' of fp32' * (of > 1)}", largest / of, "%" * (of > 1))
    claims.predict(f"{name}: smallest number", smallest)
    claims.predict(f"{name}: from 1 to the next number", next_to_1)
    every = torch.arange(1, 2**15 - 1, dtype=torch.int16).view(dtype).double()  # all patterns of bits above zero
    every = every[every.isfinite()]
    claims.measure(f"{name}: largest number{' of fp32' * (of > 1)}", every.max().item() / of)
    claims.measure(f"{name}: smallest number", every.min().item())
    claims.measure(f"{name}: from 1 to the next number", every[every > 1].min().item() - 1)
for dtype, expected in ((torch.float32, 0.1), (torch.bfloat16, 0.0)):
    name = f"a weight kept in {str(dtype).removeprefix('torch.')}: moved in 100 steps"
    claims.predict(name, expected, within=0.001)
    claims.measure(name, moved(dtype))

# %% [markdown]
# ## Predict: the scaler
#
# In fp16 the loss is multiplied by a scale before backward, and the gradients are divided by it afterwards. If one of
# them is not finite, the step is skipped and the scale halved; after `growth_interval` good steps in a row it is
# doubled. Ranks have to agree: one that skips a step alone has other weights, and another scale, for ever.
#
# One rank will overflow here, on purpose, in two steps. Under DDP its infinite gradients reach all ranks in the
# all-reduce. Under FSDP a rank sees its own shard only: here only *one* rank's shard will have the infinity, and ranks
# agree because `GradScaler`'s check, made of tensors that lie on all ranks (`DTensor`), asks the others. (The older
# FSDP, the first article's, needs `ShardedGradScaler` for that.)

# %%
OVERFLOWS, FIRST_SCALE, INTERVAL = (4, 6), 2.0**15, 3


def scaler_rule(steps):
    """(steps that are skipped, scale after the last)."""
    scale, good, skipped = FIRST_SCALE, 0, []
    for step in range(steps):
        if step in OVERFLOWS:
            scale, good = scale / 2, 0
            skipped.append(step)
        else:
            good += 1
        if good == INTERVAL:
            scale, good = scale * 2, 0
    return skipped, scale


SCALED_STEPS = 10
skipped, scale = scaler_rule(SCALED_STEPS)
SEEN = {"ddp": N, "fsdp": 1}
for strategy, seeing in SEEN.items():
    claims.predict(f"{strategy}, fp16: ranks that see the overflow of one", seeing)
    claims.predict(f"{strategy}, fp16: ranks that skip steps {skipped}, no others", N)
    claims.predict(f"{strategy}, fp16: scale after {SCALED_STEPS} steps, all ranks", scale)

# %% [markdown]
# ## Predict: bytes
#
# `autocast` keeps weights, gradients and AdamW's state in fp32, 16 bytes per parameter, and casts weights on the way
# into a matrix product. So under DDP the states stay, and so do the gradients that are sent; activations shrink, but
# not by half, for inputs of norms, the loss and the logits that it needs are in fp32, and weights are there twice.
#
# Under FSDP the policy of the scripts gathers weights in 16 bits and sums gradients in 32:
# `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`. The guide (001, line 96) sums them in
# bf16, too: half of those bytes, and each sum rounded to two or three digits. The guide (001, line 32) and the third
# article (003, line 431) count mixed precision among FSDP's advantages. DDP has it as well. What only FSDP has are
# weights that *travel* in 16 bits: under DDP they do not travel at all.

# %%
text = {name: Script.load("ddp").cells[name].text for name in ("model", "data")}
defined = {}
exec(text["model"] + text["data"], defined)  # the scripts' cells, run here as well, to count
Model, load_datasets = defined["Model"], defined["load_datasets"]
whole = Model()
elements = sum(p.numel() for p in whole.parameters())
tensors, blocks = len(list(whole.parameters())), len(whole.blocks)
in_blocks = sum(p.numel() for p in whole.blocks.parameters())
print(f"{elements:,} parameters, {elements - in_blocks:,} of them outside the {blocks} blocks")

T, d, heads, v = 128, 128, 4, 256  # context, width, heads, vocabulary
s = global_batch_size // N * T  # a rank's tokens


def activations(e):
    """What forward leaves for backward, when matrix products and what is between them take `e` bytes a number."""
    casts = e < 4  # weights in 16 bits, besides the real ones
    block = (2 * 4 + 14 * e) * s * d  # both norms' inputs in fp32; norms, q, k, v, attention, MLP twice 4: 14
    statistics = 2 * 2 * 4 * s + 4 * heads * s  # of two norms, and of attention
    head = (4 + e) * s * d + 2 * 4 * s + casts * e * v * d
    logits, inputs = 4 * s * v, 8 * (2 * s + T)
    return blocks * (block + statistics + casts * e * 12 * d * d) + head + logits + inputs


E = {"fp32": 4, half: 2}
states = 16 * elements + 4 * tensors  # AdamW counts its steps, in 4 bytes for each tensor
peak = {name: states + activations(e) + 2 * 4 * s * v for name, e in E.items()}  # as backward begins, at the logits
room = 0 if on_cpu else 0.03  # a GPU's attention keeps a little more
for name, e in E.items():
    claims.predict(f"ddp, {name}: parameters, gradients, optimizer", states, "B")
    claims.predict(f"ddp, {name}: activations", activations(e), "B", within=room)
claims.predict(f"ddp, {half}: peak, of fp32's", peak[half] / peak["fp32"], "%", within=0.01 + room)

gathered = 2 * in_blocks + (elements - in_blocks)  # blocks in forward and backward, the rest once
POLICIES = {  # (bytes of a number that is gathered, that is summed)
    "fp32": (4, 4),
    half: (2, 4),
    f"{half}, sums too": (2, 2),
}
for policy, (gathering, summing) in POLICIES.items():
    article = "001, line 96: bf16" if summing == 2 else ""
    claims.predict(f"fsdp, {policy}: bytes gathered", gathering * gathered, "B")
    claims.predict(f"fsdp, {policy}: bytes of gradients summed", summing * elements, "B", article=article)
    claims.predict(f"fsdp, {policy}: states of a rank", 16 * elements // N + 4 * tensors, "B")
for policy in (f"ddp, {half}", *(f"fsdp, {policy}" for policy in list(POLICIES)[1:])):
    claims.predict(f"{policy}: loss after {steps} steps, off by", 0.002, how="at most")

# %% [markdown]
# ## What the ranks run
#
# The model and the data of labkit's scripts, seven short trainings one after the other. labkit's scripts refuse fp16 on
# a CPU, where it gains nothing; torch itself can compute in it, slowly, and this is about numbers.

# %%
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ITEMSIZE = {"Float": 4, "Half": 2, "BFloat16": 2}


def build(strategy, computing, summing, device):
    """The same weights on every rank, trained by a strategy; `computing` and `summing` are precisions."""
    torch.manual_seed(0)
    model = Model().to(device)
    if strategy == "ddp":
        if computing != "fp32":
            model.forward = torch.autocast(device.type, DTYPES[computing])(model.forward)
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[computing], reduce_dtype=DTYPES[summing])
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def local(tensors):
    """What this rank holds of them."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def recorded(began):
    """Bytes of whole arrays that were gathered and summed since then, from torch's flight recorder."""
    backend = torch._C._distributed_c10d
    dump = backend._dump_nccl_trace_json if dist.get_backend() == "nccl" else backend._dump_fr_trace_json
    sizes = {"gathered": 0, "summed": 0}
    for entry in json.loads(dump()).get("entries", []):
        if entry["time_created_ns"] >= began:
            kind = "gathered" if "gather" in entry["profiling_name"] else "summed"
            most = max(sum(map(math.prod, entry[side])) for side in ("input_sizes", "output_sizes"))
            sizes[kind] += ITEMSIZE[entry["input_dtypes"][0]] * most
    return sizes


def train(model, samples, steps, device, scaler, overflows=()):
    """`steps` optimizer steps. In those of `overflows` the last rank has a gradient that fp16 cannot hold."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told = {"losses": [], "skipped": [], "seen": []}
    for step, (x, y) in enumerate(samples[:steps]):
        x, y, began = x[rank::size].to(device), y[rank::size].to(device), time.time_ns()
        guilty = step in overflows and rank == size - 1
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        replicated = isinstance(model, DistributedDataParallel)
        scaler.scale(loss * 1e6 if guilty and replicated else loss).backward()
        gradients = local(p.grad for p in model.parameters())
        if guilty and not replicated:
            gradients[0][0] = math.inf  # in its shard, and in no other
        if step == 2:
            told |= recorded(began)
        if not all(gradient.isfinite().all() for gradient in gradients):
            told["seen"].append(step)
        before = [p.detach().clone() for p in local(model.parameters())]
        scaler.step(optimizer)
        scaler.update()
        if all(map(torch.equal, before, local(model.parameters()))):
            told["skipped"].append(step)
        told["losses"].append(loss.detach())
    state = [t for each in optimizer.state.values() for t in each.values()]
    held = local([*model.parameters(), *(p.grad for p in model.parameters()), *state])
    told["losses"] = [loss.item() for loss in told["losses"]]
    return told | {"states": sum(t.nbytes for t in held), "scale": scaler.get_scale()}


def main():
    todo = json.loads(os.environ["TODO"])
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    data, count = load_datasets("")[0], todo["global_batch_size"]
    samples = [data[at : at + count] for at in range(0, len(data) - count, count)]
    told = {}
    for name, (strategy, computing, summing) in todo["trainings"].items():
        model = build(strategy, computing, summing, device)
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=computing == "fp16")
        told[name] = train(model, samples, todo["steps"], device, scaler)
        if name == "ddp, fp32" and dist.get_rank() == 0:
            gradients = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
            torch.save(gradients, Path(os.environ["LABKIT_RUN_DIR"], "gradients.pt"))
    for strategy in ("ddp", "fsdp"):
        scaler = torch.amp.GradScaler(device.type, init_scale=todo["scale"], growth_interval=todo["interval"])
        model = build(strategy, "fp16", "fp32", device)
        told[f"{strategy}, scaled"] = train(model, samples, todo["scaled_steps"], device, scaler, todo["overflows"])
    Path(os.environ["LABKIT_RUN_DIR"], f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
    del model
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# ## Measure

# %%
todo = {
    "trainings": {f"ddp, {name}": ("ddp", name, "fp32") for name in ("fp32", half)}
    | {
        f"fsdp, {name}": ("fsdp", name.split(",")[0], half if both[1] == 2 else "fp32")
        for name, both in POLICIES.items()
    },
    "global_batch_size": global_batch_size,
    "steps": steps,
    "scale": FIRST_SCALE,
    "interval": INTERVAL,
    "scaled_steps": SCALED_STEPS,
    "overflows": OVERFLOWS,
}
text["data"] = text["data"].replace("2**20", "2**16")
script = Script.of("precisions", **text, main=main)
more = {"TORCH_FR_BUFFER_SIZE": "4000", "TODO": json.dumps(todo)}
run = labkit.launch(script, nproc_per_node=N, env=env | more)
run.wait()

# %%
told = [json.loads((run.path / f"told-{rank}.json").read_text()) for rank in ranks]


def same(name, values):
    """What all ranks say alike; otherwise nothing, and the claim fails."""
    claims.measure(name, values[0] if len(set(values)) == 1 else float("nan"), run=run)


for strategy in SEEN:
    each = [rank[f"{strategy}, scaled"] for rank in told]
    saw = sum(rank["seen"] == skipped for rank in each)
    claims.measure(f"{strategy}, fp16: ranks that see the overflow of one", saw, run=run)
    agree = sum(rank["skipped"] == skipped for rank in each)
    claims.measure(f"{strategy}, fp16: ranks that skip steps {skipped}, no others", agree, run=run)
    same(f"{strategy}, fp16: scale after {SCALED_STEPS} steps, all ranks", [rank["scale"] for rank in each])
for policy in POLICIES:
    each = [rank[f"fsdp, {policy}"] for rank in told]
    same(f"fsdp, {policy}: bytes gathered", [rank["gathered"] for rank in each])
    same(f"fsdp, {policy}: bytes of gradients summed", [rank["summed"] for rank in each])
    same(f"fsdp, {policy}: states of a rank", [rank["states"] for rank in each])
losses = pd.DataFrame(
    {name: pd.DataFrame([rank[name]["losses"] for rank in told]).mean() for name in todo["trainings"]}
)
for name in losses.columns.drop(["ddp, fp32", "fsdp, fp32"]):
    apart = (losses[name] - losses[f"{name.split(',')[0]}, fp32"]).abs()
    print(f"{name}: loss at most {apart.max():.5f} apart from fp32's, in step {apart.idxmax()}")
    claims.measure(f"{name}: loss after {steps} steps, off by", apart.iloc[-1], run=run)
display(losses.iloc[[0, 1, steps // 2, steps - 1]].style.format("{:.5f}"))

# %% [markdown]
# That the loss hardly notices is the point: 16 bits are enough to compute with. It is the states that need 32.
#
# ## The gradients, one by one
#
# The first training, in fp32, has kept its last gradients. What would fp16 make of each? Compare it with the borders:
# at half the smallest number or below it becomes 0; below 2^-14 it is subnormal and loses digits; from 65520 on it is
# infinite. A scale moves it up. Count first, then cast and count again.

# %%
gradients = torch.load(run.path / "gradients.pt", weights_only=True).abs()
gradients = gradients[gradients > 0]
SCALES = (1, 2**16, 2**24)
ZERO, FEW, INFINITE = "become 0", "lose digits", "become infinite"


def by_borders(x):
    """The fates of numbers in fp16, from their size."""
    return {ZERO: x <= 2**-25, FEW: (x > 2**-25) & (x < 2**-14 - 2**-25), INFINITE: x >= 65520}


def by_casting(x):
    x = x.half()
    return {ZERO: x == 0, FEW: (x > 0) & (x < 2**-14), INFINITE: x.isinf()}


shares = {}
for scale in SCALES:
    for fate, which in by_borders(gradients * scale).items():
        article = "000, line 75: no scaler" if scale == 1 and fate == ZERO else ""
        claims.predict(f"scale {scale:,}: gradients that {fate}", which.sum().item(), article=article)
    for fate, which in by_casting(gradients * scale).items():
        claims.measure(f"scale {scale:,}: gradients that {fate}", which.sum().item())
        shares[f"scale {scale:,}", fate] = which.double().mean().item()
print(f"of {len(gradients):,} gradients that are not 0:")
display(pd.Series(shares).unstack(sort=False).style.format("{:.3%}"))

# %% [markdown]
# The same as a picture. The strips below are what fp16 holds: the upper one of gradients as they are, the lower one of
# gradients that were scaled by 65,536, `GradScaler`'s first scale.

# %%
sizes, numbers = gradients.log2().floor().int().unique(return_counts=True)
figure = go.Figure()
figure.add_bar(x=sizes.tolist(), y=(numbers / len(gradients)).tolist(), marker_color="#4c8eda", name="gradients")
for height, scale in ((-0.01, 1), (-0.025, 2**16)):
    shift = scale.bit_length() - 1
    for (low, high), colour, what in (((-24, -14), "#f2c14e", "subnormal"), ((-14, 16), "#5aa469", "all digits")):
        figure.add_scatter(
            x=[low - shift, high - shift],
            y=[height, height],
            mode="lines",
            line={"width": 10, "color": colour},
            name=f"fp16, {what}, scale {scale:,}",
        )
figure.update_layout(
    title="Gradients by size, and what fp16 can hold",
    xaxis={"title": "exponent of 2", "range": [-45, 17]},
    yaxis={"title": "share of gradients", "tickformat": ".0%"},
    template="plotly_white",
    width=760,
    height=380,
    margin={"t": 40, "b": 40},
)

# %% [markdown]
# ## The memory of a real step
#
# labkit's own `ddp` script in both precisions; the option adds the extra `precision`, which declares it. Every rank
# traces what torch allocates during one step.

# %%
runs = {}
for precision in E:
    options = {"precision": precision, "global_batch_size": global_batch_size, "steps": 4, "trace_memory": True}
    runs[precision] = labkit.launch("ddp", nproc_per_node=N, env=env, **options)
    runs[precision].wait()

# %%
traced = {
    name: max((rank.traced for rank in each.memory().ranks), key=lambda t: t.bytes) for name, each in runs.items()
}
for precision, found in traced.items():
    held = sum(found.categories[name] for name in ("parameters", "gradients", "optimizer"))
    claims.measure(f"ddp, {precision}: parameters, gradients, optimizer", held, run=runs[precision])
    held = found.categories["activations"]
    claims.measure(f"ddp, {precision}: activations", held, run=runs[precision])
share = traced[half].bytes / traced["fp32"].bytes
claims.measure(f"ddp, {half}: peak, of fp32's", share, run=runs[half])
rows = {
    f"ddp, {name}": {kind: size / 2**20 for kind, size in found.categories.items()} for name, found in traced.items()
}
display(pd.DataFrame(rows).T.style.format("{:.1f}").set_caption("MiB of a rank at its peak"))

# %% [markdown]
# ## On a T4
#
# A T4 has no bf16 in its hardware. torch emulates it, slower than fp32, and says nothing; the plan says it. So does the
# guide (001, line 225): "BF16 preferred on Ampere+". On a T4 that leaves fp16, with a scaler.

# %%
claims.predict("2 x T4, planned: bf16 can be used (1 is yes)", 0, article="001, line 225: Ampere+", said=0)
on_t4 = labkit.plan("ddp", device="2xT4", precision="bf16", global_batch_size=global_batch_size)
claims.measure("2 x T4, planned: bf16 can be used (1 is yes)", bool(on_t4.fits))
print(*str(on_t4).splitlines()[:2], sep="\n")

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `nproc_per_node = 4`: which bytes change, and which do not?
# - `global_batch_size = 64`: there are more activations now. What is the peak in 16 bits, of fp32's?
# - `labkit.launch("ddp", nproc_per_node=2, precision="fp16")` without a GPU: read the error message.
# - `FIRST_SCALE = 2.0**24`: claims fail, for the scaler now has to find its scale. How many steps does that cost?
# - Make claims fail: in `build`, `return model` in place of `return DistributedDataParallel(model)`. Each rank trains
#   for itself, and one skips steps that the others take.
# - Make another fail: leave `reduce_dtype` out of the policy. torch then sums in the precision that it computes in.
