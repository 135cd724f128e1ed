"""Of which sample a plan makes its batches, and that large ones have no data."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import IterableDataset

from labkit import Script
from labkit.planner.model.fake.checked_fakes import CheckedFakeMode
from labkit.planner.model.fake.fake_run import Batches
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


def as_tuple(images, boxes):
    return images, [{"boxes": each, "crops": [each[:1], each[1:]], "name": "cat"} for each in boxes]


def as_dict(images, boxes):
    return {"images": list(images.split(1)), "targets": as_tuple(images, boxes)[1], "crops": [images, images[:, :, 9:]]}


@pytest.mark.parametrize("collated", [as_tuple, as_dict])
@pytest.mark.parametrize("samples", [1, 512])
def test_batches_with_lists_are_as_collated_but_have_no_data(collated, samples):
    def collate(pairs):
        assert len(pairs) <= 3 or pairs[0][0].is_meta
        images, boxes = zip(*pairs, strict=True)
        return collated(torch.stack(images), boxes)

    def shapes(batch):
        return script.map_tensors(batch, lambda tensor: list(tensor.shape))

    cells = {}
    exec(Script.load("single").cells["batches"].text, cells)
    sample = torch.zeros(3, 512, 512), torch.zeros(5, 4)
    script = SimpleNamespace(
        load_datasets=lambda _: ([sample] * 4, []), collate=collate, map_tensors=cells["map_tensors"]
    )

    batches = Batches(SimpleNamespace(script=script, fake=CheckedFakeMode(), args=SimpleNamespace(data_dir="")))
    batch = batches.make(samples, torch.bfloat16)

    tensors = batches.tensors(batch)
    assert shapes(batch) == shapes(collate([[tensor.to("meta") for tensor in sample]] * samples))
    assert {(type(tensor), tensor.dtype) for tensor in tensors} == {(FakeTensor, torch.bfloat16)}
    assert batches.bytes() == 4 * sum(tensor.numel() for tensor in tensors) / samples
