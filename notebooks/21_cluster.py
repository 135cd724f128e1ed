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
# # 21 · From one machine to a cluster: the same script
#
# **You will be able to** start one script on one machine, on two nodes and under Slurm, read the launch line of a node
# word by word, choose the learning rate for more ranks, and say which network two nodes need. **20 minutes. You need**
# labs 01 and 03.
#
# A **node** is a machine. Each runs a torchrun, which starts its ranks; `local_rank` counts them within the node,
# `rank` over all nodes: rank = node_rank × nproc_per_node + local_rank. The second node here is this machine, too. A
# real one differs in the network, which is planned below, not measured.

# %% tags=["parameters"]
steps: int = 20  # optimizer steps of each run
batch: int = 8  # samples in a step, over all ranks

# %%
import labkit
from labkit_labs import Lesson, draw, sized
from labkit_labs.labs.other_runs import differing_words, kill_node, of_ranks, slurm, test_loss

lab = Lesson("21_cluster")
draw.hosts(2, 2)

# %% [markdown]
# ## Your predictions
#
# First the same script runs with the same seed and global batch on two ranks, once on one node and once on two. Then a
# model trains by SGD with 8 times the batch, for as many epochs.

# %%
same = lab.ask(
    "two nodes: largest difference of a loss to one node",
    default=1e-16,
    options={"not a bit": 0, "the last digits": 1e-16, "visibly": 0.01},
)
words = lab.ask("two nodes: words in which their launch lines differ", default=3)
slower = lab.ask("8 times the batch, the same learning rate: test loss, how many times the small batch's", default=1)
warmed = lab.ask("8 times the batch and the rate, after a warm-up of 16 steps: the same ratio", default=2)

# %% [markdown]
# ## One node, two nodes
#
# torchrun sets `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` for each rank, and
# `init_process_group` reads them. So the script is the same on any number of nodes; only the launch line differs. With
# `hosts=["hA", "hB"]` labkit connects to each host by ssh and starts torchrun there; `"localhost"` twice means two
# nodes on this machine.

# %%
script, hosts = labkit.Script.load("ddp"), ["localhost", "localhost"]
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # two nodes on one machine cannot share its GPUs
options = {"steps": steps, "global_batch_size": batch, "env": env}
one = labkit.launch(script, nproc_per_node=2, name="one-node", wait=True, **options)
two = labkit.launch(script, hosts=hosts, nproc_per_node=1, name="two-nodes", wait=True, **options)

# %%
alone, joined = of_ranks(one), of_ranks(two)
lab.verify(same, 0, (alone - joined).abs().max().max())
draw.curves({"one node": alone[0].items(), "two nodes": joined[0].items()}, "loss of rank 0")

# %% [markdown]
# Not a bit differs: the all-reduce adds two numbers, and a + b is b + a in floating point, too. What differs is how the
# ranks find each other. `run.command` shows what you would type, one line for each node:

# %%
print(one.command, two.command, sep="\n")
print("words in which the lines of the two nodes differ:", differing_words(two.command))
lab.verify(words, 1, differing_words(two.command))
lab.explore(draw.hosts, nproc_per_node=[1, 2, 4, 8], nnodes=[1, 2, 4])

# %% [markdown]
# | | |
# |---|---|
# | `--standalone` | one machine: torchrun finds a free port and meets itself |
# | `--nnodes 2` | how many torchruns belong together; each waits for the others |
# | `--nproc-per-node 1` | ranks that each of them starts: the world size is nnodes × nproc-per-node |
# | `--node-rank 0`, `1` | which of them this is: the only word that differs |
# | `--master-addr`, `--master-port` | where all meet: an address of the first node that the others reach |
# | `--max-restarts 0` | do not restart ranks that fail: start again from the newest checkpoint instead |
# | `--` | the end of torchrun's own options: the script and its options follow |
#
# If all nodes have met but then wait for each other, ranks may have announced the wrong address. Debian, Ubuntu and
# WSL2 write the host's own name into /etc/hosts as 127.0.1.1, and gloo looks that name up. `GLOO_SOCKET_IFNAME=eth0`
# (for NCCL `NCCL_SOCKET_IFNAME`) names the network interface to use.
#
# ## Slurm: who says which node this is?
#
# Under Slurm you do not start the nodes: `sbatch` takes a script, waits until machines are free, and runs it on the
# first; `srun` in it starts one task on each node. This script is for two nodes of 8 GPUs:
#
#     #!/bin/bash
#     #SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=64 --gpus-per-node=8 --time=12:00:00
#     set -euo pipefail
#     hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
#     export HEAD=${hosts%%$'\n'*}  # the first
#     srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit bash -c 'torchrun --nnodes 2 --nproc-per-node 8 \
#         --node-rank "$SLURM_NODEID" --master-addr "$HEAD" --master-port 29500 train.py'
#
# Mind the single quotes. In double quotes `$SLURM_NODEID` would be expanded before `srun` runs, on the first node, and
# all nodes would be node 0. And let the job fail if `scontrol` does: with a fallback to localhost no node would find
# the other, and the job would wait for torchrun's timeout without telling you why.
#
# labkit's job script (`labkit slurm print ddp --nodes 2` shows it) also lets the ranks save before the time limit and
# queues the job again. `labkit.submit` submits it and watches the run:

# %%
if slurm():
    job = labkit.submit(script, to="slurm", nodes=2, nproc_per_node=1, time="00:10:00", name="slurm", **options)
    job.wait()
    lab.verify("Slurm: largest difference of a loss to one node", 0, (alone - of_ranks(job)).abs().max().max())
else:
    print("no Slurm answers here; `make cluster-demo` brings one up")

# %% [markdown]
# ## A node dies
#
# The torchrun of node 1 is killed, as a system that is out of memory would do. With torchrun alone, the ranks that it
# has started would go on without it. labkit has a supervisor on each node, which ends them and tells the other nodes
# why.

# %%
dying = labkit.launch(
    script, hosts=hosts, nproc_per_node=1, name="dying", **{**options, "steps": 100_000, "wait": False}
)
print(kill_node(dying, 1))

# %% [markdown]
# On node 0 the first thing that *went wrong* was a broken connection, as in lab 18. With torchrun alone, look at the
# logs of all nodes, and look for a node that has none.
#
# ## More nodes, larger batch?
#
# If the global batch stays the same, more ranks change nothing but the time. Usually, though, each rank keeps its
# number of samples: 8 times as many ranks then have 8 times the global batch, and an epoch has an eighth of the steps.
# The usual rule for SGD is **linear scaling**: 8 times the learning rate as well, after a **warm-up** in which it rises
# from step to step (Goyal et al.). Four runs of ten epochs show this. Two ranks are enough: together they have the
# gradient that 16 would have (lab 03).


# %%
import torch


def optimizer_of(parameters, args):
    return torch.optim.SGD(parameters, lr=args.lr)


# %%
digits = labkit.Script.load("ddp", task="digits").with_cells(optimizer_of=optimizer_of)
ways = {"32 samples": (32, 0.01, 0), "256 samples": (256, 0.01, 0), "256, 8 x the rate": (256, 0.08, 0)}
ways["256, 8 x, warm-up"] = 256, 0.08, 16  # samples, learning rate, steps in which it rises
trained = {}
for name, (samples, lr, rising) in ways.items():
    options = {"global_batch_size": samples, "lr": lr, "warmup_steps": rising}
    trained[name] = lab.launch(digits, epochs=10, name="digits", shown=False, **options)

# %%
ends = {name: test_loss(run) for name, run in trained.items()}
print("test loss:", {name: round(loss, 3) for name, loss in ends.items()})
lab.verify(slower, 1.2, ends["256 samples"] / ends["32 samples"], "times", how="at least")
lab.verify(warmed, 1.2, ends["256, 8 x, warm-up"] / ends["32 samples"], "times", how="at most")
losses = {name: run.losses() for name, run in trained.items()}
scaled = {name: [(step * ways[name][0] / 32, y) for step, y in each.items() if y < 20] for name, each in losses.items()}
display(draw.curves(scaled, "training loss up to 20, after as many samples: a step is 32 of them", log=True))
lab.score()

# %% [markdown]
# With the old rate an eighth of the steps is not enough. With 8 times the rate from the first step the loss explodes
# (guessing among ten digits gives 2.3): the steps are too long for untrained weights. After a warm-up the run ends
# about where that of the small batch does. The rule has a limit, 8,192 images for Goyal's ResNet-50; beyond it only a
# sweep (`labkit.sweep(script, lr=[…])`) can tell. For Adam the square root of 8 is the usual factor (Malladi et al.).
#
# ## On 2 × T4 and 8 × A100
#
# Does a second host make a step shorter? The plans are for DDP on a transformer of 113 million parameters, with 64
# samples per step, on one of these hosts or on two, over three networks:

# %%
gpt = sized(labkit.Script.load("ddp"), width=768, layers=16, heads=12)
networks = {f"2 hosts, {name}": (gpt, {"nodes": 2, "network": name}) for name in ("10GbE", "100GbE", "InfiniBand NDR")}
lab.plans({"1 host": gpt} | networks, global_batch_size=64)

# %% [markdown]
# The 450 MB of gradients in fp32 cross the network in every step. Over a slow one two hosts take longer than one, and
# the faster the GPUs are, the faster the network must be: what is enough for T4s is too little for A100s.
#
# **Which way to start?** On one machine use `torchrun --standalone`; on a few with ssh, a line on each or `hosts=[…]`;
# under Slurm, a job script like the one above or `labkit.submit`. For Kubernetes, `docs/examples/kubeflow.yaml` has the
# same script.
#
# ## Try this
#
# 1. Launch with `hosts=["localhost", "localhots"]`: what happens, and when?
#    <details><summary>Answer</summary>The launch is refused before anything runs: "ssh localhots failed: … Could not
#    resolve hostname". <code>labkit launch --hosts … --print</code> prints a line to paste on each host
#    instead.</details>
# 2. Kill a rank of the second node (`SIGKILL`) instead of its torchrun.
#    <details><summary>Answer</summary>"rank 1 on localhost-1 was killed (SIGKILL) by another process, not by labkit",
#    and at which step. No process was left.</details>
# 3. Compare four ranks on one node with two on each of two nodes: do the losses still agree to the last bit?
#    <details><summary>Answer</summary>Yes: the largest difference was 0. Four numbers can be added in several orders,
#    but gloo's order depends on the ranks, not on the hosts. NCCL may choose another algorithm between hosts; then the
#    last bits differ.</details>
#
# ## Sources
#
# Goyal et al. (arXiv 1706.02677) and Malladi et al. (arXiv 2205.10287): learning rate and batch. docs.pytorch.org,
# *torchrun*: static and elastic rendezvous. slurm.schedmd.com, *sbatch* and *srun*. docs/how_to/cluster.md.
