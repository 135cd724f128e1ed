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
# A **rank** is a process, a **process group** is some ranks that talk, and a **collective** is a call that every rank
# of a group makes together. There are six that you will meet; the labs that follow use five of them, and `all_to_all`
# is what mixtures of experts need. Here you write down what each leaves on every rank and how many bytes it costs, then
# measure both on real ranks; the bytes are the kernel's own TCP counters. At the end you write DDP's all-reduce by
# hand. The second article (002, lines 233-234) says of it: "GPU0 receives grad_1, GPU1 receives grad_0". That is tested
# too.

# %% tags=["parameters"]
nproc_per_node: int = 2  # ranks; try 4 as well, a ring of two hides much

# %%
import json
import sys

import pandas as pd

import labkit
from labkit import Script
from labkit.claims import Claims

machine = labkit.doctor()
on_cpu = machine.gpu_count < nproc_per_node
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if on_cpu else {}
n, ranks = nproc_per_node, range(nproc_per_node)
claims = Claims("02_collectives")

# %% [markdown]
# ## The six, and one in a smaller group
#
# Each function below works on this rank's `x` and returns what the rank is left with. torchrun starts the same script
# in every rank; only `dist.get_rank()` differs.

# %%
import os

import torch
import torch.distributed as dist


def join_group():
    """This rank's device, after it has joined the group of all ranks. torchrun has told it who it is."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


# %%
import torch
import torch.distributed as dist


def exchange(outgoing, received):
    """Send one tensor to the right neighbour while another arrives from the left one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    to_right = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)
    from_left = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([to_right, from_left]):
        work.wait()


def collectives(x):
    """By name: functions that return what this rank is left with. `x` itself stays as it is."""
    ranks = dist.get_world_size()
    all_but_last = dist.new_group(range(ranks - 1))  # called on every rank, also on the one that is left out

    def broadcast():
        out = x.clone()
        dist.broadcast(out, src=0)
        return out

    def all_reduce():
        out = x.clone()
        dist.all_reduce(out)  # the sum, unless another operation is named
        return out

    def all_gather():
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    def reduce_scatter():
        out = torch.empty_like(x[: len(x) // ranks])
        dist.reduce_scatter(out, list(x.chunk(ranks)))
        return out

    def all_to_all():
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    def send_recv():
        out = torch.empty_like(x)
        exchange(x, out)
        return out

    def all_reduce_in_a_group():
        out = x.clone()
        if dist.get_rank() < ranks - 1:
            dist.all_reduce(out, group=all_but_last)
        return out

    every = (broadcast, all_reduce, all_gather, reduce_scatter, all_to_all, send_recv, all_reduce_in_a_group)
    return {function.__name__: function for function in every}


# %%
import json
import os

import torch
import torch.distributed as dist


def main():
    device = join_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([10.0 * (rank + 1) + column for column in range(ranks)], device=device)
    left_with = {name: call().tolist() for name, call in collectives(x).items()}
    print(json.dumps({"process": os.getpid(), "left_with": left_with}))
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# ## Predict: the values
#
# Rank *r* begins with `10 (r + 1) + 0, 1, …`, one number for each rank: rank 0 has 10, 11; rank 1 has 20, 21. Before
# you read on: who has what after an `all_to_all`?

# %%
begin = [[10 * (rank + 1) + column for column in ranks] for rank in ranks]
columns = list(zip(*begin, strict=True))
total = [sum(column) for column in columns]
part = [sum(column[:-1]) for column in columns]
values = {
    "broadcast": [begin[0] for _ in ranks],  # what rank 0 had
    "all_reduce": [total for _ in ranks],  # the sum, everywhere
    "all_gather": [sum(begin, []) for _ in ranks],  # everything, everywhere
    "reduce_scatter": [[total[rank]] for rank in ranks],  # of the sum, each its part
    "all_to_all": [list(columns[rank]) for rank in ranks],  # rows become columns
    "send_recv": [begin[rank - 1] for rank in ranks],  # what the left neighbour had
    "all_reduce_in_a_group": [part if rank < n - 1 else begin[rank] for rank in ranks],
}
for name, lists in values.items():
    claims.predict(f"{name}: values as predicted", sum(map(len, lists)), "values")

# %%
what = labkit.launch(
    Script.of("values", join=join_group, collectives=collectives, main=main), nproc_per_node=n, env=env
)
what.wait()

# %%
seen = [json.loads(what.logs(rank=rank).splitlines()[-1]) for rank in ranks]
assert len({each["process"] for each in seen}) == n, "every rank is a process of its own"
rows = {"(begins with)": begin} | {name: [each["left_with"][name] for each in seen] for name in values}
for name, lists in values.items():
    pairs = [zip(said, found, strict=True) for said, found in zip(lists, rows[name], strict=True)]
    same = sum(said == found for pair in pairs for said, found in pair)
    claims.measure(f"{name}: values as predicted", same, run=what)
shown = [{f"rank {rank}": " ".join(f"{v:.0f}" for v in lists[rank]) for rank in ranks} for lists in rows.values()]
pd.DataFrame(shown, index=list(rows)).style.set_properties(**{"text-align": "left"})

# %% [markdown]
# `all_reduce` is `reduce_scatter` followed by `all_gather`: read the two rows. DDP needs the first, FSDP the other two.
#
# ## Predict: the bytes
#
# Let every rank have a tensor of *S* bytes. What must be sent at least, by all *N* ranks together, follows from what is
# left where: a broadcast has to reach *N - 1* others, so *(N - 1) S*; to sum a tensor takes as much, and to hand the
# sum out as much again. Where gloo runs on Linux, the kernel counts the bytes of every connection, and the next cell
# reads that count. gloo carries out a reduce-scatter as an all-reduce: it costs the double of what NCCL's does.

# %%
import json
import os
import socket
import struct
import time
from pathlib import Path

import torch
import torch.distributed as dist

PER_RANK = 65_536  # floats for each rank: enough for 1 KiB of headers not to matter
SENT = 200  # where `struct tcp_info` has tcpi_bytes_sent; tcpi_bytes_retrans is next to it


def bytes_sent():
    """What this process has sent so far over all its TCP connections, once each, as the kernel counts it."""
    sent = 0
    for opened in Path("/proc/self/fd").iterdir():
        try:
            if str(opened.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(opened.name))) as connection:
                    counters = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    first_and_again, again = struct.unpack_from("QQ", counters, SENT)
                    sent += first_and_again - again
        except OSError:  # closed by now, or no TCP
            continue
    return sent


def cost_of(call):
    dist.barrier()
    time.sleep(0.1)  # let the kernel empty its buffers
    before = bytes_sent()
    call()
    time.sleep(0.1)
    return bytes_sent() - before


def main():
    device = join_group()
    x = torch.ones(PER_RANK * dist.get_world_size(), device=device)
    calls = collectives(x)
    for call in calls.values():
        call()  # the first one connects
    print(json.dumps({name: cost_of(call) for name, call in calls.items()}))
    dist.barrier()
    dist.destroy_process_group()


# %%
countable = on_cpu and sys.platform == "linux"
S = 4 * PER_RANK * n
costs = {
    "broadcast": (n - 1) * S,
    "all_reduce": 2 * (n - 1) * S,
    "all_gather": n * (n - 1) * S,  # N tensors, each to N - 1 others
    "reduce_scatter": 2 * (n - 1) * S,  # gloo's; (n - 1) * S would do
    "all_to_all": (n - 1) * S,  # each rank keeps 1/N of its own
    "send_recv": n * S,
}
if countable:
    for name, cost in costs.items():
        claims.predict(f"{name}: sent by all ranks", cost, "B", within=0.01)
    script = Script.of("bytes", join=join_group, collectives=collectives, main=main)
    counted = labkit.launch(script, nproc_per_node=n, env=env)
    counted.wait()

# %%
if countable:
    sent = [json.loads(counted.logs(rank=rank).splitlines()[-1]) for rank in ranks]
    for name in costs:
        whole = sum(each[name] for each in sent)
        claims.measure(f"{name}: sent by all ranks", whole, run=counted, because="gloo's headers and acknowledgements")
    shown = {f"rank {rank} sent / S": {name: sent[rank][name] / S for name in costs} for rank in ranks}
    display(pd.DataFrame(shown).style.format("{:.4f}"))

# %% [markdown]
# ## The ring: an all-reduce by hand
#
# Cut the tensor into *N* chunks and pass them round. In the first *N - 1* steps a rank adds what arrives to its own and
# passes the sum on; then one chunk on each rank is finished, and in *N - 1* more steps the finished ones go round.
# Every rank sends *2 (N - 1)* chunks of *S / N*: less than *2 S*, however many ranks there are. If each rank received
# the gradients of all others, as the article has it, it would be *(N - 1) S*: the same for two ranks, 3 *S* for four.
#
# What does rank 0 receive of rank 1's gradient, as such? Only what its left neighbour passes on in the first step: one
# chunk. All that comes later is sums. To see that, the second tensor is a power of two, *2 ** rank*: the bits of a sum
# say which ranks are in it.

# %%
import json

import torch
import torch.distributed as dist


def ring_all_reduce(x):
    """Sum `x` over all ranks, in place. Returns what was received, and the state of `x` after each step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks, received, states = x.chunk(ranks), [], [x.tolist()]
    for step in range(2 * (ranks - 1)):
        outgoing, mine = chunks[(rank - step) % ranks], chunks[(rank - step - 1) % ranks]
        arrived = torch.empty_like(mine)
        exchange(outgoing, arrived)
        if step < ranks - 1:
            mine += arrived  # reduce-scatter: a sum that grows on its way
        else:
            mine.copy_(arrived)  # all-gather: it is finished
        received.append(arrived)
        states.append(x.tolist())
    return torch.cat(received), states


def main():
    device = join_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(rank)
    gradient = torch.randint(-1000, 1000, (64 * ranks,), generator=random).float().to(device)
    expected = gradient.clone()
    dist.all_reduce(expected)
    received, _ = ring_all_reduce(gradient)
    from_ranks, states = ring_all_reduce(torch.full((ranks,), 2.0**rank, device=device))
    answer = {"difference": (gradient - expected).abs().max().item(), "received_bytes": received.nbytes,
              "received_from": from_ranks.tolist(), "states": states}  # fmt: skip
    print(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


# %%
S = 4 * 64 * n
claims.predict("ring: largest difference to dist.all_reduce", 0)  # whole numbers: their sums are exact
claims.predict("ring: received by each rank", 2 * (n - 1) * S // n, "B")
claims.predict(
    "ring: share of its neighbour's gradient that rank 0 receives as such",
    1 / n,
    article="GPU0 receives grad_1 (002, lines 233-234)",
    said=1.0,
)
ring = labkit.launch(
    Script.of("ring", join=join_group, collectives=collectives, ring=ring_all_reduce, main=main),
    nproc_per_node=n,
    env=env,
)
ring.wait()

# %%
told = [json.loads(ring.logs(rank=rank).splitlines()[-1]) for rank in ranks]
claims.measure("ring: largest difference to dist.all_reduce", max(each["difference"] for each in told), run=ring)
claims.measure("ring: received by each rank", max(each["received_bytes"] for each in told), run=ring)
alone = told[0]["received_from"].count(2.0 ** (n - 1))
claims.measure(
    "ring: share of its neighbour's gradient that rank 0 receives as such",
    alone / n,
    run=ring,
    because="later steps carry sums",
)

# %% [markdown]
# Which gradients are in which chunk, after each step:


# %%
def names(value):
    """13 → "0+2+3": the ranks whose gradients are in a sum of powers of two."""
    return "+".join(str(rank) for rank in ranks if int(value) >> rank & 1)


def shade(text):
    return f"background: rgba(9, 105, 218, {0.6 * (text.count('+') + 1) / n:.2f}); text-align: center"


titles = ["begins", *(f"sum {step}" for step in range(1, n)), *(f"hand out {step}" for step in range(1, n))]
columns = pd.MultiIndex.from_product([[f"rank {rank}" for rank in ranks], [f"chunk {chunk}" for chunk in ranks]])
steps = zip(*(each["states"] for each in told), strict=True)
cells = [[names(value) for state in step for value in state] for step in steps]
display(pd.DataFrame(cells, index=titles[: len(cells)], columns=columns).style.map(shade))

# %% [markdown]
# ## What was claimed

# %%
claims.check()

# %% [markdown]
# ## Try
#
# - `nproc_per_node=4`. Each rank sends 1.5 *S* and not 3 *S*; a quarter of a neighbour's gradient arrives as such.
# - In `ring_all_reduce`, replace `mine += arrived` by `mine.copy_(arrived)`: the difference is no longer 0. Run only
#   `ranks - 1` steps: every rank keeps one finished chunk, which is a reduce-scatter.
# - Divide by *N* after the ring, and you have what DDP does with gradients (lab 03).
# - Let the last rank skip one `all_reduce` in `main`, launch without `wait()`, and ask `run.stacks()` who is missing.
