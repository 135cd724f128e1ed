"""Models that are not stacks of different real layers: each is trained as on one rank, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from strategies.test_extras import largest_difference, trained

import labkit
from labkit import Script

HEAD = "import torch\nfrom torch import nn\n\n\n"
SERIES = """
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x = torch.randn(160, 1, 32, generator=torch.Generator().manual_seed(0)).cumsum(-1)
    return TensorDataset(x[:128], x[:128].roll(3, -1)), TensorDataset(x[128:], x[128:].roll(3, -1))
"""
REGRESSION = """
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return torch.tensor(batch[1].numel())


def loss_of(outputs, batch):
    return F.mse_loss(outputs, batch[1], reduction="sum")


def metrics_of(outputs, batch):
    return {}
"""
FOURIER = f"""{HEAD}class Model(nn.Module):  # its first parameter is complex
    def __init__(self, width=8, modes=6):
        super().__init__()
        self.modes, self.lift, self.drop = modes, nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        real = torch.randn(width, width, modes) / width
        self.weight = nn.Parameter(torch.complex(real, -real))

    def forward(self, x):
        low = torch.fft.rfft(self.lift(x))[..., : self.modes]
        return self.drop(torch.fft.irfft(torch.einsum("bim,iom->bom", low, self.weight), n=x.shape[-1]))
"""
ALL_COMPLEX = f"""{HEAD}class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        real = torch.randn(width, width) / width
        self.weight = nn.Parameter(torch.complex(real, -real))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.Sequential(*(Layer(width) for _ in range(3)))

    def forward(self, x):
        return self.blocks(torch.complex(x, x)).abs()
"""
SHARED = f"""{HEAD}class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):  # one layer, four times
    def __init__(self, width=32):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(width)] * 4), nn.Linear(width, 32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
PARTS = SHARED.replace("class Model(nn.Module):  # one layer, four times", "class Model(nn.Module):")
PARTS = (
    PARTS[: PARTS.index("class Model")]
    + """class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Layer(width) for _ in range(4)), nn.Linear(width, 32)

    def embed(self, x):
        return x

    def unembed(self, x):
        return self.head(x)

    def forward(self, x, scale=1):
        for block in self.blocks:
            x = block(x) * scale
        return self.unembed(x)
"""
)
FORCES = """
import torch
from torch import nn


class Model(nn.Module):  # as a library would: the text of the script does not show create_graph
    def __init__(self, width=32):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(width, width) for _ in range(3)), nn.Linear(width, 32)

    def forward(self, x):
        with torch.enable_grad():
            h = x.requires_grad_()
            for layer in self.layers:
                h = layer(h).tanh()
            energy = self.head(h)
            return energy + torch.autograd.grad(energy.sum(), x, **{"create" + "_graph": self.training})[0]
"""
LAZY = """
from torch import nn


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(32))
"""


def regression(strategy: str, model: str, *extras: str, task: str = REGRESSION) -> Script:
    return Script.load(strategy, *extras).with_cells(model=model, data=SERIES, task=f"import torch\n{task}")


@pytest.mark.parametrize(
    ("model", "strategy", "options"),
    [
        (FOURIER, "ddp", []),
        (ALL_COMPLEX, "zero1", []),
        (ALL_COMPLEX, "fsdp", []),
        (ALL_COMPLEX, "zero2", []),
        (SHARED, "ddp", []),
        (SHARED, "zero1", []),
        (SHARED, "zero2", []),
        (SHARED, "fsdp", []),
        (SHARED, "fsdp1", ["--wrap", "none"]),
        (PARTS, "pipeline", ["--accumulate", "2"]),
        (FORCES, "ddp", []),
        (FORCES, "fsdp1", []),
    ],
)
def test_two_ranks_train_what_one_does(model: str, strategy: str, options: list[str], tmp_path: Path) -> None:
    expected = trained(regression("single", model), 1, [], tmp_path / "one")
    assert largest_difference(trained(regression(strategy, model), 2, options, tmp_path / "two"), expected) < 1e-9


def test_a_layer_that_is_used_several_times_is_recomputed_and_accumulated_as_any_other(tmp_path: Path) -> None:
    extras = ("accumulate", "recompute_and_compile")
    options = ["--accumulate", "2", "--activation-checkpointing"]
    expected = trained(regression("single", SHARED), 1, [], tmp_path / "one")
    two = trained(regression("fsdp", SHARED, *extras), 2, options, tmp_path / "two")
    assert largest_difference(two, expected) < 1e-9


@pytest.mark.parametrize("model", [FOURIER, ALL_COMPLEX, SHARED])
def test_precision_changes_the_digits_and_not_the_model(model: str, runs_dir: Path) -> None:
    script = regression("single", model, "precision")
    options = {"nproc_per_node": 1, "global_batch_size": 16, "steps": 4, "lr": 1e-2, "wait": True}
    double, single, half = (
        labkit.launch(script, precision=precision, **options).losses() for precision in ("fp64", "fp32", "bf16")
    )
    assert list(single) == pytest.approx(list(double), rel=1e-4)
    assert list(half) == pytest.approx(list(double), rel=0.1)


def test_a_layer_that_fsdp1_would_wrap_once_is_refused_by_the_plan_and_by_the_script(runs_dir: Path) -> None:
    script = regression("fsdp1", SHARED)
    sentence = "FSDP1 wraps only one use of a layer that is used several times: use fsdp, or --wrap none"
    with pytest.raises(labkit.LaunchError, match=sentence):
        labkit.plan(script, nproc_per_node=2, global_batch_size=16)
    with pytest.raises(labkit.RankFailedError, match=f"ranks 0, 1 stopped: {sentence}"):
        labkit.launch(script, nproc_per_node=2, global_batch_size=16, steps=1, wait=True)


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("zero1", "ZeRO-1 needs parameters of one type, and these have torch.complex64 and torch.float32: use ddp"),
        ("fsdp", "FSDP expects uniform original parameter dtype"),
        ("zero2", "FSDP expects uniform original parameter dtype"),
        ("fsdp1", "Cannot flatten integer dtype tensors"),
    ],
)
def test_a_plan_says_that_complex_parameters_beside_real_ones_are_not_sharded(strategy: str, sentence: str) -> None:
    try:
        plan = labkit.plan(regression(strategy, FOURIER), nproc_per_node=2, global_batch_size=16)
    except labkit.LaunchError as error:
        assert sentence in str(error)
    else:
        assert plan.problems[0].startswith("this will fail: ")
        assert sentence in plan.problems[0]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("batch[0], 0.5", "a pipeline passes one tensor by position: let outputs_of pass the others by name"),
        ("batch[0], scale=0.5", "stages pass one tensor on, and blocks would need scale: compute it in them"),
    ],
)
def test_what_stages_do_not_pass_on_is_refused(arguments: str, sentence: str, runs_dir: Path) -> None:
    script = regression("pipeline", PARTS, task=REGRESSION.replace("model(batch[0])", f"model({arguments})"))
    options = {"nproc_per_node": 2, "global_batch_size": 16, "accumulate": 2}
    with pytest.raises(labkit.LaunchError, match=sentence):
        labkit.plan(script, **options)
    with pytest.raises(labkit.RankFailedError, match=f"ranks 0, 1 stopped: {sentence}"):
        labkit.launch(script, steps=1, wait=True, **options)


@pytest.mark.parametrize(
    ("model", "strategy", "sentence"),
    [
        (FORCES, "fsdp", "fully_shard does not support a backward pass through a gradient: use ddp or zero1"),
        (FORCES, "zero2", "fully_shard does not support a backward pass through a gradient: use ddp or zero1"),
        (LAZY, "ddp", "lazy modules have none: use nn.Linear"),
    ],
)
def test_a_plan_refuses_what_fails_in_torch(model: str, strategy: str, sentence: str) -> None:
    with pytest.raises(labkit.LaunchError, match=sentence):
        labkit.plan(regression(strategy, model), nproc_per_node=2, global_batch_size=16)


def test_a_plan_has_nothing_to_say_of_fsdp1_and_gradients_of_gradients() -> None:
    assert not labkit.plan(regression("fsdp1", FORCES), nproc_per_node=2, global_batch_size=16).problems
