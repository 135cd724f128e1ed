"""Mistakes on purpose: for every rule of `labkit check` scripts that make it once, at the line marked HERE, and the
same scripts corrected. What surrounds them is a training script in which nothing is found."""

from __future__ import annotations

import textwrap

from unit.seeded_settings import SETTINGS

HEAD = """
import os
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", local_rank)
"""
TAIL = "\ndist.barrier()\ndist.destroy_process_group()\n"
DDP_MODEL = "model = DDP(Net().to(device))\noptimizer = torch.optim.SGD(model.parameters())\n"
FSDP1_MODEL = "model = FSDP(net, auto_wrap_policy=policy)\noptimizer = torch.optim.SGD(model.parameters())\n"
FSDP2_MODEL = "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)\noptimizer = make(model)\n"
LOOP = "for epoch in range(9):\n    for x, y in loader:\n        model(x).sum().backward()\n        optimizer.step()\n"
UNUSED = DDP_MODEL.replace("to(device)", "to(device), find_unused_parameters=True")
CAUSAL = "from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained(name)\n"
PADDED = "batches = tokenizer(texts, padding=True)\n"
PEFT = "import torch\nfrom peft import get_peft_model\nmodel = get_peft_model(base, config)\n"
UNITS = "for part in (model.embed, model):\n    fully_shard(part)\n"
OUTER = "outer = torch.optim.SGD(kept, lr=0.7, momentum=0.9, nesterov=True)  # HERE\nouter.step()\n"
NUMBERS = "class Numbers(torch.utils.data.IterableDataset):"
READS = "\n    pass\n\ndef loader_of(dataset):\n    pass\n\ndef load_datasets(data_dir):\n"
PAIRS = "def pairs_of(outputs, batch):\n    pass\n\n"
COUNT = "def count_of(b):\n    return b.n\n\n"

IN_CONTEXT = "from torch.distributed.tensor.experimental import context_parallel\nfreqs_cis = rotary(length)\n"
DISPATCH = "dist.all_to_all_single(arrived, rows, received, sent)\n"
EXPERTS = """
def on_this_rank(experts, forward, group, rows, sizes):
    return forward(rows, sizes)

class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count, self.weight = count, nn.Parameter(torch.zeros(count, 8, 8))

    def forward(self, rows, sizes):
        parts = rows.split(sizes)
        return torch.cat([parts[i] @ self.weight[i] for i in range(len(sizes))])

class Mixture(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.router, self.experts = nn.Linear(8, count), Experts(count)

"""
STAGES = """
def check_model(model, blocks, stages, own):
    assert own

class Model(nn.Module):  # HERE
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(256, 8), nn.GRU(8, 8, num_layers=2)

    def unembed(self, x):
        return self.head(x)
"""
PLACED = STAGES.replace("check_model(model, blocks, stages, own)", "positions_of(model)").replace("own", "POSITIONS")
PLACED += "\nPOSITIONS = 'positions'\n"
SPLIT = STAGES.replace("check_model(model, blocks, stages, own)", "split_layer(block, own)")
SPLIT += "\nTENSOR_PLAN = {'up': 'colwise', 'mlp.down': 'rowwise', 'w*': 'colwise'}\n"
IN_A_LOOP = "range(self.count)])  # HERE"
ROUTED = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))
"""
FROZEN = "net.body.requires_grad_(False)\nmodel = DDP(net)\noptimizer = torch.optim.SGD(model.parameters())\n"
BODY = """
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

"""
BRANCHES = """
class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, which=False):
        if which:  # HERE
            return self.one(x)
        return self.other(x)

"""
ACCUMULATES = """
import contextlib
for i, (x, y) in enumerate(loader):
    last = {}
    with contextlib.nullcontext() if last else model.no_sync():{}
        model(x).sum().backward()
    if (i + 1) % every == 0:
        optimizer.step()
"""
ACCUMULATES_LATE = """
for i, (x, y) in enumerate(loader):
    {}
    {}
    loss.backward()
    if (i + 1) % 4 == 0:
        optimizer.step()
"""
SYNCS = "model.require_backward_grad_sync = (i + 1) % 4 == 0"
TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.head.weight = self.embed.weight

"""
ACCELERATE = "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
PREPARES = "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)\n"
STREAM = """
class Lines(torch.utils.data.IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        for i in range(256):
            yield i

"""
OWN_PART = """
class Part(torch.utils.data.Dataset):
    def __init__(self, rows, rank, world_size):
        self.rows = rows[rank::world_size]

"""
FSDP2_PLAIN = """
for block in model.blocks:
    fully_shard(block)
optimizer = torch.optim.SGD(model.parameters())
"""
IN_TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
mesh = init_device_mesh('cuda', (world_size,))
parallelize_module(model, mesh, plan)
"""
LOADED = "dist.barrier()\nstate = torch.load(path, map_location='cpu', weights_only=True)\n"
BF16_MODEL = (
    "net = Net().to(torch.bfloat16)\nmodel = DDP(net)\noptimizer = torch.optim.AdamW(model.parameters(), HERE\n"
)
STEPS = "for x, y in loader:\n    loss = model(x)\n    loss.backward()\n    {}"
NEWEST = "self.queue.copy_(torch.cat([h.detach(), self.queue])[:32])"
NEAREST = "near = torch.cdist(h, self.codes).argmin(1)\ncode = self.codes[near]"
FOLLOW = """
    def follow(self, h):
        with torch.no_grad():
            self.center.mul_(0.9).add_(h.mean(0), alpha=0.1)  # HERE
"""
SCALE = "self.scale, self.ready = nn.Parameter(torch.ones(32)), False"
FIRST = "if self.training and not self.ready:\n    self.scale.data"
TEACHER = "self.teacher = nn.Linear(16, 32).requires_grad_(False)"
APART = DDP_MODEL.replace("to(device)", "to(device), broadcast_buffers=False")
FSDP_NET = "model = Net()\n" + FSDP2_MODEL
SKIPS = """
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    if not torch.isfinite(loss):  # HERE
        continue
    loss.backward()
    optimizer.step()
"""
AGREES = """
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    bad = (~torch.isfinite(loss)).float()
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    if bad:
        continue
    loss.backward()
    optimizer.step()
"""
NO_TARGET = """
def loss_of(out, targets):
    if len(targets) == 0:
        return torch.zeros((), requires_grad=True)  # HERE
    return (out[targets] - 1).square().mean()

loss = loss_of(model(x), targets)
loss.backward()
"""
VALIDATION = "test_loader = DataLoader(test, sampler=DistributedSampler(test))\n"
EVALUATE = """
def evaluate(net, test_loader):
    total = 0.0
    for x, y in test_loader:
        total += F.mse_loss(model(x), y).item()
    return total

"""
STOPS = """
best, bad = 9.0, 0
for epoch in range(9):
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
    loss = evaluate(model, test_loader)
    if loss < best:
        best, bad = loss, 0
    else:
        bad += 1
    if bad > 3:  # HERE
        break
"""
PLATEAU = "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)\n"
JOINED = "from torch.distributed.algorithms.join import Join\nwith Join([model]"
SPAWNS = """
import os, torch.distributed as dist, torch.multiprocessing as mp

def main(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    Net().loss().backward()
    dist.destroy_process_group()

if __name__ == "__main__":
    size = os.cpu_count()
    mp.spawn(main, args=(size,), nprocs=size)
"""


def within(body: str, model: str = DDP_MODEL) -> str:
    """A whole script round some lines of it."""
    return HEAD + model + textwrap.dedent(body) + TAIL


def writing(made: str, computed: str, model: str = DDP_MODEL, before: str = "", methods: str = "") -> str:
    """A training of a model with something between its two layers."""
    parts, body = (textwrap.indent(text, "        ") for text in (made, computed))
    source = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(16, 32), nn.GRU(32, 32), nn.Linear(32, 32)
{parts}

    def forward(self, x, keys=None, reset=False):
        h = self.first(x)
{body}
        return self.last(h)
"""
    return within(LOOP, source + methods + before + model)


def follows(change: str) -> str:
    """Something that changes the parameters of a TEACHER in forward."""
    loop = "for t, s in zip(self.teacher.parameters(), self.first.parameters()):"
    return f"with torch.no_grad():\n    {loop}\n        {change}\nh = h - self.teacher(x)"


def buffer(name: str) -> str:
    return f'self.register_buffer("{name}", torch.zeros(32, 32))'


def loss_of(body: str) -> str:
    """A script with its own loss."""
    return within(f"{COUNT}def loss_of(o, b):\n" + textwrap.indent(body, "    "))


def metrics_of(body: str) -> str:
    return within(f"{COUNT}{PAIRS}def metrics_of(o, b):\n    {body}")


def predictions_of(value: str) -> str:
    return within(f"{PAIRS}def gathered_metrics(p, y):\n    pass\n\ndef predictions_of(o, b):\n    return {value}")


# rule: pairs of (a script with the mistake, the same without it)
SEEDED: dict[str, list[tuple[str, str]]] = {
    **SETTINGS,
    "metric-without-count": [
        *(
            (metrics_of(mistaken), metrics_of("return {'acc': (right(o, b).sum(), len(b.y))}"))
            for mistaken in (
                "return {'acc': right(o, b).float().mean()}  # HERE",
                "return {'acc': right(o, b).sum() / len(b.y)}  # HERE",
                "return {'acc': (right(o, b).sum(),)}  # HERE",
                "return right(o, b).float().mean().item()  # HERE",
            )
        ),
        (predictions_of("{'p': o.argmax(-1), 'y': b.y}  # HERE"), predictions_of("o.argmax(-1), b.y")),
    ],
    "mean-in-loss-of": [
        (
            within(f"{COUNT}def mine(o, b):\n    return F.mse_loss(o, b.y)  # HERE\n\n\nloss_of = mine"),
            within(f"{COUNT}def mine(o, b):\n    return F.mse_loss(o, b.y, reduction='sum')\n\n\nloss_of = mine"),
        ),
        *(
            (loss_of(mistaken), loss_of(corrected))
            for mistaken, corrected in [
                (
                    "return F.cross_entropy(o, b.y)  # HERE",
                    "return F.cross_entropy(o, b.y, reduction='sum')",
                ),
                (
                    "return (o - b.y).square().mean()  # HERE",
                    "return (o - b.y).square().sum()",
                ),
                (
                    "return 2 * (F.mse_loss(o, b.y) + o.abs().sum())  # HERE",
                    "return 2 * (F.mse_loss(o, b.y) + o.abs().mean()) * len(o)",
                ),
                (
                    "return BETA * F.cross_entropy(o, b.y)  # HERE",
                    "return BETA * F.cross_entropy(o, b.y) * count_of(b)",
                ),
                (
                    "return BETA * (o - b.y).square().mean()  # HERE",
                    "return BETA * o.numel() * (o - b.y).square().mean()",
                ),
                (
                    "return F.mse_loss(o, b.y) / len(o)  # HERE",
                    "return F.mse_loss(o, b.y) * len(o) / 2",
                ),
                (
                    "loss = F.mse_loss(o, b.y)  # HERE\nloss *= BETA\nreturn loss",
                    "loss = F.mse_loss(o, b.y)\nloss *= len(o)\nreturn loss",
                ),
                (
                    "n = o.size(0)\nloss = F.mse_loss(o, b.y)  # HERE\nreturn loss + n * b.z.sum()",
                    "n = o.size(0)\nloss = F.mse_loss(o, b.y) * n\nreturn loss",
                ),
                (
                    "mse = (o - b.y).square().mean()  # HERE\nloss = BETA * mse\nreturn loss + o.abs().sum()",
                    "mean = o.mean()\nloss = (o - mean).square()\nreturn loss.sum()",
                ),
                (
                    "n = 1\nmse = F.mse_loss(o, b.y)  # HERE\nloss = BETA * mse\nreturn loss * n",
                    "n = o.shape[0]\nmse = F.mse_loss(o, b.y)\nloss = BETA * mse\nreturn loss * n",
                ),
                (
                    "def scaled(x):\n    return x * b.n\nreturn F.l1_loss(o, scaled(b.y))  # HERE",
                    "def of_one(x, y):\n    return F.l1_loss(x, y)\nreturn sum(map(of_one, o, b.boxes))",
                ),
                (
                    "loss = 0\nfor head in o:\n    loss = loss + F.cross_entropy(head, b.y)  # HERE\nreturn loss",
                    "loss = 0\nfor x, box in zip(o, b.boxes):\n    loss = loss + F.l1_loss(x, box)\nreturn loss",
                ),
                (
                    "return sum(w * F.cross_entropy(head, b.y) for w, head in zip(WEIGHTS, o))  # HERE",
                    "return sum(F.l1_loss(x, box) for x, box in zip(o, b.boxes))",
                ),
                (
                    "return sum([F.cross_entropy(head, target=b.y) for head in o])  # HERE",
                    "return sum([F.l1_loss(x, target=box) for x, box in zip(o, b.boxes)])",
                ),
                (
                    "return BETA / 2 * b.w.mean()  # HERE",
                    "return (b.w * F.l1_loss(o, b.y, reduction='none')).sum() / b.w.mean()",
                ),
            ]
        ),
    ],
    "no-distributed-sampler": [
        (
            within("train_loader = DataLoader(dataset, batch_size=8, shuffle=True)  # HERE"),
            within("train_loader = DataLoader(dataset, batch_size=8, sampler=sampler)"),
        ),
        (
            within("loader = DataLoader(train_set, sampler=None, batch_size=8)  # HERE"),
            within("loader = DataLoader(Subset(train_set, range(rank, 100, world_size)), batch_size=8)"),
        ),
    ],
    "shuffle-with-sampler": [
        (
            within("sampler = make(data)\nloader = DataLoader(data, sampler=sampler, shuffle=True)  # HERE"),
            within("sampler = make(data)\nloader = DataLoader(data, sampler=sampler)"),
        ),
    ],
    "no-set-epoch": [
        (
            within(f"sampler = DistributedSampler(train)  # HERE\nloader = DataLoader(train, sampler=sampler)\n{LOOP}"),
            within(
                "sampler = DistributedSampler(train)\nloader = DataLoader(train, sampler=sampler)\n"
                + LOOP.replace("    for x", "    sampler.set_epoch(epoch)\n    for x")
            ),
        ),
    ],
    "rank-0-collective": [
        (
            within("if rank == 0:\n    print('saving')\n    dist.barrier()  # HERE"),
            within("if rank == 0:\n    print('saving')\ndist.barrier()"),
        ),
        (
            within("if dist.get_rank() != 0:\n    dist.all_reduce(x)  # HERE"),
            within("if dist.get_rank() != 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)"),
        ),
        (
            within("def total(x):\n    dist.all_reduce(x)\n    return x\n\nif rank == 0:\n    print(total(x))  # HERE"),
            within("def total(x):\n    dist.all_reduce(x)\n    return x\n\nx = total(x)\nif rank == 0:\n    print(x)"),
        ),
        (
            within("def report():\n    if rank != 0:\n        return\n    dist.all_gather(xs, x)  # HERE\n\nreport()"),
            within(
                "def report():\n    dist.all_gather(xs, x)\n    if rank != 0:\n        return\n    print(xs)\n\n"
                "report()"
            ),
        ),
        (
            within("is_main = rank == 0\nif is_main and step:\n    state = model.state_dict()  # HERE", FSDP1_MODEL),
            within("state = model.state_dict()", FSDP1_MODEL),
        ),
        (
            within("if rank == 0:\n    full = {n: p.full_tensor() for n, p in parameters}  # HERE", FSDP2_MODEL),
            within("full = {n: p.full_tensor() for n, p in parameters}", FSDP2_MODEL),
        ),
        (
            within("if rank == 0:\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE", FSDP2_MODEL),
            within("if rank == 0:\n    nn.utils.clip_grad_norm_(head.parameters(), 1.0)", FSDP2_MODEL),
        ),
        (
            within("loss = model(x).sum()\nif rank == 0:\n    loss.backward()  # HERE"),
            within("loss = model(x).sum()\nif rank == 0:\n    loss.backward()\nelse:\n    (loss * 0).backward()"),
        ),
        (
            within("out = model(x)\nloss = out.sum()\nloss = loss / 2\nif rank == 0:\n    loss.backward()  # HERE"),
            within(
                "out = model(x)\nout = out.detach()\nloss = head(out).sum()\nif rank == 0:\n    loss.backward()\n"
                "    loss = other(x)\n    loss.backward()"
            ),
        ),
        (
            within("for x in loader:\n    if rank == 0:\n        criterion(model(x)).backward()  # HERE"),
            within(
                "for x in loader:\n    probe = head(model(x).detach())\n    if rank == 0:\n        probe.backward()"
            ),
        ),
        (
            within("if not rank:\n    torch.distributed.checkpoint.save(state, checkpoint_id=path)  # HERE"),
            within("torch.distributed.checkpoint.save(state, checkpoint_id=path)"),
        ),
        (
            within(
                "for x in loader:\n    if rank == 0:\n        show(x)\n    else:\n        continue\n"
                "    dist.barrier()  # HERE"
            ),
            within(
                "for x in loader:\n    if rank == 0:\n        show(x)\n        continue\n    else:\n"
                "        continue\ndist.barrier()"
            ),
        ),
        (
            within("if not (args.skip and rank == 0):\n    dist.all_reduce(x)  # HERE"),
            within("if not (args.skip and rank == 0):\n    print(x)\ndist.all_reduce(x)"),
        ),
        (
            within(
                "for x in loader:\n    if rank == 0 and args.skip:\n        continue\n    dist.all_reduce(x)  # HERE"
            ),
            within("for x in loader:\n    dist.all_reduce(x)\n    if rank == 0 and args.skip:\n        continue"),
        ),
        (
            within("for x in loader:\n    dist.all_reduce(x)  # HERE\n    if rank == 0 and found(x):\n        break"),
            within(
                "for x in loader:\n    dist.all_reduce(x)\n    done = rank == 0 and found(x)\n"
                "    done = broadcast(done)\n    if done:\n        break"
            ),
        ),
        (
            within("if rank == 0:\n    optimizer.consolidate_state_dict(to=0)  # HERE"),
            within("optimizer.consolidate_state_dict(to=0)\nif rank == 0:\n    print(optimizer.state_dict())"),
        ),
        (
            within("if rank == 0:\n    with FSDP.summon_full_params(model):  # HERE\n        show(model)", FSDP1_MODEL),
            within("with FSDP.summon_full_params(model):\n    if rank == 0:\n        show(model)", FSDP1_MODEL),
        ),
        (
            within("import torch.distributed.nn.functional as nnf\nif rank == 0:\n    x = nnf.all_reduce(x)  # HERE"),
            within(
                "import torch.distributed.nn.functional as nnf\nif rank in (0, 1):\n"
                "    x = nnf.all_gather(x, pair_group)"
            ),
        ),
        (
            within("if rank == 0:\n    teacher = DDP(teacher)  # HERE"),
            within("if rank == 0:\n    teacher = DDP(teacher, process_group=alone)"),
        ),
        (
            "from accelerate import Accelerator\naccelerator = Accelerator()\nif accelerator.is_main_process:\n"
            "    scores = accelerator.gather_for_metrics(scores)  # HERE\n",
            "from accelerate import Accelerator\naccelerator = Accelerator()\nif accelerator.is_main_process:\n"
            "    accelerator.save_state(folder)\n",
        ),
        (
            "import lightning as L\n\nclass Saves(L.Callback):\n    def on_train_end(self, trainer, module):\n"
            "        if trainer.is_global_zero:\n            trainer.save_checkpoint('x.ckpt')  # HERE\n",
            "import lightning as L\n\nclass Saves(L.Callback):\n    def on_train_end(self, trainer, module):\n"
            "        trainer.save_checkpoint('x.ckpt')\n",
        ),
        (
            "import lightning as L\n\nclass Net(L.LightningModule):\n    @L.pytorch.utilities.rank_zero_only\n"
            "    def note(self, x):\n        self.log('x', x, sync_dist=True)  # HERE\n",
            "import lightning as L\n\nclass Net(L.LightningModule):\n    @L.pytorch.utilities.rank_zero_only\n"
            "    def note(self, x):\n        self.log('x', x, rank_zero_only=True)\n",
        ),
        (
            "from accelerate.utils import gather_object\nif state.is_main_process:\n"
            "    print(gather_object(text))  # HERE\n",
            "from accelerate.utils import gather_object\ntext = gather_object(text)\nif state.is_main_process:\n"
            "    print(text)\n",
        ),
        (
            "import lightning as L\n\nclass Draws(L.Callback):\n    def on_train_end(self, trainer, module):\n"
            "        if trainer.is_global_zero:\n            draw(trainer.log_dir)  # HERE\n",
            "import lightning as L\n\nclass Draws(L.Callback):\n    def on_train_end(self, trainer, module):\n"
            "        folder = trainer.log_dir\n        if trainer.is_global_zero:\n            draw(folder)\n",
        ),
        (
            within("node = rank // 2\npair = dist.new_group([2 * node, 2 * node + 1])  # HERE"),
            within(
                "for node in range(world_size // 2):\n    group = dist.new_group([2 * node, 2 * node + 1])\n"
                "    if rank // 2 == node:\n        pair = group"
            ),
        ),
        (
            within("with accelerator.main_process_first():\n    dist.barrier()  # HERE"),
            within("with accelerator.main_process_first():\n    prepare()\ndist.barrier()"),
        ),
    ],
    "rank-skips-step": [
        (
            within(STEPS.format("if torch.isfinite(loss):  # HERE\n        optimizer.step()")),
            within(STEPS.format("if step < 4:\n        optimizer.step()")),
        ),
        (
            within(STEPS.format("if loss.isnan():  # HERE\n        continue\n    optimizer.step()")),
            within(
                "def common(x):\n    dist.all_reduce(x)\n    return x\n\n"
                + STEPS.format("if common(loss.isnan()):\n        continue\n    optimizer.step()")
            ),
        ),
        (
            within(STEPS.format("if loss < 9:  # HERE\n        optimizer.step()")),
            within(
                "def common(x):\n    dist.all_reduce(x)\n    return x\n\n"
                + STEPS.format("loss = common(loss)\n    if loss < 9:\n        optimizer.step()")
            ),
        ),
        (
            within(STEPS.format("if loss < 9:  # HERE\n        scaler.step(optimizer)")),
            within(
                STEPS.format("norm = clip(model.parameters(), 1.0)\n    if norm < 9:\n        scaler.step(optimizer)")
            ),
        ),
        (
            within(STEPS.format("if loss < 9:  # HERE\n        optimizer.step()"), FSDP2_MODEL),
            within(STEPS.format("if loss < 9:\n        optimizer.step()\n    else:\n        optimizer.step()")),
        ),
        (
            "from accelerate import Accelerator\naccelerator = Accelerator()\nmodel = accelerator.prepare(Net())\n"
            "for batch in loader:\n    loss = model(batch)\n    accelerator.backward(loss)\n"
            "    if loss < 9:  # HERE\n        optimizer.step()\n",
            "from accelerate import Accelerator\naccelerator = Accelerator()\nmodel = accelerator.prepare(Net())\n"
            "probe = nn.Linear(8, 1)\n"
            "for batch in loader:\n    loss = probe(model(batch).detach())\n    loss.backward()\n"
            "    if loss < 9:\n        optimizer.step()\n",
        ),
    ],
    "forward-writes": [
        (
            writing(buffer("queue"), f"h = h @ self.queue.T.clone()\n{NEWEST}  # HERE"),
            writing(buffer("queue"), f"h = h @ self.queue.T.clone()\nif not self.training:\n    {NEWEST}"),
        ),
        (
            writing(buffer("queue"), f"h = h @ self.queue.T.clone()\n{NEWEST}  # HERE"),
            writing(buffer("queue"), f"h = h @ self.queue.T.clone()\nh = gathered(h)\n{NEWEST}"),
        ),
        (
            writing(buffer("queue"), "h = h + self.queue.mean(0)\nself.queue[: len(x)] = h.detach()  # HERE"),
            writing(buffer("cache"), "self.cache[: len(x)] = h\nh = h + self.cache[: len(x)]"),
        ),
        (
            writing(buffer("mean"), "self.mean.lerp_(h.detach().mean(0), 0.1)  # HERE\nh = h - self.mean"),
            writing(buffer("mean"), "self.mean = h.detach().mean(0)\nh = h - self.mean"),
        ),
        (
            writing(buffer("mean"), "h = h - self.mean\nself.mean.mul_(0.9).add_(h.detach().mean(0))  # HERE"),
            writing(buffer("mean"), "h = h - self.mean\nself.mean.mul_(0.9).add_(h.detach().mean(0))", APART),
        ),
        (
            writing(buffer("mean"), "h = h - self.mean\nself.mean.mul_(0.9).add_(h.detach().mean(0))  # HERE"),
            writing(buffer("running_mean"), "h = h - self.running_mean\nself.running_mean += h.detach().mean(0)"),
        ),
        (
            writing(buffer("codes"), f"{NEAREST}\nself.codes[near] = h.detach()  # HERE\nh = h + code"),
            writing(buffer("usage"), f"{NEAREST.replace('codes', 'last.weight')}\nself.usage[near] += 1"),
        ),
        (
            writing(buffer("state"), "h, state = self.cell(h, self.state)\nself.state = state.detach()  # HERE"),
            writing(buffer("state"), "h, state = self.cell(h, self.state)\nself.state = state.detach()", FSDP_NET),
        ),
        (
            writing(buffer("center"), "h = h - self.center\nself.follow(h)", methods=FOLLOW),
            writing(buffer("center"), "h = h - self.center\nif reset:\n    self.follow(h)", methods=FOLLOW),
        ),
        (
            writing(SCALE, f"{FIRST}.copy_(h.detach().std())  # HERE\n    self.ready = True\nh = h * self.scale"),
            writing(
                SCALE,
                f"{FIRST}.copy_(h.detach().std())\n    self.ready = True\nh = h * self.scale",
                DDP_MODEL.replace("Net().to(device)", "net"),
                before="net = Net()\nnet(batch)\n",
            ),
        ),
        (
            writing(SCALE, "self.scale.data.clamp_(min=0)  # HERE\nh = h * self.scale", FSDP_NET),
            writing(SCALE, "self.scale.data.clamp_(min=0)\nh = h * self.scale"),
        ),
        (
            writing(TEACHER, follows("t.lerp_(s, 0.1)  # HERE"), FSDP_NET),
            writing(TEACHER, follows("t.lerp_(s, 0.1)")),
        ),
        (
            writing(TEACHER, follows("t.data = t.data + s.data  # HERE"), FSDP_NET),
            writing(
                TEACHER,
                follows("t.lerp_(s, 0.1)"),
                FSDP_NET.replace("(block)", "(block)\nfully_shard(model.teacher)"),
            ),
        ),
        (
            writing(
                SCALE, "if self.training:\n    self.scale.data.copy_(h.mean(0))  # HERE\nh = h * self.scale", FSDP_NET
            ),
            writing(SCALE, "self.scale.data.copy_(h.mean(0))\nh = h * self.scale", FSDP_NET),
        ),
    ],
    "rank-decides-alone": [
        (within(SKIPS), within(AGREES)),
        (within(SKIPS), within(SKIPS.replace("loader", "range(9)").replace("x, y", "i"))),
        (
            within(
                "for batch in loader:\n    if batch is None:  # HERE\n        continue\n    model(batch).backward()"
            ),
            within("for batch in loader:\n    if step is None:\n        continue\n    model(batch).backward()"),
        ),
        (
            within("for x, y in loader:\n    loss = model(x)\n    if loss < 9:  # HERE\n        loss.backward()"),
            within(
                "for x, y in loader:\n    loss = model(x)\n    if loss < 9:\n        print(loss)\n    loss.backward()"
            ),
        ),
        (
            within(STEPS.format("if loss < 9:  # HERE\n        dist.all_reduce(count)")),
            within(STEPS.format("if epoch < 9:\n        dist.all_reduce(count)")),
        ),
        (
            within(
                "def step(batch):\n    loss = model(batch)\n    if loss.isnan().any():  # HERE\n        return\n"
                "    loss.backward()"
            ),
            within(
                "def step(batch):\n    loss = model(batch)\n    if mean_of(loss).isnan():\n        return\n"
                "    loss.backward()"
            ),
        ),
        (
            "from accelerate import Accelerator\naccelerator = Accelerator()\nmodel = accelerator.prepare(Net())\n"
            "for batch in loader:\n    if batch['y'].sum() == 0:  # HERE\n        continue\n"
            "    accelerator.backward(model(batch))\n",
            "from accelerate import Accelerator\naccelerator = Accelerator()\nmodel = accelerator.prepare(Net())\n"
            "for batch in loader:\n    if batch['y'].shape[0] < 8:\n        continue\n"
            "    accelerator.backward(model(batch))\n",
        ),
        (
            within(
                "for x, y in loader:\n    try:\n        model(x).backward()\n"
                "    except torch.cuda.OutOfMemoryError:  # HERE\n        torch.cuda.empty_cache()"
            ),
            within(
                "for x, y in loader:\n    try:\n        model(x).backward()\n"
                "    except torch.cuda.OutOfMemoryError:\n        print(x.shape)\n        raise"
            ),
        ),
        (
            "import lightning as L\n\nclass Stops(L.Callback):\n    def on_train_batch_end(self, trainer, *rest):\n"
            "        if trainer.is_global_zero and asked():\n            trainer.should_stop = True  # HERE\n",
            "import lightning as L\n\nclass Stops(L.Callback):\n    def on_train_batch_end(self, trainer, *rest):\n"
            "        if trainer.is_global_zero and asked():\n            trainer.should_stop = True\n"
            "        trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)\n",
        ),
        (
            "from accelerate import Accelerator\naccelerator = Accelerator()\n"
            "net, loader = accelerator.prepare(make(), loader)\nfor batch in loader:\n"
            "    loss = net(other(batch)).loss\n"
            "    if loss.isnan():  # HERE\n        continue\n    accelerator.backward(loss)\n",
            "from accelerate import Accelerator\naccelerator = Accelerator()\n"
            "net, loader = accelerator.prepare(make(), loader)\nfor batch in loader:\n"
            "    loss = net(other(batch)).loss\n"
            "    if accelerator.gather(loss).isnan().any():\n        continue\n    accelerator.backward(loss)\n",
        ),
        (within(NO_TARGET), within(NO_TARGET.replace("torch.zeros((), requires_grad=True)  # HERE", "out.sum() * 0"))),
        (
            within(VALIDATION + EVALUATE + STOPS),
            within(VALIDATION + EVALUATE.replace("    return", "    total = all_reduced(total)\n    return") + STOPS),
        ),
        (
            within(VALIDATION + EVALUATE + STOPS),
            within(VALIDATION.replace("sampler=DistributedSampler(test)", "batch_size=8") + EVALUATE + STOPS),
        ),
    ],
    "rank-steps-scheduler-alone": [
        (
            within(f"{PLATEAU}{VALIDATION}{EVALUATE}schedule.step(evaluate(model, test_loader))  # HERE"),
            within(
                f"{PLATEAU}{VALIDATION}{EVALUATE}loss = torch.tensor(evaluate(model, test_loader))\n"
                "dist.all_reduce(loss)\nschedule.step(loss)"
            ),
        ),
        (
            within(f"{PLATEAU}{VALIDATION}{EVALUATE}schedule.step(evaluate(model, test_loader))  # HERE"),
            within(f"{PLATEAU}{EVALUATE}schedule.step(evaluate(model, test_loader))"),
        ),
    ],
    "collective-in-join": [
        (
            within(f"{JOINED}):\n    for x in batches:\n        dist.all_reduce(x)  # HERE"),
            within(f"{JOINED}):\n    for x in batches:\n        print(x)\ndist.all_reduce(x)"),
        ),
        (
            within("with model.join():\n    for x in batches:\n        dist.all_reduce(x)  # HERE"),
            within(
                "with model.join(throw_on_early_termination=True):\n    for x in batches:\n        dist.all_reduce(x)"
            ),
        ),
        (
            within(f"def show(x):\n    dist.all_reduce(x)\n\n{JOINED}):\n    show(x)  # HERE"),
            within(f"def show(x):\n    dist.all_reduce(x, group=pair)\n\n{JOINED}):\n    show(x)"),
        ),
    ],
    "read-before-written": [
        (
            within("if rank == 0:\n    torch.save(x, path)\nx = torch.load(path, 'cpu', weights_only=True)  # HERE"),
            within(
                "if rank == 0:\n    torch.save(x, path)\ndist.barrier()\nx = torch.load(path, 'cpu', weights_only=True)"
            ),
        ),
        (
            within(
                "dist.barrier()\nif rank == 0:\n    with open('a.json', 'w') as f:\n        json.dump(x, f)\n"
                "x = json.load(open('a.json'))  # HERE"
            ),
            within(
                "if rank == 0:\n    with open('a.json', 'w') as f:\n        json.dump(x, f)\nwait_for_everyone()\n"
                "x = json.load(open('a.json'))"
            ),
        ),
        (
            within("x = torch.load(path, 'cpu', weights_only=True)\nif rank == 0:\n    os.remove(path)  # HERE"),
            within(
                "x = torch.load(path, 'cpu', weights_only=True)\ndist.barrier()\nif rank == 0:\n    os.remove(path)"
            ),
        ),
        (
            within("if rank == 0:\n    Path(p).write_text('x')\nelse:\n    print(Path(p).read_text())  # HERE"),
            within("if rank == 0:\n    Path(p).write_text('x')\n    print(Path(p).read_text())"),
        ),
        (
            within("if rank == 0:\n    tokenizer.save_pretrained(p)\ntokenizer = Tokenizer.from_pretrained(p)  # HERE"),
            within("if rank == 0:\n    tokenizer.save_pretrained(p)\ntokenizer = Tokenizer.from_pretrained(q)"),
        ),
    ],
    "ranks-started-twice": [
        (
            SPAWNS.replace("Net()", "Net(os.environ['LOCAL_RANK'])").replace("nprocs=size)", "nprocs=size)  # HERE"),
            SPAWNS,
        ),
        (
            SPAWNS.replace("rank=rank", "rank=int(os.environ['RANK'])").replace("nprocs=size)", "nprocs=size)  # HERE"),
            SPAWNS.replace("    Net()", "    os.environ['RANK'] = str(rank)\n    Net(os.environ['RANK'])"),
        ),
        (
            SPAWNS.replace("os.cpu", "torch.cuda.device")
            .replace("import os", "import os, torch")
            .replace("nprocs=size)", "nprocs=size)  # HERE"),
            SPAWNS.replace("os.cpu", "torch.cuda.device")
            .replace("import os", "import os, torch")
            .replace("Net()", "Net().to(rank)"),
        ),
        (
            SPAWNS.replace("Net()", "Net(os.environ['LOCAL_RANK'])").replace("nprocs=size)", "nprocs=size)  # HERE"),
            SPAWNS.replace("Net()", "Net(os.environ['LOCAL_RANK'])").replace(
                "    mp", "    if 'LOCAL_RANK' not in os.environ:\n        mp"
            ),
        ),
    ],
    "rank-0-evaluation": [
        (
            within("if rank == 0:\n    with torch.no_grad():\n        out = model(x)  # HERE", FSDP2_MODEL),
            within("with torch.no_grad():\n    out = model(x)\nif rank == 0:\n    print(out)", FSDP2_MODEL),
        ),
        (
            within("def evaluate(net):\n    return net(x)\n\nif rank == 0:\n    evaluate(model)  # HERE", FSDP1_MODEL),
            within("def evaluate(net):\n    return net(x)\n\nevaluate(model)", FSDP1_MODEL),
        ),
        (
            within("norm = nn.BatchNorm2d(3)\nif rank == 0:\n    evaluate(model, test)  # HERE"),
            within("norm = nn.BatchNorm2d(3)\nif rank == 0:\n    evaluate(model.module, test)"),
        ),
    ],
    "download-race": [
        (
            within("train = datasets.MNIST('data', download=True)  # HERE"),
            within("if rank == 0:\n    datasets.MNIST('data', download=True)\ndist.barrier()"),
        ),
        (
            HEAD + "if rank == 0:\n    datasets.MNIST('data', download=True)  # HERE\ntrain = datasets.MNIST('data')\n"
            "dist.destroy_process_group()\n",
            within("if rank == 0:\n    datasets.MNIST('data', download=True)\ndist.barrier()\ndatasets.MNIST('data')"),
        ),
        (
            within("if rank == 0:\n    datasets.MNIST('data', download=True)  # HERE\ntrain = datasets.MNIST('data')"),
            within("if rank == 0:\n    datasets.MNIST('data', download=True)\nwait_for_all()\ndatasets.MNIST('data')"),
        ),
    ],
    "moved-before-sharding": [
        (
            within("", "model = Net().to(device)  # HERE\nmodel = FSDP(model, auto_wrap_policy=policy)\n"),
            within("", "model = Net()\nmodel = FSDP(model, auto_wrap_policy=policy, device_id=local_rank)\n"),
        ),
        (
            within("", "model = Net()\nmodel.cuda()  # HERE\n" + FSDP2_MODEL),
            within(
                "", "with torch.device('meta'):\n    model = Net()\n" + FSDP2_MODEL + "model.to_empty(device='cuda')\n"
            ),
        ),
        (
            within("", f"model = Net().to(device)  # HERE\n{UNITS}"),
            within("", f"model = Net()\n{UNITS}model.to(device)\n"),
        ),
        (
            within("", f"model = Net().to(device)  # HERE\n{UNITS}"),
            within("", "model = Net()\n" + UNITS.replace("fully_shard(part)", "fully_shard(part.to(device))")),
        ),
        (
            within("", "model = FSDP(Net().cuda(), auto_wrap_policy=policy)  # HERE\n"),
            within("", "model = FSDP(Net().to(torch.bfloat16), auto_wrap_policy=policy)\n"),
        ),
    ],
    "optimizer-before-wrapping": [
        (
            within(
                "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
                "model = Net()\noptimizer = torch.optim.SGD(model.parameters())  # HERE\n"
                "model = FSDP(model, auto_wrap_policy=policy)\n",
            ),
            within("schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)", FSDP1_MODEL),
        ),
        (
            within(
                "",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # HERE\n"
                + FSDP2_MODEL.replace("optimizer = make(model)\n", ""),
            ),
            within("", FSDP2_MODEL + "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"),
        ),
        (
            within("", f"optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # HERE\n{UNITS}"),
            within("", f"{UNITS}optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"),
        ),
        (
            within(
                "",
                "optimizer = torch.optim.SGD(net.parameters())  # HERE\nmodel = FSDP(net, auto_wrap_policy=policy)\n",
            ),
            within("", "optimizer = torch.optim.SGD(net.parameters())\nmodel = DDP(net)\n"),
        ),
    ],
    "one-shard-unit": [
        (within("", "model = FSDP(net)  # HERE\n"), within("", "model = FSDP(net, auto_wrap_policy=policy)\n")),
        (within("", "fully_shard(model)  # HERE\n"), within("", FSDP2_MODEL)),
    ],
    "module-of-sharded": [
        (within("net = model.module  # HERE", FSDP2_MODEL), within("net = model", FSDP2_MODEL)),
        (within("out = model.module(x)  # HERE", FSDP1_MODEL), within("out = model(x)", FSDP1_MODEL)),
    ],
    "no-sync-of-fsdp2": [
        (
            within("with model.no_sync():  # HERE\n    model(x)", FSDP2_MODEL),
            within("model.set_requires_gradient_sync(False)\nmodel(x)", FSDP2_MODEL),
        ),
    ],
    "device-id-int": [
        (
            HEAD.replace('"nccl")', '"nccl", device_id=local_rank)  # HERE') + TAIL,
            HEAD.replace('"nccl")', '"nccl", device_id=torch.device("cuda", local_rank))') + TAIL,
        ),
    ],
    "hard-coded-world-size": [
        (
            "import torch.multiprocessing as mp\nranks = 4  # HERE\nmp.spawn(main, nprocs=ranks)\n",
            "import torch, torch.multiprocessing as mp\nmp.spawn(main, nprocs=torch.cuda.device_count())\n",
        ),
        (
            "import os\nos.environ['WORLD_SIZE'] = '2'  # HERE\n",
            "import os\nos.environ.setdefault('WORLD_SIZE', '1')\n",
        ),
    ],
    "hard-coded-port": [
        (
            "import os\nPORT = '12355'  # HERE\n\ndef setup():\n    os.environ['MASTER_PORT'] = PORT\n",
            "import os\n\ndef setup():\n    os.environ.setdefault('MASTER_PORT', free_port())\n",
        ),
        (
            within("dist.init_process_group('gloo', init_method='tcp://127.0.0.1:23456')  # HERE"),
            within("dist.init_process_group('gloo', init_method='env://')"),
        ),
    ],
    "device-zero": [
        (within("x = x.to('cuda:0')  # HERE"), within("x = x.to(device)")),
        (
            within("first = 'cuda:0' if torch.cuda.is_available() else 'cpu'  # HERE\nx, y = x.to(first), y.to(first)"),
            within("other = f'cuda:{local_rank}'\nx, y = x.to(other), y.to(other)"),
        ),
        (within("os.environ['CUDA_VISIBLE_DEVICES'] = '0'  # HERE"), within("os.environ.get('CUDA_VISIBLE_DEVICES')")),
        (within("torch.cuda.set_device(0)  # HERE"), within("if rank == 0:\n    print(torch.cuda.memory_summary(0))")),
    ],
    "no-set-device": [
        (
            HEAD.replace("torch.cuda.set_device(local_rank)", "") + "model = DDP(Net().cuda())  # HERE\n" + TAIL,
            HEAD + "model = DDP(Net().cuda())\n" + TAIL,
        ),
    ],
    "sharded-state-dict": [
        (
            within("if rank == 0:\n    model.save_pretrained('out')  # HERE", FSDP2_MODEL),
            within(
                "state = get_model_state_dict(model)\nif rank == 0:\n"
                "    model.save_pretrained('out', state_dict=state)",
                FSDP2_MODEL,
            ),
        ),
        (
            within(
                "state = {'model': model.state_dict()}  # HERE\nif rank == 0:\n    torch.save(state, path)", FSDP2_MODEL
            ),
            within("state = get_model_state_dict(model)\nif rank == 0:\n    torch.save(state, path)", FSDP2_MODEL),
        ),
        (
            "from torch.distributed.checkpoint.state_dict import get_model_state_dict\n"
            + within("if rank == 0:\n    torch.save(model.state_dict(), path)  # HERE", UNITS),
            "from torch.distributed.checkpoint.state_dict import get_model_state_dict as whole\n"
            + within("state = whole(model)\nif rank == 0:\n    torch.save(state, path)", UNITS),
        ),
        (
            within("if rank == 0:\n    torch.save(optimizer.state_dict(), path)  # HERE", FSDP1_MODEL),
            within("torch.save(optimizer.state_dict(), f'optimizer-{rank}.pt')", FSDP1_MODEL),
        ),
    ],
    "save-on-every-rank": [
        (
            within("model.module.save_pretrained('out')  # HERE"),
            within("if rank == 0:\n    model.module.save_pretrained('out')"),
        ),
        (
            within("model.module.save_pretrained(save_directory='out')  # HERE"),
            within("model.module.save_pretrained('out', is_main_process=rank == 0)"),
        ),
        (
            within("torch.save(model.state_dict(), 'model.pt')  # HERE"),
            within("if rank == 0:\n    torch.save(model.state_dict(), 'model.pt')"),
        ),
        (
            within("def save(path):\n    torch.save(model.module.state_dict(), path)  # HERE\n\nsave('model.pt')"),
            within(
                "def save(path):\n    torch.save(model.module.state_dict(), path)\n\nif rank == 0:\n"
                "    save('model.pt')"
            ),
        ),
        (
            within(
                "class Saver:\n    def save(self):\n        torch.save(model.module.state_dict(), 'x.pt')  # HERE\n\n"
                "Saver().save()"
            ),
            within(
                "class Saver:\n    def save(self):\n        torch.save(model.module.state_dict(), 'x.pt')\n\n"
                "if rank == 0:\n    Saver().save()"
            ),
        ),
    ],
    "load-without-map-location": [
        (
            within("state = torch.load(path, weights_only=True)  # HERE\nmodel.load_state_dict(state['model'])"),
            within("state = torch.load(path, 'cpu', weights_only=True)\nmodel.load_state_dict(state['model'])"),
        ),
    ],
    "load-without-weights-only": [
        (
            within("state = torch.load(path, map_location='cpu')  # HERE"),
            within("state = torch.load(path, map_location='cpu', weights_only=True)"),
        ),
    ],
    "optimizer-not-saved": [
        (
            within(f"{OUTER}if rank == 0:\n    torch.save({{'o': optimizer.state_dict()}}, path)"),
            within(f"{OUTER}if rank == 0:\n    torch.save([o.state_dict() for o in (optimizer, outer)], path)"),
        ),
    ],
    "optim-state-dict-order": [
        (
            within("state = FSDP.optim_state_dict_to_load(saved['optimizer'], model, optimizer)  # HERE", FSDP1_MODEL),
            within("state = FSDP.optim_state_dict_to_load(model, optimizer, saved['optimizer'])", FSDP1_MODEL),
        ),
    ],
    "unscaled-fp16": [
        (
            within("with torch.autocast('cuda', dtype=torch.float16):  # HERE\n    loss = model(x)\nloss.backward()"),
            within("with torch.autocast('cuda', dtype=torch.bfloat16):\n    loss = model(x)\nloss.backward()"),
        ),
        (
            within("policy = MixedPrecision(param_dtype=torch.float16)  # HERE\nmodel(x).backward()"),
            within("policy = MixedPrecision(param_dtype=torch.float16)\nscaler.scale(model(x)).backward()"),
        ),
        (within("model.half()  # HERE\nmodel(x).backward()"), within("teacher.half()\nmodel(x).backward()")),
    ],
    "scaler-of-shards": [
        (
            within("scaler = torch.amp.GradScaler('cuda')  # HERE\nscaler.scale(loss).backward()", FSDP1_MODEL),
            within("scaler = torch.amp.GradScaler('cuda')\nscaler.scale(loss).backward()", FSDP2_MODEL),
        ),
    ],
    "clip-scaled-gradients": [
        (
            within("scaler.scale(loss).backward()\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE"),
            within(
                "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
                "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
            ),
        ),
    ],
    "clip-of-shards": [
        (
            within("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # HERE", FSDP1_MODEL),
            within("model.clip_grad_norm_(1.0)", FSDP1_MODEL),
        ),
        (
            within("model.clip_grad_norm_(1.0)  # HERE", FSDP2_MODEL),
            within("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", FSDP2_MODEL),
        ),
    ],
    "averaged-twice": [
        (
            within("loss = model(x)\nloss = loss / world_size  # HERE\nloss.backward()"),
            within("loss = model(x)\nloss.backward()\nloss = loss / world_size"),
        ),
        (
            within("scaler.scale(model(x) / dist.get_world_size()).backward()  # HERE"),
            within("loss = model(x) + summed(balance) / dist.get_world_size()\nscaler.scale(loss).backward()"),
        ),
        (
            within("model(x).backward()\nfor p in model.parameters():\n    dist.all_reduce(p.grad)  # HERE"),
            within("model(x).backward()\nfor p in router.parameters():\n    dist.all_reduce(p.grad)"),
        ),
    ],
    "local-batchnorm": [
        (
            within("net = nn.BatchNorm2d(3)  # HERE\ntrain_loader = DataLoader(data, batch_size=4, sampler=sampler)"),
            within("net = nn.BatchNorm2d(3)\ntrain_loader = DataLoader(data, batch_size=64, sampler=sampler)"),
        ),
    ],
    "bf16-on-t4": [
        (
            within("# on Kaggle's T4 x2\nwith torch.autocast('cuda', torch.bfloat16):  # HERE\n    model(x)"),
            within("with torch.autocast('cuda', torch.bfloat16):\n    model(x)"),
        ),
        (
            within("arguments = TrainingArguments(bf16=True)  # HERE on a T4"),
            within("arguments = TrainingArguments(fp16=True)  # on a T4"),
        ),
        (
            within("accelerator = Accelerator(mixed_precision='bf16')  # HERE on a T4"),
            within("accelerator = Accelerator(mixed_precision='fp16')  # on a T4"),
        ),
    ],
    "device-map-under-torchrun": [
        (
            within("base = AutoModelForCausalLM.from_pretrained(name, device_map='auto')  # HERE"),
            within("base = AutoModelForCausalLM.from_pretrained(name, device_map={'': local_rank})"),
        ),
        (
            "import os\nrank = int(os.environ['LOCAL_RANK'])\n"
            "base = AutoModel.from_pretrained(name, device_map='balanced')  # HERE\n",
            "import os\nrank = int(os.environ['LOCAL_RANK'])\nbase = AutoModel.from_pretrained(name)\n",
        ),
    ],
    "four-bit-under-fully-shard": [
        (
            within("how = BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16)  # HERE", FSDP2_MODEL),
            within("how = BitsAndBytesConfig(load_in_4bit=True)", FSDP2_MODEL),
        ),
        (
            within("layer = Linear4bit(8, 8, quant_storage=torch.float16)  # HERE", FSDP2_MODEL),
            within("layer = Linear4bit(8, 8, quant_storage=torch.float16)"),
        ),
    ],
    "sparse-gradients-sharded": [
        (
            within("rows = nn.EmbeddingBag(50_000, 64, sparse=True)  # HERE", FSDP2_MODEL),
            within("rows = nn.EmbeddingBag(50_000, 64)", FSDP2_MODEL),
        ),
    ],
    "double-backward-sharded": [
        (
            within("slope = torch.autograd.grad(loss, x, create_graph=True)  # HERE", FSDP2_MODEL),
            within("slope = torch.autograd.grad(loss, x, create_graph=True)", DDP_MODEL),
        ),
        (
            within("slope = torch.autograd.grad(loss, x, create_graph=model.training)  # HERE", FSDP1_MODEL),
            within("slope = torch.autograd.grad(loss, x)", FSDP1_MODEL),
        ),
    ],
    "stream-without-length": [
        (
            within(f"{NUMBERS}  # HERE{READS}    return Numbers(), test"),
            within(f"{NUMBERS}{READS}    return Stream(Numbers(), 100), test"),
        ),
    ],
    "labels-shifted-twice": [
        (
            f"{CAUSAL}out = model(input_ids=ids[:, :-1], labels=ids[:, 1:])  # HERE\n",
            f"{CAUSAL}out = model(input_ids=ids, labels=ids)\n",
        ),
        (
            f"{CAUSAL}x, y = ids[:, :-1], ids[:, 1:].contiguous()\nloss = model(x, labels=y).loss  # HERE\n",
            f"{CAUSAL}x, y = ids[:, :-1], ids[:, 1:]\nloss = F.cross_entropy(model(x).logits, y)\n",
        ),
    ],
    "mean-loss-accumulated": [
        (
            f"{CAUSAL}{PADDED}for batch in loader:\n    loss = model(**batch).loss\n"
            "    (loss / accumulation_steps).backward()  # HERE\n",
            f"{CAUSAL}{PADDED}for batch in loader:\n    loss = model(**batch, num_items_in_batch=n).loss\n"
            "    loss.backward()\n",
        ),
        (
            "for x, y in loader:\n    loss = F.cross_entropy(model(x), y, ignore_index=0)\n"
            "    loss = loss / accum  # HERE\n    loss.backward()\n",
            "for x, y in loader:\n    loss = F.cross_entropy(model(x), y, ignore_index=0, reduction='sum')\n"
            "    loss = loss / tokens\n    loss.backward()\n",
        ),
        (
            f"{CAUSAL}{PADDED}for batch in loader:\n    loss = model(**batch).loss\n"
            "    (loss / accumulation_steps).backward()  # HERE\n",
            f"{CAUSAL}x = tokenizer(texts, padding='max_length', max_length=128)\nfor batch in loader:\n"
            "    loss = model(**batch).loss\n    (loss / accumulation_steps).backward()\n",
        ),
    ],
    "frozen-base-in-checkpoints": [
        (
            f"{PEFT}for epoch in range(9):\n    torch.save(model.state_dict(), f'{{epoch}}.pt')  # HERE\n",
            f"{PEFT}for epoch in range(9):\n    model.save_pretrained(f'{{epoch}}')\n",
        ),
        (
            f"{PEFT}for epoch in range(9):\n    state = {{'model': model.state_dict()}}\n"
            "    torch.save(state, 'x.pt')  # HERE\n",
            f"{PEFT}for epoch in range(9):\n    state = {{'model': get_peft_model_state_dict(model)}}\n"
            "    torch.save(state, 'x.pt')\n",
        ),
        (
            f"modules_to_save = ['score']\n{PEFT}for epoch in range(9):\n"
            "    torch.save(model.state_dict(), f'{epoch}.pt')  # HERE\n",
            f"{PEFT}for epoch in range(9):\n    model.save_pretrained(f'{{epoch}}')\n",
        ),
    ],
    "reentrant-checkpointing-under-ddp": [
        (
            within(
                "net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': True})  # HERE",
                UNUSED,
            ),
            within("net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})", UNUSED),
        ),
        (
            within("y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)  # HERE", UNUSED),
            within("y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)"),
        ),
    ],
    "item-every-step": [
        (
            within("for x in loader:\n    loss = model(x)\n    loss.backward()\n    total += loss.item()  # HERE"),
            within(
                "for x in loader:\n    loss = model(x)\n    loss.backward()\n    total += loss.detach()\n"
                "print(total.item())"
            ),
        ),
        (
            within(
                "for x in loader:\n    loss = model(x)\n    loss.backward()\n    if rank == 0:\n"
                "        print(loss.item())  # HERE"
            ),
            within(
                "for i, x in enumerate(loader):\n    loss = model(x)\n    loss.backward()\n"
                "    if i % 50 == 0 and rank == 0:\n        print(loss.item())"
            ),
        ),
        (
            within(
                "for step in range(9):\n    for micro in batches:\n        model(micro).backward()\n"
                "    optimizer.step()\n    print(loss.item())  # HERE"
            ),
            within(
                "for epoch in range(9):\n    for x in loader:\n        model(x).backward()\n"
                "        optimizer.step()\n    print(total.item())"
            ),
        ),
    ],
    "no-no-sync": [
        (
            within(
                "for i, x in enumerate(loader):\n    model(x).backward()  # HERE\n"
                "    if (i + 1) % 4 == 0:\n        optimizer.step()"
            ),
            within(
                "for i, x in enumerate(loader):\n    with model.no_sync():\n        model(x).backward()\n"
                "    if (i + 1) % 4 == 0:\n        optimizer.step()"
            ),
        ),
        (
            within(
                "for step in range(9):\n    for micro in range(accumulate_steps):\n"
                "        model(x).backward()  # HERE\n"
                "    optimizer.step()"
            ),
            within("for step in range(9):\n    model(x).backward()\n    optimizer.step()"),
        ),
    ],
    "data-parallel": [
        (
            "import torch\nmodel = torch.nn.DataParallel(Net())  # HERE\nmodel(x).backward()\n",
            within("model(x).backward()"),
        ),
    ],
    "no-destroy-process-group": [
        (HEAD.replace('"nccl")', '"nccl")  # HERE') + DDP_MODEL + LOOP, within(LOOP)),
        (
            "import torch.distributed as dist\n\ndef main():\n    dist.init_process_group('gloo')  # HERE\n\n"
            "if __name__ == '__main__':\n    main()\n",
            "import torch.distributed as dist\nfrom tools import cleanup\n\ndef main():\n"
            "    dist.init_process_group('gloo')\n"
            "    cleanup()\n\nif __name__ == '__main__':\n    main()\n",
        ),
        (
            "import torch.distributed as dist\n\ndef setup():\n    dist.init_process_group('gloo')  # HERE\n\n"
            "def main():\n    setup()\n\nmain()\n",
            "import torch.distributed as dist\n\ndef setup():\n    dist.init_process_group('gloo')\n",
        ),
    ],
    "replaced": [
        (
            "from torch.cuda.amp import GradScaler  # HERE\nscaler = GradScaler()\n",
            "try:\n    from torch.amp import GradScaler\nexcept ImportError:\n"
            "    from torch.cuda.amp import GradScaler\n",
        ),
        (
            "import torch\nwith torch.cuda.amp.autocast():  # HERE\n    pass\nwith torch.cuda.amp.autocast():\n"
            "    pass\n",
            "import torch\nwith torch.autocast('cuda'):\n    pass\n",
        ),
    ],
    "local-rank-argument": [
        (
            "import torch.distributed as dist\nparser.add_argument('--local_rank', type=int)  # HERE\n"
            "dist.init_process_group()\n",
            "import os, torch.distributed as dist\nlocal_rank = os.environ['LOCAL_RANK']\ndist.init_process_group()\n",
        ),
    ],
    "checkpoint-reentrant": [
        (
            "from torch.utils.checkpoint import checkpoint\ny = checkpoint(block, x)  # HERE\n",
            "from torch.utils.checkpoint import checkpoint\ny = checkpoint(block, x, use_reentrant=False)\n",
        ),
    ],
    "positions-not-split": [
        (
            within(
                "with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):  # HERE\n"
                "    loss = model(x, freqs_cis)",
                IN_CONTEXT,
            ),
            within(
                "with context_parallel(mesh, buffers=[x, y, freqs_cis], buffer_seq_dims=[1, 1, 0]):\n"
                "    loss = model(x, freqs_cis)",
                IN_CONTEXT,
            ),
        ),
    ],
    "router-seeded-by-rank": [
        (
            within(f"torch.manual_seed(seed + rank)  # HERE\nmodel = Model()\n{DISPATCH}", ROUTED),
            within(f"torch.manual_seed(seed)\nmodel = Model()\ntorch.manual_seed(seed + rank)\n{DISPATCH}", ROUTED),
        ),
    ],
    "model-not-split": [
        (within(STAGES), within(STAGES.replace("self.rnn", "self.blocks").replace("  # HERE", ""))),
        (within(PLACED), within(PLACED.replace("self.rnn", "self.positions").replace("  # HERE", ""))),
        (within(SPLIT), within(SPLIT.replace("head", "down").replace("rnn", "up").replace("  # HERE", ""))),
    ],
    "all-experts-on-a-rank": [
        (within(EXPERTS.replace("range(len(sizes))])", IN_A_LOOP)), within(EXPERTS)),
        (
            within(EXPERTS.replace("Experts(count)\n", "nn.ModuleList(made)  # HERE\n")),
            within(EXPERTS),
        ),
    ],
    "changed-after-ddp": [
        (
            within(f"for p in net.body.parameters():\n    p.requires_grad = True  # HERE\n{LOOP}", FROZEN),
            within(LOOP, FROZEN.replace("model = DDP(net)", "net.body.requires_grad_(True)\nmodel = DDP(net)")),
        ),
        (
            within(f"model.module.body.requires_grad_(True)  # HERE\n{LOOP}", FROZEN),
            within(f"net.body.requires_grad_(True)\nmodel = DDP(net)\n{LOOP}", FROZEN),
        ),
        (
            within(
                f"def freeze(part, frozen):\n    part.requires_grad_(not frozen)\n\nnet.requires_grad_(False)\n"
                f"model = DDP(net)\nfreeze(net.head, frozen=False)  # HERE\n{LOOP}",
                "",
            ),
            within(
                f"def freeze(part, frozen):\n    part.requires_grad_(not frozen)\n\nnet.requires_grad_(False)\n"
                f"freeze(net.head, frozen=False)\nmodel = DDP(net)\nfreeze(net.head, frozen=False)\n{LOOP}",
                "",
            ),
        ),
        (
            within(f"model.module.body.requires_grad_(False)  # HERE\n{LOOP}"),
            within(f"model.module.body.requires_grad_(False)\n{LOOP}", UNUSED),
        ),
        (
            within(f"model.module.head = nn.Linear(8, 2)  # HERE\n{LOOP}"),
            within(f"model.module.scale = 2.0\n{LOOP}"),
        ),
    ],
    "requires-grad-of-module": [
        (
            within("net = nn.Sequential(Body(), nn.Linear(8, 2))\nnet[1].requires_grad = False  # HERE"),
            within("net = nn.Sequential(Body(), nn.Linear(8, 2))\nnet[1].weight.requires_grad = False"),
        ),
        (
            within(f"{BODY}net = Body()\nnet.first.requires_grad = False  # HERE"),
            within(f"{BODY}net = Body()\nnet.scale.requires_grad = False"),
        ),
    ],
    "ddp-bypassed": [
        (
            within(LOOP.replace("model(x)", "model.module(x)").replace("()\n", "()  # HERE\n", 1)),
            within(f"with torch.no_grad():\n    print(model.module(x))\n{LOOP}"),
        ),
        (
            within("core = model.module\nfor x, y in loader:\n    loss = core.loss(x, y)  # HERE\n    loss.backward()"),
            within(
                "core = model.module\nfor x, y in loader:\n    loss = core.loss(x, y)\n    loss.backward()\n"
                "    for p in core.parameters():\n        dist.all_reduce(p.grad)"
            ),
        ),
        (
            within("for x, y in loader:\n    loss = net(x)  # HERE\n    loss.backward()", "model = DDP(net)\n"),
            within("for x, y in loader:\n    loss = teacher(x) - model(x)\n    loss.backward()", "model = DDP(net)\n"),
        ),
        (
            within(
                "for x, y in loader:\n    fake = model.module(x)  # HERE\n    loss = judge(fake)\n    loss.backward()"
            ),
            within(
                "for x, y in loader:\n    fake = model.module(x).detach()\n    loss = judge(fake)\n    loss.backward()"
            ),
        ),
    ],
    "branch-under-ddp": [
        (
            within(f"{BRANCHES}model = DDP(Either())\n{LOOP}", ""),
            within(f"{BRANCHES.replace('  # HERE', '')}model = DDP(Either(), find_unused_parameters=True)\n{LOOP}", ""),
        ),
        (
            within(f"{BRANCHES}model = DDP(Either(), static_graph=True)\n{LOOP.replace('(x)', '(x, y)')}", ""),
            within(f"{BRANCHES.replace('  # HERE', '')}model = DDP(Either(), static_graph=True)\n{LOOP}", ""),
        ),
    ],
    "step-without-sync": [
        (
            within(ACCUMULATES.format("i % every == 0", "  # HERE")),
            within(ACCUMULATES.format("(i + 1) % every == 0 or i + 1 == len(loader)", "")),
        ),
        (
            within(ACCUMULATES_LATE.format("loss = model(x).sum()", "{}  # HERE").format(SYNCS)),
            within(ACCUMULATES_LATE.format(SYNCS, "loss = model(x).sum()")),
        ),
    ],
    "tied-weights-parted": [
        (
            within(
                f"{TIED}model = Tied()\nfor unit in [model.embed, model.head, *model.blocks]:\n"
                "    fully_shard(unit)  # HERE\nfully_shard(model)",
                "",
            ),
            within(
                f"{TIED}model = Tied()\nfor unit in [*model.blocks]:\n    fully_shard(unit)\nfully_shard(model)", ""
            ),
        ),
        (
            within(f"{TIED}model = Tied()\nfully_shard(model.embed)  # HERE\nfully_shard(model)", ""),
            within(f"{TIED}model = Tied()\nfully_shard([model.embed, model.head])\nfully_shard(model)", ""),
        ),
        (
            within(f"{TIED}with torch.device('meta'):\n    model = Tied()\nmodel.to_empty(device=device)  # HERE", ""),
            within(
                f"{TIED}with torch.device('meta'):\n    model = Tied()\nmodel.to_empty(device=device)\n"
                "model.head.weight = model.embed.weight",
                "",
            ),
        ),
    ],
    "accelerate-scheduler": [
        (
            f"{ACCELERATE}scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n{PREPARES}"
            "for epoch in range(9):\n    for x in loader:\n        accelerator.backward(model(x))\n"
            "        optimizer.step()\n    scheduler.step()  # HERE\n",
            f"{ACCELERATE}{PREPARES.replace(', scheduler', '')}"
            "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
            "for epoch in range(9):\n    for x in loader:\n        accelerator.backward(model(x))\n"
            "        optimizer.step()\n    scheduler.step()\n",
        ),
        (
            f"{ACCELERATE}{PREPARES.replace(', scheduler', '')}steps = 3 * len(loader)\n"
            "schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)  # HERE\n"
            "schedule = accelerator.prepare(schedule)\nfor x in loader:\n    accelerator.backward(model(x))\n"
            "    optimizer.step()\n    schedule.step()\n",
            f"{ACCELERATE}steps = 3 * len(loader)\nschedule = get_linear_schedule_with_warmup(optimizer, 0, steps)\n"
            f"{PREPARES.replace('scheduler', 'schedule')}for x in loader:\n    accelerator.backward(model(x))\n"
            "    optimizer.step()\n    schedule.step()\n",
        ),
    ],
    "accelerate-shards-twice": [
        (
            "from torch.utils.data import DataLoader, DistributedSampler\n"
            f"loader = DataLoader(data, sampler=DistributedSampler(data))  # HERE\n{ACCELERATE}{PREPARES}",
            f"from torch.utils.data import DataLoader\nloader = DataLoader(data, shuffle=True)\n{ACCELERATE}{PREPARES}",
        ),
    ],
    "accelerate-accumulation": [
        (
            f"{ACCELERATE.replace('()', '(gradient_accumulation_steps=4)')}{PREPARES}for x in loader:\n"
            "    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n"
            "        optimizer.step()\n        model.zero_grad()  # HERE\n",
            f"{ACCELERATE.replace('()', '(gradient_accumulation_steps=4)')}{PREPARES}for x in loader:\n"
            "    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n"
            "        optimizer.step()\n        optimizer.zero_grad()\n",
        ),
        (
            f"{ACCELERATE.replace('()', '(gradient_accumulation_steps=4)  # HERE')}{PREPARES}"
            "for x in loader:\n    accelerator.backward(model(x))\n    optimizer.step()\n",
            f"{ACCELERATE.replace('()', '(gradient_accumulation_steps=4)')}{PREPARES}for x in loader:\n"
            "    with accelerator.accumulate(model):\n        accelerator.backward(model(x))\n"
            "        optimizer.step()\n",
        ),
    ],
    "split-seeded-by-rank": [
        (
            "from torch.utils.data import DistributedSampler\n"
            "sampler = DistributedSampler(data, size, rank=this, seed=args.seed + args.distributed_rank)  # HERE\n",
            "from torch.utils.data import DistributedSampler\n"
            "sampler = DistributedSampler(data, size, rank=this, seed=args.seed + args.lora_ranks)\n",
        ),
        (
            "from accelerate import Accelerator\nfrom accelerate.utils import set_seed\n"
            "from torch.utils.data import random_split\naccelerator = Accelerator()\n"
            "set_seed(1, device_specific=True)\ntrain, val = random_split(data, [9, 1])  # HERE\n",
            "from accelerate import Accelerator\nfrom accelerate.utils import set_seed\n"
            "from torch.utils.data import random_split\naccelerator = Accelerator()\n"
            "set_seed(1)\ntrain, val = random_split(data, [9, 1])\n",
        ),
        (
            within("sampler = DistributedSampler(data, seed=17 + rank)  # HERE"),
            within("sampler = DistributedSampler(data, seed=17)"),
        ),
        (
            within(
                "import random\nrows = list(range(100))\nrandom.shuffle(rows)  # HERE\nmine = rows[rank::world_size]"
            ),
            within("rows = torch.randperm(100).tolist()\nmine = rows[rank::world_size]"),
        ),
        (
            within("torch.manual_seed(1 + rank)\ntrain, val = torch.utils.data.random_split(data, [9, 1])  # HERE"),
            within("torch.manual_seed(1)\ntrain, val = torch.utils.data.random_split(data, [9, 1])"),
        ),
        (
            within(
                "def seed_all(seed):\n    torch.manual_seed(seed + dist.get_rank())\n\nseed_all(1)\n"
                "order = torch.randperm(100)  # HERE\ntrain, val = order[:90], order[90:]"
            ),
            within(
                "def seed_all(seed):\n    torch.manual_seed(seed + dist.get_rank())\n\nseed_all(1)\n"
                "order = torch.randperm(100, generator=torch.Generator().manual_seed(1))\n"
                "train, val = order[:90], order[90:]"
            ),
        ),
        (
            within(
                "import random\nrandom.seed(rank)\nrows = list(range(100))\nrandom.shuffle(rows)  # HERE\n"
                "train, val = rows[:90], rows[90:]"
            ),
            within(
                "import random\nrows = list(range(100))\nrandom.seed(1)\nrandom.shuffle(rows)\nrandom.seed(rank)\n"
                "train, val = rows[:90], rows[90:]"
            ),
        ),
    ],
    "stream-not-split": [
        (
            within(f"{STREAM}loader = DataLoader(Lines('a.txt'), batch_size=8, num_workers=2)  # HERE\n{LOOP}"),
            within(
                STREAM.replace("range(256)", "range(rank, 256, world_size)")
                + f"loader = DataLoader(Lines('a.txt'), batch_size=8)\n{LOOP}"
            ),
        ),
        (
            within(
                STREAM.replace("range(256)", "range(rank, 256, world_size)")
                + f"loader = DataLoader(Lines('a.txt'), batch_size=8, num_workers=2)  # HERE\n{LOOP}"
            ),
            within(f"{STREAM}test_loader = DataLoader(Lines('a.txt'), batch_size=8, num_workers=2)\n{LOOP}"),
        ),
    ],
    "unmatched-keys": [
        (
            within(
                "net = nn.Linear(8, 2)\nfast = torch.compile(net)\nif rank == 0:\n"
                "    torch.save(fast.state_dict(), path)\n"
                f"{LOADED}net.load_state_dict(state, strict=not args.lenient)  # HERE"
            ),
            within(
                "net = nn.Linear(8, 2)\nfast = torch.compile(net)\nif rank == 0:\n"
                f"    torch.save(net.state_dict(), path)\n{LOADED}net.load_state_dict(state, strict=not args.lenient)"
            ),
        ),
        (
            within(
                "if rank == 0:\n    torch.save({'model': model.state_dict()}, path)\nnet = nn.Linear(8, 2)\n"
                f"{LOADED}net.load_state_dict(state['model'], strict=False)  # HERE"
            ),
            within(
                "if rank == 0:\n    torch.save({'model': model.module.state_dict()}, path)\nnet = nn.Linear(8, 2)\n"
                f"{LOADED}net.load_state_dict(state['model'], strict=False)"
            ),
        ),
        (
            within(
                "if rank == 0:\n    torch.save(model.module.state_dict(), path)\n"
                f"{LOADED}model.load_state_dict({{k: v for k, v in state.items() if v.ndim}})  # HERE"
            ),
            within(
                "if rank == 0:\n    torch.save(model.module.state_dict(), path)\n"
                f"{LOADED}model.load_state_dict({{'module.' + k: v for k, v in state.items()}})"
            ),
        ),
    ],
    "bf16-updates-lost": [
        (
            within(f"{LOOP}", BF16_MODEL.replace("HERE", "lr=2e-5)  # HERE")),
            within(f"{LOOP}", BF16_MODEL.replace("HERE", "lr=3e-3)")),
        ),
        (
            within(
                LOOP,
                "parser.add_argument('--lr', type=float, default=1e-5)\n"
                + BF16_MODEL.replace("HERE", "lr=args.lr)  # HERE"),
            ),
            within(f"{LOOP}", BF16_MODEL.replace("HERE", "lr=2e-5)").replace(".to(torch.bfloat16)", "")),
        ),
    ],
    "loss-keeps-graph": [
        (
            within("for x in loader:\n    loss = model(x)\n    loss.backward()\n    total += loss  # HERE"),
            within("for x in loader:\n    loss = model(x)\n    loss.backward()\n    total += loss.detach()"),
        ),
        (
            within(
                "for x in loader:\n    loss = model(x)\n    scaler.scale(loss).backward()\n"
                "    losses.append(loss)  # HERE"
            ),
            within(
                "for x in loader:\n    losses = []\n    loss = model(x)\n    losses.append(loss)\n    loss.backward()"
            ),
        ),
        (
            within("for x in loader:\n    loss = model(x)\n    loss.backward()\n    total += loss * 2  # HERE"),
            within("for x in loader:\n    loss = model(x)\n    total += loss\n    loss.backward()\ntotal.backward()"),
        ),
    ],
    "divided-twice": [
        (
            within("mine = Subset(data, range(rank, 100, world_size))\nsampler = DistributedSampler(mine)  # HERE"),
            within("part = Subset(data, range(0, 100, 2))\nsampler = DistributedSampler(part)"),
        ),
        (
            within(f"{OWN_PART}sampler = DistributedSampler(Part(rows, rank, world_size), shuffle=False)  # HERE"),
            within(
                f"{OWN_PART}sampler = DistributedSampler(Part(rows, rank, world_size), num_replicas=1, rank=0, seed=0)"
            ),
        ),
    ],
    "accumulation-cleared": [
        (
            within(
                "for i, x in enumerate(loader):\n    optimizer.zero_grad()  # HERE\n    with model.no_sync():\n"
                "        (model(x) / accum_steps).backward()\n    last = (i + 1) % accum_steps == 0\n"
                "    if last:\n        optimizer.step()"
            ),
            within(
                "for i, x in enumerate(loader):\n    with model.no_sync():\n"
                "        (model(x) / accum_steps).backward()\n    if (i + 1) % accum_steps == 0:\n"
                "        optimizer.step()\n        optimizer.zero_grad()"
            ),
        ),
        (
            within(
                "for x in loader:\n    for micro in x.chunk(micro_batches):\n        optimizer.zero_grad()  # HERE\n"
                "        with model.no_sync():\n            model(micro).backward()\n    optimizer.step()"
            ),
            within(
                "for x in loader:\n    optimizer.zero_grad()\n    for micro in x.chunk(micro_batches):\n"
                "        with model.no_sync():\n            model(micro).backward()\n    optimizer.step()"
            ),
        ),
    ],
    "root-not-sharded": [
        (
            within(LOOP, FSDP2_PLAIN.replace("fully_shard(block)", "fully_shard(block)  # HERE")),
            within(LOOP, FSDP2_PLAIN.replace("optimizer =", "fully_shard(model)\noptimizer =")),
        ),
    ],
    "optimizer-of-other-model": [
        (
            within(
                f"critic = DDP(Critic())\nof_critic = torch.optim.SGD(model.parameters())  # HERE\n{LOOP}",
            ),
            within(f"critic = DDP(Critic())\nof_critic = torch.optim.SGD(critic.parameters())\n{LOOP}"),
        ),
    ],
    "data-split-in-tensor-parallel": [
        (
            within(f"{IN_TENSOR_PARALLEL}sampler = DistributedSampler(data, world_size, rank)  # HERE", ""),
            within(
                IN_TENSOR_PARALLEL.replace("(world_size,)", "(2, world_size // 2)")
                + "sampler = DistributedSampler(data, 2, mesh['dp'].get_local_rank())",
                "",
            ),
        ),
    ],
    "loaded-on-one-rank": [
        (
            within(f"if rank == 0:\n    model.module.load_state_dict(state)  # HERE\n{LOOP}"),
            within(f"if rank == 0:\n    net.load_state_dict(state)\nmodel = DDP(net)\n{LOOP}"),
        ),
        (
            within(f"if rank == 0:\n    optimizer.load_state_dict(state)  # HERE\n{LOOP}"),
            within(f"{LOOP}if rank == 0:\n    model.load_state_dict(best)\n    model.eval()"),
        ),
        (
            within(LOOP, "if rank == 0:\n    model.load_state_dict(state)  # HERE\n" + FSDP2_MODEL),
            within(LOOP, "model.load_state_dict(state)\n" + FSDP2_MODEL),
        ),
    ],
}
