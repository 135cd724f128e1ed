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
# # 12 · Pipelines: who waits, and who holds how much
#
# **You will be able to** read a pipeline's timeline, say how long its ranks are idle and how many micro-batches they
# hold, and choose a schedule. **20 minutes. You need** labs 02, 04 and 05.
#
# In a pipeline each rank holds a group of consecutive layers, a **stage**. The batch is cut into **micro-batches**,
# which pass through the stages one after another, forward (blue) and backward (orange). Each box has the number of its
# micro-batch; time runs to the right. A **schedule** says in which order a rank takes them. Grey is the **bubble**: the
# rank has nothing to do. In the first picture the batch is not cut, so only one rank computes at a time. Interleaved
# schedules give each rank two stages of half the length: rank 0 has the first and the fifth eighth of the layers (the
# paler one), and a micro-batch goes round twice.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks, p; their stages only sleep, so two cores are enough
micro_batches: int = 8  # m; a multiple of the ranks
forward_ms: int = 50  # a rank's forward of one micro-batch; its backward takes twice as long

# %%
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.pipelines import bubble, in_flight, measured, simulated

lab, p, m, F = Lesson("12_pipeline", ranks=nproc_per_node), nproc_per_node, micro_batches, forward_ms / 1000
naive, lone = simulated("GPipe", p, 1, m * F, 2 * m * F), simulated("1F1B", p, m, F, 2 * F)
display(draw.pipeline(naive, "the whole batch at once", share=False), draw.pipeline(lone, "1F1B", share=False))
draw.grid(simulated("Interleaved1F1B", p, m, F, 2 * F, 2), "Interleaved1F1B", share=False)

# %% [markdown]
# ## Your predictions
#
# There are four ranks and eight micro-batches. You can count the answers in the pictures, where a forward of 1F1B is 1
# long, a backward 2, and its whole step 33. GPipe, not drawn, does all forwards first. 1F1B (one forward, one backward)
# starts a backward as soon as it can, and until then rank r starts only p - r forwards, even if it has to wait. With
# two stages, a micro-batch in one of them counts as 1/2.

# %%
idle = lab.ask("share of the ranks' time that is bubble, with 1F1B", default=37.5, unit="%")
holds = lab.ask("micro-batches whose activations rank 0 holds at once, with 1F1B", default=8)
interleaved = lab.ask("the same with Interleaved1F1B (a micro-batch in one of two stages counts 1/2)", default=3)

# %% [markdown]
# ## Run four schedules
#
# The schedules are torch's own. The stages do not compute: their forward and backward sleep, so that four of them fit
# on two cores and a stage lasts as long as if it had a GPU of its own. Python and sending add some milliseconds to each
# forward and backward, so the measured bubble of 1F1B may differ from the formula by a fifth, and by more if forwards
# and backwards are many and short.
#
# The fourth, zero bubble, cuts each backward in two: the gradients of the stage's inputs (orange), for which another
# rank waits, and those of its weights (teal), which fill gaps. Rank 0's first stage has nobody to send gradients to, so
# it runs both halves together (drawn as two boxes; their order means nothing).
#
# `SleepingStage`, `Pace` (1.0 is real time) and `DONE` (what a rank has done, and when) come with `lab.run`;
# `run.script` shows them.

# %%
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class


def schedule_of(name, v, micro_batches, forward):
    r, p, cpu = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    # this rank, r, has the stages r, r + p, …
    stages = [PipelineStage(SleepingStage(i, forward / v, 2 * forward / v), i, v * p, cpu) for i in range(r, v * p, p)]
    options = {"loss_fn": lambda y, t: (y - t).sum(), "scale_grads": False}
    return get_schedule_class(name)(stages if v > 1 else stages[0], micro_batches, **options)


def each_schedule(device, cases, forward):
    schedules, answer = [schedule_of(*case, forward) for case in cases], []
    for factor in (0.02, 1.0):  # in the first round torch learns the shapes
        Pace.factor = factor
        for schedule, (_, _, count) in zip(schedules, cases, strict=True):
            x = torch.zeros(count, 4)
            dist.barrier()
            DONE.clear()
            schedule.step(*([x] if dist.get_rank() == 0 else []), target=x, losses=[])  # the last stage uses target
            answer.append(list(DONE))
    return answer[len(cases) :]


# %%
cases = [("GPipe", 1, m), ("1F1B", 1, m), ("Interleaved1F1B", 2, m), ("InterleavedZeroBubble", 2, m)]
ideal = {(name, count): simulated(name, p, count, F, 2 * F, v) for name, v, count in cases}
held = {name: [in_flight(spans, rank) for rank in range(p)] for (name, _), spans in ideal.items()}
lab.predict(idle, (p - 1) / (m + p - 1), "%", within=0.2, timed=True)
lab.predict_each({holds: min(m, p), interleaved: min(m, (p + 2 * (p - 1) + 1) / 2)})
lab.predict_each({f"{name}: ranks that hold as many micro-batches as predicted": p for name in held})
on_cpu = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
run, answers = lab.run(each_schedule, cases, F, env=on_cpu, options={"shown": False})

# %%
seen = {case: measured(done) for case, done in zip(ideal, zip(*answers, strict=True), strict=True)}
counted = {each: [in_flight(seen[each, m], rank) for rank in range(p)] for each in held}
agree = {each: sum(a == b for a, b in zip(held[each], counted[each], strict=True)) for each in held}
results = {f"{each}: ranks that hold as many micro-batches as predicted": count for each, count in agree.items()}
results |= {idle: bubble(seen["1F1B", m]), holds: counted["1F1B"][0], interleaved: counted["Interleaved1F1B"][0]}
lab.measure_each(results, run=run)
pairs = {f"{each}, {how}": spans[each, m] for each in held for how, spans in (("predicted", ideal), ("measured", seen))}
display(draw.schedules({"the whole batch at once": naive} | {each: ideal[each, m] for each in held}))
draw.grids(pairs)

# %% [markdown]
# Trust the *predicted* rows to see which schedule is faster. On a busy machine some sleeps end late, and the schedules
# that cut the work into the most pieces lose the most; zero bubble may even come last.
#
# ## Why
#
# **Time.** Each rank is busy for *m* forwards and *m* backwards. The step is longer by *p - 1* of each: the first
# micro-batch needs *p - 1* forwards to reach the last rank, and the last gradient needs *p - 1* backwards to return. A
# rank cannot fill its gap with the next batch, which must wait for the optimizer's step, which in turn needs all
# gradients. So the bubble's share is (p - 1)/(m + p - 1): 27% here, for GPipe and 1F1B alike. With *v* stages on a rank
# each wait is 1/*v* as long: (p - 1)/(v m + p - 1).
#
# **Memory.** A rank has the states of its own stages only, about 1/p of them. A micro-batch's activations stay in
# memory from its forward until its backward. GPipe holds all *m*; 1F1B on rank *r* at most *p - r*, whatever *m* is.
# 1F1B saves memory, not time. Interleaved 1F1B holds more: count rank 0's forwards before its first backward in the
# picture at the top of the page, 11 halves or 5.5 micro-batches:
#
# - 4 through its first stage, *p*;
# - then 7 more until micro-batch 0 is back: its own forward through the second stage, and one forward for each step to
#   the last rank and back, 2(p - 1) of them. (Zero bubble goes only half as far ahead, so it starts 8.)
#
# **Which to choose?** Usually 1F1B. labkit's script has GPipe as its default because that runs with any number of
# micro-batches, even one; torch's 1F1B needs at least as many as there are ranks. Choose interleaved 1F1B or zero
# bubble if the bubble is too large and you cannot add micro-batches; both send more than *v* times as often (over 7
# boundaries here instead of 3). Zero bubble needs more memory than the table below shows: a micro-batch counts until
# the gradients of the inputs exist, but the inputs themselves stay until those of the weights do.

# %%
table = {each: " · ".join(f"{number:g}" for number in numbers) for each, numbers in counted.items()}
print(*(f"{each:>22}, held by rank 0 · 1 · …: {numbers}" for each, numbers in table.items()), sep="\n")
lab.score()

# %% [markdown]
# More micro-batches make the bubble smaller (16 in these pictures, 8 in those above), and more ranks make it larger:


# %%
def step_of(ranks, micro_batches, schedule):
    return draw.grid(simulated(schedule, ranks, micro_batches, 1, 2, 1 + schedule.startswith("Inter")))


lab.explore(step_of, ranks=[2, 4, 8], micro_batches=[8, 16, 32], schedule=["GPipe", "1F1B", "Interleaved1F1B"])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# Is a pipeline worth it there? Take a transformer of 113 million parameters in fp32, 32 samples of 128 tokens per step,
# and GPipe with 4 or 16 micro-batches (`accumulate` in labkit's scripts):

# %%
from labkit import Script

sizes, few, many = {"width": 768, "layers": 16, "heads": 12}, {"accumulate": 4}, {"accumulate": 16}
gpt = {name: sized(Script.load(name), **sizes) for name in ("ddp", "pipeline")}
ways = {"DDP": gpt["ddp"], "pipeline, 4": (gpt["pipeline"], few), "pipeline, 16": (gpt["pipeline"], many)}
lab.plans(ways, global_batch_size=32)

# %% [markdown]
# By the formula the bubble is 20% and 5.9% on two ranks, 64% and 30% on eight; the plans' waiting is close. Where the
# model fits on each device, DDP waits less and is faster. More micro-batches have a price, too: each reads and writes
# all gradients once more, and its smaller matrix products use the GPU less efficiently. (With 16, memory is a little
# larger, because gradients already exist at its peak; with 4 they do not.)
#
# So a pipeline is for models that do not fit. Here is one of 838 million parameters, with eight samples of 1,024 tokens
# per step, one in each micro-batch (DDP and FSDP accumulate gradients over four on each rank):

# %%
large = {"vocabulary": 50257, "context": 1024, "width": 1280, "heads": 20, "layers": 36}
gpt = {name: sized(Script.load(name), **large) for name in ("ddp", "fsdp", "pipeline")}
ways = {name.upper(): (gpt[name], {"accumulate": 4}) for name in ("ddp", "fsdp")}
ways |= {name: (gpt["pipeline"], {"accumulate": 8, "schedule": name}) for name in ("GPipe", "1F1B")}
lab.plans(ways, devices=("2xT4",), global_batch_size=8)

# %% [markdown]
# GPipe holds the activations of all eight samples, 1F1B those of two on rank 0, the fuller one, which is drawn. So 1F1B
# fits. So does FSDP, which is simpler and takes about as long. (FSDP and DDP need 3.1 GiB more than in lab 05: labkit's
# FSDP reduces gradients only after the last micro-batch, and until then keeps them whole; DDP keeps them beside its
# buckets.) A pipeline wins when links are slow: it sends only the activations between two stages, and their gradients,
# here 80 MiB per step. FSDP gathers the model's 3.1 GiB about twice for each of four micro-batches.
#
# ## Try this
#
# 1. `micro_batches = 16`: what happens to the bubble, and to what GPipe and 1F1B hold?
#    <details><summary>Answer</summary>The bubble shrinks from 27% to 16% (measured with other work on the
#    machine: 20%). GPipe now holds 16 micro-batches on every rank, 1F1B still 4, 3, 2 and 1.</details>
# 2. `micro_batches = 4`: what difference remains between GPipe and 1F1B?
#    <details><summary>Answer</summary>On rank 0 none: both hold 4. The last rank holds 4 with GPipe, 1 with 1F1B. The
#    bubble is 43% with both (measured: 44 to 47%).</details>
# 3. `forward_ms = 5`: why do the measured bubbles no longer agree?
#    <details><summary>Answer</summary>Measured on a busy machine, half of the time is bubble with GPipe and 1F1B, not
#    27%, and 41% with zero bubble, not 6. Each forward and backward costs Python and gloo some milliseconds, which are
#    no longer negligible next to a 5 ms stage. Real stages need to be long for the same reason. What is held does not
#    change.</details>
#
# **In your own code:** `print(Script.load("pipeline"))` prints a training script with `torch.distributed.pipelining`.
# Its function `cut` puts a model's blocks into stages; for Hugging Face's Llama and Qwen it reads their
# `base_model_pp_plan`. Transformers' `Trainer` has no pipeline. `device_map="auto"` is not one: layers are spread over
# the devices, but one device works at a time.
#
# ## Sources
#
# Huang et al., *GPipe* (arXiv 1811.06965). Narayanan et al. (arXiv 2104.04473): 1F1B and the interleaved schedule. Qi
# et al., *Zero Bubble* (arXiv 2401.10241). torch/distributed/pipelining/schedules.py.
#
# ### Appendix: what was claimed, and what the articles say
#
# *Distributed Training Techniques: DDP, Pipeline Parallelism, and FSDP* (003) gives the bubble as (p - 1)/m in line
# 302. That is the bubble over the *ideal* time, an overhead: for p = m = 4 the overhead is 75%, the share 43%. In line
# 314 it calls the memory of Interleaved 1F1B the lowest; 1F1B's is lower.

# %%
lab.check(
    {
        idle: ("(p - 1)/m, of another quantity (003, line 302)", None),
        interleaved: ("memory: lowest (003, line 314)", p - 1),
    }
)
