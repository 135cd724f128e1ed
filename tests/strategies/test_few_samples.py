"""A batch may be larger than the data: its samples are repeated, the same on any number of ranks."""

import pytest

import labkit
from labkit import Script

DATA = """
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    tokens = torch.randint(256, (13, 17), generator=torch.Generator().manual_seed(0))
    whole = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return torch.utils.data.Subset(whole, range(10)), torch.utils.data.Subset(whole, range(10, 13))
"""


def test_a_batch_larger_than_the_data_repeats_samples_and_says_so(runs_dir):
    losses, said = [], []
    for strategy, ranks in (("single", 1), ("ddp", 2)):
        script = Script.load(strategy, "precision").with_cells(data=DATA)
        run = labkit.launch(
            script, nproc_per_node=ranks, global_batch_size=32, precision="fp64", steps=6, wait=True, runs_dir=runs_dir
        )
        losses.append([*run.losses()])
        said.append(run.logs(rank=0))
        assert not [*run.findings().certain]

    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert all("a batch of 32 repeats some of the 10 training samples" in text for text in said)
