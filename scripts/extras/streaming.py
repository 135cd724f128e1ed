"""Training data that can only be read in order: an IterableDataset, resumed from its state if it has one."""

# %% notes
# of checkpoints.py

# %% batches
from itertools import islice

import torch
from torch.utils.data import IterableDataset


class Stream(IterableDataset):
    """The training data that load_datasets returns: an iterable, and the number of samples in an epoch.

    An epoch begins where the last one ended; a dataset that ends starts again. One with state_dict and load_state_dict,
    as Hugging Face's have, is resumed by its state, any other by reading again what was trained on.
    """

    def __init__(self, dataset, epoch_samples):
        self.dataset, self.epoch_samples = dataset, epoch_samples
        self.samples, self.fresh = None, dataset.state_dict() if hasattr(dataset, "state_dict") else None

    def __len__(self):
        return self.epoch_samples

    def __iter__(self):
        while True:
            yield from self.dataset
            if hasattr(self.dataset, "load_state_dict"):  # otherwise Hugging Face's restart where they resumed
                self.dataset.load_state_dict(self.fresh)

    def begin(self, samples):
        """Continue from a saved state, or after this many samples."""
        if "stream" in notes and hasattr(self.dataset, "load_state_dict"):
            self.dataset.load_state_dict(notes["stream"])
            samples = 0
        self.samples = islice(iter(self), samples, None)


def batches(dataset, batch_size, dp_mesh, args, epoch=None, start=0):
    """One data rank's batches: of a training epoch from step `start` on, or of all samples in order.
    Every rank reads the whole stream and takes its share: step k trains on the same samples for any number of ranks."""
    ranks, rank = dp_mesh.size(), dp_mesh.get_local_rank()
    if epoch is None:
        chunks = [range(i, min(i + batch_size, len(dataset))) for i in range(0, len(dataset), batch_size)]
        chunks += chunks[:1] * (-len(chunks) % ranks)  # the same number on every rank; evaluate ignores the extra ones
        return loader_of(dataset, chunks[rank::ranks], args, epoch)
    return stream(dataset, batch_size, ranks, rank, epoch, start)


def stream(dataset, batch_size, ranks, rank, epoch, start):
    if not isinstance(dataset, Stream):
        raise SystemExit(f"load_datasets returned {type(dataset).__name__} as training data; the extra streaming needs "
                         "Stream(dataset, epoch_samples)")  # fmt: skip
    steps = max(1, len(dataset) // (batch_size * ranks))
    if dataset.samples is None:
        dataset.begin((epoch * steps + start) * batch_size * ranks)
    for _ in range(start, steps):
        samples = list(islice(dataset.samples, batch_size * ranks))
        if hasattr(dataset.dataset, "state_dict"):
            notes["stream"] = dataset.dataset.state_dict()
        yield collate(samples[rank * batch_size : (rank + 1) * batch_size])


def map_tensors(batch, change):
    """Changes every tensor in nested dicts, tuples and lists; lists become tuples."""
    if hasattr(batch, "items"):
        return {name: map_tensors(part, change) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map_tensors(part, change) for part in batch)
    return change(batch) if torch.is_tensor(batch) else batch
