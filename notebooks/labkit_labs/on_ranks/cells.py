"""Cells that a lab's script gets besides its own: read as text, never imported. Standard library and torch only."""

from typing import Any


def each_rank(device: Any, *arguments: Any) -> Any:
    """The lab's own function stands here."""
    raise NotImplementedError


# %% join
import os

import torch
import torch.distributed as dist


def join_group() -> torch.device:
    """This rank's device, after it has joined the group of all ranks. torchrun has told it who it is."""
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    return device


# %% traffic
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

SENT = 200  # where `struct tcp_info` has tcpi_bytes_sent; tcpi_bytes_retrans is next to it


def bytes_sent() -> int:
    """What this process has sent over all its TCP connections, once each, as the kernel counts it (Linux, gloo)."""
    sent = 0
    for opened in Path("/proc/self/fd").iterdir():
        try:
            if str(opened.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(opened.name))) as connection:
                    counters = connection.getsockopt(socket.IPPROTO_TCP, 11, 256)  # TCP_INFO
                    first_and_again, again = struct.unpack_from("QQ", counters, SENT)
                    sent += first_and_again - again
        except OSError:  # closed by now, or not TCP
            continue
    return sent


def sent_by(call: Callable[[], Any]) -> int:
    """Bytes that this rank sends while it makes the call; the call is made once before, to connect."""
    call()
    dist.barrier()
    time.sleep(0.1)  # let the kernel empty its buffers
    before = bytes_sent()
    call()
    time.sleep(0.1)
    return bytes_sent() - before


# %% exchange
import torch
import torch.distributed as dist


def exchange(outgoing: torch.Tensor, arrived: torch.Tensor) -> None:
    """Send one tensor to the right neighbour in the ring of ranks while another arrives from the left one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    to_right = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)
    from_left = dist.P2POp(dist.irecv, arrived, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([to_right, from_left]):
        work.wait()


# %% recorded
import json
import math
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist


def calls_since(began: int) -> list[tuple[str, str, int]]:
    """The collectives that this rank has called since `time.time_ns()` was `began`, in order, from torch's flight
    recorder: "gathers" or "sums", the group's description, and the bytes of the whole array. gloo records a
    reduce-scatter as the all-reduce that it makes instead, so both are "sums"."""
    backend = torch._C._distributed_c10d
    dump = backend._dump_nccl_trace_json if dist.get_backend() == "nccl" else backend._dump_fr_trace_json
    calls = []
    for entry in json.loads(dump())["entries"]:
        if entry["time_created_ns"] >= began:
            each = getattr(torch, f"{entry['input_dtypes'][0]}Tensor").dtype.itemsize
            size = each * max(sum(map(math.prod, entry[side])) for side in ("input_sizes", "output_sizes"))
            kind = "gathers" if "gather" in entry["profiling_name"] else "sums"
            calls.append((kind, entry["process_group"][1], size))
    return calls


def collectives_since(began: int) -> dict[str, Any]:
    """The same by kind: calls, bytes, and the bytes of the largest all-gather."""
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    largest = 0
    for kind, _, size in calls_since(began):
        calls[kind] += 1
        sizes[kind] += size
        largest = max(largest, size if kind == "gathers" else 0)
    return {"calls": calls, "bytes": sizes, "largest gather": largest}


# %% tower
import torch
from torch import nn


def tower(width: int, layers: int, device: torch.device) -> nn.Sequential:
    """Linear layers with the same random weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)


# %% compared
import torch


def gradients_differ(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between the gradients of two copies of a model, relative to the largest of its tensor."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)


# %% timed
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

PAUSE, STEPS = 0.005, 25


def timed_steps(
    models: dict[Callable[..., None], nn.Module], loss: Callable[[nn.Module], torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Steps of several ways to average gradients, `way(model, loss)`, each with a model of its own. By the name of the
    way: the all-reduces of a step, their bytes, the time from the end of backward to that of the step, all spans as
    (kind, begin, end) in seconds, and how much the gradients differ from those of the first way.

    The ways take turns, `STEPS` times. Of each the step counts that waited least after backward: other programs make a
    wait longer, and a slower rank does. In backward each layer sleeps for `PAUSE` seconds before it computes, in place
    of a GPU, so that the cores are free for gloo."""
    now, all_reduce = time.monotonic, dist.all_reduce
    sent, begun, computed = list[list[Any]](), list[float](), list[float]()

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        note = ["all_reduce", now(), None, tensor.nbytes]
        sent.append(note)
        work = all_reduce(tensor, *args, **options)
        if work is None:
            note[2] = now()
        else:
            work.get_future().then(lambda _: note.__setitem__(2, now()))
        return work

    def pause(*_: Any) -> None:
        begun.append(now())
        time.sleep(PAUSE)

    for model in models.values():
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, allreduce_hook)  # what DDP does by itself, but where it can be noted
        for layer in [m for m in model.modules() if m._parameters]:
            layer.register_full_backward_pre_hook(pause)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda _: computed.append(now()))
    steps: dict[str, list[dict[str, Any]]] = {way.__name__: [] for way in models}
    dist.all_reduce = noted
    try:
        for _ in range(STEPS):
            for way, model in models.items():
                model.zero_grad()
                for notes in (sent, begun, computed):
                    notes.clear()
                dist.barrier()
                start = now()
                way(model, lambda model=model: loss(model))
                end = now()
                while any(note[2] is None for note in sent):
                    time.sleep(0.001)
                done = computed[-1]
                noticed = [("forward", start, begun[0]), ("backward", begun[0], done), ("waiting", done, end)]
                noticed += [(kind, begin, finish) for kind, begin, finish, _ in sent]
                spans = [(kind, begin - start, finish - start) for kind, begin, finish in noticed]
                step = {"all-reduces": len(sent), "bytes": sum(note[3] for note in sent), "spans": spans}
                steps[way.__name__].append(step | {"ms after backward": 1e3 * (end - done)})
    finally:
        dist.all_reduce = all_reduce
    first = next(iter(models.values()))
    return {
        way.__name__: min(steps[way.__name__][2:], key=lambda step: step["ms after backward"])  # DDP settles in two
        | {"difference": gradients_differ(model, first)}
        for way, model in models.items()
    }


# %% stepped
import time
from typing import Any

import torch
from torch import nn


def third_step(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """Bytes of parameters that this rank holds at moments of a step, and the step's collectives. It is the third
    step, because DDP settles its buckets in the first two. The weights are set so that numbers stay near 1."""
    for p in model.parameters():
        nn.init.constant_(p, 1 / x.shape[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        began, moments = time.time_ns(), {"before forward": held(model.parameters())}
        loss = model(x).square().mean()
        moments["after forward"] = held(model.parameters())
        loss.backward()
        moments["gradients"] = held(p.grad for p in model.parameters())
        optimizer.step()
    return {**moments, **collectives_since(began)}


# %% held
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor


def held(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the tensors on this rank. A tensor on the meta device takes none."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(t.nbytes for t in local if not t.is_meta)


# %% slow
import os
import time

import torch
from torch.utils.data import Dataset


class Slow(Dataset):
    """Samples that take `seconds` each to load. A sample is the number of the process that loaded it."""

    def __init__(self, samples: int, seconds: float = 0.0):
        self.seconds = seconds
        self.loaded = torch.zeros(samples, dtype=torch.int64).share_memory_()  # workers write, the rank reads

    def __len__(self) -> int:
        return len(self.loaded)

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        self.loaded[index] += 1
        return os.getpid()


# %% loading
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def step_seconds(loader: DataLoader[Any], compute: float) -> float:
    """Seconds from step to step, once the loader has settled. A step computes for `compute` seconds, then the ranks
    all-reduce. W workers deliver W batches at once, so W steps are measured at once."""
    ends, w = list[float](), max(1, loader.num_workers)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    for _ in loader:
        time.sleep(compute)
        dist.all_reduce(torch.zeros(1, device=device))
        ends.append(time.monotonic())
    return statistics.median((later - earlier) / w for earlier, later in zip(ends[w:], ends[2 * w :], strict=False))


def batches_ahead(loader: DataLoader[Any]) -> int:
    """Batches of a `Slow` that are loaded beyond the first one, in a first step that never ends."""
    stream, data, before, loaded = iter(loader), loader.dataset, -1, 0
    next(stream)
    while before != loaded:
        time.sleep(0.4)
        before, loaded = loaded, int(data.loaded.sum())
    return loaded // (loader.batch_size or 1) - 1


# %% sleeping
import time
from typing import Any

import torch
from torch import nn

DONE: list[tuple[str, int, float, float]] = []  # kind, stage, begin, end; one clock for all ranks of a machine


def work(kind: str, stage: int, seconds: float) -> None:
    began = time.monotonic()
    time.sleep(seconds)
    DONE.append((kind, stage, began, time.monotonic()))


class SleepingLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: int, seconds: float) -> torch.Tensor:
        ctx.stage, ctx.seconds = stage, seconds
        work("forward", stage, seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        work("backward", ctx.stage, ctx.seconds)  # the gradients of the inputs
        return gradients[0], None, None


class SleepingWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, stage: int, seconds: float) -> torch.Tensor:
        ctx.stage, ctx.seconds = stage, seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        work("weights", ctx.stage, ctx.seconds)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A stage whose forward, and the two halves of whose backward, are real steps of autograd that only sleep, so they
    last as long on two busy cores as on four GPUs. Each writes into DONE when it began and ended."""

    def __init__(self, index: int, seconds: float):  # of a forward; a backward takes twice as long
        super().__init__()
        self.index, self.seconds = index, seconds
        self.first = nn.Parameter(torch.zeros(())) if index == 0 else 0.0  # so that stage 0 has a backward, too
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        y = SleepingLayer.apply(x + self.first, self.index, self.seconds)
        return y * SleepingWeight.apply(self.weight, self.index, self.seconds)


# %% main
import json
import sys

import torch.distributed as dist


def main() -> None:
    device = join_group()
    print(json.dumps(each_rank(device, *json.loads(sys.argv[1]))))
    dist.barrier()
    dist.destroy_process_group()
