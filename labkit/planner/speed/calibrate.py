"""Measures how fast the ranks of this machine compute a script's model; rates.py runs it as a plain torchrun script.

torchrun --standalone --nproc-per-node=2 calibrate.py script.py '{"small": 2, "large": 8, "argv": []}' answer.json

Each rank trains alone in its own process group, so nothing is communicated; all compute at the same time, so the
figures include contention for cores, caches and memory.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from labkit.planner.contract import prepared
from labkit.planner.model.samples import floating_type, longest

SECONDS, SPLIT_SECONDS, TURN, LEAST = 7.0, 2.0, 0.05, 3  # in total, per call and round; minimum rounds
MEETINGS = 8  # passes with the collective and without
SMALL = 1 << 10  # floats
COPIED = 64 << 20  # bytes
TENSORS, PAIRS = 32, 8


class Ranks:
    """Synchronizes the ranks through torchrun's store, because each has its own process group."""

    def __init__(self) -> None:
        self.store, self.rank, self.count = next(rendezvous("env://"))
        self.met = 0

    def gather(self, value: Any = None) -> list[Any]:
        """The values of all ranks, once all are here."""
        self.met += 1
        self.store.set(f"labkit/{self.met}/{self.rank}", json.dumps(value))
        every = self.store.multi_get([f"labkit/{self.met}/{rank}" for rank in range(self.count)])
        return [json.loads(each) for each in every]


def timed(
    calls: dict[str, Callable[[], object]], seconds: float, ranks: Ranks, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each call's repeats on all ranks. The calls alternate in rounds, so that other load affects them
    equally; in "alone" only rank 0 computes while the others wait without using a core."""
    mine: dict[str, list[float]] = {name: [] for name in calls}
    began, round = time.perf_counter(), 0
    while ranks.gather(round <= LEAST or time.perf_counter() - began < seconds)[0]:
        for name, call in calls.items():
            ranks.gather()
            end = time.perf_counter() + TURN
            while name != "alone" or ranks.rank == 0:
                before = time.perf_counter()
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                now = time.perf_counter()
                if round:  # the first is a warm-up
                    mine[name].append(now - before)
                if now >= end:
                    break
        round += 1
    every = ranks.gather(mine)
    return {name: [time for times in every for time in times[name]] for name in calls}


def waiting(blocks: nn.ModuleList, train: Callable[[], object], ranks: Ranks) -> float:
    """Seconds that a small collective costs computing ranks, which includes waiting for the slowest rank and the
    wake-up. One is added after the forward and the backward of every block."""
    store = PrefixStore("labkit/waiting", ranks.store)
    group: Any = ProcessGroupGloo(store, ranks.rank, ranks.count, timedelta(minutes=30))
    small, meets = torch.zeros(SMALL), False

    def meet(*_: object) -> None:
        if meets:
            group.allreduce([small]).wait()

    hooks = [add(meet) for block in blocks for add in (block.register_forward_hook, block.register_full_backward_hook)]
    times: dict[bool, list[float]] = {False: [], True: []}
    for meets in (False, True) * MEETINGS:
        ranks.gather()
        began = time.perf_counter()
        train()
        times[meets].append(time.perf_counter() - began)
    for hook in hooks:
        hook.remove()
    longer = median(times[True][1:]) - median(times[False][1:])
    return max(0.0, longer) / len(hooks)


def overheads(device: torch.device) -> dict[str, float]:
    """Seconds of host work that strategies add independently of sizes, measured on tiny tensors."""
    mesh = init_device_mesh(device.type, (1,))

    def once(call: Callable[[], object]) -> float:
        return median(repeat(call, number=1, repeat=12)[2:])

    def updating(tensors: list[torch.Tensor]) -> float:
        parameters = [nn.Parameter(tensor) for tensor in tensors]
        for p in parameters:
            p.grad = torch.zeros_like(p)
        return once(torch.optim.AdamW(parameters).step) / TENSORS

    def pairs() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(PAIRS))).to(device)

    def training(model: nn.Module) -> float:
        x = torch.ones(1, 4, device=device, requires_grad=True)
        return once(lambda: model(x).sum().backward()) / PAIRS

    plain = [torch.zeros(4, device=device) for _ in range(TENSORS)]
    whole, split = pairs(), pairs()
    for pair in split:
        parallelize_module(pair, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return {
        "tensor": updating(plain),
        "dtensor": updating([distribute_tensor(tensor, mesh) for tensor in plain]),
        "split_pair": max(0.0, training(split) - training(whole)),
    }


def split_layers(blocks: Iterable[nn.Module], parts: int) -> bool:
    """Reduce each block's layers to the first of `parts` shards, as on a tensor rank (TENSOR_PLAN in labkit's script:
    the first of a pair by rows of its weight, the second by columns). False if the blocks are of another kind."""
    for block in blocks:
        named = [getattr(block, name, None) for name in ("qkv", "out", "up", "down")]
        layers, width = [layer for layer in named if isinstance(layer, nn.Linear)], getattr(block, "head_width", None)
        if len(layers) < len(named) or width is None:
            return False
        if (layers[1].in_features // width) % parts or layers[2].out_features % parts:
            return False
        for layer, dim in zip(layers, (0, 1, 0, 1), strict=True):
            weight, bias = layer.weight.detach(), layer.bias
            layer.weight = nn.Parameter(weight.chunk(parts, dim)[0].clone())
            if dim == 0 and bias is not None:
                layer.bias = nn.Parameter(bias.detach().chunk(parts)[0].clone())
    return True


def main() -> None:
    script, request, answer = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    ranks = Ranks()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", store=HashStore(), rank=0, world_size=1)
    cells: dict[str, Any] = {"__name__": "script", "__file__": str(script)}
    exec(compile(script.read_text(encoding="utf-8"), str(script), "exec"), cells)
    sys.argv = [str(script), *request["argv"]]
    args = cells["parse_args"]()
    torch.manual_seed(0)
    mesh = cells["make_mesh"](device.type, args)
    model = prepared(cells, device, args)
    dtype = floating_type(model)
    model = cells["parallelize"](model, mesh, device, args)
    optimizer = cells["make_optimizer"](model, mesh, args)
    data, _ = cells["load_datasets"](args.data_dir)
    sample, _ = longest(data, cells["collate"], cells["map_tensors"])

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    batches = {
        size: cells["map_tensors"](cells["collate"]([sample] * request[size]), on_device) for size in ("small", "large")
    }
    half = cells["half_of"](args) if "half_of" in cells else None

    def both(batch: Any) -> None:
        cells["forward_backward"](model, batch, mesh["data"], args)
        model.zero_grad()

    def forward(batch: Any, model: Callable[..., object] = model) -> torch.Tensor:
        loss: torch.Tensor = cells["loss_of"](cells["outputs_of"](model, batch), batch)
        return loss

    def outer_parts(x: torch.Tensor, *_: object, **__: object) -> object:
        with torch.autocast(device.type, half) if half else nullcontext():  # as in_precision's forward
            return model.unembed(model.embed(x))

    def ends(batch: Any) -> None:
        forward(batch, outer_parts).backward()
        model.zero_grad()

    source, target = torch.ones(COPIED // 4, device=device), torch.empty(COPIED // 4, device=device)
    gradients = [(p, torch.zeros_like(p)) for p in model.parameters() if p.requires_grad]

    def update() -> None:
        for p, gradient in gradients:
            p.grad = gradient
        optimizer.step()

    in_parts = all(hasattr(model, part) for part in ("embed", "blocks", "unembed"))
    kinds = (both, forward, ends) if in_parts else (both, forward)
    calls: dict[str, Callable[[], object]] = {"optimizer": update, "copy": lambda: target.copy_(source)}
    calls |= {f"{kind.__name__}_{size}": partial(kind, batch) for kind in kinds for size, batch in batches.items()}
    train = calls["both_large"]
    times = timed(calls | {"alone": train}, SECONDS, ranks, device)
    waits = waiting(model.blocks, train, ranks) if in_parts and ranks.count > 1 and not cuda else 0.0
    if in_parts and ranks.count > 1 and split_layers(model.blocks, ranks.count):
        split = {f"split_{size}": calls[f"both_{size}"] for size in batches}
        times |= timed(split, SPLIT_SECONDS, ranks, device)
    work = overheads(device)  # on all ranks at the same time
    if ranks.rank == 0:
        more = {
            "elements": sum(p.numel() for _, p in gradients),
            "tensors": len(gradients),
            "copied": COPIED,
            "waiting": waits,
        }
        answer.write_text(json.dumps({"times": {n: usual(t) for n, t in times.items()}, "overheads": work, **more}))
    ranks.gather()
    dist.destroy_process_group()


def usual(times: list[float]) -> list[float]:
    """[lower quartile, minimum, 90th percentile]. The quartile is robust, because other load only adds time."""
    ordered = sorted(times)
    return [ordered[len(ordered) // 4], ordered[0], ordered[-1 - len(ordered) // 10]]


main()
