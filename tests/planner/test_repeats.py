"""What a plan computes once: operators with the same arguments, and layers that do the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from labkit.planner.model.fake.checked_fakes import CheckedFakeMode
from labkit.planner.model.forward_order import Followed

CALLS = {
    "sum": lambda x, y: x + y,
    "with another type": lambda x, y: x + y.half(),
    "one number": lambda x, y: x * 2,
    "of rows": lambda x, y: x.sum(1, keepdim=True),
    "product": lambda x, y: x @ y.t(),
    "in place": lambda x, y: x.mul_(y),
    "copied in place": lambda x, y: x.copy_(y.double()),
    "transposed": lambda x, y: x.t(),
    "part": lambda x, y: x[2:, ::2],
    "parts": lambda x, y: x.split(3),
    "expanded": lambda x, y: x[None].expand(3, -1, -1),
    "copied view": lambda x, y: x.t().contiguous(),
    "several results": lambda x, y: torch.topk(x, 2),
    "norm": lambda x, y: F.layer_norm(x, (8,)),
    "of a list": lambda x, y: torch.cat([x, y]),
    "for each": lambda x, y: torch._foreach_mul([x, y], 2.0),
    "no elements": lambda x, y: x[:0] + y[:0],
    "dropped nothing": lambda x, y: torch.ops.aten.native_dropout(x, 0.0, True),
    "memory format": lambda x, y: x.view(1, 2, 4, 8).to(memory_format=torch.channels_last) + 1,
}


def described(results, *arguments):
    """Shape, strides, type, place in its storage and the storage's size; and which results share whose storage."""
    tensors = [*arguments, *tree_leaves(results)]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), str(tensor.device))
               for tensor in tensors]  # fmt: skip
    return layouts, sizes, [storages.index(storage) for storage in storages]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_second_call_of_an_operator_returns_what_torch_returns(call):
    def results(mode, times):
        with mode:
            for _ in range(times):
                arguments = torch.empty(8, 8), torch.empty(8, 8)
                seen = described(call(*arguments), *arguments)
        return seen

    assert results(CheckedFakeMode(), 2) == results(FakeTensorMode(), 1)


def test_an_operator_that_fails_fails_again_in_torchs_words():
    with CheckedFakeMode():
        x, y = torch.empty(4, 3), torch.empty(4, 3)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"shape '\[5\]' is invalid for input of size 12"):
                x.view(5)
            with pytest.raises(RuntimeError, match="a and b must have same reduction dim"):
                x @ y


class Layer(nn.Module):
    computed = 0

    def __init__(self, width, features):
        super().__init__()
        self.up, self.down = nn.Linear(width, features), nn.Linear(features, width)

    def forward(self, x, mask):
        Layer.computed += 1
        return x + self.down(self.up(x) * mask), None


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8, 16 if i < 3 else 32) for i in range(5))

    def forward(self, x):
        mask = torch.ones(len(x), 1)
        for layer in self.layers:
            x, _ = layer(x, mask)
        x += 1  # an output that needs a gradient may be changed, other than a leaf
        return x


def followed(model):
    with CheckedFakeMode():
        model = model()
        return Followed(model, lambda samples: torch.zeros(samples, 8).requires_grad_(), [*model.layers])


def test_layers_that_do_the_same_compute_once(monkeypatch):
    monkeypatch.setattr(Layer, "computed", 0)
    chain = followed(Stack)

    assert Layer.computed == 2 * 2  # two kinds of layers, two numbers of samples
    assert [chain.blocks.index(like) for like in chain.alike().values()] == [0, 0, 0, 3, 3]
    assert {(call.input_at, call.output_at, call.flow.shape) for call in chain.calls[3]} == {(0, 0, (8,))}
