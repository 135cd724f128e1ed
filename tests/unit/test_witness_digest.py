"""Digests of tensors are exact: one bit more or less is another digest, and layout and alignment do not matter."""

from types import SimpleNamespace

import pytest
import torch

from labkit.worker.witness.digest import PIECE, Scrubber, _sum_by_torch, read_digests
from labkit.worker.witness.later import Later
from labkit.worker.witness.models import DistributedModel


def digest(tensor):
    sums = []
    read_digests(torch, [tensor], Later(torch, pytest.fail), sums.extend)
    assert len(sums) == 1
    return sums[0]


def test_a_digest_is_the_sum_of_the_bytes_as_64_bit_words():
    tensor = torch.tensor([3, -1, 7], dtype=torch.int64)
    assert digest(tensor) == 9
    assert digest(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 2], dtype=torch.uint8)) == 1 + 2
    assert digest(torch.empty(0)) == 0


def test_one_changed_bit_changes_it_and_a_copy_does_not():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.randn(33, 7).to(dtype)
        other = tensor.clone()
        assert digest(other) == digest(tensor)
        other.view(torch.uint8)[32, 0] ^= 1
        assert digest(other) != digest(tensor)


def test_torch_computes_the_same_as_numpy_where_words_are_whole():
    for tensor in (torch.randn(64), torch.randn(65)[1:], torch.randn(8, 16).t()):
        assert digest(tensor) == int(_sum_by_torch(torch, tensor)) & (1 << 64) - 1


def test_the_scrubber_sums_every_tensor_in_turn():
    tensors = [torch.randn(PIECE // 4), torch.randn(16), torch.randn(32)]
    scrubber = Scrubber(lambda: tensors)
    assert len(scrubber.pieces) == 2 and scrubber.is_whole
    before = [scrubber.sum(turn) for turn in range(2)]
    tensors[2][5] += 1
    after = [scrubber.sum(turn) for turn in range(2)]
    assert after[0] == before[0] == digest(tensors[0])
    assert after[1] != before[1]


def test_the_scrubber_follows_a_tensor_whose_memory_has_moved():
    tensors = [torch.nn.Parameter(torch.ones(64))]
    scrubber = Scrubber(lambda: tensors)
    scrubber.sum(0)
    tensors[0].data = torch.full((64,), 2.0)
    assert scrubber.sum(1) == digest(tensors[0])
    tensors.clear()
    assert scrubber.sum(2) == 0


def test_the_scrubber_reads_no_further_than_a_smaller_tensor_at_the_same_place():
    whole = torch.arange(64, dtype=torch.int64)
    tensors = [torch.nn.Parameter(whole, requires_grad=False)]
    scrubber = Scrubber(lambda: tensors)
    assert scrubber.sum(0) == sum(range(64))
    tensors[0].data = whole[:16]
    assert scrubber.sum(1) == sum(range(16))


def test_a_model_is_left_local_from_its_first_step_without_a_synchronized_pass_on():
    class Wrapped:
        require_backward_grad_sync = False
        _join_config = SimpleNamespace(enable=False)
        _comm_hooks, _module_parameters, process_group = (), (), None

    wrapped = Wrapped()
    fake = SimpleNamespace(distributed=SimpleNamespace(get_process_group_ranks=lambda group: [0, 1]))
    model = DistributedModel(fake, wrapped)
    assert not model.is_left_local()
    model.before_backward()
    assert model.is_left_local()  # at the check of this very step
    wrapped.require_backward_grad_sync = True
    model.before_backward()
    assert not model.is_left_local()  # the last micro-batch was
    model.after_step()
    wrapped.require_backward_grad_sync = False
    model.before_backward()
    model.after_step()
    assert model.is_left_local()
