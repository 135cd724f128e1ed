"""Findings about gradients, from lines as ranks write them, and what the worker sees of real ones."""

import gc
import json
import weakref

import pytest

from labkit.record import RunFolder
from labkit.witness.evidence import Evidence
from labkit.witness.gradients import Discarded, ScaledClip, Scalers, ShardClip, Uncleared

PLACE = {"t": 10.0, "step": 20, "number": 20, "line": 7}
UNCLEARED = {"k": "uncleared", "step": 6, "since": 2, "checks": 3}


@pytest.fixture
def judge(tmp_path):
    def judge(rule, *ranks, outcome="succeeded"):
        """What a rule says about the lines of these ranks."""
        attempt = RunFolder(tmp_path)
        for rank, lines in enumerate(ranks):
            attempt.witnessed(rank).parent.mkdir(parents=True, exist_ok=True)
            attempt.witnessed(rank).write_text("".join(f"{json.dumps(PLACE | line)}\n" for line in lines))
        evidence = Evidence(attempt, range(len(ranks)), "train.py")
        evidence.read()
        evidence.outcome = outcome
        return list(rule().judge(evidence))

    return judge


def clipped(step, limit=1.0, scale=65536.0):
    return {"k": "clipped", "step": step, "limit": limit, "scale": scale}


def shard(number, norm, clipped=True):
    return {"k": "shard", "number": number, "step": number, "optimizer": 0, "ranks": [0, 1]} | {
        "norm": norm,
        "clipped": clipped,
    }


def scale(at, value, **values):
    return {"k": "scale", "at": at, "step": at, "optimizer": 0, "ranks": [0, 1], "scale": value} | values


def test_gradients_that_are_never_cleared(judge):
    (finding,) = judge(Uncleared, [UNCLEARED, UNCLEARED | {"step": 11, "checks": 4}], [UNCLEARED])
    assert finding.sentence == (
        "since step 2: nothing clears the gradients, so that each step uses the sum of its own and of earlier ones': "
        "they were still there in each of the 3 steps that were checked, up to step 6"
    )
    assert (finding.certain, finding.ranks, finding.line) == (True, (0, 1), 7)
    assert judge(Uncleared, []) == []


def test_gradients_that_are_cleared_before_they_are_averaged(judge):
    line = {"k": "discarded", "step": 6, "since": 2, "checks": 3, "passes": 4}
    (finding,) = judge(Discarded, [line, line | {"step": 11, "checks": 4}], [line])
    assert finding.sentence == (
        "since step 2: a step uses the gradients of the last of its 4 backward passes, those of the others are "
        "cleared: it was so in each of the 3 steps that were checked, up to step 6"
    )
    assert (finding.certain, finding.ranks, finding.line) == (False, (0, 1), 7)


def test_gradients_that_are_clipped_while_they_are_scaled(judge):
    (finding,) = judge(ScaledClip, [clipped(2), clipped(5)], [])
    assert (
        finding.what == "gradients are clipped to 1 while they are multiplied by the loss scale 65536, as if to 1.5e-05"
    )
    assert (finding.certain, finding.since, finding.until, finding.ranks) == (True, 1, 2, (0,))
    assert judge(ScaledClip, [clipped(2)]) == []
    assert judge(ScaledClip, [clipped(2, 6553.6), clipped(5, 6553.6)]) == []  # multiplied by the scale
    assert judge(ScaledClip, [clipped(2, scale=1.0), clipped(5, scale=1.0)]) == []
    assert judge(ScaledClip, [clipped(2, "inf"), clipped(5, "inf")]) == []  # only the norm is asked for


def test_shards_that_are_clipped_by_norms_of_their_own(judge):
    (finding,) = judge(ShardClip, [shard(2, 2.8), shard(5, 4.1)], [shard(2, 7.5), shard(5, 8.5, clipped=False)])
    assert finding.what == "ranks 0 and 1 clip parts of the same gradients by different norms"
    assert finding.values == ("rank 0: norm 4.1", "rank 1: norm 8.5")
    assert (finding.certain, finding.until) == (True, 2)
    for ours, theirs in (
        ([shard(2, 2.8), shard(5, 4.1)], [shard(2, 2.8), shard(5, 4.1001)]),  # the norm of all
        ([shard(2, 2.8), shard(5, 4.1)], [shard(2, 7.5)]),
        ([shard(2, 2.8, clipped=False), shard(5, 4.1)], [shard(2, 7.5, clipped=False), shard(5, 8.5)]),
        ([shard(2, 2.8), shard(5, 4.1)], []),
        ([shard(2, "inf"), shard(5, "nan")], [shard(2, 7.5), shard(5, 8.5)]),  # not finite on one rank
        ([shard(n, 2.8) for n in (2, 2, 5, 5)], [shard(n, 7.5) for n in (2, 2, 5, 5)]),  # which is which
    ):
        assert judge(ShardClip, ours, theirs) == []


def test_scalers_that_part(judge):
    equal = [scale(5, 65536.0), scale(10, 65536.0)]
    (finding,) = judge(Scalers, [*equal, scale(20, 65536.0)], [*equal, scale(20, 32768.0)])
    assert finding.sentence.startswith("since a step between 11 and 20: the loss scales of ranks 0 and 1 differ")
    assert finding.values == ("rank 0: scale 65536", "rank 1: scale 32768")
    assert finding.certain
    assert judge(Scalers, [*equal, scale(20, 1.0)], [*equal, scale(20, 2.0)], outcome="") == []  # may be equal again
    later = [scale(20, 1.0), scale(50, 1.0)], [scale(20, 2.0), scale(50, 2.0)]
    assert len(judge(Scalers, *later, outcome="")) == 1
    (infinite,) = judge(Scalers, [*equal, scale(20, 65536.0)], [*equal, scale(20, "inf")])
    assert infinite.values == ("rank 0: scale 65536", "rank 1: scale inf")
    assert judge(Scalers, [scale(5, 1.0), scale(10, 2.0)], [scale(5, 2.0), scale(10, 2.0)]) == []
    assert judge(Scalers, [scale(5, 1.0)], [scale(5, 2.0, ranks=[1])]) == []


KINDS = (
    "clear by optimizer",
    "clear by value",
    "clear data",
    "decay",
    "decay and clip",
    "own optimizer",
    "nothing",
    "clip",
)


def clearing_of(witness):
    return next(area for area in witness._areas if type(area).__name__ == "Clearing")


@pytest.mark.parametrize("kind", KINDS)
def test_only_gradients_that_nothing_clears_are_uncleared(kind, tmp_path):
    torch = pytest.importorskip("torch")
    from labkit.worker.witness.witness import Witness

    witness = Witness(torch, tmp_path / "ring", tmp_path / "witness.jsonl")
    p = torch.nn.Parameter(torch.ones(300))
    own = type("Own", (torch.optim.SGD,), {"__module__": "train"})
    optimizer = (own if kind == "own optimizer" else torch.optim.SGD)([p], lr=1e-3)
    clearing = clearing_of(witness)
    for step in range(1, 23):
        loss = (p * torch.randn(300)).sum()
        if kind == "clear by optimizer":
            optimizer.zero_grad()
        elif kind == "clear by value":
            optimizer.zero_grad(set_to_none=False)
        witness.before_backward(loss)
        loss.backward()
        witness.after_backward()
        if kind == "decay and clip":
            p.grad *= 0.9
        if kind in ("decay and clip", "clip"):
            clearing.changed("outside")
            torch.nn.utils.clip_grad_norm_([p], 1.0)
            clearing.changed("clipping")
        witness.before_step(optimizer)
        optimizer.step()
        witness.after_step(optimizer, step)
        if kind == "clear data":
            p.grad.data.zero_()
        elif kind == "decay":
            p.grad.data.mul_(0.5)
    witness.finish()
    assert witness.recorder.dropped == 0
    path = tmp_path / "witness.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line["step"] for line in lines if line["k"] == "uncleared"]
    assert steps == ([6, 11, 21] if kind in ("nothing", "clip") else [])


@pytest.mark.parametrize("limit", ["number", "tensor", "on a device"])
def test_the_limit_of_scaled_gradients_is_a_number_or_not_known(limit, tmp_path):
    torch = pytest.importorskip("torch")
    from labkit.worker.witness.witness import Witness

    witness = Witness(torch, tmp_path / "ring", tmp_path / "witness.jsonl")
    p, scaler = torch.nn.Parameter(torch.ones(300)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([p], lr=1e-3)
    clipping = next(area for area in witness._areas if type(area).__name__ == "Clipping")
    limits = {"number": 0.5, "tensor": torch.tensor(0.5), "on a device": torch.tensor(0.5, device="meta")}
    clipping._scalers.add(scaler)
    for step in range(1, 3):
        optimizer.zero_grad()
        loss = scaler.scale(p.sum())
        witness.before_backward(loss)
        loss.backward()
        witness.after_backward()
        after = clipping._clips([p], limits[limit], torch.tensor(1.0))
        p.grad *= 0.5
        if after is not None:
            after(None)
        clipping._unscales(scaler, optimizer)
        witness.before_step(optimizer)
        optimizer.step()
        witness.after_step(optimizer, step)
    assert witness.recorder.dropped == 0
    path = tmp_path / "witness.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [line["limit"] for line in lines if line["k"] == "clipped"] == ([] if limit == "on a device" else [0.5])


@pytest.fixture
def model(group_of_one):
    torch = pytest.importorskip("torch")
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 2))


@pytest.mark.parametrize(
    "kind",
    ["clear", "clear by value", "clip", "sum", "once", "perturb", "synchronized", "one batch", "own optimizer", "two"],
)
def test_only_gradients_that_nothing_uses_are_discarded(kind, model, tmp_path):
    import torch

    from labkit.worker.witness.witness import Witness

    witness = Witness(torch, tmp_path / "ring", tmp_path / "witness.jsonl")
    iterator = iter(torch.utils.data.DataLoader(torch.ones(1, 40)))
    witness.wrapped(model)
    own = type("Own", (torch.optim.SGD,), {"__module__": "train"})
    optimizer = (own if kind == "own optimizer" else torch.optim.SGD)(model.parameters(), lr=1e-3)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1e-3)
    for step in range(1, 23):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        before = [p.detach().clone() for p in model.parameters()]
        for number in range(3):
            if kind != "one batch" or not number:
                witness.after_fetch(iterator, torch.ones(1, 40), True)
            if kind != "once" or not number:
                optimizer.zero_grad(set_to_none=kind != "clear by value")
            model.require_backward_grad_sync = kind == "synchronized" or number == 2
            loss = model(torch.randn(4, 40)).square().mean()
            witness.before_backward(loss)
            loss.backward()
            witness.after_backward()
            for p, total in zip(model.parameters(), sums, strict=True):
                total += p.grad
            if kind == "perturb" and not number:
                with torch.no_grad():
                    [p.add_(0.1) for p in model.parameters()]
        for p, total, weight in zip(model.parameters(), sums, before, strict=True):
            p.data.copy_(weight)
            if kind == "sum":
                p.grad = total
        if kind == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for each in [other, optimizer] if kind == "two" else [optimizer]:
            witness.before_step(each)
            each.step()
            witness.after_step(each, step)
    witness.finish()
    assert witness.recorder.dropped == 0
    lines = [json.loads(line) for line in (tmp_path / "witness.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["k"] == "discarded"]
    assert steps == ([6, 11, 21] if kind in ("clear", "clear by value", "clip") else [])


def test_parameters_that_the_script_drops_are_not_held(tmp_path):
    torch = pytest.importorskip("torch")
    from labkit.worker.witness.witness import Witness

    witness = Witness(torch, tmp_path / "ring", tmp_path / "witness.jsonl")
    p = torch.nn.Parameter(torch.ones(300))
    p.grad, optimizer, reference = torch.ones(300), torch.optim.SGD([p], lr=1e-3), weakref.ref(p)
    witness.before_step(optimizer)
    optimizer.step()
    witness.after_step(optimizer, 1)
    assert clearing_of(witness).kept
    del p, optimizer
    gc.collect()
    assert reference() is None


def test_torch_compile_traces_a_function_that_is_observed_as_it_is():
    torch = pytest.importorskip("torch")
    from labkit.worker.witness.around import call_around

    calls, owner = [], type("Owner", (), {"double": lambda x: 2 * x})
    call_around(owner, "double", lambda x: calls.append(x), recorder=None)
    assert owner.double(3) == 6
    compiled = torch.compile(lambda x: owner.double(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert calls == [3]
