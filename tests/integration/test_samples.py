"""The samples of a step are those of the batches that it used, or unknown; never another number.

Every script is a loop as people write it and prints, as JSON, how many samples each step used.
"""

from __future__ import annotations

import re

import pytest
from loops_alone import train_alone

START = """
import json, random
from time import sleep
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(83, 8), torch.randint(0, 4, (83,))  # ten batches of 8, and one of 3
data = TensorDataset(x, y)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = []


def step(*losses):
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train(a, b):
    step(cross_entropy(model(a), b))
    samples.append(len(a))


def loader(data=data, **options):
    return DataLoader(data, **({"batch_size": 8} | options))


class Shard(IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from list(zip(x, y))[first::workers]


"""
END = "\nprint(json.dumps(samples))\n"

PLAIN = """
for a, b in loader(shuffle=True):
    train(a, b)
"""
WORKERS = """
for _ in range(2):
    for a, b in loader(num_workers=2, prefetch_factor=3):
        train(a, b)
"""
WORKERS_OUT_OF_ORDER = """
loader = loader(num_workers=2, persistent_workers=True, in_order=False)
for _ in range(2):
    for a, b in loader:
        train(a, b)
"""
BATCHES_OF_ANY_SIZE = """
class Batches:
    def __iter__(self):
        indices, sizes = list(range(83)), random.Random(0)
        while indices:
            size = sizes.randint(1, 9)
            yield indices[:size]
            del indices[:size]


for workers in (0, 2):
    for a, b in DataLoader(data, batch_sampler=Batches(), num_workers=workers):
        train(a, b)
"""
TUPLES_OF_IMAGES = """
class Images(Dataset):
    def __len__(self):
        return 43

    def __getitem__(self, i):
        return torch.randn(3, 8, 8), {"boxes": torch.rand(2, 4)}


model = nn.Conv2d(3, 1, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, _ in loader(Images(), collate_fn=lambda batch: tuple(zip(*batch))):
    step(sum(model(image[None]).square().mean() for image in images))
    samples.append(len(images))
"""
LISTS_OF_PAIRS = """
for batch in loader(collate_fn=lambda batch: batch):
    step(sum(cross_entropy(model(a[None]), b[None]) for a, b in batch))
    samples.append(len(batch))
"""
TIME_FIRST = """
model = nn.GRU(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader(torch.randn(43, 10, 4), collate_fn=lambda batch: torch.stack(batch, dim=1)):
    step(model(batch)[0].square().mean())
    samples.append(batch.shape[1])
"""
MAPPINGS = """
from collections import UserDict, namedtuple
from dataclasses import dataclass


@dataclass
class Fields:
    text: list
    x: torch.Tensor


Named = namedtuple("Named", "name x")
sequences = [torch.randn(i % 5 + 1, 8) for i in range(19)]
for items, collate, inputs_of in (
    ([{"text": "abc", "nested": {"x": a}} for a in x[:19]], None, lambda batch: batch["nested"]["x"]),
    ([Named("abc", a) for a in x[:19]], None, lambda batch: batch.x),
    (x[:19], lambda batch: Fields(["abc"] * 3, torch.stack(batch)), lambda batch: batch.x),
    (x[:19], lambda batch: UserDict(x=torch.stack(batch)), lambda batch: batch["x"]),
    (sequences, lambda batch: nn.utils.rnn.pack_sequence(batch, enforce_sorted=False), lambda batch: batch.data),
    (sequences, lambda batch: (torch.cat(batch), len(batch)), lambda batch: batch[0]),  # like a batch of graphs
):
    for batch, size in zip(loader(items, collate_fn=collate), (8, 8, 3)):
        step(model(inputs_of(batch)).square().mean())
        samples.append(size)
"""
STREAM = """
for workers in (0, 2):
    for a, b in loader(Shard(), num_workers=workers):
        train(a, b)
"""
STREAM_BATCH_FIRST = """
def collate(items):
    return {"a": torch.stack([a for a, _ in items])[:, :5], "b": torch.stack([b for _, b in items])}


model = nn.Linear(5, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for workers in (0, 2):
    for batch in loader(Shard(), num_workers=workers, collate_fn=collate):
        train(batch["a"], batch["b"])
"""
LISTS_OF_INDICES = """
for a, b in DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 8, drop_last=False)):
    train(a, b)
"""
AHEAD = """
training = loader()
for _ in range(2):
    batches = iter(training)
    following = next(batches)
    while following is not None:
        (a, b), following = following, next(batches, None)
        train(a, b)
"""
AHEAD_IN_A_THREAD = """
import queue, threading

waiting = queue.Queue(4)


def produce():
    for _ in range(2):
        for batch in loader():
            waiting.put(batch)
    waiting.put(None)


threading.Thread(target=produce, daemon=True).start()
while (batch := waiting.get()) is not None:
    train(*batch)
"""
MICRO_BATCHES_AT_ONCE = """
from itertools import islice

batches = iter(loader())
while micro_batches := list(islice(batches, 4)):
    step(*(cross_entropy(model(a), b) / 4 for a, b in micro_batches))
    samples.append(sum(len(a) for a, _ in micro_batches))
"""
SEVERAL_LOSSES = """
for a, b in loader():
    out = model(a)
    step(cross_entropy(out, b).clone(), model(a).square().mean())
    samples.append(len(a))
"""
GAN = """
discriminator, generator = nn.Linear(8, 1), nn.Linear(4, 8)
of_d = torch.optim.Adam(discriminator.parameters())
of_g = torch.optim.Adam(generator.parameters())
for a, _ in loader():
    fake, size = generator(torch.randn(len(a), 4)), len(a)
    mse_loss(discriminator(a), torch.ones(size, 1)).backward()
    mse_loss(discriminator(fake.detach()), torch.zeros(size, 1)).backward()
    of_d.step()
    of_d.zero_grad()
    mse_loss(discriminator(fake), torch.ones(size, 1)).backward()
    of_g.step()
    of_g.zero_grad()
    samples.append(size)
"""
LBFGS = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)


def closure():
    optimizer.zero_grad()
    loss = cross_entropy(model(a), b)
    loss.backward()
    return loss


for a, b in loader():
    optimizer.step(closure)
    samples.append(len(a))
"""
OPTIMIZERS_IN_BACKWARD = """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def after_gradient(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(after_gradient)
for a, b in loader():
    cross_entropy(model(a), b).backward()
    samples.append(len(a))
"""
IN_A_THREAD = """
import threading


def all_of_it():
    for a, b in loader():
        train(a, b)


thread = threading.Thread(target=all_of_it)
thread.start()
thread.join()
"""
EVALUATIONS = """
training = loader()
for _ in range(2):
    for a, b in training:
        train(a, b)
        for c, _ in loader(batch_size=50):  # fetched with gradients on, as most scripts do
            with torch.no_grad():
                model(c)
    with torch.no_grad():
        for c, _ in loader(batch_size=50):
            model(c)
"""
ALL_BUT_THE_SHORT_ONE = """
training = loader()
for _ in range(2):
    for a, b in training:
        if len(a) < 8:
            continue
        train(a, b)
    for a, _ in training:
        with torch.no_grad():
            model(a)
"""
EPOCHS_OF_ONE_BATCH = """
training, evaluation = loader(batch_size=83), loader(batch_size=83)
for _ in range(12):
    for a, b in training:
        train(a, b)
    for c, _ in evaluation:
        model(c)
"""
NEW_ITERATORS = """
training = loader(shuffle=True)
for _ in range(12):
    train(*next(iter(training)))
"""
# Loops whose first steps, or those of each epoch, are unknown, and how many of these there are.
TWO_LOADERS = """
labelled, others = loader(), loader(batch_size=5)
for _ in range(2):
    for (a, b), (c, _) in zip(labelled, others):
        step(cross_entropy(model(a), b) + model(c).square().mean())
        samples.append(len(a) + len(c))
    for c, _ in loader(batch_size=50):
        with torch.no_grad():
            model(c)
"""
AN_ENDLESS_ONE = """
def endless(loader):
    while True:
        yield from loader


others = endless(loader(batch_size=13))
for _ in range(2):
    for a, b in loader():
        c, _ = next(others)
        step(cross_entropy(model(a), b) + model(c).square().mean())
        samples.append(len(a) + len(c))
"""
SKIPPED = """
training = loader()
for _ in range(2):
    for i, (a, b) in enumerate(training):
        if i != 4:
            train(a, b)
"""
EVALUATION_BROKEN_OFF = """
training = loader(num_workers=1, persistent_workers=True)
evaluation = loader(batch_size=20, num_workers=1, persistent_workers=True)
for _ in range(2):
    for a, b in training:
        train(a, b)
    for i, (c, _) in enumerate(evaluation):
        with torch.no_grad():
            model(c)
        if i == 1:
            break
"""
KEPT_BATCHES = """
batches = list(loader())
for _ in range(2):
    for a, b in batches:
        train(a, b)
"""
STREAM_TIME_FIRST = """
for a in loader(Shard(), collate_fn=lambda items: torch.stack([a for a, _ in items], dim=1)):  # (8, 8)
    step(model(a.T).square().mean())
    samples.append(a.shape[1])
"""

COUNTED = {
    "plain": (PLAIN, 0),
    "workers": (WORKERS, 0),
    "workers out of order": (WORKERS_OUT_OF_ORDER, 0),
    "batches of any size": (BATCHES_OF_ANY_SIZE, 0),
    "tuples of images": (TUPLES_OF_IMAGES, 0),
    "lists of pairs": (LISTS_OF_PAIRS, 0),
    "time first": (TIME_FIRST, 0),
    "mappings, tuples, packed sequences, graphs": (MAPPINGS, 0),
    "stream": (STREAM, 0),
    "stream, batch first": (STREAM_BATCH_FIRST, 0),
    "lists of indices": (LISTS_OF_INDICES, 0),
    "ahead": (AHEAD, 1),
    "ahead, in a thread": (AHEAD_IN_A_THREAD, 1),
    "micro-batches at once": (MICRO_BATCHES_AT_ONCE, 0),
    "several losses": (SEVERAL_LOSSES, 0),
    "GAN": (GAN, 0),
    "LBFGS": (LBFGS, 0),
    "optimizers in backward": (OPTIMIZERS_IN_BACKWARD, 0),
    "in a thread": (IN_A_THREAD, 0),
    "evaluations": (EVALUATIONS, 0),
    "all but the short one": (ALL_BUT_THE_SHORT_ONE, 0),
    "epochs of one batch": (EPOCHS_OF_ONE_BATCH, 0),
    "new iterators": (NEW_ITERATORS, 0),
    "two loaders": (TWO_LOADERS, 1),
    "an endless one": (AN_ENDLESS_ONE, 2),
    "skipped": (SKIPPED, 2),
    "an evaluation that is broken off": (EVALUATION_BROKEN_OFF, 1),
    "stream, time first": (STREAM_TIME_FIRST, 1),
}

WITHOUT_A_LOADER = """
for a, b in zip(x.split(8), y.split(8)):
    train(a, b)
"""
ONE_BATCH = """
a, b = next(iter(loader()))
for _ in range(12):
    train(a, b)
"""
SINGLE_SAMPLES = """
for a, b in loader(batch_size=None):
    train(a[None], b[None])
"""
STREAM_OF_BATCHES = """
class Ready(IterableDataset):
    def __iter__(self):
        yield from zip(x.split(8), y.split(8))


for a, b in loader(Ready(), batch_size=None):
    train(a, b)
"""
TWO_STEPS_FOR_EACH = """
for a, b in loader():
    train(a, b)
    train(a, b)
"""
JOINED = """
batches = iter(loader(batch_size=4))
for _ in range(10):
    (a, b), (c, d) = next(batches), next(batches)
    train(torch.cat([a, c]), torch.cat([b, d]))
"""
UNKNOWN = {
    "without a loader": (WITHOUT_A_LOADER, 0),
    "one batch": (ONE_BATCH, 1),
    "single samples": (SINGLE_SAMPLES, 0),
    "stream of batches": (STREAM_OF_BATCHES, 0),
    "two steps for each": (TWO_STEPS_FOR_EACH, 11),
    "joined": (JOINED, 0),
    "kept batches": (KEPT_BATCHES, 1),
}


def program(loop):
    """Each step, or each second one, gets a record of its own."""
    return (
        START.replace("    samples.append(len(a))\n", "    samples.append(len(a))\n    sleep(0.06)\n")
        + re.sub(r"^( +)(samples\.append.*)$", r"\1\2\n\1sleep(0.06)", loop, flags=re.M)
        + END
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    loops = {name: program(loop) for name, (loop, _) in (COUNTED | UNKNOWN).items()}
    return train_alone(tmp_path_factory.mktemp("samples"), loops)


def rows_of(trained):
    metrics, history, samples = trained
    assert history.step == history.totals["steps"] == len(samples)
    rows = metrics[["step", "steps", "samples", "throughput"]].astype(float)
    known = rows.dropna(subset=["samples"])
    expected = [
        sum(samples[int(step - steps) : int(step)]) for step, steps in zip(known["step"], known["steps"], strict=True)
    ]
    assert known["samples"].tolist() == expected
    assert (rows["throughput"].isna() == rows["samples"].isna()).all()
    return rows, known


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", COUNTED)
def test_the_samples_of_a_step_are_those_of_its_batches(shape, trained):
    rows, known = rows_of(trained[shape])

    assert len(known) >= 2
    assert len(rows) - len(known) <= COUNTED[shape][1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", UNKNOWN)
def test_samples_that_cannot_be_counted_are_unknown(shape, trained):
    _, known = rows_of(trained[shape])

    assert len(known) <= UNKNOWN[shape][1]
