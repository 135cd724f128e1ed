"""Of which sample a plan makes its batches."""

import pytest
import torch
from torch.utils.data import IterableDataset

from labkit.planner.model.samples import LOOKED_AT, longest

LENGTHS = [3, 9, 4, *[5] * LOOKED_AT, 99]  # the last is beyond those that are looked at


class InOrder(IterableDataset):
    def __iter__(self):
        return (torch.zeros(length) for length in LENGTHS)

    def __len__(self):
        return len(LENGTHS)


def looked_for(dataset):
    return longest(dataset, torch.nn.utils.rnn.pad_sequence, lambda batch, change: change(batch))


@pytest.mark.parametrize("dataset", [[torch.zeros(length) for length in LENGTHS], InOrder()], ids=["list", "stream"])
def test_it_is_the_longest_of_the_first(dataset):
    sample, among = looked_for(dataset)

    assert (len(sample), among) == (9, LOOKED_AT)


def test_samples_of_one_length_need_no_note():
    assert looked_for([torch.zeros(4)] * 3)[1] == 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [([], "there is nothing to train on"), (iter([torch.zeros(3)]), r"list_iterator.* return Stream\(dataset, ")],
)
def test_a_training_set_without_samples_or_length_is_an_error(dataset, message):
    with pytest.raises(SystemExit, match=message):
        looked_for(dataset)
