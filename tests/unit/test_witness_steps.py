"""What the worker sees of an optimizer's parameters and of ties, with a real model of DDP."""

import gc
import json
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from labkit.worker.witness.schedules import Schedules  # noqa: E402
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


def test_two_models_that_validations_leave_in_eval_mode_are_found_and_nothing_stays_hooked(
    witness, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)  # of one rank nothing is compared
    train = nn.Module.train
    models = [nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        witness.wrapped(model)

    def steps(count):
        for _ in range(count):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(4, 8)).square().mean().backward()
                witness.before_step(optimizer)
                optimizer.step()
                witness.after_step(optimizer, witness.step + 1)

    for _ in range(3):
        for model in models:
            model.train()
        steps(2)
        for model in models:
            model.eval()
        with torch.no_grad():
            for model in models:
                witness.before_forward(model, ())
        steps(12)

    assert [line["type"] for line in written(tmp_path, "left_in_eval")] == ["Dropout", "Dropout"]
    assert nn.Module.train is train


def test_optimizers_are_twins_while_both_make_steps(witness, tmp_path):
    model, critic = (nn.parallel.DistributedDataParallel(nn.Linear(8, 2)) for _ in range(2))
    first, second, third = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(3))
    for each in (model, critic):
        witness.wrapped(each)

    def steps(count, *optimizers):
        for _ in range(count):
            for optimizer in optimizers:
                critic(model(torch.randn(4, 8)).repeat(1, 4)).square().mean().backward()
                witness.before_step(optimizer)
                optimizer.step()
                witness.after_step(optimizer, witness.step + 1)

    steps(40, first)  # and from then on another one
    steps(40, second)
    assert {line["is_twice"] for line in written(tmp_path, "orphans")} == {False}
    steps(40, second, third)
    assert True in {line["is_twice"] for line in written(tmp_path, "orphans")}


@pytest.mark.parametrize(
    ("make", "is_end"),
    [
        (lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8), True),
        (lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4), False),
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 8)), False),
    ],
    ids=["to its end", "set by hand later", "no plan"],
)
def test_a_rate_of_zero_is_a_schedules_end_if_it_began_there(make, is_end, witness, tmp_path):
    area = area_of(witness, Schedules)
    area.hook()
    try:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler = make(optimizer)
        for step in range(1, 21):
            optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
            if step > 8 and isinstance(scheduler, torch.optim.lr_scheduler.LinearLR) and not is_end:
                optimizer.param_groups[0]["lr"] = 0.0
            witness.before_step(optimizer)
            optimizer.step()
            witness.after_step(optimizer, step)
            if step <= 8 or is_end:
                scheduler.step()
    finally:
        torch.optim.lr_scheduler.LRScheduler.step = torch.optim.lr_scheduler.LRScheduler.step.__wrapped__
    witness.finish()
    newest = written(tmp_path, "schedule")[-1]
    assert (newest["idle"], newest["is_end"], newest["ended"]) == (12, is_end, 8)


@pytest.mark.parametrize("trains_on", [False, True])
def test_a_schedule_that_is_gone_is_of_the_whole_training_unless_it_goes_on(trains_on, witness, tmp_path):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def train(scheduler=None):
        for _ in range(8):
            parameter.grad = torch.ones(2)
            witness.before_step(optimizer)
            optimizer.step()
            witness.after_step(optimizer, witness.step + 1)
            if scheduler is not None:
                scheduler.step()

    area_of(witness, Schedules).hook()
    try:
        train(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8))
        gc.collect()
    finally:
        torch.optim.lr_scheduler.LRScheduler.step = torch.optim.lr_scheduler.LRScheduler.step.__wrapped__
    if trains_on:
        train()
    witness.finish()
    newest = written(tmp_path, "schedule")[-1]
    assert (newest["moves"], newest["steps"], newest["is_over"]) == (8, 8, not trains_on)
