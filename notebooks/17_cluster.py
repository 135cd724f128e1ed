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
# One machine with two ranks; two nodes with one rank each; a Slurm cluster. What has to change in the training script?
# Predict, then compare: the losses digit by digit, the launch lines word by word. At the end you kill one node's
# torchrun in the middle of a training and see what the other node says. The second node is this machine, too: what
# differs with a real one is the network, and that is not measured here.

# %% tags=["parameters"]
steps: int = 20  # optimizer steps of each run
batch: int = 8  # samples in a step, over all ranks

# %%
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import plotly.graph_objects as go
import psutil

import labkit
from labkit import Script
from labkit.claims import Claims

env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # two nodes on one machine cannot share its GPUs
claims = Claims("17_cluster")
script = Script.load("ddp")
options = {"steps": steps, "global_batch_size": batch, "env": env}

# %% [markdown]
# ## What the script knows of machines
#
# Next to nothing: torchrun gives each rank its number and a place to meet, in environment variables. These are all that
# the script names itself, to choose a GPU and to run without torchrun, too; `init_process_group` reads a few more
# (`MASTER_ADDR`, …).

# %%
read = re.findall(r'environ(?:\.get\(|\[|\.setdefault\()"(\w+)"|"(\w+)" (?:not )?in os\.environ', str(script))
known = sorted({"".join(names) for names in read})
about_hosts = [name for name in known if re.search("HOST|NODE|ADDR|SLURM", name)]
print(", ".join(known))

# %% [markdown]
# So the same script, byte for byte, with the same seed and the same global batch on two ranks must train the same
# model, wherever the ranks are. The all-reduce adds two numbers, and a + b is b + a in floating point, too: predict
# *no* difference, not a small one.

# %%
claims.predict("environment variables about hosts that the script names", 0)
claims.predict("two nodes: largest difference of a loss to one node", 0)
claims.predict("two nodes: torchrun processes", 2)
claims.predict("two nodes: words in which their launch lines differ", 1)
claims.measure("environment variables about hosts that the script names", len(about_hosts))

# %% [markdown]
# ## One node, two ranks

# %%
one = labkit.launch(script, nproc_per_node=2, name="one-node", wait=True, **options)

# %% [markdown]
# ## Two nodes, one rank on each
#
# With `hosts=["hA", "hB"]` labkit connects to each by ssh and starts torchrun there. `"localhost"`, twice, is two nodes
# on this machine, with a torchrun of its own for each.

# %%
hosts = ["localhost", "localhost"]
two = labkit.launch(script, hosts=hosts, nproc_per_node=1, name="two-nodes", wait=True, **options)


# %%
def losses(run):
    """By step and rank."""
    return run.metrics().pivot(index="step", columns="rank", values="loss")


alone, joined = losses(one), losses(two)
claims.measure("two nodes: largest difference of a loss to one node", (alone - joined).abs().max().max(), run=two)
claims.measure("two nodes: torchrun processes", len([*two.folder.path.glob("nodes/*/agent.json")]), run=two)
figure = go.Figure()
for name, table, dash in (("one node", alone, "solid"), ("two nodes", joined, "dot")):
    for rank in table:
        figure.add_scatter(x=table.index, y=table[rank], name=f"{name}, rank {rank}", line={"dash": dash})
display(figure.update_layout(height=300, xaxis_title="step", yaxis_title="loss", template="plotly_white"))

# %% [markdown]
# Not a bit differs. What does: who meets whom, and how. That is in the line that starts each node.
#
# ## The launch lines, word by word
#
# `run.command` is what starts the same training without labkit: on one machine a line, on several one for each.

# %%
print(one.command, two.command, sep="\n")
words = [line.split() for line in two.command.splitlines()]
differing = sum(a != b for a, b in zip(*words, strict=True))
claims.measure("two nodes: words in which their launch lines differ", differing, run=two)

# %% [markdown]
# | | |
# |---|---|
# | `--standalone` | one machine: torchrun finds a free port and meets itself |
# | `--nnodes 2` | so many torchruns belong together; each waits for the others |
# | `--nproc-per-node 1` | ranks that each of them starts: the world has nnodes × nproc-per-node |
# | `--node-rank 0`, `1` | which of them this is, and with it which ranks it has: the only word that differs |
# | `--master-addr`, `--master-port` | where all meet: an address of the first node that the others reach |
# | `--max-restarts 0` | a restart is a new launch, from the newest checkpoint: torch's own way is unreliable |
#
# An address, not a name: Debian, Ubuntu and WSL2 write the host's own name into /etc/hosts as 127.0.1.1, so that the
# first node waits where nobody else can come, and all of them in silence.
#
# This is *static* rendezvous: the number of nodes is fixed. The elastic one (`--rdzv-backend c10d`) needs three more
# settings where host names are wrong, and was seen to hang after a link was cut.
#
# ## Slurm: who says which node this is?
#
# Under Slurm you do not start the nodes: `sbatch` takes a text, waits until there are machines, and runs it on the
# first; `srun` in it starts one task on each node. Inside the task Slurm says which node it is. The text, with plain
# torchrun (`labkit.submit` puts labkit's own supervisor in front of it, and watches), for a job that saves checkpoints:

# %%
asked = ["--nodes", "2", "--nproc-per-node", "1", "--time", "00:10:00"]
flags = ["--steps", str(steps), "--global-batch-size", str(batch), "--checkpoint-dir", "checkpoints"]
labkit_slurm = [sys.executable, "-m", "labkit.cli", "slurm", "print", "ddp", "--plain", *asked, "--", *flags]
text = subprocess.run(labkit_slurm, capture_output=True, text=True, check=True).stdout
print(text)

# %% [markdown]
# Find in it: where the node's number is read (inside the task, not before), who ends all tasks when one fails, what
# happens before the time limit, and that nothing says `|| echo localhost`: a job that cannot learn its head's address
# must fail, or each node trains alone and nobody notices.

# %%
claims.predict("sbatch text: node's number is read inside the task", 1)
claims.predict("sbatch text: lines that fall back to localhost", 0)
claims.measure("sbatch text: node's number is read inside the task", int("SLURM_NODEID" in text))
claims.measure("sbatch text: lines that fall back to localhost", len(re.findall(r"\|\|.*localhost", text)))


def slurm_answers():
    if not (shutil.which("sbatch") and shutil.which("sinfo")):
        return False
    try:
        return subprocess.run(["sinfo", "--noheader"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


# %%
runs = [one, two]
if slurm_answers():
    claims.predict("Slurm: largest difference of a loss to one node", 0)
    job = labkit.submit(script, to="slurm", nodes=2, nproc_per_node=1, time="00:10:00", name="slurm", **options)
    job.wait()
    difference = (alone - losses(job)).abs().max().max()
    claims.measure("Slurm: largest difference of a loss to one node", difference, run=job)
    runs.append(job)
else:
    print("no Slurm answers here: the text above is what sbatch would be given. `make cluster-demo` brings one up")
labkit.compare(runs)

# %% [markdown]
# One row a run, one script, one loss. The times of two nodes on one machine say nothing of a network: there, what goes
# between hosts in each step has to fit through it. `labkit.plan(script, nodes=…, nproc_per_node=…, network="100GbE")`
# predicts that, and says which groups of ranks had better stay inside a host.
#
# ## A node dies
#
# Its torchrun is killed, as by a system that is out of memory. torchrun alone: the ranks it has started go on as if
# nothing had happened, and so does the other node. labkit has a supervisor on each node, which look at one another
# through the run folder. Predict: what do both nodes' records say, and how many processes are left?

# %%
claims.predict("killed node: nodes whose record names it", 2)
claims.predict("killed node: processes left on both nodes", 0)
endless = {**options, "steps": 100_000}
dying = labkit.launch(script, hosts=hosts, nproc_per_node=1, name="dying", wait=False, **endless)


def last_step():
    table = dying.metrics()
    return table["step"].max() if len(table) else 0


deadline = time.monotonic() + 60
while not last_step() > 3 and time.monotonic() < deadline:
    time.sleep(0.5)
agent = json.loads((dying.folder.path / "nodes" / "1" / "agent.json").read_text())["agent"]
os.kill(agent["pid"], signal.SIGKILL)
killed = time.monotonic()
try:
    dying.wait()
except labkit.RankFailedError as error:
    print(error)
print(f"over {time.monotonic() - killed:.1f} s after the kill")

# %%
states = [json.loads((dying.folder.path / "nodes" / str(node) / "state.json").read_text()) for node in range(2)]


def of_run(process):
    try:
        return dying.id in process.environ().values()
    except psutil.Error:
        return False


naming = sum("localhost-1" in state["cause"]["sentence"] for state in states)
claims.measure("killed node: nodes whose record names it", naming, run=dying)
left = [process for process in psutil.process_iter() if of_run(process)]
claims.measure("killed node: processes left on both nodes", len(left), run=dying)

# %% [markdown]
# Both say the same, and name the node that was killed, though the first thing that *went wrong* on the other one was a
# broken connection.
#
# To try on your own: kill a rank instead of its torchrun, or stop one (`SIGSTOP`); give `hosts` two real names, one of
# them mistyped; and read `docs/examples/kubeflow.yaml`, for the same script on a cluster of another kind.

# %%
claims.check()
