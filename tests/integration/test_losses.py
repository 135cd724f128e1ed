"""The loss shown is the script's, or n/a with a reason; steps are counted as the script counts them.

Every script is a loop as people write it and prints, as JSON, what it holds for the loss of each step.
"""

from __future__ import annotations

import json
import re

import pytest
from loops_alone import train_alone

import labkit
from labkit import words
from labkit.record import RunReader

START = """
import json
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(160, 8), torch.randint(0, 4, (160,))
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []


def batches(size=16):
    return list(zip(x.split(size), y.split(size)))


"""
END = "\nprint(json.dumps(losses))\n"

DIVIDED = """
for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=8)):
    loss = cross_entropy(model(a), b) / 4
    loss.backward()
    losses[i // 4:] = [*losses[i // 4:], loss.item() * 4]
    if i % 4 == 3:
        losses[i // 4:] = [sum(losses[i // 4:]) / 4]
        optimizer.step()
        optimizer.zero_grad()
"""
DIVIDED_ON_TWO_LINES = """
from contextlib import nullcontext
for _ in range(6):
    micro_batches, mean = batches(40), 0.0
    for a, b in micro_batches[:-1]:
        with nullcontext():  # no_sync()
            loss = cross_entropy(model(a), b) * 0.25
            loss.backward()
        mean += loss.item()
    a, b = micro_batches[-1]
    loss = cross_entropy(model(a), b) * 0.25
    loss.backward()
    losses.append(mean + loss.item())
    optimizer.step()
    optimizer.zero_grad()
"""
LAST_WINDOW_IS_SHORT = """
for i, (a, b) in enumerate(batches(16)):  # ten of them, four to a step
    loss = cross_entropy(model(a), b)
    (loss / 4).backward()
    losses[i // 4:] = [*losses[i // 4:], loss.item()]
    if i % 4 == 3 or i == 9:
        losses[i // 4:] = [sum(losses[i // 4:]) / len(losses[i // 4:])]
        optimizer.step()
        optimizer.zero_grad()
"""
DIVIDED_BY_THE_COUNT_OF_THE_STEP = """
for _ in range(6):
    count, total = torch.tensor(len(y)), 0.0
    for a, b in batches(40):
        loss = cross_entropy(model(a), b, reduction="sum") / count
        loss.backward()
        total += loss.item()
    losses.append(total)
    optimizer.step()
    optimizer.zero_grad()
"""
NOT_DIVIDED = """
for _ in range(6):
    mean = 0.0
    for a, b in batches(40):
        loss = cross_entropy(model(a), b)
        loss.backward()
        mean += loss.item() / 4
    losses.append(mean)
    optimizer.step()
    optimizer.zero_grad()
"""
SUMS_DIVIDED_BY_A_NUMBER_OF_THE_STEP = """
for _ in range(6):
    total = 0.0
    for a, b in batches(40):
        loss = cross_entropy(model(a), b, reduction="none").sum() / len(y)  # not a tensor that all of them share
        loss.backward()
        total += loss.item()
    losses.append(total)
    optimizer.step()
    optimizer.zero_grad()
"""
SUMS_BY_REDUCTION_DIVIDED_BY_THE_COUNT_OF_THE_STEP = """
for _ in range(6):
    count, total = torch.tensor(len(y)), 0.0
    for a, b in batches(40):
        loss = cross_entropy(model(a), b, reduction="sum") / count.clamp(min=1) * 1  # as labkit's own scripts do
        loss.backward()
        total += loss.item()
    losses.append(total)
    optimizer.step()
    optimizer.zero_grad()
"""
SUMS_DIVIDED_BY_THE_COUNT_OF_THE_STEP_UNDER_HOOKS = """
for _ in range(6):
    count = torch.tensor(len(y))
    for a, b in batches(40):
        with torch.autograd.graph.save_on_cpu():
            loss = cross_entropy(model(a), b, reduction="sum") / count
        loss.backward()
    losses.append(None)
    optimizer.step()
    optimizer.zero_grad()
"""
SUMS_DIVIDED_BY_THEIR_OWN_COUNT = """
for _ in range(6):
    mean = 0.0
    for a, b in batches(40):
        loss = cross_entropy(model(a), b, reduction="none").sum() / len(a)
        loss.backward()
        mean += loss.item() / 4
    losses.append(mean)
    optimizer.step()
    optimizer.zero_grad()
"""
SUMS_OF_PADDED_SEQUENCES = """
for _ in range(6):
    for a, b in batches(40):
        each = cross_entropy(model(a), b, reduction="none")
        loss = each.masked_fill(torch.arange(40) > 4, 0.0).sum() / 20  # five of each: 20 are in all of them
        loss.backward()
    losses.append(None)
    optimizer.step()
    optimizer.zero_grad()
"""
TWO_LOSSES = """
for a, b in batches():
    out = model(a)
    first, second = cross_entropy(out, b), out.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    losses.append(first.item() + second.item())
    optimizer.step()
    optimizer.zero_grad()
"""
ONE_LOSS_TWO_OPTIMIZERS = """
weight, bias = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias])
for a, b in batches():
    loss = cross_entropy(model(a), b)
    loss.backward()
    losses.append(loss.item())
    for optimizer in (weight, bias):
        optimizer.step()
        optimizer.zero_grad()
"""
OPTIMIZERS_IN_BACKWARD = """
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}


def step(p):
    optimizers[p].step()
    optimizers[p].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for a, b in batches():
    loss = cross_entropy(model(a), b)
    loss.backward()
    losses.append(loss.item())
"""
REINFORCEMENT = """
for _ in range(10):
    policy = torch.distributions.Categorical(logits=model(torch.randn(32, 8)))
    action = policy.sample()
    loss = -(policy.log_prob(action) * torch.randn(32)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
LBFGS = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)


def closure():
    optimizer.zero_grad()
    loss = cross_entropy(model(a), b)
    loss.backward()
    return loss


for a, b in batches():
    losses.append(float(optimizer.step(closure)))
"""
GRADIENT_SCALER_SKIPS = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-4)
for a, b in batches():
    loss = cross_entropy(model(a), b) * 10
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    losses.append(loss.item())
assert scaler.get_scale() < 2.0**127  # which is how it says that it has left steps out
"""
SECOND_TRAINING = """
for step in range(10):
    if step == 5:
        first = model, optimizer
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    factor = 1.0 if step < 5 else 100.0
    loss = cross_entropy(model(x), y) * factor
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
"""

CHANGED_IN_PLACE = """
for a, b in batches():
    loss = cross_entropy(model(a), b)
    loss.backward()
    losses.append(loss.item())
    with torch.no_grad():
        loss.zero_()  # or reduced over ranks
    optimizer.step()
    optimizer.zero_grad()
"""
MICRO_BATCHES_CHANGED_IN_PLACE = """
for _ in range(6):
    mean = 0.0
    for a, b in batches(40):
        loss = cross_entropy(model(a), b) / 4
        loss.backward()
        mean += loss.item()
        with torch.no_grad():
            loss.add_(5)
    losses.append(mean)
    optimizer.step()
    optimizer.zero_grad()
"""
SCALED_AND_CHANGED_IN_PLACE = """
scaler = torch.amp.GradScaler("cpu")
for a, b in batches():
    loss = cross_entropy(model(a), b)
    scaler.scale(loss).backward()
    losses.append(loss.item())
    with torch.no_grad():
        loss.mul_(17)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
SCALED_FOR_FSDP1 = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
""" + SCALED_AND_CHANGED_IN_PLACE.replace('torch.amp.GradScaler("cpu")', 'ShardedGradScaler("cpu")')
A_WINDOW_OF_ONE = LAST_WINDOW_IS_SHORT.replace("batches(16)", "batches(18)[:9]").replace("i == 9", "i == 8")
HALF_OF_EACH = """
for _ in range(6):
    mean = 0.0
    for a, b in batches(40):
        loss = 0.5 * cross_entropy(model(a), b)
        loss.backward()
        mean += loss.item() / 4
    losses.append(mean)
    optimizer.step()
    optimizer.zero_grad()
"""
ADDENDS_WITH_WEIGHTS = HALF_OF_EACH.replace(
    "0.5 * cross_entropy(model(a), b)", "0.25 * cross_entropy(model(a), b) + 0.75 * model(a).square().mean()"
)
DIVIDED_BY_A_CONSTANT = "ten = torch.tensor(10.0)\n" + HALF_OF_EACH.replace(
    "0.5 * cross_entropy(model(a), b)", "cross_entropy(model(a), b) / ten"
)
DIVIDED_BY_THEIR_OWN_COUNT_IN_ONE_TENSOR = "count = torch.tensor(40.0)\n" + HALF_OF_EACH.replace(
    "0.5 * cross_entropy(model(a), b)", 'cross_entropy(model(a), b, reduction="sum") / count'
)
MASKED_SUMS_DIVIDED_BY_THEIR_OWN_COUNTS = HALF_OF_EACH.replace(
    "loss = 0.5 * cross_entropy(model(a), b)",
    """mask = (torch.rand(40) > 0.4).float()
        loss = (cross_entropy(model(a), b, reduction="none") * mask).sum() / mask.sum()""",
)
UNEVEN = """
for _ in range(6):
    sizes = torch.randint(3, 30, (4,)).tolist()
    micro_batches = [*zip(x.split([*sizes, 160 - sum(sizes)]), y.split([*sizes, 160 - sum(sizes)]))][:4]
    n_all, total = sum(sizes), 0.0
    for a, b in micro_batches:
        n = len(a)
        loss = cross_entropy(model(a), b) * (n / n_all)
        loss.backward()
        total += loss.item()
    losses.append(total)
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHT = "cross_entropy(model(a), b) * (n / n_all)"
UNEVEN_BY_TENSORS = UNEVEN.replace(WEIGHT, "torch.tensor(n) / torch.tensor(n_all) * cross_entropy(model(a), b)")
UNEVEN_IN_TWO_STEPS = UNEVEN.replace(WEIGHT, "-(-cross_entropy(model(a), b) * n / n_all)")
UNEVEN_DIVIDED = UNEVEN.replace(WEIGHT, "cross_entropy(model(a), b) / (n_all / n)")
UNEVEN_WITH_A_CONSTANT = UNEVEN.replace(WEIGHT, "0.1 * cross_entropy(model(a), b) * (n / n_all)")
UNEVEN_ADDENDS = UNEVEN.replace(
    WEIGHT, "cross_entropy(out := model(a), b) * (n / n_all) + 0.01 * out.square().mean() * (n / n_all)"
)
UNEVEN_ADDENDS_IN_PART = UNEVEN_ADDENDS.replace(".mean() * (n / n_all)", ".mean()").replace("(total)", "(None)")
UNEVEN_ON_TWO_LINES = UNEVEN.replace(
    "        loss.backward()",
    """        if n == len(micro_batches[-1][0]):
            loss.backward()
        else:
            loss.backward()""",
)
UNEVEN_BY_THE_GRADIENT = UNEVEN.replace(WEIGHT, "cross_entropy(model(a), b)").replace(
    "loss.backward()", "loss.backward(torch.tensor(n / n_all))"
)
UNEVEN_BY_THE_GRADIENT = UNEVEN_BY_THE_GRADIENT.replace("(total)", "(None)")
MASKS = UNEVEN.replace(
    "n_all, total = sum(sizes), 0.0",
    """own = [(torch.rand(len(b)) > 0.6).float() for _, b in micro_batches]
    n_all, total = sum(mask.sum().item() for mask in own), 0.0""",
)
WEIGHTS_OF_TOKENS = MASKS.replace(WEIGHT, '(cross_entropy(model(a), b, reduction="none") * (own.pop(0) / n_all)).sum()')
MASKED_SUMS_DIVIDED_BY_THE_COUNT_OF_ALL = MASKS.replace(
    WEIGHT, '(cross_entropy(model(a), b, reduction="none") * own.pop(0)).sum() / n_all'
)
IGNORED_LABELS = MASKS.replace(
    WEIGHT, 'cross_entropy(model(a), b.masked_fill(own.pop(0) == 0, -100), reduction="sum") / n_all'
)
SMOOTHED_LABELS = IGNORED_LABELS.replace('"sum")', '"sum", label_smoothing=0.1)')
AS_ACCELERATE_SAYS = """
for step in range(6):
    micro_batches, total = batches(40)[: 4 if step % 2 else 2], 0.0
    n_all = sum(len(b) for _, b in micro_batches)
    for a, b in micro_batches:
        loss = cross_entropy(model(a), b, reduction="sum") * 4 * 1 / n_all  # micro-batches, ranks
        loss = loss / 4  # accelerate's own
        loss.backward()
        total += loss.item()
    losses.append(total)
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS_THAT_ARE_NOT_SHARES = """
for _ in range(6):
    for weight in (1.0, 0.5, 0.25):
        (weight * cross_entropy(model(x), y)).backward()
    losses.append(None)
    optimizer.step()
    optimizer.zero_grad()
"""
WEIGHTS_OF_TOKENS_OF_ALL_RANKS = WEIGHTS_OF_TOKENS.replace("/ n_all)", "/ 1000)").replace("(total)", "(None)")
TWO_WINDOWS_IN_A_STEP = """
for _ in range(6):
    for window in (batches(40)[:2], batches(20)[:6]):  # the step of the first was left out
        n_all = torch.tensor(sum(len(b) for _, b in window))
        for a, b in window:
            (cross_entropy(model(a), b, reduction="sum") / n_all).backward()
    losses.append(None)
    optimizer.step()
    optimizer.zero_grad()
"""
A_GRADIENT_OF_ONE = NOT_DIVIDED.replace("loss.backward()", "loss.backward(torch.ones_like(loss))")
OF_SHARES = "sum of 4 micro-batches"

SHOWN = {
    "divided": (DIVIDED, "mean of 4 micro-batches"),
    "divided on two lines": (DIVIDED_ON_TWO_LINES, "mean of 4 micro-batches"),
    "the last window is short": (LAST_WINDOW_IS_SHORT, "mean of 2 micro-batches"),
    "divided by the count of the step": (DIVIDED_BY_THE_COUNT_OF_THE_STEP, "sum of 4 micro-batches"),
    "sums divided by a number of the step": (SUMS_DIVIDED_BY_A_NUMBER_OF_THE_STEP, "sum of 4 micro-batches"),
    "sums by reduction divided by the count of the step": (
        SUMS_BY_REDUCTION_DIVIDED_BY_THE_COUNT_OF_THE_STEP,
        "sum of 4 micro-batches",
    ),
    "sums divided by their own count": (SUMS_DIVIDED_BY_THEIR_OWN_COUNT, "mean of 4 backward passes"),
    "not divided": (NOT_DIVIDED, "mean of 4 backward passes"),
    "two losses": (TWO_LOSSES, "sum of 2 losses"),
    "one loss, two optimizers": (ONE_LOSS_TWO_OPTIMIZERS, "as passed to backward()"),
    "optimizers in backward": (OPTIMIZERS_IN_BACKWARD, "as passed to backward()"),
    "reinforcement": (REINFORCEMENT, "as passed to backward()"),
    "LBFGS": (LBFGS, "first of 5 evaluations"),
    "a scaler skips steps": (GRADIENT_SCALER_SKIPS, "as passed to backward()"),
    "a second training": (SECOND_TRAINING, "as passed to backward()"),
    "changed in place": (CHANGED_IN_PLACE, "as passed to backward()"),
    "micro-batches changed in place": (MICRO_BATCHES_CHANGED_IN_PLACE, "mean of 4 micro-batches"),
    "scaled and changed in place": (SCALED_AND_CHANGED_IN_PLACE, "as passed to backward()"),
    "scaled for FSDP1": (SCALED_FOR_FSDP1, "as passed to backward()"),
    "a window of one": (A_WINDOW_OF_ONE, "mean of 1 micro-batch"),
    "half of each": (HALF_OF_EACH, "mean of 4 backward passes"),
    "addends with weights": (ADDENDS_WITH_WEIGHTS, "mean of 4 backward passes"),
    "divided by a constant": (DIVIDED_BY_A_CONSTANT, "mean of 4 backward passes"),
    "divided by their own count in one tensor": (DIVIDED_BY_THEIR_OWN_COUNT_IN_ONE_TENSOR, "mean of 4 backward passes"),
    "masked sums divided by their own counts": (MASKED_SUMS_DIVIDED_BY_THEIR_OWN_COUNTS, "mean of 4 backward passes"),
    "a gradient of one": (A_GRADIENT_OF_ONE, "mean of 4 backward passes"),
    "uneven": (UNEVEN, OF_SHARES),
    "uneven, by tensors": (UNEVEN_BY_TENSORS, OF_SHARES),
    "uneven, in two steps": (UNEVEN_IN_TWO_STEPS, OF_SHARES),
    "uneven, divided": (UNEVEN_DIVIDED, OF_SHARES),
    "uneven, with a constant": (UNEVEN_WITH_A_CONSTANT, OF_SHARES),
    "uneven addends": (UNEVEN_ADDENDS, OF_SHARES),
    "uneven, on two lines": (UNEVEN_ON_TWO_LINES, OF_SHARES),
    "weights of tokens": (WEIGHTS_OF_TOKENS, OF_SHARES),
    "masked sums divided by the count of all": (MASKED_SUMS_DIVIDED_BY_THE_COUNT_OF_ALL, OF_SHARES),
    "ignored labels": (IGNORED_LABELS, OF_SHARES),
    "smoothed labels": (SMOOTHED_LABELS, OF_SHARES),
    "as accelerate says": (AS_ACCELERATE_SAYS, OF_SHARES),
}

GAN = """
discriminator, generator = nn.Linear(8, 1), nn.Linear(4, 8)
of_d = torch.optim.Adam(discriminator.parameters())
of_g = torch.optim.Adam(generator.parameters())
for a, _ in batches():
    fake = generator(torch.randn(16, 4))
    of_d.zero_grad()
    mse_loss(discriminator(a), torch.ones(16, 1)).backward()
    mse_loss(discriminator(fake.detach()), torch.zeros(16, 1)).backward()
    of_d.step()
    of_g.zero_grad()
    mse_loss(discriminator(fake), torch.ones(16, 1)).backward()
    of_g.step()
    losses.append(None)
"""
ACTOR_AND_CRITIC = """
critic = nn.Linear(8, 1)
of_actor = torch.optim.Adam(model.parameters())
of_critic = torch.optim.Adam(critic.parameters())
for a, b in batches():
    advantage = torch.randn(16, 1) - critic(a)
    policy = torch.distributions.Categorical(logits=model(a))
    actor_loss = -(policy.log_prob(policy.sample()) * advantage.detach()[:, 0]).mean()
    critic_loss = advantage.square().mean()
    of_actor.zero_grad()
    of_critic.zero_grad()
    actor_loss.backward()
    critic_loss.backward()
    of_actor.step()
    of_critic.step()
    losses.append(None)
"""
THREE_OPTIMIZERS = """
models = [nn.Linear(8, 4) for _ in range(3)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for a, b in batches():
    for model, optimizer in zip(models, optimizers):
        loss = cross_entropy(model(a), b)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    losses.append(None)
"""
GRADIENTS_BY_HAND = """
for step in range(10):
    model.weight.grad, model.bias.grad = torch.randn(4, 8), torch.randn(4)
    optimizer.step()
    losses.append(None)
"""
TURNS = """
other = nn.Linear(8, 4)
of_other = torch.optim.SGD(other.parameters(), lr=0.1)
for step in range(24):
    network, stepping = (other, of_other) if step // 4 % 2 else (model, optimizer)
    loss = cross_entropy(network(x), y)
    loss.backward()
    stepping.step()
    stepping.zero_grad()
    losses.append(None)
"""
NOT_SHARES = "n/a: backward passes with weights that do not sum to 1"
OF_SEVERAL = "n/a: several optimizers, each with its own loss"
NOT_KNOWN = {
    "GAN": (GAN, OF_SEVERAL),
    "actor and critic": (ACTOR_AND_CRITIC, OF_SEVERAL),
    "three optimizers": (THREE_OPTIMIZERS, OF_SEVERAL),
    "two optimizers in turns": (TURNS, OF_SEVERAL),
    "micro-batches or several losses": (
        DIVIDED_ON_TWO_LINES.replace(" * 0.25", ""),
        "n/a: backward passes from several lines, which may be separate losses or parts of one",
    ),
    "sums divided by the number of some values": (
        SUMS_OF_PADDED_SEQUENCES,
        "n/a: sums of micro-batches divided by the same number, which may count one micro-batch or all",
    ),
    "hooks hide the divisor": (
        SUMS_DIVIDED_BY_THE_COUNT_OF_THE_STEP_UNDER_HOOKS,
        "n/a: saved-tensor hooks hide the divisor of the micro-batch losses",
    ),
    "gradients by hand": (GRADIENTS_BY_HAND, "n/a: no backward pass started from a scalar"),
    "weights that are not shares": (WEIGHTS_THAT_ARE_NOT_SHARES, NOT_SHARES),
    "weights of tokens of all ranks": (WEIGHTS_OF_TOKENS_OF_ALL_RANKS, NOT_SHARES),
    "uneven addends in part": (UNEVEN_ADDENDS_IN_PART, NOT_SHARES),
    "uneven, by the gradient": (UNEVEN_BY_THE_GRADIENT, NOT_SHARES),
    "two windows in a step": (TWO_WINDOWS_IN_A_STEP, NOT_SHARES),
}


WITHOUT_AN_OPTIMIZER = """
for a, b in batches():
    loss = cross_entropy(model(a), b)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
    losses.append(loss.item())
"""
BACKWARD_OR_GRAD = """
    if step < 5:
        loss.backward()
    else:
        for p, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
            p.grad = gradient
"""
SECOND_TRAINING_UNKNOWN = SECOND_TRAINING.replace("    loss.backward()", BACKWARD_OR_GRAD)


def program(loop):
    slowly = "\nfrom time import sleep\n"  # most steps get a record of their own
    loop = re.sub(r"^( +)(losses\S* = \[sum.*|losses\.append.*)$", r"\1\2\n\1sleep(0.06)", loop, flags=re.M)
    return START + slowly + loop + END


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    loops = {name: loop for name, (loop, _) in (SHOWN | NOT_KNOWN).items()} | {"unknown": SECOND_TRAINING_UNKNOWN}
    # one step of each is under a dispatch mode
    programs = {name: program(loop) for name, loop in loops.items()}
    return train_alone(tmp_path_factory.mktemp("losses"), programs, trace_memory=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", SHOWN)
def test_the_loss_shown_is_the_scripts_and_says_what_it_is(shape, trained):
    metrics, history, losses = trained[shape]

    assert history.step == history.totals["steps"] == len(losses)
    recorded = metrics.dropna(subset=["loss"]).set_index("step")["loss"]
    assert len(recorded) >= 2
    assert {step: losses[step - 1] for step in recorded.index} == pytest.approx(recorded.to_dict(), rel=1e-5)
    assert history.latest["loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert history.loss_of == SHOWN[shape][1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", NOT_KNOWN)
def test_a_loss_that_is_not_one_is_not_shown_and_the_reason_is(shape, trained):
    metrics, history, steps = trained[shape]

    assert history.step == history.totals["steps"] == len(steps)
    assert "loss" not in history.latest
    assert not history.series["loss"].points()
    assert metrics["loss"].isna().all()
    assert history.loss_of == NOT_KNOWN[shape][1]


@pytest.mark.timeout(600)
def test_a_second_training_without_a_known_loss_does_not_show_the_first_ones(trained):
    _, history, losses = trained["unknown"]

    assert history.step == len(losses)
    assert "loss" not in history.latest
    assert history.loss_of == "n/a: no backward pass started from a scalar"


def alone(tmp_path, loop, **options):
    (tmp_path / "loop.py").write_text(program(loop))
    run = labkit.launch(tmp_path / "loop.py", nproc_per_node=1, wait=True, **options)
    return run, words.headline(RunReader(run.folder).read_all(), run.status())


def test_of_several_optimizers_all_states_count_and_the_headline_says_why_there_is_no_loss(tmp_path):
    run, headline = alone(tmp_path, GAN, trace_memory=True)
    history = RunReader(run.folder).read_all().ranks[0]
    both = (8 + 1) + (4 + 1) * 8  # parameters of the discriminator and the generator
    idle = (8 + 1) * 4  # of an optimizer that does not step
    states = 2 * 4 * both + 4 * 4  # Adam's moments, and a step for each of 4 parameters

    assert f"loss {OF_SEVERAL}" in headline
    held = {"parameters": 4 * (both + idle), "gradients": 4 * both, "optimizer": states}
    assert (history.device, history.held) == ("cpu", held)
    assert history.traced.categories["optimizer"] == states


def test_a_training_without_an_optimizer_has_no_steps_and_says_why(tmp_path):
    run, headline = alone(tmp_path, WITHOUT_AN_OPTIMIZER)

    metrics = run.metrics()
    assert len(metrics) == 0
    assert {"rank", "step", "loss", "throughput", "step_seconds", "forward", "backward", "optimizer"} <= {*metrics}
    assert headline.startswith("10 backward passes, no step of a torch.optim optimizer")


TRAINER = """
import json
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (64, 16))]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=1, logging_steps=1,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
"""


def test_hugging_faces_trainer_with_micro_batches_has_the_loss_that_it_logs(tmp_path):
    path = tmp_path / "trainer.py"
    path.write_text(TRAINER)

    run = labkit.launch(path, nproc_per_node=1, wait=True)

    history, losses = (
        RunReader(run.folder).read_all().ranks[0],
        json.loads(run.logs(rank=0, stream="stdout").splitlines()[-1]),
    )
    assert history.step == history.totals["steps"] == len(losses) == 8
    assert history.totals["samples"] == 64
    recorded = run.metrics().dropna(subset=["loss"]).set_index("step")["loss"].to_dict()
    assert recorded == pytest.approx({step: losses[step - 1] for step in recorded}, abs=2e-3)  # Trainer rounds
    assert history.loss_of == "sum of 4 micro-batches"
