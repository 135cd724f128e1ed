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
# # 09 · How much faster?
#
# **You will be able to** measure speed-up and efficiency, tell strong scaling from weak, fit Amdahl's law to a few
# measured points, and say what a published speed-up can and cannot tell you. **20 minutes. You need** lab 03.
#
# With N ranks, a step that takes T(1) on one rank takes T(N). The **speed-up** is T(1) / T(N), for the same global
# batch; the **efficiency** is the speed-up divided by N. Two questions are often mixed up:
#
# - **Strong scaling**: the global batch stays, so each rank has 1/N of it. Will the same training end sooner?
# - **Weak scaling**: each rank keeps its batch, so the global batch grows. Does a rank still do as much per second?
#   (The speed-up is then that of samples per second. A larger batch is another training, lab 03.)

# %% tags=["parameters"]
nproc_per_node: int = 4  # the most ranks: 4, or 8 (they mostly sleep, so two cores are enough)
sample_ms: int = 5  # computing time of a sample, forward and backward
serial_ms: int = 20  # the part of each step that every rank does in full

# %%
from labkit import Script
from labkit_labs import Lesson, draw, sized

lab = Lesson("09_scaling", ranks=nproc_per_node)
counts, batch = [n for n in (1, 2, 4, 8) if n <= nproc_per_node], 36
share = serial_ms / (serial_ms + batch * sample_ms)  # of a step on one rank

# %% [markdown]
# ## Your predictions
#
# A step on one rank has 36 samples of 5 ms each, and then 20 ms that do not depend on the batch and that every rank has
# to spend in full: say, the optimizer's step. That is 10% of 200 ms. The ranks also all-reduce 1 MB of gradients, which
# takes little here.
#
# The fourth question is about an article that measured a CNN on MNIST. It explains its speed-up with an "overhead" of 5
# to 10%.

# %%
strong = lab.ask(f"strong scaling: speed-up on {counts[-1]} ranks", default=counts[-1], unit="times")
weak = lab.ask(f"weak scaling, 36 samples per rank: efficiency on {counts[-1]} ranks", default=80, unit="%")
most = lab.ask("strong scaling: the most that any number of ranks can reach", default=100, unit="times")
divided = lab.ask("44.69 s on one GPU, 34.69 s on two: share of the time that did not divide", default=10, unit="%")

# %% [markdown]
# ## Measure
#
# Computing is only a sleep here, so that four ranks on two cores take as long as on four GPUs. The all-reduce is real.

# %%
import time

import torch
import torch.distributed as dist


def step_time(device, samples, seconds, serial):
    gradients, times = torch.ones(250_000, device=device), []
    for _ in range(9):
        dist.barrier()
        began = time.monotonic()
        time.sleep(samples * seconds)  # forward and backward of this rank's samples
        dist.all_reduce(gradients)
        time.sleep(serial)  # every rank, in full
        times.append(time.monotonic() - began)
    return min(times)  # the least disturbed


# %%
measured = {"strong": {}, "weak": {}}
for n in counts:
    for kind, samples in (("strong", batch / n), ("weak", batch)):
        work = samples, sample_ms / 1000, serial_ms / 1000
        _, times = lab.run(step_time, *work, ranks=n, options={"shown": False})
        measured[kind][n] = max(times)

# %%
import pandas as pd

speedup = {n: measured["strong"][1] / seconds for n, seconds in measured["strong"].items()}
efficiency = {n: measured["weak"][1] / seconds for n, seconds in measured["weak"].items()}
columns = {"strong: step, s": measured["strong"], "speed-up": speedup}
columns |= {"efficiency": {n: each / n for n, each in speedup.items()}}
columns |= {"weak: step, s": measured["weak"], "weak: efficiency": efficiency}
pd.DataFrame(columns).rename_axis("ranks").round(3)

# %% [markdown]
# ## Amdahl's law
#
# Let *s* be the share of T(1) that does not divide. Then T(N) = T(1) × (s + (1 - s)/N), so the speed-up is **N / (1 + s
# (N - 1))**, and however many ranks there are, it stays below **1 / s**. From any measured speed-up you can solve for
# *s* (Karp and Flatt):


# %%
def amdahl(ranks, serial):
    return ranks / (1 + serial * (ranks - 1))


def serial_share(ranks, times_as_fast):
    return (ranks / times_as_fast - 1) / (ranks - 1)


fitted = {n: serial_share(n, each) for n, each in speedup.items() if n > 1}
print("share that does not divide:", {n: f"{each:.1%}" for n, each in fitted.items()})
beyond, last = [2**k for k in range(8)], fitted[counts[-1]]
lines = {"measured": speedup.items(), f"Amdahl, s = {last:.1%}": [(n, amdahl(n, last)) for n in beyond]}
draw.speedups(lines | {"weak scaling, measured": [(n, n * each) for n, each in efficiency.items()]})

# %%
lab.verify(strong, amdahl(counts[-1], share), speedup[counts[-1]], "times", within=0.1, timed=True)
lab.verify(weak, 1, efficiency[counts[-1]], "%", within=0.1, timed=True)
lab.verify(most, 1 / share, 1 / last, "times", within=0.25, timed=True)

# %% [markdown]
# Ten percent are enough to lose a quarter of four ranks, and to end at ten times, with a thousand ranks as with a
# million. Weak scaling loses nothing to the same ten percent: the part that divides has grown along (Gustafson). So an
# efficiency means little without the kind of scaling, and a large one is easily had by giving each rank more to do.
#
# Watch the fitted share as ranks are added. If it stays, Amdahl's law describes the step. If it **grows**, something
# else grows with N: here the all-reduce, and on a busy machine the waiting for a core. Then the law promises too much.
#
# What does not divide in real training? The optimizer's step under DDP, whereas ZeRO and FSDP divide it; waiting for
# the slowest rank; a loader that cannot keep up (lab 10); Python's overhead per operation, when a rank's batch has
# become so small that the GPU waits for the next kernel; and communication that backward does not hide.
#
# ## With real computing
#
# The same with labkit's `ddp` script, on one rank and on two, each with one core. This one depends on what else the
# machine does: a speed-up above 2, and so a negative share, means that the machine was busier during the first run.

# %%
ddp, rates = sized(Script.load("ddp"), width=256), {}
for n in (1, 2):
    run = lab.launch(ddp, ranks=n, steps=30, global_batch_size=16, shown=False)
    rates[n] = 1 / run.metrics().query("step > 5").step_seconds.median()
real = rates[2] / rates[1]
print(f"2 ranks: {real:.2f} times as fast; share that does not divide: {serial_share(2, real):.1%}")

# %% [markdown]
# ## What do published numbers tell?
#
# A popular article on DDP and FSDP measures a CNN on MNIST (5 epochs; 44.69 s on one GPU, 34.69 s with DDP on two,
# 34.63 s with FSDP) and gives a table of speed-ups on 2, 4 and 8 GPUs without saying of what. It explains them with
# *Speedup = 2 / (1 + overhead)*, which is Amdahl's law for N = 2, and an overhead of 5 to 10% for DDP, 10 to 20% for
# FSDP.

# %%
published = {
    "DDP, measured by the article": {2: 44.69 / 34.69},
    "FSDP, measured by the article": {2: 44.69 / 34.63},
    "DDP, the article's table": {2: 1.9, 4: 3.5, 8: 6.0},
    "FSDP, the article's table": {2: 1.8, 4: 3.7, 8: 7.5},
}
implied = {name: {n: serial_share(n, each) for n, each in of.items()} for name, of in published.items()}
display(pd.DataFrame(implied).T.map("{:.1%}".format).replace("nan%", "").rename_axis("share that does not divide"))
display(draw.speedups({name: of.items() for name, of in published.items() if len(of) > 1}))
print({f"overhead {each:.0%}": round(amdahl(2, each), 2) for each in (0.05, 0.1, 0.2)})

# %%
lab.verify(divided, (2 * 34.69 - 44.69) / 44.69, implied["DDP, measured by the article"][2], "%", within=0.001)
far = max(abs(each - amdahl(n, 0.05)) for n, each in published["DDP, the article's table"].items())
lab.verify("the article's table for DDP: largest distance from Amdahl's law with 5%", 0.1, far, how="at most")
lab.verify("the article's table for FSDP: gain from 2 to 4 GPUs", 2, 3.7 / 1.8, "times", how="at least")
lab.score()

# %% [markdown]
# **What can be told**
#
# - Its own measurement, 1.29 times, means that **55%** of the time did not divide: five to ten times the overhead that
#   it names. With that share eight GPUs would be 1.6 times as fast as one.
# - Its table for DDP is Amdahl's law with about 5%, to the first decimal. Measured points rarely lie on a formula so
#   well; whether these were measured, the article does not say.
# - Its table for FSDP is **more than linear** from 2 to 4 and from 4 to 8 GPUs: 3.7 / 1.8 = 2.06. A fixed overhead
#   cannot do that. It can happen if twice the GPUs hold a larger batch each, but then it is another training.
# - *GPU utilisation* of 95% (DDP) and 90% (FSDP) fits its speed-ups of 1.9 and 1.8, but for FSDP and the small model it
#   gives 90% and 1.3 times. A GPU counts as busy while any kernel runs, also one that waits for others.
#
# **What cannot be told**: what the 55% are. The times are of whole runs, so starting processes, loading the data and
# the first batches are in them, which do not divide either; two loader workers per GPU may have been the limit. Nothing
# is said about repeats, or whether the global batch stayed (its code keeps 128 per GPU, so two GPUs take half as many
# steps). **A benchmark should say**: strong or weak, what is timed, after how many steps, how often, and the spread.
#
# ## On 2 × T4 and 8 × A100
#
# Beyond this machine's cores only a plan can go. Strong scaling of a transformer of 25 million parameters (64 samples
# of 128 tokens per step) under DDP:

# %%
script = sized(Script.load("ddp"), width=512, layers=8, heads=8)
devices = ["1xT4", "2xT4", "1xA100 80", "2xA100 80", "4xA100 80", "8xA100 80"]
display(planned := lab.plans({"DDP": script}, devices=devices, global_batch_size=64))
steps = {tuple(device.split("x")): plan.step.seconds for (_, device), plan in planned.plans.items()}
faster = {
    kind: [(int(n), steps["1", kind] / steps[n, kind]) for n, other in steps if other == kind] for _, kind in steps
}
draw.speedups(faster, "planned, not run: strong scaling under DDP")

# %% [markdown]
# The planner expects 6.8 times on eight A100s: by Amdahl, a share of 2.5%. Most of it is AdamW, which every rank runs
# in full; backward hides nearly all of the communication within one machine.

# %% [markdown]
# ## Try this
#
# 1. `serial_ms = 60`: what is the speed-up on four ranks, and the limit? Work it out, then run it.
#    <details><summary>Answer</summary>s = 60 / 240 = 25%. On four ranks 4 / 1.75 = 2.3 times, and never more than
#    4.</details>
# 2. Let rank 1 take twice as long for its samples: `samples * seconds * (1 + (dist.get_rank() == 1))`. What does
#    the fitted share become?
#    <details><summary>Answer</summary>All wait for the slow rank. On two ranks T = 180 + 20 ms, as on one: the speed-up
#    is 1 and the share 100%. The share is whatever does not get faster, for any reason.</details>
# 3. A colleague reports an efficiency of 98% on 64 GPUs. Which three questions do you ask?
#    <details><summary>Answer</summary>Strong or weak scaling? Relative to one GPU, or to one machine of eight? And in
#    samples per second, or in time to the same loss?</details>
#
# ## Recap
#
# | | held | sent | waits |
# |---|---|---|---|
# | strong scaling | activations: 1/N | gradients: the same, ever less hidden by backward | for what does not divide |
# | weak scaling | the same per rank | the same, hidden as before | the same share as on one rank |
#
# ## Sources
#
# Amdahl, *Validity of the Single Processor Approach* (1967). Gustafson, *Reevaluating Amdahl's Law* (1988). Karp and
# Flatt, *Measuring Parallel Processor Performance* (1990). The article is *Distributed Training with PyTorch: DDP vs
# FSDP*, sections *Real-World Benchmark Results* and *Scaling Beyond 2 GPUs*.
