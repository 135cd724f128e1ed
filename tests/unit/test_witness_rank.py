"""A rank's witness holds nothing of the script's, and goes on when a part of it, or a step, fails."""

import gc
import weakref

import pytest

from labkit.ring import RingReader

torch = pytest.importorskip("torch")


@pytest.fixture
def witness(tmp_path):
    from labkit.worker.witness.witness import Witness

    return Witness(torch, tmp_path / "ring", tmp_path / "witness.jsonl")


def steps(witness, optimizer, count):
    for _ in range(count):
        witness.before_step(optimizer)
        optimizer.step()
        witness.after_step(optimizer, witness.step + 1)


def an_optimizer():
    p = torch.nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    return torch.optim.SGD([p], lr=0.1)


def test_a_loss_is_not_held_if_its_backward_pass_raises(witness):
    loss = (torch.ones(3, requires_grad=True) * 2).sum()
    reference = weakref.ref(loss)
    witness.before_backward(loss)
    del loss
    assert reference() is None


def test_an_area_that_fails_does_not_keep_others_from_their_moment(witness, tmp_path, monkeypatch):
    called = []
    first, *_, last = witness._areas
    monkeypatch.setattr(first, "after_check", lambda *_: 1 / 0)
    monkeypatch.setattr(last, "after_check", lambda *_: called.append(witness.number))
    steps(witness, an_optimizer(), 5)
    assert (called, witness.recorder.dropped) == ([1, 2, 5], 3)
    assert RingReader(tmp_path / "ring").now().number == 5


def test_a_step_that_raises_and_is_made_again_is_counted_once(witness):
    optimizer = an_optimizer()
    witness.before_step(optimizer)  # and its step raises
    steps(witness, optimizer, 4)
    assert (witness.optimizers[0].steps, witness.optimizers[0].due) == (4, 5)


def test_optimizers_that_a_script_has_dropped_are_not_kept(witness):
    for _ in range(100):
        steps(witness, an_optimizer(), 1)
    gc.collect()
    steps(witness, an_optimizer(), 1)
    assert len(witness.optimizers) == 1 and witness.made == 101


def test_a_data_set_is_not_held_when_its_loop_was_left(witness, monkeypatch):
    from torch.utils.data import DataLoader, TensorDataset

    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    draw = iterators._next_index

    def observed(iterator):
        index = draw(iterator)
        witness.batches.after_draw(iterator, index)
        return index

    monkeypatch.setattr(iterators, "_next_index", observed)
    data = TensorDataset(torch.randn(40, 2))
    iterator, reference = iter(DataLoader(data, batch_size=4)), weakref.ref(data)
    for _ in range(2):
        witness.after_fetch(iterator, next(iterator), True)
        witness.after_backward()
    del iterator, data
    gc.collect()
    assert reference() is None


def test_loaders_that_are_read_side_by_side_begin_one_epoch_each(witness, monkeypatch):
    from torch.utils.data import DataLoader

    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    draw = iterators._next_index

    def observed(iterator):
        index = draw(iterator)
        witness.batches.after_draw(iterator, index)
        return index

    monkeypatch.setattr(iterators, "_next_index", observed)
    both = [iter(DataLoader(torch.randn(40, 2), batch_size=4)) for _ in range(2)]
    for _ in range(5):
        for iterator in both:
            witness.after_fetch(iterator, next(iterator), True)
    assert witness.epochs == 2
