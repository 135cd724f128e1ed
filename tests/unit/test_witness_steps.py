"""What the worker sees of an optimizer's parameters and of ties, with a real model of DDP."""

import gc
import json
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from labkit.worker.witness.updates import Ties, Updates  # noqa: E402
from labkit.worker.witness.witness import Witness  # noqa: E402


@pytest.fixture
def witness(group_of_one, tmp_path):
    return Witness(torch, tmp_path / "ring", tmp_path / "witness.jsonl")


def area_of(witness, kind):
    return next(area for area in witness._areas if isinstance(area, kind))


def written(tmp_path, kind):
    lines = [json.loads(line) for line in (tmp_path / "witness.jsonl").read_text().splitlines()]
    return [line for line in lines if line["k"] == kind]


def train(witness, model, optimizer, steps=21):
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        witness.before_step(optimizer)
        optimizer.step()
        witness.after_step(optimizer, step)


def test_parameters_in_no_optimizer_are_not_held(witness):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model, optimizer = nn.parallel.DistributedDataParallel(net), torch.optim.SGD(net[1].parameters())
    witness.wrapped(model)
    train(witness, model, optimizer, 1)
    known = area_of(witness, Updates)._known[0]
    (key, (reference, _)), *_ = known.orphans.items()
    assert key == (0, "0.weight") and reference() is net[0].weight
    lost = weakref.ref(net[0].weight)
    del model, net, optimizer, reference, _
    gc.collect()
    assert lost() is None and witness.recorder.dropped == 0


@pytest.mark.parametrize(
    ("other", "strange"),
    [
        (nn.Parameter(torch.ones(8, 8)), 1),
        (nn.Parameter(torch.ones(6, 8)), 1),  # it has grown
        (nn.Parameter(torch.ones(8, 8), requires_grad=False), 0),
        (nn.Parameter(torch.ones(5)), 0),
        (nn.Parameter(torch.tensor(1.0)), 0),
    ],
)
def test_a_strange_parameter_may_have_been_trained_in_place_of_a_lost_one(other, strange, witness, tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    model = nn.parallel.DistributedDataParallel(net)
    witness.wrapped(model)
    train(witness, model, torch.optim.SGD([*net[1].parameters(), other], lr=0.01))
    assert {line["strange"] for line in written(tmp_path, "orphans")} == {strange}
    assert witness.recorder.dropped == 0


@pytest.mark.parametrize("are_equal", [True, False])
def test_a_checkpoint_parts_a_tie_if_its_tensors_are_equal(are_equal, witness, tmp_path):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    ties, before = area_of(witness, Ties), nn.Module.load_state_dict
    after = ties._observe("load_state_dict")(net)
    state = {name: torch.randn(8, 8) if name.endswith("weight") else p for name, p in net.state_dict().items()}
    if are_equal:
        state["1.weight"] = state["0.weight"].clone()
    before(net, state, assign=True)
    after(None)
    train(witness, net, torch.optim.SGD(net.parameters(), lr=0.01), 2)
    names = [line["names"] for line in written(tmp_path, "parted")]
    assert names == ([["0.weight", "1.weight"]] if are_equal else []) and witness.recorder.dropped == 0
