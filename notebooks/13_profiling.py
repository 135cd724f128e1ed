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
# A step that is too slow is slow for one reason, and somebody's. You will make the same training slow in two ways, once
# by a rank that dawdles, once by gradients that are sent too late, and read from the timeline which it was. Layers that
# sleep make time exact, so it can be claimed on busy cores, too. The third article (003, line 235) says that all must
# wait for the slowest; the second (002, line 130) that gradients are sent after backward. One of them is right.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; their layers sleep, two cores are enough
slow_rank: int = 1  # which rank dawdles
slow_ms: int = 400  # and how long, in every step
layers: int = 4  # of the model; each is a bucket of gradients
backward_ms: int = 40  # how long each layer's backward sleeps; it must be longer than sending a bucket takes

# %%
import gzip
import json
import re
from collections import defaultdict
from statistics import median

import pandas as pd

import labkit
from labkit import Script
from labkit.claims import Claims
from labkit.record.measured.intervals import intersection, subtracted, total, union

N, ranks = nproc_per_node, range(nproc_per_node)
others = [rank for rank in ranks if rank != slow_rank]
FORWARD, BACKWARD, SLOW = 0.01, backward_ms / 1000, slow_ms / 1000
claims = Claims("13_profiling")

# %% [markdown]
# ## A model that sleeps
#
# Each layer is a real linear layer of 1 MiB, and a pause. In backward the pause comes first, then the gradients. Where
# a rank dawdles, it does so in its forward. How long travels in the environment: the script is the same for all.

# %%
import json
import os
import time

import torch
from torch import nn

TIMES = json.loads(os.environ.get("PAUSES", "{}"))  # seconds: forward, backward, slow; and the rank that is slow


class Pause(torch.autograd.Function):
    """Sleeps, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(TIMES["forward"])
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(TIMES["backward"])
        return gradient


class Model(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(TIMES["layers"]))

    def forward(self, x):
        if os.environ["RANK"] == str(TIMES["slow_rank"]):
            time.sleep(TIMES["slow"])
        for block in self.blocks:
            x = Pause.apply(block(x))
        return x


# %%
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    """(train, test): noise. Nothing here depends on what is learnt."""
    x, y = torch.rand(256, 512), torch.randint(512, (256,))
    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])


# %%
def train(name, strategy="ddp", slow=-1, **options):
    """Twelve steps, of which the profiler records three."""
    script = Script.load(strategy).with_cells(model=Model, data=load_datasets)
    pauses = {"forward": FORWARD, "backward": BACKWARD, "slow": SLOW, "slow_rank": slow, "layers": layers}
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PAUSES": json.dumps(pauses)}  # sleep needs no GPU
    run = labkit.launch(
        script, nproc_per_node=N, steps=12, global_batch_size=4 * N, profile=True, name=name, env=env, **options
    )
    run.wait()
    return run


# %% [markdown]
# ## Predict
#
# A bucket is full when a layer's gradients are there (`bucket_mib=1`, of labkit's extra `ddp_options`). So DDP
# sends as many buckets as there are layers, and each but the last while the next layer's backward still runs:
# **hidden**. The last layer in backward is the model's first; nothing is left to compute while its bucket is sent:
# **exposed**. With all gradients in one bucket, all of it is exposed.
#
# One all-reduce more opens each step. It adds up a single number, how many predictions all ranks make together, by
# which the script divides the loss: it is sent during forward, and waited for before backward.
#
# When a rank sleeps *s* longer in its forward, its gradients come *s* later. The others wait just as long, inside their
# own all-reduces, which start with their first bucket and end when the dawdler's last one is there: *s* and *L - 1*
# backwards of a layer. It looks as if *their* communication were slow. The dawdler itself finds everybody there.

# %%
COUNT = 1  # the all-reduce of the number of predictions
claims.predict("healthy: all-reduces per step", layers + COUNT)
claims.predict(
    "healthy: of those, hidden under backward",
    layers - 1,
    article="after backward pass, gradients are synchronized (002, line 130)",
    said=0,
    timed=True,
)
claims.predict("one bucket: all-reduces per step", 1 + COUNT)
claims.predict("one bucket: of those, hidden under backward", 0, timed=True)
for rank in others:
    waits = {"article": "all GPUs must wait for slowest one (003, line 235)", "said": SLOW}
    claims.predict(f"dawdler: rank {rank} waits, per step", SLOW, "s", within=0.15, **waits)
    spoken = SLOW + (layers - 1) * BACKWARD
    claims.predict(f"dawdler: all-reduces of rank {rank} last, per step", spoken, "s", within=0.15)
claims.predict("dawdler: it waits itself, per step", 0.15 * SLOW, "s", how="at most")
claims.predict("dawdler: its forward is longer by", SLOW, "s", within=0.15)
claims.predict("dawdler: step time of the slowest rank over the fastest's", 1.1, how="at most", timed=True)
claims.predict("dawdler: the rank that waits least", slow_rank)
claims.predict("dawdler: the rank that labkit names", slow_rank)
claims.predict("steps that were recorded", 3)
claims.predict("matrix products per step", 3 * layers - 1)
display(claims)

# %% [markdown]
# ## Healthy
#
# Above, what a rank computes; below, what it sends. `profile=True` records three steps with torch's profiler, and the
# timeline puts all ranks on one clock. Of each all-reduce, how much lies under what its rank computes?

# %%
healthy = train("healthy", bucket_mib=1)
display(healthy.timeline())


# %%
def all_reduces(timeline):
    """For every rank and step but the last, the shares of its all-reduces that backward hides, in order."""
    found = {}
    for rank in timeline.ranks:
        own = [span for span in timeline.spans if span.rank == rank]
        computing = union((span.start, span.end) for span in own if span.kind == "backward")
        for step in timeline.steps[:-1]:  # the last one's all-reduce may end after the profiler has
            sent = [(span.start, span.end) for span in own if span.kind == "all_reduce" and span.step == step]
            found[rank, step] = [total(intersection([each], computing)) / total([each]) for each in sent]
    return found


def measure_hidden(name, run):
    shares = all_reduces(run.timeline())
    claims.measure(f"{name}: all-reduces per step", median(map(len, shares.values())), run=run)
    hidden = median(sum(share > 0.5 for share in each) for each in shares.values())
    claims.measure(f"{name}: of those, hidden under backward", hidden, run=run)
    rows = {f"rank {rank}, step {step}": [f"{share:.0%}" for share in each] for (rank, step), each in shares.items()}
    display(pd.DataFrame(rows).T.rename(columns=lambda number: f"all-reduce {number + 1}"))


measure_hidden("healthy", healthy)

# %% [markdown]
# The first column is the number of predictions, sent during forward; the others are buckets. The guide (001, line 14)
# says that sending "overlaps with backward pass", and is right, except for the last bucket.
#
# ## Sent too late
#
# The same, with all gradients in one bucket. Every rank waits, and all alike: for bytes, not for another rank. Here
# they are few; with a billion parameters on a slow link it is this wait that grows.

# %%
late = train("one-bucket", bucket_mib=2 * layers)
display(late.timeline())
measure_hidden("one bucket", late)

# %% [markdown]
# ## A dawdler
#
# One rank sleeps in its forward. Before you press Play: the step times of both ranks are the same, because the one
# that is done first waits. Step time says *that* a rank is slow, never which.

# %%
dawdling = train("dawdler", bucket_mib=1, slow=slow_rank)
display(dawdling.timeline().animation())

# %%
times = dawdling.metrics().query("step > 2").groupby("rank")["step_seconds"].median()
claims.measure("dawdler: step time of the slowest rank over the fastest's", times.max() / times.min(), run=dawdling)


def per_step(timeline, rank, *kinds):
    """Seconds of a rank in spans of these kinds: the median step's."""
    spans = [span for span in timeline.spans if span.rank == rank and span.kind in kinds]
    return median(total(union((s.start, s.end) for s in spans if s.step == step)) for step in timeline.steps)


timeline = dawdling.timeline()
waited = {rank: per_step(timeline, rank, "waiting") for rank in ranks}
forward = {rank: per_step(timeline, rank, "forward") for rank in ranks}
spoke = {rank: per_step(timeline, rank, "all_reduce") for rank in ranks}
for rank in others:
    because = "the dawdler's sleep"
    claims.measure(f"dawdler: rank {rank} waits, per step", waited[rank], run=dawdling, because=because)
    claims.measure(f"dawdler: all-reduces of rank {rank} last, per step", spoke[rank], run=dawdling, because=because)
claims.measure("dawdler: it waits itself, per step", waited[slow_rank], run=dawdling)
longer = forward[slow_rank] - median(forward[rank] for rank in others)
claims.measure("dawdler: its forward is longer by", longer, run=dawdling)
claims.measure("dawdler: the rank that waits least", min(waited, key=waited.get), run=dawdling)
rows = {"step time": times, "forward": forward, "in all-reduces": spoke, "waits": waited}
display((pd.DataFrame(rows) * 1000).style.format("{:.0f} ms"))

# %% [markdown]
# Read down a column. The rank with the longest all-reduces is **not** the slow one: it waits in them. What the link
# costs is what the rank that came last spends in them, and who that is, is told by what each does on its own: forward,
# input, optimizer. labkit looks at those without a profiler, in any run:

# %%
verdict = "; ".join(dawdling.verdict())
named = re.search(r"rank (\d+) is the straggler", verdict)
claims.measure("dawdler: the rank that labkit names", int(named[1]) if named else float("nan"), run=dawdling)
print(verdict)

# %% [markdown]
# ## Under FSDP
#
# The same model, of which each rank keeps a part of every block. Press Play: a block is gathered before it computes, in
# forward and again in backward, and its gradient is reduce-scattered afterwards. What can be sent while something else
# computes? (gloo copies in the thread that asks; NCCL does it beside the kernels.)

# %%
display(train("fsdp", "fsdp").timeline().animation())

# %% [markdown]
# ## Side by side
#
# Of each rank's step: computing while nothing is sent, computing while something is, and waiting. Only the last is time
# that better communication could save, and in the third run it could not.

# %%
import plotly.graph_objects as go


def parts(timeline, rank):
    """Seconds per step: computing alone, computing while sending, waiting."""
    own = [span for span in timeline.spans if span.rank == rank]
    sending = union((span.start, span.end) for span in own if span.kind == "all_reduce")
    computing = union((s.start, s.end) for s in own if s.kind in ("input", "forward", "backward", "optimizer"))
    hidden = intersection(computing, sending)
    waiting = union((span.start, span.end) for span in own if span.kind == "waiting")
    return [total(each) / len(timeline.steps) for each in (subtracted(computing, hidden), hidden, waiting)]


runs = {"healthy": healthy, "one bucket": late, "dawdler": dawdling}
bars = [(f"{name}, rank {rank}", parts(run.timeline(), rank)) for name, run in runs.items() for rank in ranks]
figure = go.Figure()
looks = (("computes", "#4c8eda"), ("computes, communication hidden", "#9cc3f0"), ("waits", "#e5534b"))
for number, (name, colour) in enumerate(looks):
    lengths = [each[number] * 1000 for _, each in bars]
    figure.add_bar(y=[label for label, _ in bars], x=lengths, name=name, orientation="h", marker_color=colour)
figure.update_layout(
    barmode="stack", height=120 + 40 * len(bars), margin={"t": 50, "b": 40, "l": 130}, template="none",
    xaxis_title="ms per step", yaxis_autorange="reversed",
    legend={"orientation": "h", "y": 1.15, "traceorder": "normal"},
)  # fmt: skip
display(figure)

# %% [markdown]
# ## The trace itself
#
# Each rank's trace is a file of torch's profiler in the run's folder. Perfetto (ui.perfetto.dev) opens it, Holistic
# Trace Analysis (HTA) reads the folder, and so does a page of Python: events have a name, a begin and a length, and lie
# within each other. A layer is one matrix product forward and two backward, for its weight and for its input; the first
# layer's input needs no gradient.


# %%
def operators(path):
    """The events of torch's operators in a trace, in order."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"]))


def own_times(events):
    """By name: (calls, milliseconds without what lies within)."""
    calls, times, open_ = defaultdict(int), defaultdict(float), defaultdict(list)
    for event in events:
        around = open_[event["tid"]]
        while around and event["ts"] >= around[-1]["ts"] + around[-1]["dur"]:
            around.pop()
        if around:
            times[around[-1]["name"]] -= event["dur"] / 1000
        calls[event["name"]] += 1
        times[event["name"]] += event["dur"] / 1000
        around.append(event)
    return [(name, calls[name], times[name]) for name in sorted(times, key=times.get, reverse=True)]


trace = healthy.path / "profile" / "rank0.json.gz"
events = operators(trace)
recorded = len(healthy.timeline().steps)
claims.measure("steps that were recorded", recorded, run=healthy)
products = sum(event["name"] == "aten::mm" for event in events)
claims.measure("matrix products per step", products / recorded, run=healthy)
table = pd.DataFrame(own_times(events)[:8], columns=["operator", "calls", "ms"])
display(table.style.hide().format({"ms": "{:.1f}"}))

# %% [markdown]
# What does it cost? Three steps are recorded, whatever the length of the training: the profiler keeps every operator in
# memory, and its file grows with each. In the steps in which it is started and ends, it takes time of its own; look at
# the recorded ones in between, and never at the speed of a whole run that was profiled for longer.

# %%
steps = healthy.metrics().query("rank == 0").set_index("step")["step_seconds"]
print(f"{len(events):,} operators in {trace.stat().st_size:,} bytes, for {recorded} steps of rank 0")
print("ms by step:", *(f"{seconds * 1000:.0f}" for seconds in steps))

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `backward_ms=2`: sending a bucket takes longer than a layer's backward. Which claims fail, and what would help?
# - Let the dawdler dawdle in its data instead: a `time.sleep` in `load_datasets` is paid once, one in a dataset's
#   `__getitem__` in every step. What does labkit say now?
# - Let **all** ranks dawdle: `if TIMES["slow_rank"] >= 0:` in `Model.forward`. Nobody waits, and no rank is named: the
#   claims about waiting fail. A slow model is no straggler.
# - `bucket_mib=2` in the healthy run: how many all-reduces, how many of them hidden?
