"""Worker processes that load batches ahead of the training."""

# %% loader
import argparse
import random
import signal
import sys

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

collate = default_collate  # samples -> a batch: any nest of dicts, tuples and lists; a data cell may replace it


def loader_arguments(parser):
    parser.add_argument("--workers", type=int, default=2, help="processes that load batches")
    parser.add_argument("--prefetch", type=int, default=4, help="batches each worker loads ahead")
    parser.add_argument("--pin-memory", action=argparse.BooleanOptionalAction, help="default: on if there is a GPU")


def loader_of(dataset, chunks, args, epoch):
    """Loads each list of sample indices as one batch, in --workers processes."""
    options = {"prefetch_factor": args.prefetch, "worker_init_fn": outlive_signals} if args.workers else {}
    return DataLoader(
        Seeded(dataset, f"{args.seed} {epoch}") if args.workers else dataset,
        batch_sampler=chunks,
        collate_fn=collate,
        generator=torch.Generator().manual_seed(args.seed + (epoch or 0)),  # dropout uses the global generator
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available() if args.pin_memory is None else args.pin_memory,
        **options,
    )


class Seeded(Dataset):
    """Each sample's random augmentation depends only on the epoch and the sample, not on the worker that loads it, the
    number of ranks, or the step at which a run is resumed."""

    def __init__(self, dataset, seed):
        self.dataset, self.seed = dataset, seed

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        own = random.Random(f"{self.seed} {index}").getrandbits(32)
        random.seed(own)
        torch.manual_seed(own)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(own)
        return self.dataset[index]


def outlive_signals(worker):
    """torchrun also signals a rank's workers, but a rank that saves before it stops needs them to finish its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, signal.SIG_IGN)
