"""Train with fully_shard (FSDP2): parameters, gradients and optimizer state are split over the ranks (ZeRO-3).

Run it anywhere PyTorch is installed:

    torchrun --standalone --nproc-per-node=2 fsdp.py --steps 100
"""

# %% parameters
import argparse


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, default=1, help="passes over the training data")
    training.add_argument("--steps", type=int, default=0, help="stop after this many optimizer steps (0: by epochs)")
    training.add_argument("--global-batch-size", type=int, default=64, help="samples per step over all ranks")
    training.add_argument("--accumulate", type=int, default=1, help="micro-batches per step on each rank")
    training.add_argument("--precision", choices=["fp32", "fp16", "bf16", "fp64"], default="fp32")
    training.add_argument("--activation-checkpointing", action="store_true", help="recompute blocks in backward")
    training.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate")
    training.add_argument("--seed", type=int, default=0, help="for weights and the order of samples")
    files = parser.add_argument_group("files")
    files.add_argument("--data-dir", default="", help="where load_datasets looks first")
    files.add_argument("--checkpoint-dir", default="", help="resume from and save to this folder")
    files.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: none)")
    strategy_arguments(parser.add_argument_group("strategy"))
    return parser.parse_args()


# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP. x: (batch, time, width) in and out."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small decoder-only transformer over bytes. (batch, time) of int64 in, (batch, time, vocabulary) out."""

    def __init__(self, vocabulary=256, context=128, width=128, heads=4, layers=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %% data
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, context=128, limit=2**20):
    """(train, test): next-byte prediction on text files, by default Python's own standard library."""
    files = sorted(Path(data_dir).glob("*.txt") if data_dir else Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:limit]
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, context + 1, context)
    cut = len(windows) * 9 // 10
    return tuple(TensorDataset(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in (windows[:cut], windows[cut:]))


# %% loader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def batches(dataset, batch_size, rank, world_size, *, pin_memory, shuffle_seed=None):
    """(loader, sampler) of one rank's share. Shuffled, only whole batches; otherwise in order, every sample.

    Whatever the number of ranks, step k trains on the same samples: the sampler deals one permutation out to
    the ranks like cards.
    """
    shuffle = shuffle_seed is not None
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=shuffle, seed=shuffle_seed or 0, drop_last=shuffle)
    chunks = BatchSampler(sampler, batch_size, drop_last=shuffle)
    if isinstance(dataset, TensorDataset):  # in memory: index whole batches, nothing is decoded per item
        return DataLoader(dataset, sampler=chunks, batch_size=None, pin_memory=pin_memory), sampler
    options = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "pin_memory": pin_memory}
    return DataLoader(dataset, batch_sampler=chunks, **options), sampler


# %% strategy
from contextlib import nullcontext

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def strategy_arguments(parser):
    parser.add_argument("--reshard-after-forward", choices=["auto", "always", "never"], default="auto",
                        help="always: ZeRO-3; never: ZeRO-2 (fewer all-gathers, more memory)")  # fmt: skip
    parser.add_argument("--cpu-offload", action="store_true", help="keep shards in host memory between uses")


def parallelize(model, mesh, args):
    """Each rank keeps 1/N of every parameter; a block is all-gathered just before it computes, then freed."""
    half = DTYPES.get(args.precision)  # gather and compute in 16 bits, reduce gradients and keep shards in fp32
    options = {
        "mesh": mesh,
        "reshard_after_forward": {"auto": None, "always": True, "never": False}[args.reshard_after_forward],
        "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
    }
    if args.cpu_offload:  # pinned memory exists only where there is a GPU
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in getattr(model, "blocks", []):
        fully_shard(block, **options)
    return fully_shard(model, **options)  # the rest: embeddings, the last norm, the head


def gradient_sync(model, last):
    """Backward reduce-scatters only on the last micro-batch of a step."""
    model.set_requires_gradient_sync(last)
    return nullcontext()


# %% recompute
from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute_blocks(model):
    """Activation checkpointing: keep only each block's input, run its forward again during backward."""
    if not hasattr(model, "blocks"):
        raise SystemExit("--activation-checkpointing recomputes model.blocks; this model has no .blocks")
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


# %% checkpoint
import hashlib
import json
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def digest(path):
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def committed(folder):
    """Checkpoints whose COMMIT.json was written, newest first."""
    found = [path.parent for path in folder.glob("step-*/COMMIT.json") if path.parent.suffix != ".tmp"]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def commit_of(path):
    """What COMMIT.json says when every file is as it was written, None (and a line that says why) when one is not."""
    try:
        commit = json.loads((path / "COMMIT.json").read_text())
        damaged = [name for name, file in commit["files"].items() if digest(path / name) != file]
    except (OSError, ValueError, KeyError) as error:
        damaged = [str(error)]
    if damaged:
        print(f"{path.name} is damaged ({', '.join(damaged)}): using an older checkpoint if there is one", flush=True)
    return None if damaged else commit


def from_rank_0(decide):
    """What rank 0 decides, known to all: ranks that looked for themselves might see different files."""
    box = [decide() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    return box[0]


def save_checkpoint(folder, step, model, optimizer, scaler):
    """Write beside, then rename: a kill in the middle leaves the older checkpoints whole. Two are kept."""
    beside, final = folder / f"step-{step}.tmp", folder / f"step-{step}"

    def prepare():
        folder.mkdir(parents=True, exist_ok=True)
        last = sum(path.stat().st_size for older in committed(folder)[:1] for path in older.iterdir())
        weights = sum(p.numel() * p.element_size() for p in model.parameters())  # of a shard the whole
        needed = 1.2 * (last or 3 * weights)  # AdamW keeps two moments of each
        free = shutil.disk_usage(folder).free
        if free < needed:
            print(f"step {step} not saved: {free:,} bytes free, it needs some {needed:,.0f}", flush=True)
        if free < needed or final.exists():
            return False
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        return True

    if not from_rank_0(prepare):
        return
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=beside)
    if dist.get_rank() == 0:
        files = {path.name: digest(path) for path in beside.iterdir()}
        commit = {"step": step, "scaler": scaler.state_dict(), "files": files}
        (beside / "COMMIT.json").write_text(json.dumps(commit))
        beside.rename(final)
        for older in committed(folder)[2:]:
            shutil.rmtree(older)
    dist.barrier()


def load_checkpoint(folder, model, optimizer, scaler):
    """Restore the newest checkpoint that verifies; returns its step, 0 when there is none."""
    commit = from_rank_0(lambda: next(filter(None, map(commit_of, committed(folder))), None))
    if commit is None:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{commit['step']}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scaler.load_state_dict(commit["scaler"])
    return commit["step"]


# %% report
import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path


def report(rank, **values):
    """Append one JSON line to the run folder when there is one; otherwise rank 0 prints a plain line."""
    folder = os.environ.get("LABKIT_RUN_DIR")
    finite = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    if folder:
        line = json.dumps({"k": "report", "t": time.monotonic(), **finite}) + "\n"
        with suppress(OSError), Path(folder, "ranks", str(rank), "metrics.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())  # a full disk costs records, never the training
    elif rank == 0:
        print("  ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()), flush=True)


# %% evaluate
import torch
import torch.distributed as dist
from torch.nn import functional as F


@torch.no_grad()
def evaluate(model, dataset, batch_size, device, forward):
    """Mean loss and accuracy over the whole data set, on all ranks, every sample counted once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader, _ = batches(dataset, batch_size, rank, world_size, pin_memory=device.type == "cuda")
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()
    position = rank
    for x, y in loader:
        y = y.to(device, non_blocking=True)
        # The sampler repeats samples until all ranks have as many: run them (collectives match), do not count them.
        real = torch.arange(position, position + len(y) * world_size, world_size, device=device) < len(dataset)
        position += len(y) * world_size
        logits = forward(model, x)
        losses = F.cross_entropy(logits.flatten(0, -2).double(), y.flatten(), reduction="none").view_as(y)[real]
        totals += torch.stack([losses.sum(), (logits.argmax(-1) == y)[real].sum(), y[real].new_tensor(y[real].numel())])
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    return loss / count, correct / count


# %% main
import gc
import os
import time
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def join_group():
    """(device, mesh) after joining torchrun's process group; without torchrun, a group of one."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # before the group: NCCL would take GPU 0 on every rank
    backend = "nccl" if gpus >= local_ranks else "gloo"  # NCCL refuses two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    bound = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **bound, **alone)
    return device, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))


@record
def main():
    args = parse_args()
    device, mesh = join_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size, rest = divmod(args.global_batch_size, world_size * args.accumulate)
    if rest or not batch_size:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} must be a multiple of "
                         f"{world_size} ranks x {args.accumulate} micro-batches")  # fmt: skip
    if args.precision == "fp16" and device.type != "cuda":
        raise SystemExit("--precision fp16 needs a GPU; use fp32 or bf16 on the CPU")

    torch.manual_seed(args.seed)  # the same weights on every rank
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model = Model().to(dtype)
    report(rank, parameters=sum(p.numel() for p in model.parameters()))
    if args.activation_checkpointing:
        recompute_blocks(model)
    model = parallelize(model, mesh, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    def forward(model, x):
        x = x.to(device, dtype if x.is_floating_point() else None, non_blocking=True)
        with torch.autocast(device.type, DTYPES.get(args.precision), enabled=args.precision in DTYPES):
            return model(x)

    train, test = load_datasets(args.data_dir)
    loader, sampler = batches(train, batch_size, rank, world_size, pin_memory=device.type == "cuda",
                              shuffle_seed=args.seed)  # fmt: skip
    steps_per_epoch = len(loader) // args.accumulate
    if not steps_per_epoch:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} exceeds the {len(train)} training samples")
    total_steps = args.steps or args.epochs * steps_per_epoch
    checkpoints = Path(args.checkpoint_dir) if args.checkpoint_dir else None
    step = load_checkpoint(checkpoints, model, optimizer, scaler) if checkpoints else 0
    report(rank, total_steps=total_steps, start_step=step, steps_per_epoch=steps_per_epoch, train_samples=len(train))

    reported, training_seconds = 0.0, 0.0
    while step < total_steps:
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        model.train()
        started, loss_sum = time.perf_counter(), 0.0
        first, stop = step_in_epoch * args.accumulate, steps_per_epoch * args.accumulate
        for micro, (x, y) in enumerate(islice(loader, first, stop), first):
            last = (micro + 1) % args.accumulate == 0
            with gradient_sync(model, last):
                logits = forward(model, x)
                y = y.to(device, non_blocking=True)
                # not in 16 bits: the scaled loss of fp16 would overflow, bf16 would keep two digits
                loss = F.cross_entropy(logits.flatten(0, -2).to(dtype), y.flatten()) / args.accumulate
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
            if not last:
                continue
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            # .item() waits for the GPU: ten times a second at most, not every step
            if step <= 20 or step == total_steps or time.monotonic() - reported >= 0.1:
                reported = time.monotonic()
                report(rank, step=step, epoch=epoch, loss=loss_sum.item())
            loss_sum = 0.0
            if checkpoints and args.save_every and step % args.save_every == 0:
                save_checkpoint(checkpoints, step, model, optimizer, scaler)
            if step == total_steps:
                break
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        training_seconds += seconds
        report(rank, epoch=epoch, epoch_seconds=seconds, training_seconds=training_seconds)

    test_loss, test_accuracy = evaluate(model, test, batch_size, device, forward)
    report(rank, step=step, test_loss=test_loss, test_accuracy=test_accuracy, test_samples=len(test))

    # In this order gloo ranks do not abort at exit: free, collect, meet, then destroy the group.
    del model, optimizer, loader
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
