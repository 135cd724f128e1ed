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
# "Use 3D Parallelism (Data + Pipeline + Tensor) for even bigger models (100B+ parameters)", says the third article
# (003, line 484). What is that? Ranks get coordinates, like seats in rows, and each axis has a strategy of its own. You
# will predict what a rank says on each axis and what it holds, as products of small numbers, for three meshes of four
# ranks; then run them. All train exactly what one device trains.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks, on two cores, too; 8 gives a mesh of 2 x 2 x 2
accumulate: int = 2  # micro-batches per step
large: bool = True  # plan a GPT of 838 million parameters for four T4s, too: some ten seconds

# %%
import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
claims = Claims("10_meshes")
N, m = nproc_per_node, accumulate

# %% [markdown]
# ## A mesh is an array of ranks
#
# labkit's `hybrid` script has the axes pipeline, data and tensor, in this order. Along each axis lies a process group:
# the ranks that differ in this coordinate only. Of eight ranks:

# %%
import torch


def groups(shape):
    """The ranks of each process group, by axis."""
    mesh = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    names = ("pipeline", "data", "tensor")
    return {name: mesh.movedim(axis, -1).flatten(0, 1).tolist() for axis, name in enumerate(names)}


for name, ranks in groups((2, 2, 2)).items():
    print(f"{name:>8}: {ranks}")

# %% [markdown]
# Neighbours are in one tensor group: they talk most, in the middle of every block, and want the fastest link. A
# pipeline says least, so its stages may be far apart, on other hosts.
#
# ## Predict
#
# A mesh of p x d x t ranks, L blocks, m micro-batches. On a rank, in one step:
#
# | axis | says | calls |
# |---|---|---|
# | tensor | sums of activations, in each of its blocks | 4 (L / p) m all-reduces |
# | data | its blocks, and what its stage has besides | L / p + 1 all-gathers, L / p + 1 reduce-scatters |
# | pipeline | activations in or gradients in, at a border | m receives for each border |
#
# Parameters are kept gathered for the whole step, so the data axis does not know of m. At the start of each step it
# all-reduces two numbers: how many predictions all ranks make together, by which the loss is divided, and whether any
# rank's batch has a shape that its pipeline does not know yet. An axis of one rank says nothing, with one exception:
# gloo records the first of these even within a single rank; NCCL, by its source, launches nothing there. (At the end of
# a step the last stage also tells the others the loss.)

# %%
L, WIDTH, CONTEXT, VOCABULARY = 4, 64, 128, 256
FLOAT = 8  # bytes: the runs are in fp64, so that losses can be compared
NUMBERS = 2  # all-reduces of one number each, along the data axis
meshes = {
    "data x tensor": {"tensor": 2},
    "pipeline x data": {"pipeline": 2},
    "pipeline x tensor" if N == 4 else "pipeline x data x tensor": {"pipeline": 2, "tensor": 2},
}


def shape(name):
    p, t = meshes[name].get("pipeline", 1), meshes[name].get("tensor", 1)
    return p, N // (p * t), t


def calls(name):
    """Of a rank in one step; with at most two stages every rank has one border."""
    p, d, t = shape(name)
    units = L // p + 1
    return {
        "all_reduce": (4 * (L // p) * m if t > 1 else 0) + (NUMBERS if d > 1 else int(on_cpu)),
        "all_gather": units if d > 1 else 0,
        "reduce_scatter": units if d > 1 else 0,
        "send_recv": m if p > 1 else 0,
    }


def block(width, t):
    """Its elements on each of t tensor ranks: four layers are split, two norms and the biases after a sum are not."""
    return (12 * width * width + 7 * width) // t + 6 * width


def parameters(name, last):
    """Bytes on the first or the last rank: its blocks' share, and the embeddings, the head, or both."""
    p, d, t = shape(name)
    first_end, last_end = (VOCABULARY + CONTEXT) * WIDTH, (VOCABULARY + 2) * WIDTH
    ends = first_end + last_end if p == 1 else last_end if last else first_end
    return FLOAT * (L // p * block(WIDTH, t) + ends) // d


kinds = [kind for kind in ("all_reduce", "all_gather", "reduce_scatter", "send_recv") if on_cpu or kind != "send_recv"]
for name in meshes:
    for kind in kinds:
        claims.predict(f"{name}: {kind}", calls(name)[kind], "calls")
    for which in ("first", "last"):
        claims.predict(f"{name}: parameters, {which} rank", parameters(name, which == "last"), "B")
    claims.predict(f"{name}: loss apart from one device's", 1e-9, how="at most")

# %% [markdown]
# For the peak ask `labkit.plan`. Its table also says what else four ranks could do with this model.

# %%
sizes = "vocabulary=256, context=128, width=128, heads=4, layers=4"
loaded = Script.load("hybrid")
assert sizes in loaded.cells["model"].text
cells = {"model": loaded.cells["model"].text.replace("width=128, heads", f"width={WIDTH}, heads")}
cells["data"] = loaded.cells["data"].text.replace("2**20", "2**15")
hybrid, single = loaded.with_cells(**cells), Script.load("single").with_cells(**cells)
options = {"global_batch_size": 2 * N, "precision": "fp64"}

plan = labkit.plan(hybrid, nproc_per_node=N, accumulate=m, **meshes["data x tensor"], **options)
claims.predict("data x tensor: peak", plan.bytes, "B", within=0.06)
display(plan)

# %% [markdown]
# ## Measure

# %%
alone = labkit.launch(single, nproc_per_node=1, steps=9, env=env, **options)
alone.wait()
runs = {"data x tensor": labkit.launch(plan, steps=9, profile=True, env=env)}
runs["data x tensor"].wait()
options |= {"accumulate": m, "nproc_per_node": N, "profile": True, "trace_memory": True}
for name in list(meshes)[1:]:
    runs[name] = labkit.launch(hybrid, steps=9, env=env, **meshes[name], **options)
    runs[name].wait()

# %%
from collections import Counter


for name, run in runs.items():
    seen = [Counter(span.kind for span in run.timeline().of_step() if span.rank == rank) for rank in range(N)]
    for kind in kinds:
        assert len({each[kind] for each in seen}) == 1, (name, kind, seen)
        claims.measure(f"{name}: {kind}", seen[0][kind], run=run)
    held = [rank.traced for rank in run.memory().ranks]
    claims.measure(f"{name}: parameters, first rank", held[0].categories["parameters"], run=run)
    claims.measure(f"{name}: parameters, last rank", held[-1].categories["parameters"], run=run)
    off = (run.losses() / alone.losses() - 1).abs().dropna()
    assert len(off) == 9
    claims.measure(f"{name}: loss apart from one device's", off.max(), run=run)
peak = max(rank.traced.bytes for rank in runs["data x tensor"].memory().ranks)
claims.measure("data x tensor: peak", peak, run=runs["data x tensor"])
display(claims)

# %% [markdown]
# One step of the last mesh: stages compute in turn, and within a stage the tensor ranks wait for each other.

# %%
run.timeline()

# %% [markdown]
# ## Is it worth it?
#
# The articles reach for three axes because a model is large. Of what a rank holds, though, FSDP alone divides the most:
# parameters, gradients and optimizer state by all N ranks, while tensor parallelism keeps embeddings, norms and the
# head whole. (By default the hybrid script also takes all micro-batches forward before the first goes back, as GPipe
# does, and keeps their activations.) More axes pay when FSDP's gathers no longer hide behind the computation: among
# many hosts, or when a rank has too few samples left. A model of 7 billion parameters was trained with FSDP alone by
# the PyTorch team and IBM (fms-fsdp; for 70 billion they give a throughput, not a trained model). What the planner says
# of 838 million parameters and four T4s:

# %%
if large:
    wanted = "vocabulary=50257, context=1024, width=1280, heads=20, layers=36"
    big = {"model": loaded.cells["model"].text.replace(sizes, wanted)}
    big["data"] = loaded.cells["data"].text.replace("context=128", "context=1024")
    advised = labkit.plan(loaded.with_cells(**big), device="4xT4", global_batch_size=4, tensor=2)
    alike = 36 * block(1280, 2) + (2 * 50257 + 1024 + 2) * 1280  # on a tensor rank, before the data axis divides it
    told = "838 M, data x tensor on 4: parameters of a rank"
    claims.predict(told, 4 * alike / 2, "B", within=0.01)
    claims.calculated(told, advised.rehearsed.categories["parameters"], because="rehearsed, not run")
    print(f"FSDP on 4 would keep {advised.facts.elements * 4 / 4 / 2**20:.0f} MiB of parameters on a rank")
    display(advised)

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `accumulate = 4`: which counts double, and which do not?
# - `nproc_per_node = 8`: three axes at once. Predict the third mesh before you look.
# - `labkit.launch(hybrid, nproc_per_node=4, tensor=4)`: what is left to the data axis?
# - Make claims fail: gather again in every micro-batch, `reshard_after_forward=True` in the strategy cell
#   (`hybrid.with_cells(strategy=…)`). Which axis says more now, and does the loss notice?
