"""Train on one device: python train.py --steps 100"""
# A comment `# with <cell>: <code>` is code in scripts that have this cell, or this function or option.

# %% parameters
import argparse


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training data")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps, instead of --epochs")
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples per step over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3, help="the optimizer's learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.01, help="applied to every parameter")
    parser.add_argument("--seed", type=int, default=0, help="for initial weights, sample order and dropout")
    parser.add_argument("--data-dir", default="", help="the folder that load_datasets reads")
    # with <title>_arguments: <title>_arguments(parser.add_argument_group("<title>"))
    return parser.parse_args()


# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):  # attention and MLP; x: (batch, time, width)
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        # q, k and v are interleaved by head, so a tensor-parallel shard holds whole heads
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width))
        q, k, v = heads.permute(3, 0, 2, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):  # a small decoder over bytes: (batch, time) of int64 in, (batch, time, vocabulary) out
    def __init__(self, vocabulary=256, context=128, width=128, heads=4, layers=4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def embed(self, tokens):
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def unembed(self, x):
        return self.head(self.norm(x))

    def forward(self, tokens):
        return self.unembed(self.blocks(self.embed(tokens)))


# %% loader
import torch
from torch.utils.data import DataLoader, default_collate

collate = default_collate  # samples -> a batch: any nest of dicts, tuples and lists; a data cell may replace it


def loader_of(dataset, chunks, args, epoch):
    own = {"generator": torch.Generator(), "pin_memory": torch.cuda.is_available()}  # dropout uses the global generator
    return DataLoader(dataset, batch_sampler=chunks, collate_fn=collate, **own)


# %% data
import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir, context=128, limit=2**20):
    """(train, test): next-byte prediction on text files, by default Python's own standard library."""
    files = sorted(Path(data_dir).glob("*.txt") if data_dir else Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)[: None if data_dir else limit]
    if len(text) < 20 * context:
        raise SystemExit(f"{data_dir} has {len(text)} bytes of *.txt; at least {20 * context} are needed")
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, context + 1, context)
    cut = len(windows) - min(len(windows) // 10, 256)  # 32,768 predictions are enough
    return tuple(TensorDataset(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in (windows[:cut], windows[cut:]))


# %% task
import torch
from torch.nn import functional as F


def outputs_of(model, batch):
    """Only calls the model: a pipeline replaces this call by its stages."""
    return model(batch[0])


def count_of(batch):
    """The number of predictions; labels of -100 are ignored."""
    return (batch[1] != -100).sum()


def loss_of(outputs, batch):
    """The sum of their losses, not the mean; in fp32 or wider, for fp16 overflows and bf16 has two digits."""
    if not torch.is_tensor(outputs):
        raise SystemExit(f"loss_of needs a tensor of logits; outputs_of returned {type(outputs).__name__}")
    logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten(), reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    return {"accuracy": ((outputs.argmax(-1) == batch[1]).sum(), count_of(batch))}


# %% batches
import torch


def batches(dataset, batch_size, dp_mesh, args, epoch=None, start=0):
    """One data rank's batches. With `epoch`: shuffled, from step `start` on. Without: every sample, in order."""
    ranks, samples = dp_mesh.size(), range(len(dataset))
    if epoch is not None:
        samples = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed + epoch)).tolist()
        global_batch = batch_size * ranks  # step k trains on the same samples for any number of ranks
        samples *= -(-global_batch // len(samples))  # fewer than a batch has are repeated
        samples = samples[start * global_batch : len(samples) // global_batch * global_batch]
    chunks = [samples[i : i + batch_size] for i in range(0, len(samples), batch_size)]
    chunks += chunks[:1] * (-len(chunks) % ranks)  # the same number on every rank; evaluate ignores the extra ones
    return loader_of(dataset, chunks[dp_mesh.get_local_rank() :: ranks], args, epoch)


def map_tensors(batch, change):
    """Changes every tensor in nested dicts, tuples and lists; lists become tuples."""
    if hasattr(batch, "items"):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map_tensors(part, change) for part in batch)
    return change(batch) if torch.is_tensor(batch) else batch


# %% strategy
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def make_mesh(device_type, args):
    if dist.get_world_size() > 1:
        raise SystemExit(f"this script trains on one rank, not on {dist.get_world_size()}: use ddp or fsdp")
    return init_device_mesh(device_type, (1,), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """One device holds the parameters, the gradients and the optimizer's state."""
    return model.to(device)
    # with precision instead: return placed(model, device, args)


def make_optimizer(model, mesh, args):
    return optimizer_of(model.parameters(), args)


# %% optimizer
import torch


def optimizer_of(parameters, args):  # all parameters; under ZeRO-1, this rank's share
    return torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay)


# %% step
import torch
import torch.distributed as dist


def forward_backward(model, batch, dp_mesh, args):
    """Backward of the mean loss over all predictions of the global batch. Strategies average gradients over the data
    ranks, so each rank's part of the sum is multiplied by their number. Returns it: its mean over them is the loss."""
    count = torch.as_tensor(count_of(batch), device=dp_mesh.device_type)
    counted = dist.all_reduce(count, group=dp_mesh.get_group(), async_op=True)
    loss = loss_of(outputs_of(model, batch), batch)
    counted.wait()  # the ranks' counts were added up during the forward pass
    loss = loss / count.clamp(min=1) * dp_mesh.size()
    loss.backward()
    # with precision instead: scaler.scale(loss).backward()
    return loss.detach()


# %% update
def update(model, optimizer, mesh, step, total_steps, args):
    """One optimizer step, the first being step 0. Returns further values to report: {name: number or tensor}."""
    optimizer.step()
    # with precision instead: scaler.step(optimizer)
    # with precision: scaler.update()
    optimizer.zero_grad()
    return {}


# %% evaluate
from functools import partial

import torch
import torch.distributed as dist


def pairs_of(outputs, batch):
    """{name: tensor of sum and count} over a batch: the loss and the metrics."""
    loss, count, metrics = loss_of(outputs, batch), count_of(batch), metrics_of(outputs, batch)
    as_double = partial(torch.as_tensor, dtype=torch.float64, device=loss.device)
    try:
        pairs = {"loss": (loss, count), **metrics}
        return {name: torch.stack([*map(as_double, pair)]).reshape(2) for name, pair in pairs.items()}
    except (TypeError, ValueError, RuntimeError):
        raise SystemExit("metrics_of must return {name: (sum, count)}, such as {'accuracy': (correct, samples)}, and "
                         f"count_of a number; they returned {metrics!r:.200}, {count!r:.60}") from None  # fmt: skip


@torch.no_grad()
def evaluate(model, dataset, batch_size, dp_mesh, on_device, args):
    """The mean loss and the metrics over a whole data set, on all ranks; every sample counts once."""
    sums = 0.0
    # with --accumulate: batch_size = max(1, batch_size // args.accumulate)  # as much memory as in training
    # with gathered: predictions = []
    model.eval()
    for buffer in model.buffers():  # BatchNorm's statistics differ between ranks: use those that checkpoints save
        dist.broadcast(buffer, group=dp_mesh.get_group(), group_src=0)
        # with own_part instead: dist.broadcast(buffer, src=0)
    for number, batch in enumerate(batches(dataset, batch_size, dp_mesh, args)):
        batch = map_tensors(batch, on_device)
        # with own_part: batch = own_part(batch, model.context)
        outputs = outputs_of(model, batch)
        pairs = pairs_of(outputs, batch)
        real = (number * dp_mesh.size() + dp_mesh.get_local_rank()) * batch_size < len(dataset)
        sums += real * torch.stack([*pairs.values()])
        # with gathered: predictions += [predicted_in(outputs, batch)] if real else []
    dist.all_reduce(sums, group=dp_mesh.get_group())
    # with own_part instead: dist.all_reduce(sums)  # every rank has its own positions
    results = {f"test_{name}": (total / count).item() for name, (total, count) in zip(pairs, sums, strict=True)}
    # with gathered: results |= metrics_of_all(predictions, dp_mesh)
    # with show_sample: show_sample(model, on_device)
    model.train()
    return results


# %% main
import gc
import logging
import os
import sys
import time
from datetime import timedelta
# with validate: from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def join_group():
    """This rank's device, after joining torchrun's process group; without torchrun, a group of one."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()  # ranks may share one over gloo; with plain "gloo" meshes would be on NCCL
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # or NCCL's object collectives would use GPU 0 on every rank
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    nccl, gloo = {"backend": "nccl", "device_id": device}, {"backend": "cpu:gloo,cuda:gloo" if gpus else "gloo"}
    dist.init_process_group(timeout=timedelta(seconds=120), **(nccl if gpus >= local_ranks else gloo), **alone)
    return device


def report(**values):  # called on every rank; rank 0 prints
    line = "  ".join(f"{name} %({name}){'.6g' if isinstance(v, float) else 's'}" for name, v in values.items())
    logging.getLogger("metrics").info(line, values)


@record
def main():
    args, device = parse_args(), join_group()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("metrics").setLevel("WARNING" if dist.get_rank() else "INFO")
    # with lowest_is_best: lowest_is_best(args)  # or an unknown --best would end the run at its first step
    mesh = make_mesh(device.type, args)
    dp_mesh = mesh["data"]  # the ranks that read different samples
    batch_size, rest = divmod(args.global_batch_size, dp_mesh.size())
    if rest or batch_size < 1:
        multiple = f"must be a multiple of {dp_mesh.size()} data ranks"
        raise SystemExit(f"--global-batch-size {args.global_batch_size} {multiple}")
    train, test = load_datasets(args.data_dir)
    if not len(train) or not len(test):
        raise SystemExit(f"load_datasets returned {len(train)} training and {len(test)} test samples: both are needed")
    if args.global_batch_size > len(train) and not dist.get_rank():
        print(f"a batch of {args.global_batch_size} repeats some of the {len(train)} training samples", flush=True)
    per_epoch = len(train) // args.global_batch_size or 1
    total_steps = args.steps or args.epochs * per_epoch

    torch.manual_seed(args.seed)  # the same weights on every rank
    model = Model()
    # with meta_device instead: model = new_model(args)
    # with adapter: model = adapted(model, args)
    # with precision: model = in_precision(model, device, args)
    size = sum(p.numel() for p in model.parameters())
    dtype = torch.float64 if all(p.dtype.to_real() == torch.float64 for p in model.parameters()) else torch.float32
    # with layers: change_layers(model, args)
    model = parallelize(model.train(), mesh, device, args)
    # with meta_device instead: model = parallelize(model.train(), mesh, before_sharding(device, args), args)
    # with meta_device: model = initialized(model, device, args)
    # with paths: name_parameters(model)
    optimizer = make_optimizer(model, mesh, args)
    torch.manual_seed(args.seed + dp_mesh.get_local_rank())  # dropout differs between data ranks, not within a replica

    def on_device(tensor):
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    # with checkpoints: checkpoints = Checkpoints(model, optimizer, device, args)
    # with checkpoints: report(start_step=checkpoints.start)
    # with validate or checkpoints: results, stopped = {}, None  # stopped: the reason to end early
    # with validate: measure = partial(evaluate, model, test, batch_size, dp_mesh, on_device, args)
    step, reported, began = 0, 0.0, time.monotonic()
    # with checkpoints instead: step, reported, began = checkpoints.start, 0.0, time.monotonic()
    report(parameters=size, data_ranks=dp_mesh.size(), total_steps=total_steps, steps_per_epoch=per_epoch)
    while step < total_steps:
        # with validate or checkpoints instead: while step < total_steps and not stopped:
        epoch, start = divmod(step, per_epoch)
        for batch in batches(train, batch_size, dp_mesh, args, epoch=epoch, start=start):
            loss = forward_backward(model, map_tensors(batch, on_device), dp_mesh, args)
            values = {"loss": loss, **update(model, optimizer, mesh, step, total_steps, args)}
            step += 1
            if step <= 20 or step == total_steps or time.monotonic() - reported >= 0.1:  # local clock: no collectives
                reported = time.monotonic()
                # with observed: values |= observed(model)
                report(step=step, epoch=epoch, **{name: float(value) for name, value in values.items()})
            # with validate: paused = time.monotonic()
            # with validate: results, stopped = validate(step, total_steps, measure, args)
            # with validate: began += time.monotonic() - paused  # validation is not training
            # with checkpoints: stopped = checkpoints.after_step(step, total_steps, stopped)
            if step == total_steps:
                # with validate or checkpoints instead: if stopped or step == total_steps:
                break
    seconds = time.monotonic() - began
    # with validate or checkpoints: results = {"stopped": stopped} if stopped else results
    results = evaluate(model, test, batch_size, dp_mesh, on_device, args)
    # with validate or checkpoints instead: if not results:
    # with validate or checkpoints:     results = evaluate(model, test, batch_size, dp_mesh, on_device, args)
    report(step=step, training_seconds=seconds, **results)
    # with export: export(model, args)

    # with validate: del measure
    del model, optimizer  # in this order, or gloo ranks abort at exit
    # with checkpoints instead: del model, optimizer, checkpoints  # in this order, or gloo ranks abort at exit
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
