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
# # 13 · Pipelines: who waits, and who holds how much
#
# **You will be able to** read a pipeline's timeline, say how long its ranks are idle and how many micro-batches they
# hold, see what an uneven cut costs, and choose a schedule. **20 minutes. You need** labs 02, 04 and 05.
#
# FSDP fits a large model by cutting every tensor, and pays by gathering the weights of every layer, on every rank,
# twice in a step. The oldest answer is simpler: layers 1 to 10 on this device, 11 to 20 on that one. Each rank holds a
# **stage**, some consecutive layers with their optimizer state. Only activations are sent, from a stage to the next,
# and in backward their gradients.
#
# But the second rank cannot begin before the first has finished. Rows are ranks, time runs to the right, forward is
# blue and backward orange. Grey is the **bubble**: the rank has nothing to do. In the first picture the batch goes
# through the stages as a whole. In the second it is cut into **micro-batches**, with numbers, so that a rank begins
# with the first micro-batch while the one before it computes the second. Play both:

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks; their stages only sleep, so two cores are enough
micro_batches: int = 8  # of a batch; a multiple of the ranks
forward_ms: int = 40  # a rank's forward of one micro-batch; its backward takes twice as long
plans: bool = True  # plan a large model on other devices: a minute

# %%
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.pipelines import bubble, elapsed, in_flight, measured, simulated

lab, ranks, forward = Lesson("13_pipeline", ranks=nproc_per_node), nproc_per_node, forward_ms / 1000
cuts = {parts: simulated("GPipe", parts, ranks * [micro_batches * forward / parts]) for parts in (1, 2, 4)}
display(draw.pipeline(cuts[1], "the whole batch at once"))
draw.schedules({f"micro-batches: {parts}": spans for parts, spans in cuts.items()})

# %% [markdown]
# `simulated` is a calculation: an action begins when its rank is free and what it needs has arrived.
#
# A **schedule** says in which order a rank takes the micro-batches. The schedules above are **GPipe**: all forwards,
# then all backwards. **1F1B** (one forward, one backward) starts a backward as soon as it can; until then rank *r*
# starts only as many forwards as there are stages from its own to the last, even if it has to wait. **Interleaved
# 1F1B** gives each rank two stages of half the length: rank 0 has the first and the fifth eighth of the layers (the
# paler one), and a micro-batch goes round twice.

# %%
even, halves = ranks * [forward], 2 * ranks * [forward / 2]
display(draw.pipeline(simulated("1F1B", micro_batches, even), "1F1B", share=False))
draw.grid(simulated("Interleaved1F1B", micro_batches, halves, ranks), "Interleaved1F1B", share=False)

# %% [markdown]
# ## Your predictions
#
# There are four ranks and eight micro-batches. You can count in the pictures: a forward of 1F1B is 1 long, a backward
# 2, and its whole step 33. With two stages on a rank, a micro-batch in one of them counts as 1/2.

# %%
idle = lab.ask("share of the ranks' time that is bubble, with 1F1B", default=37.5, unit="%")
slower = lab.ask("how many times as long 1F1B takes if the last of the stages is twice as slow", default=1.25)
holds = lab.ask("micro-batches whose activations rank 0 holds at once, with 1F1B", default=8)
interleaved = lab.ask("the same with Interleaved1F1B (a micro-batch in one of two stages counts 1/2)", default=3)

# %% [markdown]
# ## Run the schedules
#
# The schedules are torch's own. The stages do not compute: their forward and backward sleep, so that four of them fit
# on two cores and a stage lasts as long as if it had a GPU of its own. Sending, autograd and the schedule are real.
# Each rank writes into `DONE` what it has done, and when. Other programs on the machine can only delay a step, so
# each schedule runs five times, and its fastest step counts.
#
# The last of the cases, **zero bubble**, cuts each backward in two: the gradients of the stage's inputs (orange), for
# which another rank waits, and those of its weights (teal), for which nobody waits, so that they can fill gaps.

# %%
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class


def schedule_of(name, count, seconds):  # of a forward of each stage; this rank has every ranks-th of them
    mine, cpu = range(dist.get_rank(), len(seconds), dist.get_world_size()), torch.device("cpu")
    stages = [PipelineStage(SleepingStage(i, seconds[i]), i, len(seconds), cpu) for i in mine]
    return get_schedule_class(name)(stages if len(stages) > 1 else stages[0], count, torch.nn.functional.mse_loss)


def each_schedule(device, cases):
    answer = []
    for name, count, seconds in cases:
        schedule, x = schedule_of(name, count, seconds), torch.zeros(count, 4)
        for _ in range(5):
            dist.barrier()
            DONE.clear()
            schedule.step(*([x] if dist.get_rank() == 0 else []), target=x, losses=[])  # the last stage uses target
            answer.append(list(DONE))
    return answer


# %%
slow, uneven = "1F1B, last stage twice as slow", [*even[1:], 2 * forward]
cases = {name: (name, micro_batches, even) for name in ("GPipe", "1F1B")} | {slow: ("1F1B", micro_batches, uneven)}
cases |= {name: (name, micro_batches, halves) for name in ("Interleaved1F1B", "InterleavedZeroBubble")}
run, answers = lab.run(each_schedule, [*cases.values()], env={"CUDA_VISIBLE_DEVICES": ""}, options={"shown": False})
print(run.script.cells["sleeping"].text)

# %%
steps = [measured(of_ranks) for of_ranks in zip(*answers, strict=True)]  # five of each case
seen = {way: min(steps[5 * i : 5 * i + 5], key=elapsed) for i, way in enumerate(cases)}
held = {way: [in_flight(spans, rank) for rank in range(ranks)] for way, spans in seen.items()}
ideal = {way: simulated(*case, ranks) for way, case in cases.items()}
for way, spans in ideal.items():
    print(f"{way:>30}: bubble {bubble(spans):.1%} simulated, {bubble(seen[way]):.1%} measured; held {held[way]}")
display(draw.schedules(ideal))
draw.grids({f"{way}, measured": spans for way, spans in seen.items()})

# %% [markdown]
# First what is calculated, then what was measured. Each action also costs Python and gloo some milliseconds. The last
# two schedules cut the same work into two and three times as many actions, so there the two differ most.
#
# ## Why
#
# **Time.** Each rank is busy for *m* forwards and *m* backwards. The step of *p* ranks is longer by *p - 1* of each:
# the first micro-batch needs *p - 1* forwards to reach the last rank, and the last gradient needs *p - 1* backwards to
# return. So the bubble's share is (p - 1)/(m + p - 1): 75% for one micro-batch, 27% for eight, with GPipe and 1F1B
# alike. With *v* stages on a rank each wait is 1/*v* as long: (p - 1)/(v m + p - 1). An often quoted formula, (p -
# 1)/m, is another quantity: the bubble's time over the time of the *work*.
#
# **Uneven stages.** The slowest stage sets the pace. If stage *i* needs tᵢ for the forward and backward of a
# micro-batch, the step takes t₁ + … + tₚ for the first one, and then max tᵢ for each of the other m - 1: here (1 + 1 +
# 1 + 2) + 7 · 2 = 19 instead of 11. (With 1F1B it is a little less if the slow stage is not the last.) Cut evenly, the
# same work would take 11 · 5/4. So cut by time, not by number of layers: the first stage also has the embedding, the
# last one the head and the loss.
#
# **Latency.** A micro-batch has to pass all stages, one after another, and is no sooner through than on one device that
# could hold them all. A pipeline does more per second; it answers no single request faster.
#
# **Memory.** A rank has the states of its own stages only, about 1/p of them. A micro-batch's activations stay in
# memory from its forward until its backward. GPipe holds all *m*; 1F1B on rank *r* at most *p - r*, whatever *m* is.
# 1F1B saves memory, not time. Interleaved 1F1B holds more: count rank 0's forwards before its first backward in its
# picture at the top of the page, 11 halves or 5.5 micro-batches:
#
# - 4 through its first stage, *p*;
# - then 7 more until micro-batch 0 is back: its own forward through the second stage, and one forward for each step to
#   the last rank and back, 2(p - 1) of them. (Zero bubble goes only half as far ahead, so it starts 8.)

# %%
lab.verify(idle, (ranks - 1) / (micro_batches + ranks - 1), bubble(seen["1F1B"]), "%", within=0.2, timed=True)
pace = (sum(uneven) + (micro_batches - 1) * max(uneven)) / (sum(even) + (micro_batches - 1) * max(even))
lab.verify(slower, pace, elapsed(seen[slow]) / elapsed(seen["1F1B"]), within=0.1, timed=True)
lab.verify(holds, min(micro_batches, ranks), held["1F1B"][0])
lab.verify(interleaved, min(micro_batches, (ranks + 2 * (ranks - 1) + 1) / 2), held["Interleaved1F1B"][0])
for way, spans in ideal.items():
    same = sum(in_flight(spans, rank) == held[way][rank] for rank in range(ranks))
    lab.verify(f"{way}: ranks that hold as many micro-batches as predicted", ranks, same)

# %% [markdown]
# More micro-batches make the bubble smaller, more ranks make it larger, and so does one slow stage:


# %%
def step_of(micro_batches, ranks, last_stage, schedule):
    return draw.grid(simulated(schedule, micro_batches, [1] * (ranks - 1) + [last_stage]), schedule)


lab.explore(step_of, micro_batches=[1, 2, 4, 8, 16, 32], ranks=[2, 4, 8], last_stage=[2, 1], schedule=["GPipe", "1F1B"])

# %% [markdown]
# ## Are the gradients stale?
#
# A rank cannot fill its bubble with the next batch: that must wait for the optimizer's step, which needs all gradients
# of this one. GPipe, 1F1B and all schedules above wait, so each gradient belongs to the weights that the step began
# with, as on one device. labkit's `pipeline` script shows it, in float64:

# %%
from labkit import Script

options = {"global_batch_size": 8, "precision": "fp64", "steps": 9, "shown": False}
alone = lab.launch(Script.load("single"), ranks=1, **options)
for way in ("GPipe", "1F1B"):
    piped = lab.launch(Script.load("pipeline"), accumulate=8, schedule=way, **options)
    differ = (piped.losses() / alone.losses() - 1).abs().max()
    print(f"{way}: the losses of nine steps differ from one device's by at most {differ:.0e}")
    lab.verify(f"{way}: largest difference of a loss to one device's", 1e-9, differ, how="at most")

# %% [markdown]
# Some research systems (PipeDream) do not wait. A rank updates its weights as soon as it has a gradient and begins the
# next batch meanwhile, so there is no bubble, but the gradients are those of older weights: **stale**. With four
# stages, three updates have come between on the first rank. What that does to SGD shows on the smallest loss, w²/2,
# whose gradient is *w* and whose best *w* is 0:


# %%
def trained(late, rate=0.6):
    weights = [1.0] * (late + 1)
    for _ in range(30):
        weights.append(weights[-1] - rate * weights[-1 - late])  # the gradient of an older weight
    return [*enumerate(weights[late:])]


display(draw.curves({f"{n} updates late": trained(n) for n in range(4)}, "the weight, by SGD with stale gradients"))
lab.score()

# %% [markdown]
# Old gradients need a smaller learning rate: with this one, three updates are too many, and the weight swings further
# and further from 0. torch has no such schedule.
#
# ## Which schedule?
#
# Usually 1F1B. labkit's script has GPipe as its default because that runs with any number of micro-batches, even one;
# torch's 1F1B needs at least as many as there are ranks. Choose interleaved 1F1B or zero bubble if the bubble is too
# large and you cannot add micro-batches; both send more than *v* times as often (over 7 boundaries here instead of 3),
# and both hold more than 1F1B. Zero bubble holds more than is printed above: a micro-batch counts until the gradients
# of the inputs exist, but the inputs themselves stay until those of the weights do.
#
# ## On 2 × T4 and 8 × A100
#
# A pipeline is for models that do not fit. Here is one of 760 million parameters in fp32, with eight samples of 1,024
# tokens per step: one in each of eight micro-batches (`accumulate` in labkit's scripts). DDP and FSDP accumulate
# gradients over four samples on each rank of 2 × T4, and have one on each of 8 × A100.

# %%
large = {"vocabulary": 50257, "context": 1024, "width": 1280, "heads": 20, "layers": 32}
gpt = {name: sized(Script.load(name), **large) for name in ("ddp", "fsdp", "pipeline")}
schedules = {name: (gpt["pipeline"], {"accumulate": 8, "schedule": name}) for name in ("GPipe", "1F1B")}
for devices, parts in (("2xT4", 4), ("8xA100 80", 1)):
    ways = {name.upper(): (gpt[name], {"accumulate": parts}) for name in ("ddp", "fsdp")} | schedules
    display(lab.plans(ways, devices=(devices,), global_batch_size=8)) if plans else print("(set plans = True)", devices)

# %% [markdown]
# GPipe holds the activations of all eight samples, 1F1B those of two on rank 0, the fuller one, which is drawn. So on 2
# × T4 1F1B fits. So does FSDP, which is simpler and takes about as long: compare the ranges. On 8 × A100 eight
# micro-batches are too few for eight stages: by the formula 7/15 of the time is bubble, and FSDP is far ahead.
#
# A pipeline wins when links are slow. Between two stages it sends only activations and their gradients, here 80 MiB per
# step; FSDP gathers the model's 2.8 GiB about twice for each of four micro-batches. More micro-batches have a price,
# too: each reads and writes all gradients once more, and its smaller matrix products use a GPU less efficiently.
#
# ## Recap
#
# | strategy | a rank holds | sends | waits for |
# |---|---|---|---|
# | FSDP | 1/N of all states | weights and gradients of every unit | weights that are late |
# | pipeline | its layers, and micro-batches | activations, between stages | the other stages, (p - 1)/(m + p - 1) |
#
# ## Try this
#
# 1. `micro_batches = 16`: what happens to the bubble, and to what GPipe and 1F1B hold?
#    <details><summary>Answer</summary>The bubble shrinks from 27% to 16%. GPipe now holds 16 micro-batches on every
#    rank, 1F1B still 4, 3, 2 and 1.</details>
# 2. `micro_batches = 4`: what difference remains between GPipe and 1F1B?
#    <details><summary>Answer</summary>On rank 0 none: both hold 4. The last rank holds 4 with GPipe, 1 with 1F1B. The
#    bubble is 43% with both.</details>
# 3. `forward_ms = 5`: why do the measured bubbles no longer agree?
#    <details><summary>Answer</summary>Each forward and backward costs Python and gloo some milliseconds, which are
#    no longer negligible next to a 5 ms stage. Real stages need to be long for the same reason. What is held does not
#    change.</details>
#
# **In your own code:** `print(Script.load("pipeline"))` prints a training script with `torch.distributed.pipelining`.
# Its function `cut` puts a model's blocks into stages; for Hugging Face's Llama and Qwen it reads their
# `base_model_pp_plan`. Transformers' `Trainer` has no pipeline. `device_map="auto"` is not one: layers are spread over
# the devices, but one device works at a time, as in the first picture.
#
# ## Sources
#
# Huang et al., *GPipe* (arXiv 1811.06965). Narayanan et al. (arXiv 2104.04473): 1F1B and the interleaved schedule.
# Harlap et al., *PipeDream* (arXiv 1806.03377): a pipeline that does not wait, and the versions of weights it keeps. Qi
# et al., *Zero Bubble* (arXiv 2401.10241). torch/distributed/pipelining/schedules.py.
