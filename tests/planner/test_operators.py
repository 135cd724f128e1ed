"""What is counted of a model's operators: their FLOPs, bytes and kinds, and sizes that fake kernels leave out."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from labkit.planner.model.fake import cuda_kernels
from labkit.planner.model.fake.checked_fakes import CheckedFakeMode
from labkit.planner.model.fake.cuda_kernels import KEPT, follow_kernels
from labkit.planner.model.fake.fake_run import _patch_transformers
from labkit.planner.model.fake.time_steps import CELLS, ENDS, skip_steps
from labkit.planner.model.unit_costs import Flow, UnitTracker, profile
from labkit.version import release_of

B, T, C = 2, 16, 32


def operators(model, x):
    """Those of a forward and a backward."""
    with UnitTracker(model.parameters()) as tracker:
        out = model(x)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return tracker.operators


def total(seen, phase, kind):
    return sum(each.flops for each in seen if (each.phase, each.kind) == (phase, kind))


class Attention(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("model", "shape", "kind", "flops"),
    [
        (nn.Linear(C, 64, bias=False), (B, C), "matmul", 2 * B * C * 64),
        (nn.Conv2d(4, 8, 3, padding=1, bias=False), (B, 4, T, T), "convolution", 2 * B * 8 * T * T * 4 * 9),
        (nn.Conv2d(4, 8, 3, padding=1, groups=2), (B, 4, T, T), "convolution", 2 * B * 8 * T * T * 2 * 9),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (B, 8, T, T), "depthwise", 2 * B * 8 * T * T * 9),
        (nn.ConvTranspose2d(4, 8, 2, stride=2), (B, 4, T, T), "convolution", 2 * B * 4 * T * T * 8 * 4),
        (nn.LSTM(C, C, bias=False), (T, B, C), "recurrent", 2 * B * T * 2 * 4 * C * C),
    ],
    ids=["linear", "convolution", "groups", "depthwise", "transposed", "lstm"],
)
def test_backward_computes_twice_as_much_as_forward(model, shape, kind, flops):
    seen = operators(model, torch.zeros(shape, requires_grad=True))

    assert total(seen, "forward", kind) == flops
    assert total(seen, "backward", kind) == 2 * flops


def test_attention_computes_its_two_products_and_in_backward_five():
    seen = operators(Attention(), torch.zeros(B, 4, T, 8, requires_grad=True))

    assert total(seen, "forward", "attention") == 2 * 2 * B * 4 * T * T * 8
    assert total(seen, "backward", "attention") == 5 * 2 * B * 4 * T * T * 8


def test_views_do_nothing_and_an_elementwise_operator_reads_and_writes():
    with UnitTracker([]) as tracker:
        x = torch.ones(B, C)
        tracker.operators.clear()
        x.view(-1).reshape(C, B).t()
        x[None].expand(3, B, C).detach()
        assert tracker.operators == []
        torch.relu(x)
    (relu,) = tracker.operators

    assert (relu.kind, relu.flops, relu.bytes) == ("memory", 0, 2 * B * C * 4)


def test_tracing_a_step_keeps_no_output_alive_that_its_operation_saved():
    with UnitTracker([]) as tracker:
        output = torch.relu(torch.ones(B, C, requires_grad=True))  # without a backward that would free what it saved
        alive = tracker.alive(output)
        del output
        assert not alive()


def kept(model, x):
    """Bytes that forward keeps, each storage once."""
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x)
    return sum(storages.values())


@pytest.mark.parametrize("checked", [True, False])
def test_an_lstm_keeps_its_workspace_which_torchs_fake_kernel_leaves_out(checked):
    real = kept(nn.LSTM(C, 64, num_layers=2), torch.zeros(T, B, C))
    fake = CheckedFakeMode() if checked else torch._subclasses.FakeTensorMode()
    with fake:
        planned = kept(nn.LSTM(C, 64, num_layers=2), torch.zeros(T, B, C))

    assert (planned == real) == checked
    if checked:
        assert fake.corrected == {"aten.mkldnn_rnn_layer"}


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
def test_a_layer_norms_statistics_are_as_large_as_real_ones(dtype: torch.dtype, weight: torch.dtype) -> None:
    def sizes() -> list[int]:
        x, scale = torch.zeros(4096, 8, dtype=dtype), torch.zeros(8, dtype=weight)
        return [out.untyped_storage().nbytes() for out in torch.native_layer_norm(x, [8], scale, scale, 1e-5)]

    real = sizes()
    with CheckedFakeMode() as fake:
        assert sizes() == real

    assert bool(fake.corrected) == (dtype != weight)


def test_what_real_operators_cannot_do_with_zeros_is_left_as_it_is():
    with CheckedFakeMode() as fake:
        ill = torch.linalg.cholesky(torch.zeros(3, 3))

    assert ill.shape == (3, 3)
    assert fake.corrected == set()


def test_what_conditions_select_is_everything_unless_a_router_chose():
    with CheckedFakeMode() as fake:
        mask, x = torch.ones(6, 4, dtype=torch.bool), torch.zeros(6, 4)
        numbers = torch.zeros(3, dtype=torch.int64)
        assert mask[numbers].shape == (3, 4)
        assert not fake.assumed
        assert x[mask].shape == x.masked_select(mask).shape == mask[mask].shape == (24,)
        assert fake.assumed == {"a condition is assumed to select everything"}
        chosen = x.topk(2).indices
        assert [len(found) for found in torch.where(chosen == 1)] == [3, 3]

    assert "each of 4 experts is assumed to get the same share of the tokens" in fake.assumed
    assert fake.experts == 4


@pytest.mark.parametrize("targets", [torch.ones(4, 10, dtype=torch.long), torch.ones(40, dtype=torch.long)])
def test_ctc_holds_as_much_as_its_kernel(targets):
    ctc, lengths = torch.ops.aten._ctc_loss.Tensor, (torch.full((4,), 50), torch.full((4,), 10))
    real = ctc(torch.randn(50, 4, 20), targets, *lengths)
    with CheckedFakeMode() as fake:
        planned = ctc(torch.randn(50, 4, 20), targets, *lengths)
        in_numbers = torch.ops.aten._ctc_loss.default(torch.randn(50, 4, 20), targets, [50] * 4, [10] * 4)
    assert [each.shape for each in in_numbers] == [each.shape for each in real]
    assert [(each.shape, each.dtype) for each in planned] == [(each.shape, each.dtype) for each in real]
    assert fake.assumed == {"CTC's targets are assumed to be equally long"}


def test_bincount_has_minlength_counts():
    with CheckedFakeMode() as fake:
        chosen = torch.zeros(6, 4).topk(2).indices.flatten()
        counts, weighed = chosen.bincount(minlength=4), chosen.bincount(torch.ones(12), minlength=4)

    assert counts.shape == weighed.shape == (4,)
    assert (counts.dtype, weighed.dtype) == (torch.int64, torch.float32)
    assert fake.assumed == {"bincount is assumed to see no value above its minlength"}


def test_a_skewed_router_sends_every_token_to_as_few_experts_as_it_can():
    with CheckedFakeMode(skewed=True):
        for _layer in range(2):
            chosen = torch.zeros(6, 4).topk(2).indices
            assert [len(torch.where(chosen == i)[0]) for i in range(4)] == [6, 6, 0, 0]


def test_a_wrong_fake_kernel_of_an_operator_that_nobody_named_is_corrected():
    library = torch.library.Library("unnamed", "DEF")
    library.define("scaled(Tensor x) -> (Tensor, Tensor)")
    library.impl("scaled", lambda x: (2 * x, x.new_empty(10 * x.numel())), "CPU")
    torch.library.register_fake("unnamed::scaled", lambda x: (torch.empty_like(x), x.new_empty(0)), lib=library)
    with CheckedFakeMode() as fake:
        _, workspace = torch.ops.unnamed.scaled(torch.zeros(64, 64))

    assert workspace.untyped_storage().nbytes() == 10 * 64 * 64 * 4
    assert fake.corrected == {"unnamed.scaled"}


@pytest.mark.skipif(release_of(torch.__version__) < (2, 10), reason="torch 2.8 has no grouped product on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_experts_are_as_large_as_real_ones(dtype: torch.dtype) -> None:
    def product() -> torch.Tensor:
        tokens, experts = torch.ones(12, 16, dtype=dtype, requires_grad=True), torch.ones(4, 16, 32, dtype=dtype)
        out = torch._grouped_mm(tokens, experts, offs=torch.tensor([3, 6, 9, 12], dtype=torch.int32))
        out.square().sum().backward()
        assert tokens.grad is not None
        return out

    with CheckedFakeMode():
        fake = product()
    real = product()

    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_results_have_real_strides_which_decide_whether_the_next_layer_copies():
    def normalized():
        x = torch.zeros(B, T, C, requires_grad=True)
        return nn.BatchNorm1d(C)(x.transpose(1, 2)).transpose(1, 2)

    with CheckedFakeMode():
        fake = normalized()

    assert fake.stride() == normalized().stride()


@pytest.fixture
def kernels(monkeypatch):
    """What follow_kernels assumed; its patches end with the test."""
    for name in KEPT:
        monkeypatch.setattr(torch._VF, name, getattr(torch._VF, name))
    assumed = []
    follow_kernels((8, 0), assumed.append)
    yield assumed
    cuda_kernels._registered.pop()._destroy()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_cudnn_has_one_call_for_a_recurrent_layer_and_returns_what_the_cpu_does(kind, kernels):
    def made():
        sizes = {"num_layers": 2, "bidirectional": True, "batch_first": True}
        return kind(C, 8, **sizes), torch.zeros(B, T, C, requires_grad=True)

    with CheckedFakeMode():
        model, x = made()
        seen = operators(model, x)
        planned = [each.shape for each in tree_leaves(model(x))]
    model, x = made()
    real = [each.shape for each in tree_leaves(model(x))]
    both = total(seen, "forward", "recurrent"), total(seen, "backward", "recurrent")

    assert both[0] == 2 * B * T * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert both[1] == 2 * both[0]
    assert len([each for each in seen if each.kind == "recurrent" and each.phase == "forward"]) == T
    assert planned == real
    assert len(kernels) == 2


@pytest.mark.parametrize(
    ("kind", "options", "half", "recomputed"),
    [
        (nn.GRU, {}, False, False),
        (nn.GRU, {"bidirectional": True, "num_layers": 2, "dropout": 0.1}, True, False),
        (nn.RNN, {"bias": False, "batch_first": True, "nonlinearity": "relu"}, False, True),
    ],
)
def test_time_steps_that_are_not_computed_hold_and_compute_what_they_do(kind, options, half, recomputed, monkeypatch):
    steps = 2 * ENDS + 3

    def measured():
        with CheckedFakeMode():
            model = kind(C, 8, **options)
            call = partial(checkpoint, model, use_reentrant=False) if recomputed else model
            context = partial(torch.autocast, "cpu", torch.bfloat16) if half else nullcontext
            parameters, flow = list(model.parameters()), Flow((steps, C), torch.float32)
            return profile(lambda take: call(take())[0], parameters, flow, context).profile

    def most(moments):
        return [max(m.held.at(n) + settled * m.settled for m in moments) for n in (1, 9) for settled in (0, 1)]

    def flops(work, phase):
        return sum(each.calls * each.flops.per_sample for each in work if each.phase == phase)

    for name in CELLS:
        monkeypatch.setattr(torch._VF, name, getattr(torch._VF, name))
    real = measured()
    skip_steps()
    short = measured()

    assert (short.saved, short.cached) == (real.saved, real.cached)
    assert most(short.forward) == most(real.forward)
    assert most(short.backward) == pytest.approx(most(real.backward), abs=4)
    assert all(flops(short.work, phase) == flops(real.work, phase) for phase in ("forward", "backward"))


def test_a_gpu_never_holds_the_scores_of_attention_even_with_dropout(kernels):
    def attend(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    with CheckedFakeMode():
        assert kept(attend, torch.zeros(1, 1, 256, 8, requires_grad=True)) < 256 * 256 * 4
    assert attend(torch.zeros(1, 1, 256, 8)).shape == (1, 1, 256, 8)  # real tensors are still computed


def test_a_plan_is_not_sure_of_an_operator_that_was_never_compared_with_a_gpus():
    with CheckedFakeMode(on_gpu=True) as fake:
        x = torch.zeros(2, 8, requires_grad=True)
        F.layer_norm(x, [8])
        x.tril()
        torch.linalg.qr(torch.zeros(2, 8))  # as constructors do
        assert not fake.assumed
        torch.linalg.qr(x)
    assert fake.assumed == {"aten.linalg_qr was never compared with CUDA's: what it keeps may differ there"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_heads_compute_as_much_on_a_gpu_as_on_a_cpu(dtype, kernels):
    class Grouped(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)

    with CheckedFakeMode():
        seen = operators(Grouped(), torch.zeros(B, 4, T, 8, dtype=dtype, requires_grad=True))
    products = 2 * B * 4 * T * T * 8
    assert sum(each.flops for each in seen if each.phase == "forward") == 2 * products
    assert sum(each.flops for each in seen if each.phase == "backward") in (4 * products, 5 * products)


@pytest.mark.parametrize("layer", [nn.RMSNorm(8), nn.LSTMCell(8, 8), nn.LSTMCell(8, 8, bias=False), nn.GRU(8, 8)])
def test_real_tensors_are_still_computed(layer, monkeypatch, request):
    x = torch.randn(2, 8)
    expected = layer(x)
    request.getfixturevalue("kernels")
    torch.testing.assert_close(layer(x), expected)


def test_positions_that_a_model_of_transformers_numbered_itself_are_one_sequence(monkeypatch):
    masks = pytest.importorskip("transformers.masking_utils")
    monkeypatch.setattr(masks, "find_packed_sequence_indices", masks.find_packed_sequence_indices)
    _patch_transformers()
    with CheckedFakeMode():
        assert masks.find_packed_sequence_indices(torch.arange(T)[None].expand(B, T)) is None
        assert masks.find_packed_sequence_indices(torch.zeros(B, T, dtype=torch.int64)).shape == (B, T)
    assert masks.find_packed_sequence_indices(torch.arange(T)[None].expand(B, T)) is None
