"""DiLoCo and compressed gradients: against a simulation in one process, across a checkpoint, and by the bytes sent."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from strategies.test_collectives import one_step
from strategies.test_extras import STEPS, composed_of, largest_difference, trained

import labkit

SGD = "import torch\n\n\ndef optimizer_of(parameters, args):\n    return torch.optim.SGD(parameters, lr=args.lr)\n"
ROUNDS = ["--sync-every", "2", "--outer-lr", "0.7", "--outer-momentum", "0.9"]


def test_rounds_of_one_step_without_an_outer_optimizer_are_ddp(tmp_path):
    """SGD is linear in the gradient: the mean of the replicas is the replica trained with the mean gradient."""
    one, two = (composed_of(name, "transformer").with_cells(optimizer=SGD) for name in ("ddp", "diloco"))
    options = ["--sync-every", "1", "--outer-lr", "1", "--outer-momentum", "0", "--accumulate", "2"]
    expected = trained(one, 2, [], tmp_path / "ddp")
    assert largest_difference(trained(two, 2, options, tmp_path / "diloco"), expected) < 1e-9
    longer = trained(two, 2, ["--sync-every", "2", *options[2:]], tmp_path / "longer")
    assert largest_difference(longer, expected) > 1e-6


def simulated(composed: labkit.Script, ranks: int, every: int, args: SimpleNamespace) -> dict[str, float]:
    """Algorithm 1 of arXiv 2311.08105 in one process, one replica after another, with torch's own SGD outside."""
    module = ModuleType("train")
    exec(str(composed), module.__dict__)
    train, _ = module.load_datasets("")
    torch.manual_seed(0)
    whole = module.Model()
    outer = torch.optim.SGD(whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    replicas = [module.Model() for _ in range(ranks)]
    inner = [torch.optim.AdamW(replica.parameters(), lr=1e-2, weight_decay=0.01) for replica in replicas]
    data = [SimpleNamespace(size=lambda: ranks, get_local_rank=lambda rank=rank: rank) for rank in range(ranks)]
    streams = [iter(module.batches(train, 16 // ranks, each, args, epoch=0)) for each in data]
    losses = {}
    for step in range(STEPS):
        if step % every == 0:
            for replica in replicas:
                replica.load_state_dict(whole.state_dict())
        total = 0.0
        for replica, optimizer, stream in zip(replicas, inner, streams, strict=True):
            batch = next(stream)
            loss = module.loss_of(replica(batch[0]), batch) / module.count_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() / ranks
        losses[f"loss {step + 1}"] = total
        if (step + 1) % every == 0:
            for p, *own in zip(whole.parameters(), *(replica.parameters() for replica in replicas), strict=True):
                p.grad = p.detach() - sum(own).detach() / ranks
            outer.step()
    return losses


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    composed = composed_of("diloco", "transformer", "checkpoints", "clip_and_schedule")
    return trained(composed, 2, ROUNDS, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def in_fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_ranks_train_what_the_paper_says(uninterrupted, in_fp64):
    expected = simulated(composed_of("diloco", "transformer"), 2, 2, SimpleNamespace(seed=0))
    assert max(abs(uninterrupted[name] / expected[name] - 1) for name in expected) < 1e-9


def test_a_round_goes_on_after_a_checkpoint_in_its_middle(uninterrupted, tmp_path):
    """Each replica, its inner optimizer, the start of the round and the outer momentum are restored."""
    composed = composed_of("diloco", "transformer", "checkpoints", "clip_and_schedule")
    saved = [*ROUNDS, "--checkpoint-dir", str(tmp_path / "checkpoints")]
    trained(composed, 2, saved, tmp_path / "first", steps=3)
    resumed = trained(composed, 2, saved, tmp_path / "second", start=3)
    assert resumed["loss 6"] and largest_difference(resumed, {n: uninterrupted[n] for n in resumed}) < 1e-12

    other = composed_of("ddp", "transformer", "checkpoints")  # goes on from the mean of the replicas
    trained(other, 2, saved[-2:], tmp_path / "third", start=6, steps=7)


def matrices_and_rest(rank: int) -> int:
    """Elements that PowerSGD sends: both factors of what is more than twice as large, everything else whole (Vogels et
    al., arXiv 1905.13727, algorithm 1)."""
    module = ModuleType("train")
    exec(str(labkit.Script.load("ddp")), module.__dict__)
    total = 0
    for p in module.Model().parameters():
        n, m = p.shape[0], p.numel() // p.shape[0]
        r = min(n, m, rank)
        total += r * (n + m) if 2 * r * (n + m) < n * m else n * m
    return total


def test_powersgd_sends_two_factors_of_each_matrix(tmp_path):
    _, sizes, model = one_step("ddp", 2, tmp_path, "ddp_options", compress="powersgd", powersgd_rank=2)

    assert sizes == {"all_reduce": 4 * matrices_and_rest(2)}
    assert sizes["all_reduce"] < model / 8


@pytest.mark.parametrize(("compress", "most"), [("fp16", 1e-4), ("int8", 2e-2), ("powersgd", 2e-2)])
@pytest.mark.soak
def test_compressed_gradients_train_nearly_the_same(compress, most, tmp_path):
    expected = trained(composed_of("ddp", "transformer"), 2, [], tmp_path / "whole")
    composed = composed_of("ddp", "transformer", "ddp_options")
    values = trained(composed, 2, ["--compress", compress], tmp_path / "compressed")
    assert 0 < largest_difference(values, expected) < most


OVERFLOWING = """
import math
from types import SimpleNamespace

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = compressed(DistributedDataParallel(nn.Linear(4, 4)), SimpleNamespace(compress="int8"))
for scale in (1.0, math.inf, 1.0):
    model.zero_grad()
    (model(torch.ones(2, 4)).sum() * scale).backward()
    print(all(bool(p.grad.isfinite().all()) for p in model.parameters()))
"""


def test_an_overflow_spoils_the_gradients_of_one_step_only(tmp_path):
    """Of fp16, whose scaler skips that step; what int8 leaves out of it must not be added to the next one."""
    script = tmp_path / "overflowing.py"
    script.write_text(str(labkit.Script.load("ddp", "ddp_options")).partition("\nif __name__")[0] + OVERFLOWING)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr


WITHOUT_VALUES = """
from types import SimpleNamespace
from torch._subclasses.fake_tensor import FakeTensorMode

received = SimpleNamespace(get_future=lambda: SimpleNamespace(then=lambda call: call(None)))
dist.get_world_size, dist.all_gather = lambda: 2, lambda *args, **options: received
sizes = [torch.tensor([6, 3])]
torch.tensor = lambda *args, **options: sizes.pop()  # once, where it is copied to the GPU
parameters = list(nn.Linear(2, 3).parameters())
with FakeTensorMode(allow_non_fake_inputs=True):  # which refuses whatever needs the values of tensors
    flat = torch.ones(9)
    bucket = SimpleNamespace(gradients=lambda: [flat[:6], flat[6:]], buffer=lambda: flat, index=lambda: 0,
                             parameters=lambda: parameters)
    kept = {}
    for _ in range(2):
        in_int8(kept, bucket)
print("done")
"""


def test_simulated_int8_never_waits_for_the_gpu(tmp_path):
    """On CUDA, a shape that depends on the values of a tensor makes the host wait; so does a tensor made of numbers."""
    script = tmp_path / "without_values.py"
    script.write_text(str(labkit.Script.load("ddp", "ddp_options")).partition("\nif __name__")[0] + WITHOUT_VALUES)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["done"], done.stderr


def test_at_the_end_of_a_round_every_parameter_is_sent_once(tmp_path):
    """In the fourth step."""
    _, sizes, model = one_step("diloco", 2, tmp_path, sync_every=4)
    assert sizes == {"all_reduce": model}


@pytest.mark.soak
def test_within_a_round_nothing_is_sent(tmp_path):
    """Not even how many predictions a batch has."""
    calls, _, _ = one_step("diloco", 2, tmp_path, sync_every=3)
    assert not calls
