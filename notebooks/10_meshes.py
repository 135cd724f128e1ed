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
# # 10 · Meshes: several strategies at once
#
# **You will be able to** read a mesh, say what a rank sends along each of its axes and what it holds, and tell when
# more axes are worth it. **25 minutes. You need** labs 07, 08 and 09.
#
# Ranks get coordinates, like seats in rows, and each axis has a strategy of its own. Along an axis lies a process
# group: the ranks that differ in this coordinate only. labkit's `hybrid` script has the axes pipeline, data (FSDP) and
# tensor, in this order. These are eight ranks, 2 × 2 × 2; one color is one group:

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks, on two cores, too; 8 gives a mesh of 2 x 2 x 2
accumulate: int = 2  # micro-batches per step
large: bool = True  # plan a GPT of 838 million parameters, too: a minute

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized

lab, N, m = Lesson("10_meshes", ranks=nproc_per_node), nproc_per_node, accumulate
draw.mesh(pipeline=2, data=2, tensor=2)

# %% [markdown]
# Neighbors form a tensor group: they send most, in the middle of every block, and need the fastest link. A pipeline
# sends least, so its stages may be far apart, even on different hosts.
#
# ## Your predictions
#
# A transformer of four blocks, 64 wide, on four ranks: data × tensor, 2 × 2. Each step has two micro-batches.

# %%
sums = lab.ask("all-reduces of a rank in a step of data × tensor", default=16)
gathers = lab.ask("all-gathers of a rank in the same step", default=10)
share = lab.ask("share of the parameters that a rank of data × tensor holds between two steps", default=25, unit="%")

# %% [markdown]
# ## Run three meshes
#
# With p × d × t ranks, L blocks and m micro-batches a rank makes in one step:
#
# | axis | sends | calls |
# |---|---|---|
# | tensor | sums of activations, in each of its blocks | 4 (L / p) m all-reduces |
# | data | weights and gradients of its blocks and the rest | L / p + 1 all-gathers, as many reduce-scatters |
# | pipeline | activations or their gradients, at a border | m receives |
#
# Along the data axis two numbers are all-reduced as well: how many predictions a step has, and whether a batch has a
# new shape. (gloo records the first even in a group of one rank.) Everything is in fp64, so that losses can be
# compared.

# %%
L, WIDTH, VOCABULARY, CONTEXT = 4, 64, 256, 128
third = "pipeline × tensor" if N == 4 else "pipeline × data × tensor"
meshes = {"data × tensor": (1, N // 2, 2), "pipeline × data": (2, N // 2, 1), third: (2, N // 4, 2)}


def calls(p, d, t):
    units, numbers = (L // p + 1) * (d > 1), 2 if d > 1 else int(lab.on_cpu)
    sums = 4 * (L // p) * m * (t > 1) + numbers
    return {"all_reduce": sums, "all_gather": units, "reduce_scatter": units, "send_recv": m * (p > 1)}


def parameters(p, d, t):
    """Bytes of the first rank: its blocks, of which tensor ranks split four layers, and the embeddings."""
    block = (12 * WIDTH * WIDTH + 7 * WIDTH) // t + 6 * WIDTH
    last_stage = (VOCABULARY + 2) * WIDTH if p == 1 else 0
    return 8 * (L // p * block + (VOCABULARY + CONTEXT) * WIDTH + last_stage) // d


# %%
script, single = sized(Script.load("hybrid"), width=WIDTH), sized(Script.load("single"), width=WIDTH)
kinds = [kind for kind in calls(1, 1, 1) if lab.on_cpu or kind != "send_recv"]
lab.predict_each({f"{name}: {kind}": calls(*mesh)[kind] for name, mesh in meshes.items() for kind in kinds})
lab.predict_each({f"{name}: parameters, rank 0": parameters(*mesh) for name, mesh in meshes.items()}, "B")
lab.predict_each({f"{name}: loss, compared with one device": 1e-9 for name in meshes}, how="at most")
lab.predict_each({sums: calls(1, N // 2, 2)["all_reduce"], gathers: calls(1, N // 2, 2)["all_gather"]})
lab.predict(share, parameters(1, N // 2, 2) / parameters(1, 1, 1), "%")
options = {"global_batch_size": 2 * N, "precision": "fp64", "steps": 9}
alone = lab.launch(single, ranks=1, **options)
options |= {"accumulate": m, "profile": True, "trace_memory": True}
runs = {name: lab.launch(script, pipeline=p, tensor=t, **options) for name, (p, _, t) in meshes.items()}

# %%
held = {}
for name, run in runs.items():
    spans = run.timeline().of_step()
    results = {f"{name}: {kind}": sum(span.kind == kind for span in spans) / N for kind in kinds}  # of a rank
    held[name] = run.memory().ranks[0].traced.categories
    results[f"{name}: parameters, rank 0"] = held[name]["parameters"]
    results[f"{name}: loss, compared with one device"] = (run.losses() / alone.losses() - 1).abs().max()
    lab.measure_each(results, run=run)
    if name == "data × tensor":
        both = {sums: results[f"{name}: all_reduce"], gathers: results[f"{name}: all_gather"]}
        lab.measure_each(both | {share: held[name]["parameters"] / parameters(1, 1, 1)}, run=run)
display(draw.bars(held, unit="B", title="rank 0 at its peak"))
lab.score()

# %% [markdown]
# ## Why
#
# All three train what one device trains; only who talks to whom differs. The tensor axis sends in every block and
# micro-batch. The data axis gathers its weights once for the whole step and does not know of m. A rank of 2 × 2 holds
# more than a quarter: tensor parallelism splits four layers of a block, while norms, embeddings and the head stay whole
# on every tensor rank.
#
# One step of the last mesh. Stages compute in turn, and within a stage the tensor ranks wait for each other:

# %%
runs[third].timeline()

# %% [markdown]
# Move the sliders. Which ranks should share a host?

# %%
lab.explore(draw.mesh, pipeline=[1, 2, 4], data=[1, 2, 4], tensor=[1, 2, 4])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# Is it worth it? A GPT of 838 million parameters, one sample of 1,024 tokens on each rank. FSDP alone divides
# parameters, gradients and optimizer state by all ranks. More axes pay when its gathers no longer hide behind the
# computation: on many hosts, or when a rank has too few samples left.

# %%
if large:
    sizes = {"vocabulary": 50257, "context": 1024, "width": 1280, "heads": 20, "layers": 36}
    gpt = {name: sized(Script.load(name), **sizes) for name in ("fsdp", "hybrid")}
    ways = {"FSDP": gpt["fsdp"], "data × tensor": (gpt["hybrid"], {"tensor": 2})}
    display(lab.plans(ways | {"pipeline × data": (gpt["hybrid"], {"pipeline": 2})}, global_batch_size=8))

# %% [markdown]
# ## Try this
#
# 1. `draw.mesh(pipeline=4, data=2, tensor=1)`: to which ranks does rank 3 send, and what?
#    <details><summary>Answer</summary>It is the second replica of the second stage. It sends activations to rank 5 and
#    gradients to rank 1 (its pipeline group is 1, 3, 5, 7), and shares weights and gradients with rank 2. Along the
#    tensor axis it is alone.</details>
# 2. The plans above with `{"tensor": 4}` instead of `{"tensor": 2}`, on 8 × A100: does a rank hold less?
#    <details><summary>Answer</summary>No: 10.9 GiB instead of 8.2. Only two ranks are left on the data axis,
#    so less is sharded, and a rank works on twice the samples. A step takes 509 ms instead of 445, with FSDP alone
#    331.</details>
# 3. Gather again in every micro-batch: `reshard_after_forward=True` in the strategy cell of `script`. Which axis sends
#    more now, and does the loss notice?
#    <details><summary>Answer</summary>The data axis: 15 all-gathers instead of 5 in data × tensor, 9 instead of 3
#    in pipeline × data. Reduce-scatters and the loss are the same, so nothing but the time tells you.</details>
#
# ## Sources
#
# Narayanan et al. (arXiv 2104.04473): the three axes and their order. torch/distributed/device_mesh.py. The PyTorch
# team and IBM trained a model of 7 billion parameters with FSDP alone (fms-fsdp); for 70 billion they give a
# throughput, not a trained model.
#
# ### Appendix: what was claimed, and what the articles say
#
# "Use 3D Parallelism (Data + Pipeline + Tensor) for even bigger models (100B+ parameters)", says the third article
# (003, line 484).

# %%
lab.check()
