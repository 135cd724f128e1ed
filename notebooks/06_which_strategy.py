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
# # 06 · Which strategy? Two totals, before any run
#
# **You will be able to** choose a strategy from two totals (what a rank must **hold** and what must be **sent**), judge
# a guide by them, and say how many days a training run takes. **30 minutes. You need** labs 03, 04, 05, 12 and 13.
#
# This map shows everything that matters except compute time. If memory is short, go down; if the link is slow, go left.
# (Rings are predicted, crosses measured.) You know where DDP stands: every rank holds everything, and gradients are
# sent. Where are the others?

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks: 2, 4 or 8
strategies: str = "ddp zero1 zero2 fsdp tensor_parallel pipeline"  # to be run
guides: bool = True  # plan models of 405 million and 7 billion parameters, a minute; otherwise one of 113 million

# %%
from labkit import Script, plan
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.traffic import noting_bytes, sent_in_a_step

lab, N, names = Lesson("06_which_strategy", ranks=nproc_per_node), nproc_per_node, strategies.split()
L, w, context, batch, steps = 8, 192, 32, 8, 7
block = 4 * (12 * w * w + 13 * w)  # bytes
ends = 4 * (256 + context + 2 + 256) * w  # embeddings, a norm and the head
P = L * block + ends  # bytes of all parameters
A = 4 * batch * context * w  # bytes that a block hands on to the next, for the whole batch
draw.choice({"DDP": (2 * (N - 1) * P, 4 * P)})

# %% [markdown]
# ## Your predictions
#
# The model is a transformer of eight narrow blocks, with 3.7 million parameters, and a step has eight samples of 32
# tokens, so parameters, gradients and optimizer state outweigh activations.

# %%
each = {name: float(number) for number, name in enumerate(names)}
least = lab.ask("the strategy whose ranks hold the least", default=each["fsdp"], options=each)
fewest = lab.ask("the strategy that sends the fewest bytes", default=each["ddp"], options=each)
part = lab.ask("bytes that the pipeline sends, as a share of DDP's", default=50, unit="%")

# %% [markdown]
# ## The two totals
#
# **Held.** P is the size of all parameters in fp32. With gradients and AdamW DDP holds 4 P (lab 04), ZeRO-1 2 P + 2 P /
# N, the others about 4 P / N and what they gather meanwhile; activations come on top of that. `labkit.plan` adds up
# everything.
#
# **Sent**, over all ranks in one step. An all-reduce of S bytes costs 2 (N - 1) S; a gather that leaves S on every rank
# costs (N - 1) S, as does a reduce-scatter (lab 02; gloo's costs twice that, which is what is measured below). A is
# what a block passes on to the next:
#
# | | sends | all ranks together |
# |---|---|---|
# | DDP | all-reduce of the gradients | 2 (N - 1) P |
# | ZeRO-1 | the same, and each updated parameter | 3 (N - 1) P |
# | ZeRO-2 | gather P, reduce-scatter P | 2 (N - 1) P; gloo 3 (N - 1) P |
# | FSDP | gather blocks twice, the rest once, reduce-scatter P | 3 (N - 1) P; gloo 4 (N - 1) P; a bit less |
# | tensor | 4 all-reduces of A in each of L blocks | 8 (N - 1) L A |
# | pipeline | A and its gradient from stage to stage, N - 1 times | 2 (N - 1) A |

# %%
factors = {"ddp": 2 * P, "zero1": 3 * P, "zero2": 3 * P, "fsdp": 4 * P - ends, "tensor_parallel": 8 * L * A}
sent = {name: (N - 1) * ({**factors, "pipeline": 2 * A})[name] for name in names}
plans = {}
for name in names:  # noting_bytes: each rank also writes down how much it has sent
    script = noting_bytes(sized(Script.load(name), context=context, width=w, heads=8, layers=L))
    more = {"schedule": "1F1B", "accumulate": max(N, batch // 2)} if name == "pipeline" else {}
    plans[name] = plan(script, nproc_per_node=N, global_batch_size=batch, **more)
held = {name: each.peak.bytes for name, each in plans.items()}
for name in names:  # when a rank is ahead of the others, one more block may have been gathered
    ahead = 1.5 * block / held[name] if name in ("fsdp", "zero2") else 0
    lab.predict(f"{name}: peak", held[name], "B", within=0.02 + ahead)
lab.predict(least, each[min(held, key=held.get)])
if lab.counts_bytes:
    lab.predict_each({f"{name}: sent by all ranks in a step": sent[name] for name in names}, "B", within=0.02)
    lab.predict(fewest, each[min(sent, key=sent.get)])
    lab.predict(part, sent["pipeline"] / sent["ddp"], "%", within=0.02)
runs = {name: lab.launch(planned, steps=steps, shown=False) for name, planned in plans.items()}

# %%
peaks = {name: max(rank.traced.bytes for rank in run.memory().ranks) for name, run in runs.items()}
lab.measure_each({f"{name}: peak": peak for name, peak in peaks.items()} | {least: each[min(peaks, key=peaks.get)]})
seen = {name: (sent_in_a_step(run, N, steps), peaks[name]) for name, run in runs.items() if lab.counts_bytes}
results = {f"{name}: sent by all ranks in a step": size for name, (size, _) in seen.items()}
if seen:
    results |= {fewest: each[min(seen, key=seen.get)], part: seen["pipeline"][0] / seen["ddp"][0]}
lab.measure_each(results)
display(draw.choice({name: (sent[name], held[name]) for name in names}, seen))
lab.score()

# %% [markdown]
# ## Why
#
# What DDP, ZeRO and FSDP send grows with the parameters, whatever the batch; what tensor parallelism and pipelines send
# grows with the tokens in a batch. So the former win with many tokens, the latter with few tokens and wide layers. A
# strategy that is above and to the right of another can offer only simplicity or faster computation. The pipeline holds
# the least here, because it has no gathered blocks beside its own.
#
# ## Which one?
#
# 1. **It fits under DDP**, in mixed precision (lab 10) and with fused AdamW: take DDP. If activations are too large,
#    process fewer samples at a time (`accumulate`), then use activation checkpointing (lab 04).
# 2. **The states do not fit:** take FSDP, with one block per unit (lab 05).
# 3. **FSDP waits for its gathers**, because links are slow or a rank has few tokens: try more samples per rank, FSDP
#    only within a host (lab 14), or a pipeline between hosts (lab 12).
# 4. **One sample is too much for a rank:** try tensor parallelism where there is NVLink (lab 13), or context
#    parallelism for long texts (lab 24).
# 5. **Nothing fits:** try LoRA (lab 21), CPU offload or more devices.
#
# Then compare two or three candidates, with `labkit.plan` or by running a few steps. **More ranks, larger batch?** With
# the same samples on each rank, N ranks have an N times larger global batch and N times fewer steps per epoch, and the
# learning rate has to be found again (lab 20). If the global batch stays the same, nothing changes but the time.
#
# ## Days
#
# In forward each parameter is multiplied and added once for each token, in backward twice, for the gradients of the
# inputs and those of the weights: 2 + 4 FLOPs. So a training run takes **6 × parameters × tokens** FLOPs. The bars
# assume 20 tokens for each parameter (Hoffmann et al.) and 40% of what a GPU's data sheet says; this share is called
# **MFU** (model FLOPs utilization), and 40% is usual.


# %%
def days(billions, gpus):
    flops = 6 * billions * 1e9 * 20 * billions * 1e9
    sheets = {"T4, fp16": 65e12, "A100, bf16": 312e12, "H100, bf16": 989e12}  # FLOPs per second
    needed = {name: flops / (gpus * 0.4 * per_second) / 86_400 for name, per_second in sheets.items()}
    return draw.bars(predicted=needed, unit="days")


lab.explore(days, billions=[1, 7, 70], gpus=[8, 64, 1024])

# %% [markdown]
# labkit's planner does not assume the 40%; it adds up the parts of a step: operators, the optimizer, and waiting for
# communication. This is its answer for 7 billion parameters and 140 billion tokens on 8 × A100, under FSDP in bf16,
# with 2,048 tokens on each device:

# %%
if guides:
    seven = {"vocabulary": 32000, "context": 2048, "width": 4096, "heads": 32, "layers": 33}
    ways = {name: (sized(Script.load(name), **seven), {"precision": "bf16"}) for name in ("ddp", "fsdp")}
    judged = lab.plans(ways, devices=("8xA100 40", "8xA100 80"), global_batch_size=8)
    step, sheet = judged.plans["fsdp", "8xA100 80"].step, 6 * 7e9 * 140e9 / (8 * 312e12)  # seconds
    planned = 140e9 / step.predictions_per_second
    both = {"at 40% MFU": sheet / 0.4 / 86_400, f"the planner: {sheet / planned:.0%}": planned / 86_400}
    display(draw.bars(predicted=both, unit="days", title="7 billion parameters on 8 x A100 (planned, not run)"))
else:
    print("(skipped on this page: set guides = True)")

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# Make the same choice for a larger transformer and eight samples per step (405 million parameters, 113 without
# `guides`):

# %%
large = {"vocabulary": 50257, "context": 512, "width": 1024, "heads": 16, "layers": 24}
sizes = large if guides else {"width": 768, "heads": 16, "layers": 16}
lab.plans({name: sized(Script.load(name), **sizes) for name in names}, global_batch_size=8)

# %% [markdown]
# ## Try this
#
# 1. `batch = 64`: which rings move, and in which direction?
#    <details><summary>Answer</summary>Planned: what tensor parallelism sends grows from 12 to 96 MiB, far to the right
#    of DDP, which still sends 28; what the pipeline sends grows from 0.4 to 3 MiB. Whatever holds the activations moves
#    up: DDP from 69 to 157 MiB, FSDP from 39 to 126. The pipeline stays at 36, because its micro-batches are as small
#    as before.</details>
# 2. `nproc_per_node = 4`: whose bytes triple, and who holds half as much?
#    <details><summary>Answer</summary>Planned: over all ranks, each strategy sends 3 times as much: 84 MiB by DDP, 167
#    by FSDP, 36 by tensor parallelism. FSDP and tensor parallelism hold 23 MiB instead of 39 and 38; DDP goes only from
#    69 to 63, because a rank has the activations of two samples fewer.</details>
# 3. How many days does GPT-3 take, with 175 billion parameters and 300 billion tokens, on 1,024 A100s at 40%?
#    <details><summary>Answer</summary>6 × 175e9 × 300e9 FLOPs over 1,024 × 0.4 × 312e12 a second: 28.5 days. Without
#    the 40% it would be 11, but no training run reaches the data sheet's figure.</details>
#
# ## Sources
#
# Rajbhandari et al., *ZeRO* (arXiv 1910.02054). Kaplan et al. (arXiv 2001.08361): 6 FLOPs. Hoffmann et al. (arXiv
# 2203.15556): 20 tokens.
#
# ### Appendix: what was claimed, and what the articles say
#
# The guides give a size and a strategy: "1-3B: DDP with gradient checkpointing" on 40 GB (001, line 185), "over 10B:
# FSDP + TP" (002, line 887). With `guides` three of their claims are checked here; all 38 are in
# `docs/evidence/decisions.md`. The third article (003, line 31) gives 355 years for GPT-3 on one V100: 175 billion
# parameters, 300 billion tokens, at 28 TFLOP/s.

# %%
years = 6 * 175e9 * 300e9 / 28e12 / 86_400 / 365.25
articles = {}
print(f"6 FLOPs x 175 billion parameters x 300 billion tokens at 28 TFLOP/s: {years:.0f} years")
if guides:
    lines = {"ddp, 8xA100 80": "003, line 410", "fsdp, 8xA100 40": "001, line 186", "fsdp, 8xA100 80": "003, line 411"}
    for way, line in lines.items():
        claim, fits = f"7B, {way}: fits (1 is yes)", int(way.startswith("fsdp"))
        lab.predict(claim, fits)
        lab.calculated(claim, bool(judged.plans[tuple(way.split(", "))].fits))
        articles[claim] = line, fits
    display(judged)
lab.check(articles)
