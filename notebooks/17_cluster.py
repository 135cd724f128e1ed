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
# # 17 · From one machine to a cluster: the same script
#
# **You will be able to** start one script on one machine, on two nodes and under Slurm, read the launch line of a node
# word by word, say what happens when a node dies, and choose the learning rate for more ranks. **20 minutes. You need**
# labs 01 and 03.
#
# A **node** is a machine. Each has a torchrun, which starts its ranks; `local_rank` counts them within the node, `rank`
# over all: rank = node_rank × nproc_per_node + local_rank. The second node here is this machine, too: what differs with
# a real one is the network, which is planned below and not measured.

# %% tags=["parameters"]
steps: int = 20  # optimizer steps of each run
batch: int = 8  # samples in a step, over all ranks

# %%
import labkit
from labkit.lessons import Lesson, draw, sized
from labkit.lessons.labs.nodes import (
    differing_words, job_text, kill_node, left_over, names_in, nodes_that_say, of_ranks, slurm,
)  # fmt: skip
from labkit.lessons.labs.sessions import test_loss

lab = Lesson("17_cluster")
draw.hosts(2, 2)

# %% [markdown]
# ## Your predictions
#
# The same script, with the same seed and global batch, on two ranks: once on one node, once on two.

# %%
names = lab.ask("environment variables about hosts that the script names", default=2)
same = lab.ask(
    "two nodes: largest difference of a loss to one node",
    default=1e-16,
    options={"not a bit": 0, "the last digits": 1e-16, "visibly": 0.01},
)
words = lab.ask("two nodes: words in which their launch lines differ", default=3)
naming = lab.ask("killed node: nodes whose record names it", default=1)
slower = lab.ask("8 times the batch, the same learning rate: test loss, how many times the small batch's", default=1)

# %% [markdown]
# ## One node, two nodes
#
# torchrun gives each rank its number and a place to meet, in environment variables. So the script is the same, byte for
# byte. The all-reduce adds two numbers, and a + b is b + a in floating point, too. With `hosts=["hA", "hB"]` labkit
# connects to each by ssh and starts torchrun there; `"localhost"`, twice, is two nodes on this machine.

# %%
script, hosts = labkit.Script.load("ddp"), ["localhost", "localhost"]
env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # two nodes on one machine cannot share its GPUs
options = {"steps": steps, "global_batch_size": batch, "env": env}
number, fallback = "sbatch text: the node's number is read inside the task", "sbatch text: falls back to localhost"
lab.predict_each({names: 0, same: 0, words: 1, "two nodes: torchrun processes": 2, number: 1, fallback: 0})
one = labkit.launch(script, nproc_per_node=2, name="one-node", wait=True, **options)
two = labkit.launch(script, hosts=hosts, nproc_per_node=1, name="two-nodes", wait=True, **options)
alone, joined = of_ranks(one), of_ranks(two)

# %%
print(", ".join(names_in(script)))
about = [name for name in names_in(script) for part in ("HOST", "NODE", "ADDR", "SLURM") if part in name]
results = {names: len(about), same: (alone - joined).abs().max().max(), words: differing_words(two.command)}
lab.measure_each(results | {"two nodes: torchrun processes": len([*two.path.glob("nodes/*/agent.json")])}, run=two)
lines = {"one node": alone[0].items(), "two nodes": joined[0].items()}
draw.curves(lines, "loss of rank 0")

# %% [markdown]
# Not a bit differs. What does: who meets whom, and how. `run.command` starts the same training without labkit.

# %%
print(one.command, two.command, sep="\n")
lab.explore(draw.hosts, nproc_per_node=[1, 2, 4, 8], nnodes=[1, 2, 4])

# %% [markdown]
# | | |
# |---|---|
# | `--standalone` | one machine: torchrun finds a free port and meets itself |
# | `--nnodes 2` | how many torchruns belong together; each waits for the others |
# | `--nproc-per-node 1` | ranks that each of them starts: the world size is nnodes × nproc-per-node |
# | `--node-rank 0`, `1` | which of them this is: the only word that differs |
# | `--master-addr`, `--master-port` | where all meet: an address of the first node that the others reach |
# | `--max-restarts 0` | a restart is a new launch, from the newest checkpoint: torch's own way is unreliable |
# | `--` | the end of torchrun's own options: the script and its options follow |
#
# An address, not a name: Debian, Ubuntu and WSL2 write the host's own name into /etc/hosts as 127.0.1.1, so the first
# node would wait where nobody else can come. This is *static* rendezvous: the number of nodes is fixed.
#
# ## Slurm: who says which node this is?
#
# Under Slurm you do not start the nodes: `sbatch` takes a text, waits until there are machines, and runs it on the
# first; `srun` in it starts one task on each node. `labkit.submit` writes the text, puts its own supervisor before
# torchrun, and watches. With plain torchrun:

# %%
text = job_text("ddp", ["--steps", str(steps), "--checkpoint-dir", "checkpoints"], nodes=2)
falls = [line for line in text.splitlines() if "||" in line and "localhost" in line]
lab.measure_each({number: text.count('--node-rank "$SLURM_NODEID"'), fallback: len(falls)})
print(text)

# %%
if slurm():
    job = labkit.submit(script, to="slurm", nodes=2, nproc_per_node=1, time="00:10:00", name="slurm", **options)
    job.wait()
    lab.verify("Slurm: largest difference of a loss to one node", 0, (alone - of_ranks(job)).abs().max().max())
else:
    print("no Slurm answers here: the text above is what sbatch would get. `make cluster-demo` brings one up")

# %% [markdown]
# Find in it who ends all tasks when one fails, and what happens before the time limit. Nothing says `|| echo
# localhost`: a job that cannot learn its head's address must fail, or each node trains alone and nobody notices.
#
# ## A node dies
#
# Its torchrun is killed, as by a system that is out of memory. With torchrun alone the ranks it has started go on as if
# nothing had happened. labkit has a supervisor on each node; they look at one another through the run folder.

# %%
lab.predict_each({naming: 2, "killed node: processes left on both nodes": 0})
dying = labkit.launch(
    script, hosts=hosts, nproc_per_node=1, name="dying", **{**options, "steps": 100_000, "wait": False}
)
print(kill_node(dying, 1))
results = {naming: nodes_that_say(dying, "localhost-1"), "killed node: processes left on both nodes": left_over(dying)}
lab.measure_each(results, run=dying)

# %% [markdown]
# Both name the node that was killed, though the first thing that *went wrong* on the other one was a broken connection.
#
# ## More nodes, larger batch?
#
# With the global batch kept, more ranks change nothing but the time. But a rank usually keeps its samples: 8 times as
# many ranks then have 8 times the global batch, and an epoch has an eighth of the steps. The usual rule for SGD is
# **linear scaling**: 8 times the learning rate as well, after a **warm-up** in which it rises from step to step (Goyal
# et al.). Four trainings of ten epochs. Two ranks are enough to see it: together they have the gradient that 16 would
# have (lab 03).


# %%
import torch


def optimizer_of(parameters, args):
    return torch.optim.SGD(parameters, lr=args.lr)


# %%
digits = labkit.Script.load("ddp", task="digits").with_cells(optimizer_of=optimizer_of)
ways = {"32 samples": (32, 0.01, 0), "256 samples": (256, 0.01, 0), "256, 8 x the rate": (256, 0.08, 0)}
ways["256, 8 x, warm-up"] = 256, 0.08, 16  # samples, learning rate, steps in which it rises
warmed, jump = "8 times the batch and rate, with a warm-up: that ratio", "no warm-up: largest loss of five steps"
lab.predict_each({slower: 1.2, jump: 2 * 2.3}, how="at least")  # guessing among ten digits is 2.3
lab.predict(warmed, 1.2, how="at most")
trained = {}
for name, (samples, lr, rising) in ways.items():
    options = {"global_batch_size": samples, "lr": lr, "warmup_steps": rising}
    trained[name] = lab.launch(digits, epochs=10, name="digits", **options)

# %%
losses, last = {name: run.losses() for name, run in trained.items()}, test_loss(trained["32 samples"])
results = {slower: test_loss(trained["256 samples"]) / last, warmed: test_loss(trained["256, 8 x, warm-up"]) / last}
lab.measure_each(results | {jump: losses["256, 8 x the rate"].head().max()})
scaled = {name: [(step * ways[name][0] / 32, y) for step, y in each.items() if y < 20] for name, each in losses.items()}
display(draw.curves(scaled, "training loss up to 20, a step being 32 samples", log=True))
lab.score()

# %% [markdown]
# With the old rate an eighth of the steps is not enough. With 8 times the rate from the first step the loss explodes:
# steps are too long for weights that nobody has trained yet. After a warm-up the training ends about where that of the
# small batch does. The rule has a limit, 8,192 pictures for Goyal's ResNet-50; beyond it only a sweep tells
# (`labkit.sweep(script, lr=[…])`). For Adam the square root of 8 is the usual factor (Malladi et al.).
#
# ## On 2 × T4 and 8 × A100
#
# Two hosts need a network that carries what goes between them in each step. DDP on a transformer of 113 million
# parameters, with two hosts of 2 × T4 and of 8 × A100, over three networks:

# %%
gpt = sized(labkit.Script.load("ddp"), width=768, layers=16, heads=12)
networks = {f"2 hosts, {name}": (gpt, {"nodes": 2, "network": name}) for name in ("10GbE", "100GbE", "InfiniBand NDR")}
lab.plans({"1 host": gpt} | networks, global_batch_size=64)

# %% [markdown]
# ## Try this
#
# 1. `hosts=["localhost", "localhots"]`: what happens, and when?
#    <details><summary>Answer</summary>The launch is refused before anything runs: "ssh localhots failed: … Could not
#    resolve hostname". `labkit launch --hosts … --print` prints a line to paste on each host instead.</details>
# 2. Kill a rank of the second node (`SIGKILL`) instead of its torchrun.
#    <details><summary>Answer</summary>"rank 1 on localhost-1 was killed (SIGKILL) by another process, not by labkit",
#    and at which step. No process was left.</details>
# 3. Four ranks on one node, and two on each of two: do the losses still agree to the last bit?
#    <details><summary>Answer</summary>Yes: the largest difference was 0. Four numbers have several orders in which to
#    add them, but gloo's depends on the ranks, not on the hosts. NCCL may choose another algorithm between hosts; then
#    the last bits differ.</details>
#
# ## Sources
#
# Goyal et al. (arXiv 1706.02677) and Malladi et al. (arXiv 2205.10287): learning rate and batch. docs.pytorch.org,
# *torchrun*: static and elastic rendezvous. slurm.schedmd.com, *sbatch*: `--signal`, `--requeue`. docs/cluster.md;
# `docs/examples/kubeflow.yaml` has the same script for a cluster of another kind.

# %%
lab.check()
