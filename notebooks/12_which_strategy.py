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
# # 12 · Which strategy? Two sums, before any run
#
# The articles answer with tables: "1-3B: DDP with gradient checkpointing", "over 10B: FSDP + Tensor Parallelism, the
# only viable approach". Here the answer is two sums: what must a rank **hold**, and what must it **send** in a step?
# Both follow from sizes. You predict them for one model under every strategy and measure them on real ranks, in the
# allocator and on the wire. Then the same arithmetic judges the articles' guides, for GPUs that are not here. Time is
# shown beside its plan, and never claimed.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks: 2, 4 or 8
strategies: str = "ddp zero1 zero2 fsdp tensor_parallel pipeline"  # to be run, after one rank alone
measure_speed: bool = True  # first measure this machine, so that the plan knows how long a step takes: half a minute
guides: bool = True  # judge the articles' guides and plan 1,024 ranks, too: some twenty seconds

# %%
import sys
from dataclasses import replace
from itertools import combinations

import pandas as pd
import plotly.graph_objects as go

import labkit
from labkit import Script
from labkit.claims import Claims
from labkit.planner.data_sheets import device_named
from labkit.planner.model.facts import facts_of
from labkit.planner.layout import layout_of
from labkit.planner.memory.peak import worst
from labkit.planner.speed.speed_model import SpeedModel
from labkit.planner.model.rehearsal import rehearse

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("12_which_strategy")
N, names = nproc_per_node, ["single", *strategies.split()]
countable = on_cpu and sys.platform == "linux"  # NCCL does not send by TCP

# %% [markdown]
# ## One model for all strategies
#
# The scripts' decoder with eight narrow blocks and short contexts: parameters, gradients and optimizer state outweigh
# activations. The data are noise; their cell also notes, after every step, what this process has sent so far, as the
# kernel counts it (lab 02).

# %%
import os
import socket
import struct
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

CONTEXT, VOCABULARY = 32, 256
SENT = 200  # where `struct tcp_info` has tcpi_bytes_sent; tcpi_bytes_retrans is next to it


def bytes_sent():
    """What this process has sent so far over all its TCP connections, once each."""
    sent = 0
    for opened in Path("/proc/self/fd").iterdir():
        try:
            if str(opened.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(opened.name))) as connection:
                    counters = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    first_and_again, again = struct.unpack_from("QQ", counters, SENT)
                    sent += first_and_again - again
        except OSError:  # closed by now, or no TCP
            continue
    return sent


def note(*_):
    with Path(os.environ["LABKIT_RUN_DIR"], f"sent-{os.environ['RANK']}.txt").open("a") as file:
        file.write(f"{bytes_sent()}\n")


def load_datasets(data_dir):
    """(train, test): noise."""
    if "LABKIT_RUN_DIR" in os.environ and Path("/proc/self/fd").exists():
        register_optimizer_step_post_hook(note)
    tokens = torch.randint(VOCABULARY, (1024, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return TensorDataset(x[:960], y[:960]), TensorDataset(x[960:], y[960:])


# %%
LAYERS, WIDTH, BATCH, STEPS = 8, 192, 8, 7


def decoder(**sizes):
    """The text of the scripts' model cell, with other sizes."""
    text, standard = Script.load("ddp").cells["model"].text, "vocabulary=256, context=128, width=128, heads=4, layers=4"
    assert standard in text
    return text.replace(standard, ", ".join(f"{name}={size}" for name, size in sizes.items()))


def parameters(vocabulary, context, width, layers, **_):
    """Of the decoder: 12 w² and 13 w in each block, embeddings, a norm and a head of its own."""
    return layers * (12 * width**2 + 13 * width) + (2 * vocabulary + context + 2) * width


sizes = {"vocabulary": VOCABULARY, "context": CONTEXT, "width": WIDTH, "heads": 8, "layers": LAYERS}
scripts = {name: Script.load(name).with_cells(model=decoder(**sizes), data=load_datasets) for name in names}
ranks_of = {name: 1 if name == "single" else N for name in names}
options = {name: {"global_batch_size": BATCH} for name in names}
if "pipeline" in names:
    options["pipeline"] |= {"schedule": "1F1B", "accumulate": BATCH // 2}
P = 4 * parameters(**sizes)
print(f"{P // 4:,} parameters: P = {P:,} bytes, 4 P = {4 * P:,} with gradients and AdamW's two moments")

# %% [markdown]
# ## The first sum: what must be held
#
# Of the 4 P, that is 16 bytes a parameter, DDP holds all, ZeRO-1 2 P + 2 P/N, the others about 4 P/N and what they
# gather meanwhile. Activations of a rank's samples come on top. `labkit.plan` does the whole sum:

# %%
shown = "fsdp" if "fsdp" in names else names[-1]
plan = labkit.plan(scripts[shown], nproc_per_node=ranks_of[shown], measure=measure_speed, **options[shown])
assert plan.facts.elements == P // 4
display(plan)

# %%
block = 4 * (12 * WIDTH**2 + 13 * WIDTH)


def holds(facts, script, ranks, on_gpu=True, **options):
    """Bytes of the rank that holds most, at its peak, by the plan's formulas."""
    return worst(facts, layout_of(script, ranks, options), on_gpu=on_gpu)[1].bytes


held = {name: holds(plan.facts, scripts[name], ranks_of[name], not on_cpu, **options[name]) for name in names}
for name in names:
    # FSDP gathers ahead: when a rank is ahead of the others one more block may be there
    within = 1.5 * block / held[name] if name in ("fsdp", "zero2") else 0.02
    claims.predict(f"{name}: peak", held[name], "B", within=within)

# the order of those that are planned to be more than 15 % apart
apart = [(a, b) for a, b in combinations(names, 2) if not 1 / 1.15 < held[a] / held[b] < 1.15]
pairs = claims.predict("pairs in the plan's order of memory", len(apart))
print(f"{pairs} of {len(list(combinations(names, 2)))} pairs are more than 15 % apart: their order is claimed")

# %% [markdown]
# ## The second sum: what must be sent
#
# Over all ranks, in one step. An all-reduce of S bytes costs 2 (N - 1) S, a gather that gives S everywhere and a
# broadcast (N - 1) S. gloo makes a reduce-scatter an all-reduce; NCCL's costs half (lab 02). A is what a block hands
# on, for the whole batch:
#
# | | sends | by gloo |
# |---|---|---|
# | DDP | all-reduce of the gradients | 2 (N - 1) P |
# | ZeRO-1 | and each parameter from who has updated it | 3 (N - 1) P |
# | ZeRO-2 | gather P, reduce-scatter P | 3 (N - 1) P, NCCL 2 (N - 1) P |
# | FSDP | gather blocks twice, the root once, reduce-scatter P | up to 4 (N - 1) P, NCCL 3 (N - 1) P |
# | tensor | 4 all-reduces of A in each of L layers | 8 (N - 1) L A |
# | pipeline | A and its gradient over N - 1 borders | 2 (N - 1) A |
#
# The first four do not depend on the batch, the last two only on it. (The ranks of the first four also add up one
# number in each step: how many predictions they make together, by which the loss is divided. That all-reduce of 8 bytes
# is less than gloo's headers, and left out.)

# %%
A = 4 * BATCH * CONTEXT * WIDTH
root = P - LAYERS * block
by_gloo = {
    "single": 0,
    "ddp": 2 * P,
    "zero1": 3 * P,
    "zero2": 3 * P,
    "fsdp": (2 * P - root) + 2 * P,
    "tensor_parallel": 2 * 4 * LAYERS * A,
    "pipeline": 2 * A,
}
sent = {name: (N - 1) * by_gloo[name] for name in names}
if countable:
    for name in names[1:]:
        claims.predict(f"{name}: sent by all ranks in a step", sent[name], "B", within=0.02)
predicted = pd.DataFrame({"held by a rank, MiB": held, "sent by all, MiB": sent}) / 2**20
display(predicted.style.format("{:.1f}"))

# %% [markdown]
# ## Measure

# %%
runs = {}
for name in names:
    runs[name] = labkit.launch(
        scripts[name], nproc_per_node=ranks_of[name], steps=STEPS, trace_memory=True, env=env, **options[name]
    )
    runs[name].wait()

# %%
BECAUSE = {"fsdp": "blocks gathered ahead", "zero2": "blocks gathered ahead", "pipeline": "copies of what is sent"}


def sent_in_a_step(run, ranks):
    """By all ranks, from the end of the first step to that of the last."""
    total = 0
    for rank in range(ranks):
        counts = [int(line) for line in (run.path / f"sent-{rank}.txt").read_text().split()]
        total += (counts[-1] - counts[len(counts) // STEPS - 1]) / (STEPS - 1)  # ZeRO-1 has two optimizers
    return total


peaks = {name: max(rank.traced.bytes for rank in run.memory().ranks) for name, run in runs.items()}
for name, run in runs.items():
    claims.measure(f"{name}: peak", peaks[name], run=run, because=BECAUSE.get(name, ""))
kept = sum((held[a] < held[b]) == (peaks[a] < peaks[b]) for a, b in apart)
claims.measure("pairs in the plan's order of memory", kept)
told = {"single": 0.0}
if countable:
    for name in names[1:]:
        told[name] = sent_in_a_step(runs[name], N)
        because = "gloo's headers"
        claims.measure(f"{name}: sent by all ranks in a step", told[name], run=runs[name], because=because)

# %% [markdown]
# The choice as a map. Where memory is short go down, where the link is slow go left; what is both above and to the
# right of another has nothing to offer but simplicity or speed of computing. Circles are planned, crosses measured.

# %%
figure = go.Figure()
points = {"planned": (sent, held, "circle-open", 16), "measured": (told, peaks, "x-thin", 10)}
for what, (x, y, symbol, size) in points.items():
    drawn = [name for name in names if name in x]
    figure.add_scatter(
        x=[x[name] / 2**20 for name in drawn],
        y=[y[name] / 2**20 for name in drawn],
        text=drawn if what == "planned" else None,
        mode="markers+text" if what == "planned" else "markers",
        textposition="middle right",
        cliponaxis=False,
        name=what,
        marker={"symbol": symbol, "size": size, "line": {"width": 2}},
    )
title = f"{P // 4 / 1e6:.1f} M parameters, {BATCH} samples of {CONTEXT} tokens, {N} ranks"
figure.update_layout(title=title, height=420, template="none", margin={"l": 60, "r": 40, "t": 60})
figure.update_xaxes(title="MiB sent by all ranks in a step", range=[-2, 1.2 * max(sent.values()) / 2**20])
figure.update_yaxes(title="MiB held by a rank at its peak", rangemode="tozero")
display(figure)

# %% [markdown]
# ## Time: look, do not claim
#
# Beside the two sums stands a third, computing. The plan adds it up from what was measured here before, if it was. On
# two cores that others use, too, believe neither number to better than its band.

# %%
speed_model = SpeedModel(plan.script, plan.facts, plan.device, N, plan.parameters)
rows = []
for name, run in runs.items():
    step = speed_model(layout_of(scripts[name], ranks_of[name], options[name]))
    planned = (
        f"{step.seconds * 1e3:.0f} ({step.low * 1e3:.0f} to {step.high * 1e3:.0f})" if step else "not measured here"
    )
    took = run.metrics().dropna(subset="step_seconds")["step_seconds"].median()
    rows.append({"strategy": name, "step planned, ms": planned, "step measured, ms": f"{took * 1e3:.0f}"})
display(pd.DataFrame(rows).style.hide())
labkit.compare(list(runs.values())).table[["script", "ranks", "throughput", "communication_share"]].round(3)

# %% [markdown]
# ## The articles' guides
#
# What has been measured now speaks for devices that are not here. First a sum of one line. States take 16 bytes a
# parameter, under autocast, too (single, DDP); 16/N (FSDP); or 16/N and 2 for the weights in 16 bits that ZeRO-2, the
# articles' SHARD_GRAD_OP, keeps gathered. Is that less than the device has? Then the planner's whole sum, activations
# and all. Decoders with contexts of 2,048 tokens, one sample on each rank, bf16. Where a guide gives one way, it is
# read here as: the simpler one does not fit.

# %%
WIDE = {"vocabulary": 32000, "context": 2048, "width": 4096, "heads": 64}
DECODERS = {"3B": WIDE | {"layers": 14}, "7B": WIDE | {"layers": 32}, "13B": WIDE | {"layers": 63}}
GUIDES = [  # who says that it fits, or that it does not
    ("001, line 185: 1-3B on 40 GB, DDP with checkpointing", True, "3B", "ddp", 8, "A100 40"),
    ("001, line 186: 3-7B on 40 GB, FSDP", True, "7B", "fsdp", 8, "A100 40"),
    ("001, line 187: 7-13B on 80 GB, FULL_SHARD, not SHARD_GRAD_OP", False, "13B", "zero2", 8, "A100 80"),
    ("001, line 188: 13B+, FSDP with CPU offload or tensor parallel, not alone", False, "13B", "fsdp", 16, "A100 80"),
    ("002, line 884: 1-10B cannot fit on a single GPU", False, "3B", "single", 1, "A100 80"),
    ("002, line 887: over 10B FSDP + TP is the only way", False, "13B", "fsdp", 8, "A100 80"),
    ("003, line 410: 7B, DDP does not fit 80 GB", False, "7B", "ddp", 8, "A100 80"),
    ("003, line 411: 7B on 8, FSDP fits", True, "7B", "fsdp", 8, "A100 80"),
]


def script_of(name, sizes):
    data = Script.load(name).cells["data"].text.replace("context=128", f"context={sizes['context']}")
    return Script.load(name).with_cells(model=decoder(**sizes), data=data.replace("2**20", "2**21"))


def shallower(facts, layers):
    """What is known of the same model with fewer blocks: they are all alike."""
    profiles = {variant: (*each[: layers + 1], *each[-2:]) for variant, each in facts.profiles.items()}
    return replace(facts, units=(*facts.units[: layers + 1], facts.units[-1]), profiles=profiles)


if guides:
    deepest = facts_of(script_of("ddp", DECODERS["13B"]), {})
    rows = []
    for article, said, size, strategy, n, device in GUIDES:
        share = {"zero2": 2 + 16 / n, "fsdp": 16 / n}.get(strategy, 16)
        states, usable = share * parameters(**DECODERS[size]), device_named(device).usable
        name = f"{size}, {strategy}, {n} x {device}: fits"
        claims.predict(name, int(states < usable), article=article, said=int(said))
        asked = {"precision": "bf16", "global_batch_size": n, "activation_checkpointing": "checkpointing" in article}
        peak = holds(shallower(deepest, DECODERS[size]["layers"]), script_of(strategy, DECODERS[size]), n, **asked)
        claims.calculated(name, int(peak <= usable), because="planned")
        gib = {"states": states, "peak": peak, "there are": usable}
        row = {"situation": name.removesuffix(": fits")} | {k: f"{v / 2**30:.1f} GiB" for k, v in gib.items()}
        rows.append(row | {"fits": "yes" if peak <= usable else "no", "article": "yes" if said else "no"})
    display(pd.DataFrame(rows).style.hide())

# %% [markdown]
# Checkpointing does not shrink states, so DDP ends before 3B on 40 GB. The other errors are a number that is not
# said: "13B+" means nothing until it is divided by N, and "cannot fit" names no GPU. (Elsewhere, 002, line 823, that
# article reckons with 40 GB: too few for the 46 GiB of 3B, enough for the 15 of 1B.) What is fastest of what fits is a
# question of assumed speeds; all 38 claims of the guides with the planner's choice are in `docs/articles/decisions.md`.
#
# ## From 1 to 1,024
#
# GPT-2's size on Kaggle's two T4s, in fp16. When is the second GPU worth its all-reduce? With K tokens on each rank one
# GPU needs 12 n K / F for both shares of n parameters. Two need 2 n K / F for forward, then backward or the 4 n bytes
# of gradients, whichever takes longer. They break even at K = 0.4 F / B. F is what the plan expects of a T4 with this
# model, 6 n FLOPs per token over the time of computing; B is 32 % of 15.75 GB/s. Both are assumed. The planned curve
# also has the optimizer, which takes as long on one GPU as on two, so it breaks even earlier.

# %%
GPT2 = {"vocabulary": 50257, "context": 1024, "width": 768, "heads": 12, "layers": 12}
if guides:
    two = labkit.plan(script_of("fsdp", GPT2), device="2xT4", precision="fp16", global_batch_size=4)
    reached = 6 * two.facts.elements * 2 * GPT2["context"] / two.step.parts["compute"]
    by_formula = 0.4 * reached / (0.32 * 15.75e9)
    figures = two.figures()
    crossing = figures["break-even"].data[-1].x[0]
    print(f"break-even: {by_formula:,.0f} tokens a rank by the formula, {crossing:,.0f} planned with the optimizer")
    display(figures["break-even"])

# %% [markdown]
# Then to 1,024 T4s, two in a box, boxes on a network: the same samples on each. Of FSDP's memory only the states go on
# shrinking. "1/N of each", says the guide (001, line 38).

# %%
if guides:
    script, many = script_of("fsdp", GPT2), {"precision": "fp16", "global_batch_size": 2 * 1024}
    name = "GPT-2, FSDP on 1,024: peak"
    alone = holds(two.facts, script_of("single", GPT2), 1, precision="fp16", global_batch_size=2)
    one_nth = {"article": "001, line 38: 1/N of each", "said": alone / 1024}
    claims.predict(name, holds(two.facts, script, 1024, **many), "B", within=0.06, **one_nth)
    claims.calculated(name, rehearse(script, 1024, many).bytes, because="rehearsed")
    scaling = figures["scaling"]
    scaling.data = [trace for trace in scaling.data if trace.name in ("ddp", "fsdp", "ideal")]
    display(scaling)

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `BATCH = 64`: which circles move, and in which direction? Do tensor parallelism and DDP change places?
# - `CONTEXT = 256, WIDTH = 64`: now activations fill the memory. Who profits from sharding states?
# - `nproc_per_node = 4`: whose bytes grow by 3, and who holds half as much?
# - `labkit.plan(..., device="8xH100")`: find a model for which tensor parallelism is the planner's choice.
# - Make claims fail: launch with `steps=STEPS, precision="bf16"`, of which the plan knows nothing. FSDP then gathers
#   half as many bytes, DDP sends what it sent. Which claims notice?
