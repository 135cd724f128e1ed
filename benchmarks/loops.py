"""The same model, data and batches by other means, for script_speed.py: a loop by hand, accelerate, Lightning, Trainer.

torchrun starts this as it starts a script; rank 0 prints how many seconds the steps after the first ten took.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

WARM = 10
CUDA = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if CUDA else torch.device("cpu")
spec = importlib.util.spec_from_file_location("train", Path(__file__).parents[1] / "scripts" / "train.py")
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)


class Stopwatch:
    """Seconds from the end of step WARM to the last."""

    def __init__(self, steps):
        self.step, self.steps, self.started = 0, steps, 0.0

    def tick(self):
        self.step += 1
        if CUDA and self.step in (WARM, self.steps):
            torch.cuda.synchronize()
        if self.step == WARM:
            self.started = time.perf_counter()
        if self.step == self.steps and int(os.environ["RANK"]) == 0:
            print(f"seconds {time.perf_counter() - self.started}", flush=True)
        return self.step == self.steps


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def by_hand(model, dataset, batch_size, steps, strategy):
    """The least that trains: no accumulation, precision, checkpoints or reports."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if CUDA else "gloo")
    model = model.to(DEVICE)
    if strategy == "fsdp":
        for block in model.blocks:
            torch.distributed.fsdp.fully_shard(block)
        torch.distributed.fsdp.fully_shard(model)
    elif strategy == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer, watch = torch.optim.AdamW(model.parameters(), lr=1e-3), Stopwatch(steps)
    sampler = DistributedSampler(dataset, ranks, rank, drop_last=True)
    batches = torch.utils.data.BatchSampler(sampler, batch_size, drop_last=True)
    while True:
        for x, y in DataLoader(dataset, sampler=batches, batch_size=None):
            loss_of(model, x.to(DEVICE), y.to(DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch.tick():
                dist.barrier()
                dist.destroy_process_group()
                return


def by_accelerate(model, dataset, batch_size, steps, strategy):
    from accelerate import Accelerator

    accelerator, watch = Accelerator(cpu=not CUDA), Stopwatch(steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while True:
        for x, y in loader:
            accelerator.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
            if watch.tick():
                return accelerator.end_training()


def by_lightning(model, dataset, batch_size, steps, strategy):
    import lightning

    watch = Stopwatch(steps)

    class Wrapped(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return loss_of(self.model, *batch)

        def on_train_batch_end(self, *_):
            watch.tick()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="gpu" if CUDA else "cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp" if strategy == "ddp" else "auto",
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(Wrapped(), DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True))


def by_trainer(model, dataset, batch_size, steps, strategy):
    import transformers

    watch = Stopwatch(steps)

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return {"loss": loss_of(self.model, x, y)}

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            watch.tick()

    settings = transformers.TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        use_cpu=not CUDA,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # the others do not clip either
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
    )
    pairs = [{"x": x, "y": y} for x, y in (dataset[i] for i in range(min(len(dataset), 4 * steps * batch_size)))]
    transformers.Trainer(Wrapped(), settings, train_dataset=pairs, callbacks=[Ticks()]).train()


MEANS = {"hand": by_hand, "accelerate": by_accelerate, "lightning": by_lightning, "trainer": by_trainer}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("means", choices=MEANS)
    parser.add_argument("strategy", choices=["single", "ddp", "fsdp"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    MEANS[args.means](train.Model(), train.load_datasets("")[0], args.batch_size, args.steps, args.strategy)
    sys.stdout.flush()
    os._exit(0)  # gloo aborts some exits
