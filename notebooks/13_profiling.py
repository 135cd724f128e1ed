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
# # 13 · Profiling: whose time is it?
#
# **You will be able to** read a timeline, tell a slow rank from a slow link, and say which part of a
# step better communication could save. **20 minutes. You need** lab 03.
#
# A **timeline** puts all ranks on one clock; time runs to the right. The thick bar is what a rank computes; the thin
# one below is what it sends; grey is **waiting**: nothing is left to compute. DDP sends a **bucket** of gradients as
# soon as it is full. What lies under backward is hidden and costs no time.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; their layers sleep, two cores are enough
slow_rank: int = 1  # which rank is slow
slow_ms: int = 400  # and by how much, in every step
layers: int = 4  # of the model; each is a bucket of gradients
backward_ms: int = 40  # how long each layer's backward sleeps; it must be longer than sending a bucket takes

# %%
from labkit.lessons import Lesson, draw, sized
from labkit.lessons.labs.overlap import all_reduces, operators, parts, pauses, simulated, sleeping, straggler

lab = Lesson("13_profiling", ranks=nproc_per_node)
draw.lanes(simulated(4, 0.01, 0.04, 0.08), "DDP, a bucket for each of four layers", moving=True)

# %% [markdown]
# ## Your predictions
#
# The model has four layers that sleep: 10 ms in forward, 40 in backward. So times are the same on every machine, also
# on busy cores. Then one rank, the **straggler**, sleeps 400 ms longer in its forward.

# %%
covered = lab.ask("healthy: all-reduces that backward hides, of four buckets", default=4)
longest = lab.ask(
    "straggler: rank whose all-reduces take longest", default=1, options={"the other": 0, "the straggler": 1}
)
apart = lab.ask("straggler: its step time over the other rank's", default=1.4)

# %% [markdown]
# ## Healthy
#
# `sleeping` replaces the model of labkit's script (below). Each layer has 1 MiB of
# gradients, and a bucket is to hold 1 MiB. The profiler records three of twelve steps.


# %%
print(sleeping("ddp").cells["model"].text)


# %%
def profiled(name, strategy="ddp", slow=0.0, **options):
    env = pauses(layers, 0.01, backward_ms / 1000, slow, slow_rank)
    options |= {"steps": 12, "global_batch_size": 4 * lab.ranks, "profile": True}
    return lab.launch(sleeping(strategy), name=name, env=env, **options)


lab.predict(covered, layers - 1, timed=True)
lab.predict_each({"healthy: all-reduces of a step": layers + 1, "healthy: matrix products of a step": 3 * layers - 1})
healthy = profiled("healthy", bucket_mib=1)

# %%
calls, hidden = all_reduces(healthy)
products = operators(healthy)["aten::mm"] / len(healthy.timeline().steps)
results = {"healthy: all-reduces of a step": calls, "healthy: matrix products of a step": products}
lab.measure_each(results | {covered: hidden}, run=healthy)
healthy.timeline()

# %% [markdown]
# All buckets but the last are hidden: it is full when nothing is left to compute. One more all-reduce opens each step:
# it adds up how many predictions the ranks have, by which the loss is divided. (A layer takes one matrix product
# forward and two backward, for its weight and its input; the first layer's input needs none.)
#
# ## Sent too late
#
# The same with all gradients in one bucket.

# %%
lab.predict_each({"one bucket: all-reduces of a step": 2, "one bucket: of those, hidden": 0})
late = profiled("one-bucket", bucket_mib=2 * layers)
calls, hidden = all_reduces(late)
lab.measure_each({"one bucket: all-reduces of a step": calls, "one bucket: of those, hidden": hidden}, run=late)
late.timeline()

# %% [markdown]
# All ranks wait, and all alike: for bytes, not for each other.
#
# ## A straggler
#
# One rank sleeps in its forward. Play the animation.

# %%
other, slow = (slow_rank + 1) % lab.ranks, slow_ms / 1000
lab.predict(apart, 1, within=0.1, timed=True)
lab.predict_each({longest: 0, "straggler: the rank that labkit names": slow_rank})
waits, longer_by = "straggler: the other rank waits", "straggler: forward is longer by"
lab.predict_each({waits: slow, longer_by: slow}, "s", within=0.15)
straggling = profiled("straggler", slow=slow, bucket_mib=1)
print(*straggling.verdict(), sep="\n")
straggling.timeline().animation()

# %%
times = straggling.metrics().query("step > 2").groupby("rank")["step_seconds"].median()
table = straggling.timeline().table
longer = table["forward"][slow_rank] - table["forward"][other]
results = {apart: times[slow_rank] / times[other], longest: int(table["communication"].idxmax() == slow_rank)}
results |= {waits: table["waiting"][other], longer_by: longer}
lab.measure_each(results | {"straggler: the rank that labkit names": straggler(straggling)}, run=straggling)
runs = {"healthy": healthy, "one bucket": late, "straggler": straggling}
display(draw.bars(parts(runs), unit="s", title="a step of each rank"))
lab.score()

# %% [markdown]
# Step time says *that* a rank is slow, never which: the one that is done first waits inside its own all-reduces, so
# **its** communication looks slow. Who came last is told by what each does on its own: input, forward, optimizer.
# labkit looks at those in any run, without a profiler. Better communication would save nothing here. Move the sliders:


# %%
def step_of(slow_ms, send_ms, buckets):
    return draw.lanes(simulated(4, 0.01, 0.04, send_ms / 1000, buckets=buckets, slow=slow_ms / 1000))


lab.explore(step_of, slow_ms=[0, 50, 200, 400], send_ms=[20, 80, 240], buckets=[1, 2, 4])

# %% [markdown]
# **FSDP** gathers a block before it computes, in forward and again in backward; its gradients are reduce-scattered.
# (gloo copies in the thread that asks; NCCL does it beside the kernels.)

# %%
profiled("fsdp", "fsdp").timeline()

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# How much of a step is waiting that backward does not hide, for a transformer of 25 million parameters?

# %%
from labkit import Script

gpt = {name.upper(): sized(Script.load(name), width=512, layers=8, heads=8) for name in ("ddp", "fsdp")}
lab.plans(gpt, global_batch_size=64)

# %% [markdown]
# ## Try this
#
# 1. `bucket_mib=2` in the healthy run: how many all-reduces, how many hidden?
#    <details><summary>Answer</summary>Three, with the one that counts predictions, and one hidden: two layers fill a
#    bucket, and the second of two buckets is the last one. The ranks waited 3 ms a step.</details>
# 2. `backward_ms = 2`: sending a bucket takes longer than a layer's backward.
#    <details><summary>Answer</summary>Of four buckets two or three were hidden, and the ranks waited 6 and 13 of 70 ms,
#    on a busy machine. The first claim fails there. Larger buckets (fewer calls) or a faster link would help.</details>
# 3. Let all ranks be slow: in the model's text, `True` in place of the comparison with `RANK`.
#    <details><summary>Answer</summary>A step takes 640 ms on both, forward 445 of them. Nobody waits (13 and 23 ms),
#    and labkit names no rank. A slow model is no straggler.</details>
#
# ## Sources
#
# Li et al., *PyTorch Distributed* (arXiv 2006.15704): overlap. torch/profiler: `schedule`, traces that Perfetto
# (ui.perfetto.dev) opens; a run's are in its folder `profile`. Three steps are recorded, whatever the length of the
# training: the profiler keeps every operator in memory, and takes time of its own where it starts and ends.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002, line 130) says that gradients are sent after backward; the guide (001, line 14) that sending
# "overlaps with backward pass", which holds except for the last bucket. The third (003, line 235) is right that all
# wait for the slowest.

# %%
synchronized = "after backward pass, gradients are synchronized (002, line 130)", 0
lab.check({covered: synchronized, waits: ("all GPUs must wait for slowest one (003, line 235)", slow)})
