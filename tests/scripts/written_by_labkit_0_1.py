"""Train with DistributedDataParallel: every rank keeps the whole model, gradients are all-reduced.

Run it anywhere PyTorch is installed:

    torchrun --standalone --nproc-per-node=2 ddp.py --steps 100
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
    training.add_argument("--compile", action="store_true", help="torch.compile each block, or a model without blocks")
    training.add_argument("--seed", type=int, default=0, help="for weights and the order of samples")
    training.add_argument("--deterministic", action="store_true", help="only kernels that repeat bit by bit; slower")
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate, after the warm-up")
    optimizer.add_argument("--lr-schedule", choices=["constant", "cosine"], default="constant")
    optimizer.add_argument("--warmup-steps", type=int, default=0, help="steps over which the learning rate rises")
    optimizer.add_argument("--clip", type=float, default=0.0, help="largest norm of all gradients together (0: any)")
    data = parser.add_argument_group("data")
    data.add_argument("--data-dir", default="", help="where load_datasets looks first")
    data.add_argument("--workers", type=int, help="loader processes (default: 2, or none when the data is in memory)")
    data.add_argument("--prefetch", type=int, default=4, help="batches each worker loads ahead")
    data.add_argument("--pin-memory", action=argparse.BooleanOptionalAction, help="default: where there is a GPU")
    files = parser.add_argument_group("files")
    files.add_argument("--checkpoint-dir", default="", help="resume from and save to this folder")
    files.add_argument("--save-every", type=int, default=0, help="steps between checkpoints (0: only at the end)")
    files.add_argument("--full-checkpoints", action="store_true", help="one file for torch.load instead of shards")
    files.add_argument("--async-save", action="store_true", help="write checkpoints while training goes on")
    files.add_argument("--deadline-seconds", type=float, default=0, help="then save and stop (0: no deadline)")
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
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        # head by head: a tensor-parallel rank's share of qkv's output is whole heads
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small decoder-only transformer over bytes. (batch, time) of int64 in, (batch, time, vocabulary) out."""

    def __init__(self, vocabulary=256, context=128, width=128, heads=4, layers=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def embed(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def unembed(self, x):
        return self.head(self.norm(x))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.unembed(x)


# %% data
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, context=128, limit=2**20):
    """(train, test): next-byte prediction on text files, by default Python's own standard library."""
    files = sorted(Path(data_dir).glob("*.txt") if data_dir else Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[:limit]
    if len(text) < 20 * context:
        raise SystemExit(f"{data_dir} has {len(text)} bytes of *.txt; at least {20 * context} are needed")
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, context + 1, context)
    cut = len(windows) * 9 // 10
    return tuple(TensorDataset(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in (windows[:cut], windows[cut:]))


# %% loader
import signal

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset


def batches(dataset, batch_size, data, args, *, shuffle=False):
    """(loader, sampler) of one data rank's share. Shuffled, only whole batches; otherwise in order, every sample.

    Whatever the number of ranks, step k trains on the same samples: the sampler deals one permutation out to
    the data ranks like cards. Ranks that share a replica (tensor, pipeline) read the same ones.
    """
    rank, ranks = data.get_local_rank(), data.size()
    sampler = DistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=args.seed, drop_last=shuffle)
    chunks = BatchSampler(sampler, batch_size, drop_last=shuffle)
    in_memory = isinstance(dataset, TensorDataset)
    workers = args.workers if args.workers is not None else 0 if in_memory else 2
    options = {
        "num_workers": workers,
        "pin_memory": data.device_type == "cuda" if args.pin_memory is None else args.pin_memory,
        # its own, which seeds the workers of each epoch: dropout must not notice that a loader is begun again
        "generator": torch.Generator(),
    }
    if workers:
        options |= {"prefetch_factor": args.prefetch, "worker_init_fn": outlive_sigterm}
    if in_memory:  # index whole batches, nothing is decoded per item
        return DataLoader(dataset, sampler=chunks, batch_size=None, **options), sampler
    return DataLoader(dataset, batch_sampler=chunks, **options), sampler


def outlive_sigterm(worker):
    """torchrun signals a rank's workers too; a rank that saves before it stops needs them to finish its step."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


# %% strategy
from contextlib import nullcontext

import argparse
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def strategy_arguments(parser):
    parser.add_argument("--find-unused-parameters", action="store_true", help="for models that skip layers")
    parser.add_argument("--static-graph", action="store_true", help="every step uses the same parameters")
    parser.add_argument(
        "--gradient-as-bucket-view",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="gradients live in the buckets that are all-reduced: one copy less",
    )
    parser.add_argument(
        "--bucket-mib", type=float, default=0.0, help="size of every bucket (0: torch's own, 25 after a first one of 1)"
    )
    parser.add_argument("--sync-batch-norm", action="store_true", help="batch statistics over all ranks; needs GPUs")


def make_mesh(device_type, args):
    if args.sync_batch_norm and device_type != "cuda":
        raise SystemExit("--sync-batch-norm needs GPUs: torch's SyncBatchNorm does not run on the CPU")
    if args.static_graph and args.accumulate > 1:
        raise SystemExit("--static-graph does not go with --accumulate: torch aborts on no_sync; leave one of them out")
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, args):
    """A full replica on every rank; backward all-reduces gradients bucket by bucket while it still computes."""
    cuda = mesh.device_type == "cuda"
    model = model.to(torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu")
    return DistributedDataParallel(
        nn.SyncBatchNorm.convert_sync_batchnorm(model) if args.sync_batch_norm else model,
        device_ids=[torch.cuda.current_device()] if cuda else None,
        gradient_as_bucket_view=args.gradient_as_bucket_view,
        find_unused_parameters=args.find_unused_parameters,
        static_graph=args.static_graph,
        bucket_cap_mb=args.bucket_mib or None,  # 25 is not the default: it drops the small, early first bucket
    )


def make_optimizer(model, mesh, args):
    return torch.optim.AdamW(model.parameters(), lr=args.lr)


def gradient_sync(model, last):
    """Within this context backward all-reduces only on the last micro-batch of a step."""
    return nullcontext() if last else model.no_sync()


# %% loss
import torch
from torch.nn import functional as F


def losses_of(logits, y):
    """Cross entropy of each prediction. Not in 16 bits: fp16's scaled loss would overflow, bf16 keeps two digits."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")


# %% step
def forward_backward(model, micro_batches, scaler):
    """Forward and backward of one optimizer step; returns the mean loss of this rank's samples."""
    mean = 0.0
    for number, (x, y) in enumerate(micro_batches, 1):
        with gradient_sync(model, last=number == len(micro_batches)):
            loss = losses_of(model(x), y).mean() / len(micro_batches)
            scaler.scale(loss).backward()
        mean += loss.detach()
    return mean


def predict(model, x):
    """Logits for evaluation."""
    return model(x)


# %% optimizer
import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


def learning_rate(step, total_steps, args):
    """Up during the warm-up, then constant or down half a cosine. Of the step alone: checkpoints need not hold it."""
    rise = min(1.0, (step + 1) / args.warmup_steps) if args.warmup_steps else 1.0
    if args.lr_schedule == "constant":
        return args.lr * rise
    after = max(0, step - args.warmup_steps) / max(1, total_steps - args.warmup_steps)
    return args.lr * rise * (1 + math.cos(math.pi * after)) / 2


@torch.no_grad()
def clip_gradients(model, mesh, largest):
    """Shrink all gradients by one factor so that their norm, over the whole model, is at most `largest`; returns it.

    torch's clip_grad_norm_ knows neither the other pipeline stages nor how to add shards of different meshes. Here
    each rank adds up what it holds, weighted so that an element that several ranks hold alike counts once.
    """
    stages = mesh["pipeline"].size() if "pipeline" in mesh.mesh_dim_names else 1
    # the parameters of FullyShardedDataParallel are plain tensors that do not tell that they are shards
    flat = getattr(model, "sharding_strategy", None)
    shards = defaultdict(list)  # by the number of ranks over which a parameter is split
    for p in model.parameters():
        if p.grad is None:
            continue
        pieces = stages * (mesh.size() if flat and flat.name != "NO_SHARD" else 1)
        if isinstance(p, DTensor):
            if p.grad.placements != p.placements:  # sequence parallel leaves sums to be added
                p.grad = p.grad.redistribute(placements=p.placements)
            sizes = [p.device_mesh.size(axis) for axis, where in enumerate(p.placements) if not where.is_replicate()]
            pieces *= math.prod(sizes)
        shards[pieces].append(p.grad.to_local() if isinstance(p, DTensor) else p.grad)
    total = torch.zeros((), dtype=torch.float64, device=mesh.device_type)  # offloaded gradients are on the CPU
    for pieces, grads in shards.items():
        total += get_total_norm(grads).to(total) ** 2 * pieces / dist.get_world_size()
    dist.all_reduce(total)
    norm = total.sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    for grads in shards.values():
        torch._foreach_mul_(grads, factor.to(grads[0].device, grads[0].dtype))
    return norm


class LossScaler(torch.amp.GradScaler):
    """fp16's loss scale. An overflow on one rank, in its shard or stage, skips the step on all of them."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        device = grads[0].device if grads else found_inf.device  # the CPU, if offloaded
        found = found_inf.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(device))
        found_inf.copy_(found)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


# %% blocks
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint


def recompute_blocks(model):
    """Activation checkpointing: keep only each block's input, run its forward again during backward."""
    if not hasattr(model, "blocks"):
        raise SystemExit("--activation-checkpointing recomputes model.blocks; this model has no .blocks")
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(model):
    """One compiled block serves all that are alike; what a strategy does between blocks stays outside."""
    for module in getattr(model, "blocks", [model]):
        module.forward = torch.compile(module.forward)


# %% commit
import hashlib
import json
import shutil
import tempfile

import torch.distributed as dist


def digest(path):
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def committed(folder):
    """Checkpoints whose COMMIT.json was written, newest first."""
    found = {path.parent.name.removeprefix("step-"): path.parent for path in folder.glob("step-*/COMMIT.json")}
    return [found[step] for step in sorted(filter(str.isdecimal, found), key=int, reverse=True)]


def make_room(beside, estimate, copies):
    """Make the folder to write to; says why when it does not. The last checkpoint tells better than any estimate."""
    folder, final = beside.parent, beside.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    if final in committed(folder):
        return False
    last = sum(path.stat().st_size for newest in committed(folder)[:1] for path in newest.iterdir())
    needed, free = 1.2 * copies * (last or estimate), shutil.disk_usage(folder).free
    if final.exists() or free < needed:
        why = f"{final} is in the way" if final.exists() else f"{free:,} bytes free, it needs some {needed:,.0f}"
        print(f"step {final.name.removeprefix('step-')} not saved: {why}", flush=True)
        return False
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    return True


def commit(beside, step):
    """Until this rename a kill leaves only the older checkpoints, and those whole. Two are kept."""
    files = {path.name: digest(path) for path in beside.iterdir()}
    (beside / "COMMIT.json").write_text(json.dumps({"step": step, "files": files}))
    beside.rename(beside.with_suffix(""))
    for older in committed(beside.parent)[2:]:
        shutil.rmtree(older)


def newest_whole(folder):
    """The newest checkpoint whose files are as they were written; a damaged one is named and set aside."""
    for path in committed(folder):
        try:
            files = json.loads((path / "COMMIT.json").read_text())["files"]
            damaged = [name for name in {"state.json", *files} if digest(path / name) != files.get(name)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged = [str(error)]
        if not damaged:
            return path
        print(f"{path.name} is damaged ({', '.join(damaged)}): using an older checkpoint if there is one", flush=True)
        shutil.rmtree(path.with_suffix(".damaged"), ignore_errors=True)
        path.rename(path.with_suffix(".damaged"))
    if folder.exists() and any(folder.iterdir()):
        print(f"{folder} holds no whole checkpoint of this script: training starts at step 0", flush=True)
    return None


def usable(folder):
    """Better refused before the training than at its first save."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return newest_whole(folder)


def from_rank_0(decide, group):
    """What rank 0 decides, known to all: ranks that looked for themselves might see different files."""
    try:
        box = [decide() if dist.get_rank() == 0 else None]
    except OSError as error:
        box = [error]
    dist.broadcast_object_list(box, group=group)
    if isinstance(box[0], OSError):
        raise SystemExit(f"--checkpoint-dir cannot be used: {box[0]}")
    return box[0]


# %% random_state
import random

import torch


def random_state():
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state().tolist(), "cuda": cuda}


def set_random_state(state):
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


# %% checkpoint
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Checkpoints:
    """Every rank saves the tensors it holds under their names in the model, so any strategy on any number of ranks can
    load them. What is no tensor is JSON: `others` have a state_dict of plain values, as scalers and schedulers do.
    """

    def __init__(self, args, model, optimizer, **others):
        self.folder, self.full, self.background = Path(args.checkpoint_dir), args.full_checkpoints, args.async_save
        self.model, self.optimizer, self.others = model, optimizer, others
        self.local = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer has this rank's share in .optim
        self.group = dist.new_group(backend="gloo")  # its own: a thread may save while training's collectives go on
        self.thread, self.saving, self.random = ThreadPoolExecutor(1), None, None

    def save(self, step):
        """Written beside step-N, then renamed. A background save returns as soon as it has a copy to write.

        Returns whether there was room. Of BatchNorm's statistics, which differ between ranks, rank 0's are kept.
        """
        self.finish()
        beside = self.folder / f"step-{step}.tmp"
        estimate = 3 * sum(p.numel() * p.element_size() for p in self.model.parameters())  # AdamW: two moments of each
        if not from_rank_0(lambda: make_room(beside, estimate, copies=1 + self.full), self.group):
            return False
        weights, moments = get_state_dict(self.model, self.local)
        state = {"step": step, "model": self.shapes(weights), "random": self.gather(random_state())}
        state["groups"] = [{k: v for k, v in g.items() if type(v) in (int, float)} for g in self.optimizer.param_groups]
        state["others"] = {name: other.state_dict() for name, other in self.others.items()}
        state["stepped"] = sorted(set().union(*self.gather([*moments["state"]])))  # all but unused parameters
        if dist.get_rank() == 0:
            (beside / "state.json").write_text(json.dumps(state))
        tensors = {"model": weights, "optimizer": moments["state"]}
        how = {"checkpoint_id": beside, "process_group": self.group}
        how["planner"] = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        if self.background:
            written = dcp.async_save(tensors, **how)
            self.saving = self.thread.submit(lambda: written.result() and self.all_written(beside, step))
        else:
            dcp.save(tensors, **how)
            self.all_written(beside, step)
            dist.barrier(self.group)
        return True

    def all_written(self, beside, step):
        """Of all ranks: rank 0 commits it."""
        if dist.get_rank() > 0:
            return
        if self.full:
            dcp_to_torch_save(beside, beside / "full.pt")
            for shard in [beside / ".metadata", *beside.glob("*.distcp")]:
                shard.unlink()
        commit(beside, step)

    def finish(self):
        """Wait for what is saved in the background, and raise what went wrong with it."""
        if self.saving:
            self.saving.result()
            self.saving = None
            dist.barrier(self.group)

    def load(self):
        """Restore the newest checkpoint that verifies; returns its step, 0 when there is none."""
        path = from_rank_0(lambda: usable(self.folder), self.group)
        if path is None:
            return 0
        state, rank = json.loads((path / "state.json").read_text()), dist.get_rank()
        weights, moments = get_state_dict(self.model, self.local)
        here, there = self.shapes(weights), state["model"]
        if differ := sorted(name for name in here | there if here.get(name) != there.get(name)):
            what = f"{differ[0]} is {there.get(differ[0], 'not')} in it and {here.get(differ[0], 'not')} here"
            raise SystemExit(f"{path} is of another model: {what}; {len(differ)} differ. Give another --checkpoint-dir")
        shards = path
        if (path / "full.pt").exists():  # back into shards, of which each rank reads what it holds
            shards = self.folder / "shards.tmp"
            whole = torch.load(path / "full.pt", mmap=True, weights_only=True)
            dcp.save(whole, checkpoint_id=shards, process_group=self.group)
        known = {name: moments["state"][name] for name in moments["state"] if name in state["stepped"]}
        dcp.load({"model": weights, "optimizer": known}, checkpoint_id=shards, process_group=self.group)
        if rank == 0 and shards != path:
            shutil.rmtree(shards)
        set_state_dict(self.model, self.local, model_state_dict=weights, optim_state_dict=moments)
        for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(saved)
        for name, other in self.others.items():
            if state["others"].get(name):
                other.load_state_dict(state["others"][name])
        if rank < len(state["random"]):
            self.random = state["random"][rank]
        return state["step"]

    def resume_random_state(self):
        """After the batches that were trained on have been skipped: loading them drew random numbers."""
        if self.random:
            set_random_state(self.random)
            self.random = None

    def gather(self, value):
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, self.group)
        return values

    def shapes(self, weights):
        """Of every tensor of the model, whichever rank holds it."""
        held = self.gather({name: [*tensor.size()] for name, tensor in weights.items() if torch.is_tensor(tensor)})
        return {name: size for part in held for name, size in part.items()}


# %% stop
import math
import signal
import time

import torch
import torch.distributed as dist


class Stop:
    """SIGTERM to any rank, or a deadline, ends all of them after the same step: they ask each other once a second."""

    def __init__(self, deadline_seconds, device):
        self.deadline, self.device = time.monotonic() + (deadline_seconds or math.inf), device
        self.looked, self.step, self.every, self.signalled = time.monotonic(), 0, 1, False
        signal.signal(signal.SIGTERM, self.remember)

    def remember(self, *_):
        self.signalled = True

    def agreed(self, step):
        """Why to stop, the same on every rank; None to go on."""
        if step - self.step < self.every:
            return None
        now = time.monotonic()
        step_seconds = (now - self.looked) / (step - self.step)
        asked = torch.tensor([self.signalled, now >= self.deadline, step_seconds], device=self.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        signalled, late, step_seconds = asked.tolist()
        # in steps, which all ranks count alike; at most doubled, for a step may become slower
        self.every = max(1, min(2 * self.every, int(1 / step_seconds)))
        self.looked, self.step = now, step
        return "SIGTERM" if signalled else "the deadline" if late else None


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


@torch.no_grad()
def evaluate(model, dataset, batch_size, data, args, on_device):
    """Mean loss and accuracy over the whole data set, on all ranks, every sample counted once."""
    rank, ranks = data.get_local_rank(), data.size()
    loader, _ = batches(dataset, batch_size, data, args)
    sums, position = [], rank
    model.eval()
    for x, y in map(on_device, loader):
        # The sampler repeats samples until all ranks have as many: run them (collectives match), do not count them.
        real = torch.arange(position, position + len(y) * ranks, ranks, device=y.device) < len(dataset)
        position += len(y) * ranks
        logits = predict(model, x)
        losses = losses_of(logits.double(), y).view_as(y)[real]
        hits = (logits.argmax(-1) == y)[real]
        sums.append(torch.stack([losses.sum(), hits.sum(), losses.new_tensor(losses.numel())]))
    totals = torch.stack(sums).sum(0)
    dist.all_reduce(totals)  # ranks that share a replica add the same: the quotients stay
    loss, correct, count = totals.tolist()
    return loss / count, correct / count


# %% main
import gc
import os
import time
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def join_group():
    """This rank's device, after joining torchrun's process group; without torchrun, a group of one."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # before the group: NCCL would take GPU 0 on every rank
    backend = "nccl" if gpus >= local_ranks else "gloo"  # NCCL refuses two ranks on one GPU
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    bound = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(backend, timeout=timedelta(seconds=120), **bound, **alone)
    return device


@record
def main():
    args = parse_args()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
    device = join_group()
    if (args.deadline_seconds or args.save_every) and not args.checkpoint_dir:
        raise SystemExit("--save-every and --deadline-seconds save checkpoints; say where with --checkpoint-dir")
    if args.precision == "fp16" and device.type != "cuda":
        raise SystemExit("--precision fp16 needs a GPU; use fp32 or bf16 on the CPU")
    mesh = make_mesh(device.type, args)
    rank, data = dist.get_rank(), mesh["data"]
    batch_size, rest = divmod(args.global_batch_size, data.size() * max(1, args.accumulate))
    if rest or not batch_size or args.accumulate < 1:
        raise SystemExit(
            f"--global-batch-size {args.global_batch_size} must be a multiple of "
            f"{data.size()} data ranks x {args.accumulate} micro-batches"
        )

    torch.manual_seed(args.seed)  # the same weights on every rank
    dtype = torch.float64 if args.precision == "fp64" else torch.float32
    model = Model().to(dtype)
    report(rank, parameters=sum(p.numel() for p in model.parameters()))
    if args.activation_checkpointing:
        recompute_blocks(model)
    if args.compile:
        compile_blocks(model)
    if args.precision in DTYPES:
        model.forward = torch.autocast(device.type, DTYPES[args.precision])(model.forward)
    model = parallelize(model, mesh, args)
    optimizer = make_optimizer(model, mesh, args)
    scaler = LossScaler(device.type, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + data.get_local_rank())  # dropout differs between samples, not within a replica

    def on_device(batch):
        x, y = batch
        x = x.to(device, dtype if x.is_floating_point() else None, non_blocking=True)
        return x, y.to(device, non_blocking=True)

    train, test = load_datasets(args.data_dir)
    loader, sampler = batches(train, batch_size, data, args, shuffle=True)
    steps_per_epoch = len(loader) // args.accumulate
    if not steps_per_epoch:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} exceeds the {len(train)} training samples")
    total_steps = args.steps or args.epochs * steps_per_epoch
    checkpoints = Checkpoints(args, model, optimizer, scaler=scaler) if args.checkpoint_dir else None
    step = checkpoints.load() if checkpoints else 0
    stop, stopped = Stop(args.deadline_seconds, device) if checkpoints else None, None
    report(
        rank,
        total_steps=total_steps,
        start_step=step,
        steps_per_epoch=steps_per_epoch,
        train_samples=len(train),
        data_ranks=data.size(),
    )

    reported, training_seconds = 0.0, 0.0
    while step < total_steps and not stopped:
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        loader.generator.manual_seed((args.seed + epoch) * data.size() + data.get_local_rank())
        model.train()
        started = time.perf_counter()
        stream = islice(loader, steps_per_epoch * args.accumulate)
        for _ in islice(stream, step_in_epoch * args.accumulate):
            pass  # trained on before this run was resumed
        if checkpoints:
            checkpoints.resume_random_state()
        stream = map(on_device, stream)
        while step < total_steps and not stopped and (micro_batches := list(islice(stream, args.accumulate))):
            loss = forward_backward(model, micro_batches, scaler)
            measured = {"loss": loss}
            if args.clip:
                scaler.unscale_(optimizer)
                measured["gradient_norm"] = clip_gradients(model, mesh, args.clip)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, total_steps, args)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            # .item() waits for the GPU: ten times a second at most, not every step
            if step <= 20 or step == total_steps or time.monotonic() - reported >= 0.1:
                reported = time.monotonic()
                report(rank, step=step, epoch=epoch, **{name: value.item() for name, value in measured.items()})
            stopped = stop and stop.agreed(step)
            if stopped or (checkpoints and (step == total_steps or (args.save_every and step % args.save_every == 0))):
                saved = checkpoints.save(step)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        training_seconds += seconds
        report(rank, epoch=epoch, epoch_seconds=seconds, training_seconds=training_seconds)

    if checkpoints:
        checkpoints.finish()
    if not stopped:
        test_loss, test_accuracy = evaluate(model, test, batch_size, data, args, on_device)
        report(rank, step=step, test_loss=test_loss, test_accuracy=test_accuracy, test_samples=len(test))
    elif rank == 0:
        then = "goes on there" if saved else "goes on at the last checkpoint that was saved"
        print(f"stopped by {stopped} after step {step} of {total_steps}: the same command {then}", flush=True)

    # In this order gloo ranks do not abort at exit: free, collect, meet, then destroy the group.
    del model, optimizer, loader, checkpoints
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
