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
# # 08 · Pipelines: who waits, and who holds how much
#
# In pipeline parallelism each rank has some of the layers and micro-batches pass through. A *schedule* says in which
# order a rank takes them; it decides how long ranks idle (the **bubble**) and how many micro-batches' activations they
# hold. Here the layers only sleep, so time is exact however few cores there are, and can be claimed. The
# third article (003, line 302) gives the bubble as the fraction (p - 1)/m, and (line 314) calls the memory of
# Interleaved 1F1B the lowest. You will measure both.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks, and so p; they sleep, two cores are enough
micro_batches: int = 8  # m; a multiple of the ranks
forward_ms: int = 50  # a rank's forward of one micro-batch
backward_ms: int = 100  # and its backward: half for the gradients of inputs, half for those of weights

# %%
import json
from collections import defaultdict

import pandas as pd
from plotly.subplots import make_subplots

import labkit
from labkit import Script
from labkit.claims import Claims
from labkit.planner.speed.schedules import actions

p, m, ranks = nproc_per_node, micro_batches, range(nproc_per_node)
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # sleep needs no GPU
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}  # stages on each rank: v
claims = Claims("08_pipeline")

# %% [markdown]
# ## The schedules
#
# F is a forward, B a backward, and the number that of the micro-batch. GPipe does all forwards first. 1F1B begins to
# go back as soon as it can. The interleaved ones give each rank *v* = 2 stages (a and b), each half as long. Zero
# bubble splits a backward: another rank waits only for I, the gradients of the input; W, those of the weights, fill
# gaps. This is what rank 0 does:

# %%
for name, v in SCHEDULES.items():
    order = actions(name, p, 0, range(0, v * p, p), m)
    print(f"{name:>22}:", *(f"{what}{n}{'ab'[stage // p] if v > 1 else ''}" for what, stage, n in order))

# %% [markdown]
# ## Predict: time
#
# With *p* ranks and *m* micro-batches a rank computes *m* times, and waits *p - 1* times as long as one takes: until
# the first reaches it, and after its last has left. So the **share** of time that is bubble is (p - 1)/(m + p - 1). The
# article's (p - 1)/m is the bubble over the *ideal* time, an overhead: for p = m = 4 the overhead is 75 %, the share
# 43 %. With *v* stages a rank, what is waited for is *v* times shorter: (p - 1)/(v m + p - 1).
#
# There is no such formula for every schedule, so here is a simulation: an action begins when its rank is free and what
# it needs is there. Where a formula exists, they must agree.

# %%
F, B = forward_ms / 1000, backward_ms / 1000


def simulate(name, m):
    """(rank, what, micro-batch, begin, end) of one step in which nothing but the layers takes time."""
    v = SCHEDULES[name]
    last = v * p - 1
    orders = [actions(name, p, rank, range(rank, v * p, p), m) for rank in ranks]
    place, free, ends, done = [0] * p, [0.0] * p, {}, []
    while any(place[rank] < len(orders[rank]) for rank in ranks):
        for rank in ranks:
            while place[rank] < len(orders[rank]):
                what, stage, n = orders[rank][place[rank]]
                if what == "F":
                    needs = ("F", stage - 1, n) if stage > 0 else None
                elif what == "W":
                    needs = None  # its own I, which is before it in the order
                else:
                    needs = ("back", stage + 1, n) if stage < last else ("F", stage, n)
                if needs and needs not in ends:
                    break  # later
                # nobody awaits the first stage's input gradients: torch does its whole backward as W
                seconds = {"F": F, "B": B, "I": B / 2 * (stage > 0), "W": B / 2 * (1 + (stage == 0))}[what] / v
                begin = max(free[rank], ends.get(needs, 0.0))
                free[rank] = ends["F" if what == "F" else "W" if what == "W" else "back", stage, n] = begin + seconds
                done.append((rank, what, n, begin, begin + seconds))
                place[rank] += 1
    return done


def step_seconds(spans):
    return max(end for *_, end in spans) - min(begin for *_, begin, _ in spans)


def bubble(spans):
    """The share of all ranks' time in which they do nothing."""
    return 1 - sum(end - begin for *_, begin, end in spans) / (p * step_seconds(spans))


ideal = {(name, m): simulate(name, m) for name in SCHEDULES} | {("1F1B", p): simulate("1F1B", p)}
for (name, count), spans in ideal.items():
    if name != "InterleavedZeroBubble":
        assert abs(bubble(spans) - (p - 1) / (SCHEDULES[name] * count + p - 1)) < 1e-9, name
for (name, count), spans in ideal.items():
    print(f"{name:>22}, {count} micro-batches: {step_seconds(spans):.2f} s, bubble {bubble(spans):.1%}")

# %% [markdown]
# ## Predict: what is held
#
# From a forward to its backward a micro-batch's activations stay. GPipe holds all *m*; 1F1B on rank *r* at most
# *p - r*, whatever *m* is. Interleaved 1F1B begins with more forwards before its first backward, of smaller stages:
# ((v - 1) p + 2 (p - r - 1) + 1)/v. For zero bubble, count along the order.


# %%
def in_flight(order, v):
    """The most micro-batches held at once, from a rank's order of 'forward' and 'backward'."""
    held = most = 0
    for what in order:
        held += 1 if what == "forward" else -1
        most = max(most, held)
    return most / v


def ends_of(name, rank):
    """The order of a rank's forwards and of what releases them."""
    for what, stage, _ in actions(name, p, rank, range(rank, SCHEDULES[name] * p, p), m):
        if what == "F":
            yield "forward"
        elif what == "B" or (what == "I" and stage > 0) or (what == "W" and stage == 0):
            yield "backward"


held = {
    "GPipe": [m for _ in ranks],
    "1F1B": [min(m, p - r) for r in ranks],
    "Interleaved1F1B": [min(m, (p + 2 * (p - r - 1) + 1) / 2) for r in ranks],
    "InterleavedZeroBubble": [in_flight(ends_of("InterleavedZeroBubble", r), 2) for r in ranks],
}
display(pd.DataFrame(held, index=[f"rank {rank}" for rank in ranks]).T.style.format("{:g}"))

# %% [markdown]
# ## Layers that sleep
#
# A stage's forward and the two parts of its backward are steps of autograd, as in a real model; that they only sleep
# makes them last as long on two busy cores as on two GPUs. Each writes down when it began and ended.

# %%
import time

import torch
from torch import nn

DONE = []  # (what, stage, begin, end) of this rank; the clock is the machine's, the same for all ranks


class Pace:
    factor = 1.0


def work(what, stage, seconds):
    began = time.monotonic()
    time.sleep(seconds * Pace.factor)
    DONE.append((what, stage, began, time.monotonic()))


class Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, stage, forward, backward):
        ctx.stage, ctx.seconds = stage, backward / 2
        work("forward", stage, forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        work("backward", ctx.stage, ctx.seconds)
        return gradient, None, None, None


class Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, stage, backward):
        ctx.stage, ctx.seconds = stage, backward / 2
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        work("weights", ctx.stage, ctx.seconds)
        return gradient, None, None


class Stage(nn.Module):
    def __init__(self, index, forward, backward):
        super().__init__()
        self.index, self.seconds = index, (forward, backward)
        self.first = nn.Parameter(torch.zeros(())) if index == 0 else 0.0  # so that stage 0 has a backward, too
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        forward, backward = self.seconds
        y = Layer.apply(x + self.first, self.index, forward, backward)
        return y * Weight.apply(self.weight, self.index, backward)


# %%
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class


def build(name, v, micro_batches, forward, backward):
    """A schedule of torch's with this rank's stages: rank r has r, r + p, …"""
    rank, p = dist.get_rank(), dist.get_world_size()
    stages = [
        PipelineStage(Stage(index, forward / v, backward / v), index, v * p, torch.device("cpu"))
        for index in range(rank, v * p, p)
    ]
    return get_schedule_class(name)(
        stages if v > 1 else stages[0], micro_batches, loss_fn=lambda y, target: (y - target).sum(), scale_grads=False
    )


def main():
    cases, forward, backward = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    schedules = [build(name, v, count, forward, backward) for name, v, count in cases]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    seen = []
    for round in range(3):
        Pace.factor = 0.02 if round == 0 else 1.0  # in the first round torch learns the shapes
        for schedule, (name, _, count) in zip(schedules, cases, strict=True):
            x = torch.zeros(count, 4)
            dist.barrier()
            DONE.clear()
            schedule.step(*([x] if rank == 0 else []), target=x, losses=[])
            optimizer.step()  # of nothing: it tells the profiler that a step has ended
            if round:
                seen.append({"name": name, "micro_batches": count, "done": list(DONE)})
    Path(os.environ["LABKIT_RUN_DIR"], f"steps-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# The claims. Each action also costs some milliseconds of Python and gloo, which the formulas leave out: 10 ms of it are
# allowed for. The article's formula is put to the test where the two meanings differ most, with *m* = *p*.

# %%
for name in SCHEDULES:
    seconds, count = step_seconds(ideal[name, m]), len(ideal[name, m]) / p
    claims.predict(f"{name}: step", seconds, "s", within=0.01 * count / seconds)
claims.predict("schedules in the order of their bubbles: zero bubble, interleaved, 1F1B", 3, timed=True)
claims.predict(
    f"1F1B, {p} micro-batches: share that is bubble",
    (p - 1) / (p + p - 1),
    "%",
    within=0.15,
    article="bubble fraction (p - 1)/m (003, line 302)",
    said=(p - 1) / p,
    timed=True,
)
claims.predict(f"1F1B, {p} micro-batches: bubble over the ideal time", (p - 1) / p, "%", within=0.25, timed=True)
for name in SCHEDULES:
    claims.predict(f"{name}: ranks that hold as many micro-batches as predicted", p)
three = sorted(("GPipe", "1F1B", "Interleaved1F1B"), key=lambda name: held[name][0])
claims.predict(
    "Interleaved1F1B: place by memory on rank 0 among three (1 is the lowest)",
    1 + three.index("Interleaved1F1B"),
    article="memory: lowest (003, line 314)",
    said=1,
)
# the profiler records the seventh to the ninth step: keep three of these there
cases = [(name, SCHEDULES[name], count) for name, count in ideal]
run = labkit.launch(
    Script.of("pipelines", layers=Stage, main=main),
    nproc_per_node=p,
    args=[json.dumps([cases, F, B])],
    env=env,
    profile=True,
)
run.wait()

# %%
steps = [json.loads((run.path / f"steps-{rank}.json").read_text()) for rank in ranks]
measured, counted = {}, {}
for same in zip(*steps, strict=True):  # one step, as each rank saw it
    spans = []
    for rank, step in enumerate(same):
        numbers = defaultdict(int)
        for what, stage, begin, end in step["done"]:
            spans.append((rank, what, numbers[what, stage], begin, end))
            numbers[what, stage] += 1
    key = same[0]["name"], same[0]["micro_batches"]
    if key not in measured or step_seconds(spans) < step_seconds(measured[key]):
        measured[key] = spans  # the quicker of two: other programs can only delay
    v = SCHEDULES[key[0]]
    counted[key] = [in_flight([w for w, *_ in step["done"] if w != "weights"], v) for step in same]

for name in SCHEDULES:
    because = "Python and gloo, some ms for each action"
    claims.measure(f"{name}: step", step_seconds(measured[name, m]), run=run, because=because)
    right = sum(a == b for a, b in zip(counted[name, m], held[name], strict=True))
    claims.measure(f"{name}: ranks that hold as many micro-batches as predicted", right, run=run)
expected = ["InterleavedZeroBubble", "Interleaved1F1B", "1F1B"]
order = sorted(expected, key=lambda name: bubble(measured[name, m]))
in_place = sum(a == b for a, b in zip(order, expected, strict=True))
claims.measure("schedules in the order of their bubbles: zero bubble, interleaved, 1F1B", in_place, run=run)
share = bubble(measured["1F1B", p])
claims.measure(f"1F1B, {p} micro-batches: share that is bubble", share, run=run)
overhead = step_seconds(measured["1F1B", p]) / (p * (F + B)) - 1
claims.measure(f"1F1B, {p} micro-batches: bubble over the ideal time", overhead, run=run)
found = sorted(three, key=lambda name: counted[name, m][0])
claims.measure(
    "Interleaved1F1B: place by memory on rank 0 among three (1 is the lowest)",
    1 + found.index("Interleaved1F1B"),
    run=run,
    because="it starts more forwards before its first backward",
)
rows = [
    {
        "schedule": name,
        "micro-batches": count,
        "bubble, predicted": f"{bubble(spans):.1%}",
        "bubble, measured": f"{bubble(measured[name, count]):.1%}",
        "in flight, by rank": " ".join(f"{number:g}" for number in counted[name, count]),
    }
    for (name, count), spans in ideal.items()
]
display(pd.DataFrame(rows).style.hide())

# %% [markdown]
# ## Predicted and measured, side by side
#
# Blue is forward, orange backward, yellow the weights' part of a backward where it is known apart; **grey is bubble**.
# Numbers are micro-batches.

# %%
COLOURS = {"F": "#4c8eda", "B": "#e8883a", "I": "#e8883a", "W": "#f2c14e"}
NAMES = {"forward": "F", "backward": "I", "weights": "W"}
HALF = 0.4  # of a rank's row


def bar(begin, end, rank):
    """A rectangle, as a path: hundreds of them are one shape."""
    return f"M{begin:.3f},{rank - HALF}H{end:.3f}V{rank + HALF}H{begin:.3f}Z"


def draw(figure, row, column, spans, numbered):
    zero, last = min(begin for *_, begin, _ in spans), max(end for *_, end in spans)
    paths = defaultdict(str)
    for rank, what, _, begin, end in spans:
        if end > begin:
            paths[COLOURS[NAMES.get(what, what)]] += bar(begin - zero, end - zero, rank)
    bubbles = {"#d8dee4": "".join(bar(0, last - zero, rank) for rank in ranks)}
    for colour, path in (bubbles | paths).items():
        edge = {"width": 0.5, "color": "white"}
        figure.add_shape(type="path", path=path, fillcolor=colour, line=edge, layer="below", row=row, col=column)
    told = [s for s in spans if numbered and s[4] > s[3]]
    places = {"x": [round((s[3] + s[4]) / 2 - zero, 3) for s in told], "y": [s[0] for s in told]}
    figure.add_scatter(**places, text=[s[2] for s in told], mode="text", textfont_size=9, hoverinfo="skip",
                       showlegend=False, row=row, col=column)  # fmt: skip


panels = [
    (name, way, spans[name, m]) for name in SCHEDULES for way, spans in (("predicted", ideal), ("measured", measured))
]
titles = [f"{name}, {way}: bubble {bubble(spans):.1%}" for name, way, spans in panels]
space = {"vertical_spacing": 0.07, "horizontal_spacing": 0.02}
figure = make_subplots(len(SCHEDULES), 2, shared_xaxes="all", shared_yaxes=True, subplot_titles=titles, **space)
for place, (name, _, spans) in enumerate(panels):
    draw(figure, place // 2 + 1, place % 2 + 1, spans, numbered=SCHEDULES[name] == 1)
end = max(max(span[4] for span in spans) - min(span[3] for span in spans) for *_, spans in panels)
figure.update_yaxes(range=[p - 0.5, -0.5], tickvals=list(ranks), showgrid=False, zeroline=False)
figure.update_yaxes(ticktext=[f"rank {rank}" for rank in ranks], col=1)
figure.update_xaxes(range=[0, end], showgrid=False, zeroline=False)
figure.update_xaxes(title_text="seconds", row=len(SCHEDULES))
figure.update_annotations(font_size=12)
figure.update_layout(
    template="none", height=len(SCHEDULES) * (60 + 28 * p), margin={"l": 60, "r": 10, "t": 30, "b": 45}
)
display(figure)

# %% [markdown]
# The same as the ranks' profilers saw it. Press Play: what each stage does, and which ranks talk.

# %%
timeline = run.timeline()
recorded = [cases[(6 + step) % len(cases)] for step in timeline.steps]
for step, (name, _, count) in zip(timeline.steps, recorded, strict=True):
    chunks = [(s.rank, s.kind, s.chunk, s.start, s.end) for s in timeline.of_step(step) if s.chunk is not None]
    print(f"{name}, {count} micro-batches: bubble {bubble(chunks):.1%} by the profiler")
animation = timeline.animation(timeline.steps[0])
display(animation.update_layout(title_text=f"{recorded[0][0]} on {p} ranks"))

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `micro_batches=16`: the bubble shrinks; what GPipe holds doubles, what 1F1B holds does not.
# - `micro_batches=4` with four ranks: now GPipe and 1F1B hold the same on rank 0, and the bubble is 43 %.
# - `forward_ms=10, backward_ms=20`: Python's share grows and the claims about time fail. Real stages must be long, too.
# - In `Stage.forward`, let one stage sleep twice as long. Every rank waits for it: which claims fail, which still hold?
