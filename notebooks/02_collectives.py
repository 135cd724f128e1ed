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
# # 02 · Collectives: what ranks say to each other
#
# **You will be able to** name the five calls that distributed training is made of, say what each leaves on every rank
# and what it costs, and write the most important one yourself. **15 minutes. You need** lab 01.
#
# A **rank** is a process; the ranks that talk are a **process group**; a **collective** is a call that every rank of a
# group makes together. The picture is an `all_reduce`, which leaves the sum of all ranks' tensors on every rank. Each
# rank has cut its tensor into chunks, one stripe of color in each. Chunks go round the ring: first sums grow, then the
# finished ones are handed on.

# %% tags=["parameters"]
nproc_per_node: int = 4  # ranks; on two cores, too

# %%
from labkit import Script
from labkit.lessons import Lesson, draw, sized

lab = Lesson("02_collectives", ranks=nproc_per_node)
draw.ring(nproc_per_node)

# %% [markdown]
# ## Your predictions
#
# Every rank has a tensor of *S* bytes, say its gradients.

# %%
sends = lab.ask("what each of four ranks sends in a ring all_reduce: how many times S", default=3)
alone = lab.ask("how much of its neighbor's gradient rank 0 receives as such, not in a sum", default=100, unit="%")
ratio = lab.ask("bytes of an all_reduce, over all ranks: how many times a broadcast's", default=1, unit="times")

# %% [markdown]
# ## Five collectives
#
# Rank *r* begins with the numbers 10 (r + 1) + 0, 1, 2, 3: rank 0 has 10 11 12 13, rank 1 has 20 21 22 23. Look at the
# calls and at what is expected; do you agree, before you run it? `broadcast` leaves rank 0's tensor on every rank,
# `all_reduce` the sum of all tensors, `all_gather` all of them one after another, `reduce_scatter` one chunk of the
# sum, and `all_to_all` leaves chunk *r* of every rank's tensor on rank *r*: rows become columns.

# %%
import torch
import torch.distributed as dist


def collectives(x):
    n = dist.get_world_size()
    return {  # a call, and the tensor that it fills
        "broadcast": (lambda out: dist.broadcast(out, src=0), x.clone()),
        "all_reduce": (lambda out: dist.all_reduce(out), x.clone()),
        "all_gather": (lambda out: dist.all_gather(list(out.chunk(n)), x), x.repeat(n)),
        "reduce_scatter": (lambda out: dist.reduce_scatter(out, list(x.chunk(n))), x[: len(x) // n].clone()),
        "all_to_all": (lambda out: dist.all_to_all_single(out, x), x.clone()),
    }


def left_with(device):
    rank, n = dist.get_rank(), dist.get_world_size()
    calls = collectives(torch.tensor([10.0 * (rank + 1) + column for column in range(n)], device=device))
    return {name: [call(out), out.tolist()][1] for name, (call, out) in calls.items()}


# %%
n = lab.ranks
begin = [[10 * (rank + 1) + column for column in range(n)] for rank in range(n)]
columns = [list(column) for column in zip(*begin, strict=True)]
expected = {"broadcast": [begin[0]] * n, "all_to_all": columns, "all_reduce": [[sum(c) for c in columns]] * n}
expected |= {"all_gather": [sum(begin, [])] * n, "reduce_scatter": [[sum(column)] for column in columns]}
lab.predict_each({f"{name}: ranks that have what is expected": n for name in expected})
run, seen = lab.run(left_with, collectives=collectives)

# %%
right = {name: sum(each[name] == lists[rank] for rank, each in enumerate(seen)) for name, lists in expected.items()}
lab.measure_each({f"{name}: ranks that have what is expected": count for name, count in right.items()}, run=run)
for name, rank in [(name, rank) for name in expected for rank in range(n)]:
    print(f"{'' if rank else name:>15}  rank {rank}: ", *(f"{value:.0f}" for value in seen[rank][name]))

# %% [markdown]
# Read the rows of `reduce_scatter` and `all_reduce`: an `all_reduce` is a `reduce_scatter` followed by an `all_gather`.
# DDP needs the whole of it; FSDP needs its two halves, at different times. `all_to_all` is for mixtures of experts,
# layers in which each token goes to a few of many MLPs, on whichever ranks they are.
#
# ## What does it cost?
#
# The least that all *N* ranks together must send follows from what each has at the end. A broadcast has to reach *N -
# 1* others: (N - 1) S bytes. Adding a tensor up takes as many, and handing out the sum as many again. Here the
# operating system counts the bytes of every connection. A **backend** moves them: gloo between CPUs, NCCL between
# NVIDIA's GPUs. (gloo makes a reduce-scatter out of an all-reduce, which costs twice what NCCL's does.)


# %%
def traffic(device):
    calls = collectives(torch.ones(65_536 * dist.get_world_size(), device=device))
    return {name: sent_by(lambda call=call, out=out: call(out)) for name, (call, out) in calls.items()}


# %%
S = 4 * 65_536 * n
costs = {"broadcast": (n - 1) * S, "all_reduce": 2 * (n - 1) * S, "all_gather": n * (n - 1) * S}
costs |= {"reduce_scatter": 2 * (n - 1) * S, "all_to_all": (n - 1) * S}
if lab.counts_bytes:
    lab.predict(ratio, 2, "times", within=0.02)
    lab.predict_each({f"{name}: sent by all ranks": cost for name, cost in costs.items()}, "B", within=0.01)
    run, seen = lab.run(traffic, collectives=collectives)
    total = {name: sum(each[name] for each in seen) for name in costs}
    results = {f"{name}: sent by all ranks": size for name, size in total.items()}
    lab.measure_each(results | {ratio: total["all_reduce"] / total["broadcast"]}, run=run)
    display(draw.bars(total, costs, unit="B", title=f"sent by {n} ranks together, for {S / 2**20:g} MiB on each"))

# %% [markdown]
# ## The ring, by hand
#
# In the first *N - 1* steps a rank adds what arrives to its own chunk and passes the sum on. Then one chunk on each
# rank is finished, and *N - 1* more steps hand the finished ones round. So every rank sends 2 (N - 1) chunks of S / N:
# less than 2 S, however many ranks there are.


# %%
def ring_all_reduce(x):
    rank, n, received = dist.get_rank(), dist.get_world_size(), []
    chunks = x.chunk(n)
    for step in range(2 * (n - 1)):
        outgoing, mine = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(mine)
        exchange(outgoing, arrived)
        if step < n - 1:
            mine += arrived  # reduce_scatter: a sum that grows on its way
        else:
            mine.copy_(arrived)  # all_gather: it is finished
        received.append(arrived)
    return torch.cat(received)


def by_hand(device):
    rank, n = dist.get_rank(), dist.get_world_size()
    gradient, expected = (torch.arange(64.0 * n, device=device) * (rank + 1) for _ in range(2))
    dist.all_reduce(expected)
    size = ring_all_reduce(gradient).nbytes
    bits = ring_all_reduce(torch.full((n,), 2.0**rank, device=device))
    return {"off": (gradient - expected).abs().max().item(), "sent": size / gradient.nbytes, "bits": bits.tolist()}


# %% [markdown]
# Rank *r* also sends the number 2^r around the ring. The bits of a sum show which ranks are in it, and so how much rank
# 0 gets to see of its neighbor's gradient alone.

# %%
lab.predict_each({"ring: largest difference to dist.all_reduce": 0, sends: 2 * (n - 1) / n})
lab.predict(alone, 1 / n, "%")
run, seen = lab.run(by_hand)
lab.measure_each({"ring: largest difference to dist.all_reduce": max(each["off"] for each in seen)}, run=run)
lab.measure_each({sends: seen[0]["sent"], alone: seen[0]["bits"].count(2.0 ** (n - 1)) / n}, run=run)
lab.score()

# %% [markdown]
# ## Why a ring
#
# If every rank sent its gradients to all others, it would send (N - 1) S. In the ring it is 2 (N - 1) / N S: nearly the
# same for two ranks and for a thousand.


# %%
def sent(ranks):
    return draw.bars(predicted={"to all others": ranks - 1, "in a ring": 2 * (ranks - 1) / ranks}, unit="S")


lab.explore(sent, ranks=[2, 4, 8, 16, 64])

# %% [markdown]
# ## On 2 × T4 and 8 × A100
#
# DDP all-reduces every gradient once in a step, while backward goes on. Tensor parallelism (lab 09) makes four
# all-reduces in every block, and nothing hides them. How much of a step is spent waiting?

# %%
small = {name: sized(Script.load(name), width=512, layers=8, heads=8) for name in ("ddp", "tensor_parallel")}
lab.plans(small, global_batch_size=64)

# %% [markdown]
# ## Try this
#
# 1. `nproc_per_node = 2`: what does each rank send in the ring, and how much of its neighbor's gradient arrives as
#    such?
#    <details><summary>Answer</summary>S, and half of the gradient arrives as such. In a ring of two nothing looks
#    different from plain sending to and fro; that is why this lab has four ranks.</details>
# 2. In `ring_all_reduce`, replace `mine += arrived` by `mine.copy_(arrived)`.
#    <details><summary>Answer</summary>The largest difference is 1,530, and the claim about the ring fails. No chunk is
#    a sum any more; each is the gradient of one rank, and not of the same rank everywhere.</details>
# 3. Run only `n - 1` steps. What is left on each rank?
#    <details><summary>Answer</summary>One finished chunk on each rank, of four; the others are sums of one, two or
#    three ranks. That is a reduce_scatter.</details>
#
# ## Sources
#
# Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009). The documentation
# of torch.distributed.
#
# ### Appendix: what was claimed, and what the articles say
#
# The second article (002, lines 233-234) says of DDP's all-reduce: "GPU0 receives grad_1, GPU1 receives grad_0".

# %%
lab.check({alone: ("GPU0 receives grad_1 (002, lines 233-234)", 1)})
