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
# # 17 · Profiling: whose time is it?
#
# **You will be able to** record and read a timeline, tell a slow rank from a slow link, and say what part of a step
# better communication could save. **20 minutes. You need** lab 03.
#
# A **timeline** puts all ranks on one clock; time runs to the right. The thick bar is what a rank computes, the thin
# one below is what it sends, and grey is **waiting**: nothing is left to compute. DDP sends a **bucket** of gradients
# as soon as it is full. What lies under backward is hidden and costs no time.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; their layers sleep, two cores are enough
slow_rank: int = 1  # which rank is slow
slow_ms: int = 400  # and by how much, in every step
layers: int = 4  # of the model; each is a bucket of gradients
backward_ms: int = 40  # how long each layer's backward sleeps; it must be longer than sending a bucket takes
plans: bool = True  # plan for GPUs: some seconds more

# %%
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.overlap import all_reduces, parts, pauses, simulated, sleeping, straggler

lab = Lesson("17_profiling", ranks=nproc_per_node)
draw.lanes(simulated(4, 0.01, 0.04, 0.08), "DDP, a bucket for each of four layers", moving=True)

# %% [markdown]
# ## Your predictions
#
# The model has four linear layers with 4 MiB of gradients each, and a pause after each layer: 10 ms in forward, 40 in
# backward. Pauses are the same on every machine, even on busy cores. In the last two questions one of two ranks, the
# **straggler**, pauses 400 ms longer in its forward.

# %%
covered = lab.ask("healthy: all-reduces that backward hides, of four buckets", default=4)
longest = lab.ask(
    "straggler: rank whose all-reduces take longest", default=1, options={"the other": 0, "the straggler": 1}
)
apart = lab.ask("straggler: its step time over the other rank's", default=1.4)

# %% [markdown]
# ## Healthy
#
# This runs labkit's `ddp` script with this model, and each layer's gradients in a bucket of their own. `profile=True`
# turns on torch's profiler for three of twelve steps.


# %%
def profiled(name, strategy="ddp", slow=0.0, **options):
    env = pauses(layers, 0.01, backward_ms / 1000, slow, slow_rank)
    options = {"shown": False, "steps": 12, "global_batch_size": 4 * lab.ranks, "profile": True} | options
    return lab.launch(sleeping(strategy), name=name, env=env, **options)


healthy = profiled("healthy", bucket_mib=1)

# %%
healthy.timeline()

# %% [markdown]
# All buckets but the last are hidden: that one is full only when nothing is left to compute. (The all-reduce that opens
# each step is labkit's own: it adds up the ranks' numbers of predictions, and a rank that starts early waits there.)
#
# ## Sent too late
#
# Now put all gradients in one bucket. Where will its all-reduce be, and who waits?

# %%
late = profiled("one-bucket", bucket_mib=8 * layers)
late.timeline()

# %% [markdown]
# All ranks wait at the end of backward, for bytes. (A rank that waits much longer has finished first, and waits for the
# other as well.) Between machines this can be most of a step; the sliders below show it.
#
# ## A straggler
#
# One rank pauses longer in its forward. Play the animation.

# %%
straggling = profiled("straggler", slow=slow_ms / 1000, bucket_mib=1, shown=True)
straggling.timeline().animation()

# %%
other = (slow_rank + 1) % lab.ranks
runs = {"healthy": healthy, "one bucket": late, "straggler": straggling}
display(draw.bars(parts(runs), unit="s", title="a step of each rank"))
times = straggling.metrics().query("step > 2").groupby("rank")["step_seconds"].median()
table = straggling.timeline().table
print(f"median step: {times[slow_rank]:.3f} s on rank {slow_rank}, {times[other]:.3f} s on rank {other}")
hidden = {name: all_reduces(run)[1] for name, run in runs.items()}
print("all-reduces that backward hides:", hidden, "· labkit names rank", straggler(straggling))
display(table)

# %%
lab.verify(covered, layers - 1, hidden["healthy"], timed=True)
lab.verify("one bucket: all-reduces that backward hides", 0, hidden["one bucket"], timed=True)
lab.verify(apart, 1, times[slow_rank] / times[other], within=0.1, timed=True)
lab.verify(longest, 0, int(table["communication"].idxmax() == slow_rank))
lab.verify("straggler: the other rank waits", slow_ms / 1000, table["waiting"][other], "s", within=0.15)
lab.verify("straggler: the rank that labkit names", slow_rank, straggler(straggling))
lab.score()

# %% [markdown]
# The step times are equal, so they do not tell you who is slow. Nor do the all-reduces: the rank that is done first
# waits inside its own, so **its** communication looks slow. Compare what each rank does on its own, without the others:
# input, forward and optimizer. labkit's panel does that in any run, without a profiler. Faster communication would save
# nothing here. Change how slow the rank is, how long all gradients take to send, and the number of buckets:


# %%
def step_of(slow_ms, send_ms, buckets):
    return draw.lanes(simulated(4, 0.01, 0.04, send_ms / 1000, buckets=buckets, slow=slow_ms / 1000))


lab.explore(step_of, slow_ms=[0, 50, 200, 400], send_ms=[20, 80, 240], buckets=[1, 2, 4])

# %% [markdown]
# **FSDP** gathers each block before it computes, in forward and again in backward, and reduce-scatters its gradients.
# It gathers the next block while one computes. (Between CPUs some of this is not hidden, because gloo copies in the
# thread that computes; NCCL sends while other kernels compute.)

# %%
profiled("fsdp", "fsdp").timeline()

# %% [markdown]
# ## What to do about it
#
# | the timeline shows | so | try |
# |---|---|---|
# | all ranks wait alike at the end of backward | sent late, or a slow link | smaller buckets (lab 03), lab 26 |
# | one rank waits, another does not | the other is slow | its input (lab 10), uneven batches, a shared GPU |
# | all ranks wait before each block | FSDP's gathers are not hidden | larger units, more samples per step (lab 05) |
# | gaps in which no rank computes or sends | Python is slow | larger batches, fewer `.item()`, `torch.compile` |
# | nobody waits | the model takes this long | not communication |
#
# **In your own code:**
#
# ```python
# from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
#
# with profile(
#     activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
#     schedule=schedule(wait=5, warmup=2, active=3, repeat=1),  # three steps: it keeps all operators
#     on_trace_ready=tensorboard_trace_handler("traces", worker_name=f"rank{dist.get_rank()}"),
# ) as profiler:
#     for x, y in loader:
#         ...  # forward, backward, optimizer
#         profiler.step()
# ```
#
# Perfetto (ui.perfetto.dev) opens the files, one for each rank. NCCL's kernels are on a stream of their own; one that
# is long on one rank and short on another was waiting. Profile on *all* ranks: one alone cannot show who was late.
# `run.profile(steps=3)` does this to a training that labkit has launched and that already runs.
#
# ## On 2 × T4 and 8 × A100
#
# How much of a step is spent waiting for communication that backward does not hide, for a transformer of 25 million
# parameters?

# %%
from labkit import Script

gpt = {name.upper(): sized(Script.load(name), width=512, layers=8, heads=8) for name in ("ddp", "fsdp")}
lab.plans(gpt, global_batch_size=64) if plans else print("(skipped: set plans = True)")

# %% [markdown]
# *Waiting* is the most that better communication could save.
#
# ## Try this
#
# 1. Set `bucket_mib=8` in the healthy run: how many all-reduces are there, and how many are hidden?
#    <details><summary>Answer</summary>Three, including the one that counts predictions. One is hidden: two layers fill
#    a bucket, and the second of two buckets is the last one.</details>
# 2. Set `backward_ms = 2`, so that sending a bucket takes longer than a layer's backward. What happens?
#    <details><summary>Answer</summary>The all-reduces queue up behind each other, and most of their time is after
#    backward. Fewer bytes or a faster link would help.</details>
# 3. Texts differ in length, so in each step a different rank has the longest ones. What do the means over all steps
#    show?
#    <details><summary>Answer</summary>All ranks alike: each computes as much as the others and waits as long. Only the
#    timeline of single steps shows that some rank is late in each. Batches of equal length, or packed ones, help; a
#    faster link does not, and a faster GPU shortens the wait only in proportion.</details>
#
# ## Sources
#
# Li et al., *PyTorch Distributed* (arXiv 2006.15704): overlap. torch/profiler/profiler.py. The traces of a labkit run
# are in its folder `profile`.
