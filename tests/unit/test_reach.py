"""Who may reach into a rank, how ranks decide, and what an evaluation leaves behind."""

from __future__ import annotations

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from labkit.record.requests import RequestFolder
from labkit.worker.reach import quantities
from labkit.worker.reach.evaluate import evaluate, execute, names_around
from labkit.worker.reach.requests import Breakpoint, Reach
from labkit.worker.reach.settings import Settings
from labkit.worker.recorder import Recorder


@pytest.fixture
def reach(folder):
    folder.requests.mkdir(mode=0o700)
    folder.rank(0).mkdir(parents=True)
    return Reach(folder, 0, 1, Recorder(folder.metrics(0)), Settings(), lambda: 4)


def ask(folder, expression="6 * 7"):
    return RequestFolder.post(folder.requests, {"kind": "ask", "ranks": None, "timeout": 5.0, "expression": expression})


def listen(reach):
    for _ in range(3):
        reach._advance()


@pytest.fixture
def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


def test_a_request_is_carried_out_at_the_end_of_the_next_step(folder, reach, optimizer):
    request = ask(folder)
    listen(reach)
    assert reach.flagged
    reach.at_boundary(optimizer, 4, 0.1)
    assert request.look().decision is None
    reach.at_boundary(optimizer, 5, 0.1)

    assert request.look().decision == "agreed"
    assert request.answers([0]) == {0: {"step": 5, "results": [{"value": 42}]}}
    assert not reach.flagged


@pytest.mark.parametrize("writable", ["request.json", ".", ".."])
def test_what_others_may_write_is_never_evaluated(folder, reach, writable):
    request = ask(folder)
    (request.path / writable).resolve().chmod(0o777)

    with pytest.raises(PermissionError, match="so the request was rejected"):
        reach._advance()
    assert not reach.flagged


def test_a_link_or_another_users_request_is_never_evaluated(folder, reach, monkeypatch, tmp_path):
    request = ask(folder)
    elsewhere = request.text.rename(tmp_path / "request.json")
    request.text.symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        reach._advance()

    request.text.unlink()
    elsewhere.rename(request.text)
    monkeypatch.setattr("labkit.worker.reach.requests.os.geteuid", lambda: 12345)
    with pytest.raises(PermissionError):
        reach._advance()


def test_an_option_that_is_set_holds_against_a_schedule_until_it_is_given_back(folder, reach, optimizer):
    (group,) = optimizer.param_groups
    for step, value in ((5, 0.5), (6, None)):
        RequestFolder.post(folder.requests, {"kind": "set", "ranks": None, "timeout": 5.0, "values": {"lr": value}})
        reach._step = lambda step=step: step - 1
        listen(reach)
        reach.at_boundary(optimizer, step, 0.1)
        group["lr"] = 0.7  # by a schedule
        reach._settings.pin(optimizer)
        assert group["lr"] == (value or 0.7)


def test_of_several_optimizers_the_answer_names_the_one_that_was_set(folder, reach, optimizer):
    opt_d = optimizer
    request = RequestFolder.post(folder.requests, {"kind": "set", "ranks": None, "timeout": 5.0, "values": {"lr": 0.5}})
    listen(reach)
    reach.at_boundary(opt_d, 5, 0.1, alone=False)

    assert request.answers([0])[0]["results"] == [{"only": "opt_d"}]


@pytest.mark.parametrize(("lr", "expected"), [(0.1, 0.5), (0.2, 0.2)])
def test_a_checkpoint_brings_back_what_was_set_unless_the_command_line_says_something_new(folder, lr, expected):
    def resume(notes, lr, settings):
        args, checkpoints = SimpleNamespace(lr=lr, clip=1.0, patience=3), SimpleNamespace(notes=notes)
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=args.lr)
        settings.restore(optimizer)
        settings.pin(optimizer)
        return args, checkpoints, optimizer

    class Before(Settings):
        def restore(self, optimizer):
            self.change({"lr": 0.5, "clip": 0.25, "betas": [0.5, 0.9], "patience": 7}, optimizer)
            self.change({"patience": None}, optimizer)

    args, checkpoints, _ = resume({"best_step": 3}, 0.1, Before())
    assert (args.clip, args.patience) == (0.25, 3)
    saved = json.loads(json.dumps(checkpoints.notes))

    args, checkpoints, optimizer = resume(saved, lr, Settings(folder))
    (group,) = optimizer.param_groups
    assert (args.clip, group["lr"], group["betas"]) == (0.25, expected, (0.5, 0.9))
    assert checkpoints.notes["best_step"] == 3
    assert json.loads(folder.events.read_text())["values"].get("lr") == (expected if lr == 0.1 else None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1}, "lr must be 0 or more, got -1"),
        ({"lr": math.nan}, "lr must be 0 or more, got nan"),
        ({"lr": "fast"}, "lr is 0.1, expected a value of that type, got 'fast'"),
        ({"clip": 1.0}, "the optimizer has no option 'clip'; it has lr, momentum"),
        ({"params": []}, "no option 'params'"),
    ],
)
def test_what_cannot_be_set_changes_nothing(optimizer, values, message):
    settings = Settings()
    with pytest.raises(ValueError, match=message):
        settings.change({"weight_decay": 0.5} | values, optimizer)
    assert not settings.pinned


def test_of_two_decisions_the_first_one_holds(folder, reach):
    request = ask(folder)
    request.decide("given-up")
    request.decide("agreed")

    assert request.look().decision == "given-up"
    listen(reach)
    assert not reach.flagged
    assert RequestFolder(request.path).answers([0]) == {}


def test_requests_are_numbered_in_the_order_in_which_they_are_posted(folder, reach):
    assert [ask(folder).path.name for _ in range(3)] == ["1", "2", "3"]


def test_an_evaluation_leaves_the_random_state_and_names_the_users_variables(optimizer):
    secret_of_the_loop = torch.tensor([1.0, 2.0])
    names = names_around(optimizer)
    before = torch.get_rng_state(), random.getstate()

    answer = evaluate("secret_of_the_loop * 2, torch.rand(3), optimizer.defaults['lr']", names, together=True, limit=5)

    assert answer[0] == {"array": [2.0, 4.0], "dtype": "float32"}
    assert len(answer[1]["array"]) == 3
    assert answer[2] == {"value": 0.1}
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert secret_of_the_loop.tolist() == [1.0, 2.0]


def test_whatever_is_raised_is_an_answer():
    results = evaluate("exit(3), nope, [0 for _ in iter(int, 1)], 'still here'", {}, together=True, limit=0.5)

    assert results[0]["error"].startswith("SystemExit")
    assert results[1]["error"] == "NameError: name 'nope' is not defined"
    assert results[2]["error"] == "TimeoutError: not evaluated within 0.5 s"
    assert results[3] == {"value": "still here"}


def test_a_cell_prints_like_one_in_a_notebook():
    (result,) = execute("for i in range(2):\n    print(i)\n'last'", {}, 5)
    assert result == {"printed": "0\n1\n'last'\n"}
    (result,) = execute("print(1)\n1 / 0", {}, 5)
    assert result["printed"] == "1\n"
    _, *trace = result["error"].splitlines()
    assert trace == ['  File "<cell>", line 2, in <module>', "ZeroDivisionError: division by zero"]


@pytest.fixture
def hooks():
    yield
    quantities.remove_hooks()


def test_updates_outputs_and_dead_units_are_what_a_step_has_made_of_them(hooks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5000), torch.nn.GELU())
    model[0].bias.data[:2] = -100
    model[2].bias.data[0] = -100
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, seen = torch.randn(16, 3), []
    for _ in range(2):
        out = model(x)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
        seen.append(
            (
                quantities.update_ratio(optimizer),
                quantities.dead_share(model),
                quantities.largest_output(model),
                quantities.largest_output(model, "1"),
            )
        )
    assert all(map(math.isnan, seen[0]))
    ratio, dead, logit, hidden = seen[1]
    pairs = [(new - old, new) for new, old in zip(model.parameters(), before, strict=True)]
    change, weights = (torch.cat([pair[i].flatten() for pair in pairs]).norm().item() for i in (0, 1))
    assert ratio == pytest.approx(change / weights, rel=0.1)  # of 15,000 elements about 4,000
    assert dead == pytest.approx(((out <= 0).all(0).sum().item() + 2) / 5008, abs=1e-3)
    assert logit == pytest.approx(out.abs().max().item())
    assert 0 < hidden == pytest.approx(model[1](torch.nn.functional.linear(x, before[0], before[1])).max().item())


def test_what_hooks_cannot_see_is_said(hooks):
    with pytest.raises(ValueError, match="Linear has no modules such as nn.ReLU"):
        quantities.dead_share(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.ReLU())
    model[0].compile()
    with pytest.raises(ValueError, match="Linear is compiled"):
        quantities.largest_output(model, "0.0")
    assert math.isnan(quantities.largest_output(model))
    with pytest.raises(AttributeError, match="nope"):
        quantities.largest_output(model, "nope")


def test_a_breakpoint_meets_on_the_host_whatever_device_the_script_makes_the_default(group_of_one):
    """The GPU may be far behind; here `meta` stands for it."""
    point = Breakpoint("loss > 3", 0, 1)
    point._group = dist.group.WORLD
    with torch.device("meta"):
        assert point.ranks_where(True) == [0]
        assert point.ranks_where(False) == []


def test_an_update_ratio_does_not_depend_on_the_scripts_default_device(optimizer, hooks):
    """Here `meta` stands for a GPU."""
    weight = optimizer.param_groups[0]["params"][0]
    weight.data.fill_(1.0)
    with torch.device("meta"):
        assert quantities.update_ratio(optimizer) is quantities.UNSEEN
        weight.grad = torch.ones(2, device="cpu")
        optimizer.step()
        assert quantities.update_ratio(optimizer) == pytest.approx(0.1 / 0.9)
