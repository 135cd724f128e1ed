"""How a notebook uses the tools that interactive_peers.py compares, and cells for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tool:
    """How a notebook uses it: a README's cells. What is missing, it does not offer."""

    name: str
    start: list[str] = field(default_factory=list)
    on_all: str = ""  # the first line of a cell for all ranks, and of one for rank 1
    on_one: str = ""
    fetch: str = ""
    send: str = ""
    stop: str = ""  # without one, the kernel is shut down
    reset: str = ""  # what its README says to do if something is left
    again: list[str] = field(default_factory=list)  # after a restart of the kernel
    kernel: dict[str, str] = field(default_factory=dict)  # the environment of a kernel of its own
    reason: str = ""  # why it neither fetches nor sends


GROUP = """import os, torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
if not dist.is_initialized():
    dist.init_process_group("gloo")"""
PLAIN = Tool("a plain kernel")
LABKIT = Tool(
    "labkit",
    ["import labkit\nranks = labkit.ranks(2)"],
    on_all="%%ranks\n",
    on_one="%%ranks --ranks 1\n",
    fetch="ranks.pull('kept * 1.5')",
    send="ranks.push(sent=0.25)",
    stop="ranks.stop()",
    again=["import labkit\nranks = labkit.ranks(run='latest')"],
)
DISTRIBUTED = Tool(
    "jupyter-distributed",
    [GROUP],
    on_one="%%rank 1\n",
    again=[GROUP],
    kernel={"JUPYTER_DISTRIBUTED_WORLD_SIZE": "2", "JUPYTER_DISTRIBUTED_BASE_KERNEL": "python3"},
    reason="the notebook has no process beside the ranks; a cell shows, or sets, each rank's value",
)
INIT = ["%load_ext nbdistributed\n%dist_init -n 2"]
NBDISTRIBUTED = Tool(
    "nbdistributed",
    INIT,
    on_one="%%rank [1]\n",
    stop="%dist_shutdown",
    reset="%dist_reset",
    again=INIT,
    reason="its README has no command",
)
TOOLS = [LABKIT, DISTRIBUTED, NBDISTRIBUTED]
FSDP = [
    """import torch.distributed.fsdp as fsdp
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
for layer in [*model, model]:
    fsdp.fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())""",
    "loss = model(torch.full((4, 8), float(rank + 1))).square().mean()",
    "loss.backward()",
    """norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
optimizer.step()
print(f"{type(model[0].weight).__name__} {tuple(model[0].weight.to_local().shape)} norm {norm:.5f}")""",
]
PLOT = "import matplotlib.pyplot as plt\nplt.figure(figsize=(3, 1.5))\nplt.plot([0, 1, rank])\nplt.show()"
PORT = 25999
# A script of torch.distributed.debug's. No source here may start its server by name.
WATCHED = f"""import time
import torch, torch.distributed as dist, torch.distributed.debug as debug
dist.init_process_group("gloo")
getattr(debug, "start_" + "debug_server")(port={PORT})
def elsewhere():
    time.sleep(600)
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
elsewhere()
"""
