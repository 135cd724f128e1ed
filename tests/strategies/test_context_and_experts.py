"""What ranks that split sequences or hold experts compute, send, report and save, on real gloo ranks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from strategies.matrix import edited
from strategies.test_extras import OPTIONS, composed_of, largest_difference, trained
from strategies.test_refusals import refused

import labkit
from labkit import Script
from labkit.errors import LaunchError

PAIRS = {
    "gather": ("            mask = self.mask(", "size * keys"),
    "ring": ("            yield slice(first, last)", "(last - first) * keys - int(hidden.sum())"),
}
EXCHANGE = "        arrived = rows.new_empty(sum(received), *rows.shape[1:])\n"
BATCH, LAYERS, TIME, WIDTH, TOP_K, DOUBLE = 16, 4, 128, 32, 2, 8  # of strategies.test_extras and the task mixture


def counted(folder: Path, rank: int) -> list[int]:
    return [int(number) for number in re.findall(r"^counted (\d+)$", (folder / f"log{rank}").read_text(), re.MULTILINE)]


@pytest.mark.parametrize("attention", ["gather", pytest.param("ring", marks=pytest.mark.soak)])
def test_ranks_of_a_sequence_compute_alike_because_of_the_zigzag_order(attention, tmp_path):
    """Pairs of a query and a key."""
    line, pairs = PAIRS[attention]
    say = f'            print("counted", {pairs}, flush=True)\n'
    tiles = {"TILE = 128": "TILE = 20"}  # several, and the last one shorter
    zigzag = edited(composed_of("context_parallel", "transformer"), {line: say + line, **tiles})
    values = trained(zigzag, 2, ["--attention", attention], tmp_path / "zigzag")
    pairs_of = [sum(counted(tmp_path / "zigzag", rank)) for rank in range(2)]
    assert max(pairs_of) <= 1.05 * min(pairs_of)

    if attention == "ring":
        alone = trained(composed_of("single", "transformer"), 1, [], tmp_path / "alone")
        assert largest_difference(values, alone) < 1e-9
    else:
        in_order = edited(zigzag, {"return rank, 2 * self.ranks - 1 - rank": "return 2 * rank, 2 * rank + 1"})
        trained(in_order, 2, [], tmp_path / "in order")
        pairs_of = [sum(counted(tmp_path / "in order", rank)) for rank in range(2)]
        assert pairs_of[1] > 1.05 * pairs_of[0]  # its positions see more keys


def test_each_token_goes_to_its_experts_and_back_and_their_shares_are_reported(tmp_path):
    """A copy of a token for each of its experts, there and back, in forward and in backward."""
    say = '        print("counted", sum(sent) * rows.shape[1] * rows.element_size(), flush=True)\n'
    composed = edited(composed_of("expert_parallel", "mixture"), {EXCHANGE: say + EXCHANGE})
    trained(composed, 2, [], tmp_path / "run")

    sent = [counted(tmp_path / "run", rank)[: 4 * LAYERS] for rank in range(2)]  # of the first step
    assert sum(map(sum, sent)) == 4 * LAYERS * TOP_K * BATCH * TIME * WIDTH * DOUBLE
    for rank in range(2):
        values = json.loads((tmp_path / "run" / f"values{rank}.json").read_text())
        shares = [values[f"expert_{expert} 6"] for expert in range(8)]
        assert sum(shares) == pytest.approx(1)
        assert values["busiest_expert 6"] == max(shares)


EXPERTS = """
import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.randn(count, width, width) * width**-0.5) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(count, width))
        self.act = nn.SiLU()

    def forward(self, x, counts):
        parts = enumerate(x.split(counts.tolist()))
        return torch.cat([self.act(part @ self.gate[i]) * (part @ self.up[i]) + self.bias[i] for i, part in parts])


class Layer(nn.Module):
    def __init__(self, width, count=4):
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(width), nn.Linear(width, count), Gated(count, width)
        self.shared = nn.Linear(width, width)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(tokens).sigmoid().topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        outputs = self.experts(counts=counts, x=tokens[order // 2]) * weights.flatten()[order, None]
        return x + self.shared(tokens).index_add(0, order // 2, outputs).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(256, 32), nn.Sequential(Layer(32), Layer(32))
        self.head = nn.Linear(32, 256)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))
"""


def test_a_mixture_of_ones_own_trains_the_same_with_its_experts_on_other_ranks(tmp_path):
    divided, alone = (composed_of(name, "mixture").with_cells(model=EXPERTS) for name in ("expert_parallel", "single"))
    values = trained(divided, 2, [], tmp_path / "divided")
    assert largest_difference(values, trained(alone, 1, [], tmp_path / "alone")) < 1e-9


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("self.bias = nn.Parameter(torch.zeros(count, width))", "self.register_buffer('bias', torch.zeros(count, 1))",
         "Gated has buffers, or parameters whose first axis is not the expert"),
        ("torch.zeros(count, width))", "torch.zeros(width, count))", "whose first axis is not the expert"),
        ("torch.zeros(count, width))", "torch.zeros(count))", "whose first axis is not the expert"),
        ("def forward(self, x, counts):", "def forward(self, x, counts, weights):",
         "forward.rows, sizes., as in the task mixture; got Gated: rewrite it, or use fsdp"),
        ("Gated(count, width)", "nn.ModuleList([nn.Linear(width, 4)] * count)", "got ModuleList: rewrite it"),
        ("count=4", "count=3", "3 experts cannot be split across 2 expert ranks"),
        ("self.experts", "self.mixture", "modules named experts, and Model has none"),
    ],
)  # fmt: skip
def test_experts_that_cannot_be_divided_are_refused(line, other, message):
    assert line in EXPERTS
    composed = composed_of("expert_parallel", "mixture").with_cells(model=EXPERTS.replace(line, other))
    exec(str(composed), cells := {"__name__": "train"})
    with pytest.raises(SystemExit, match=message):
        cells["experts_of"](cells["Model"](), 1, 2)


def test_a_size_is_needed_for_each_expert():
    exec(str(composed_of("expert_parallel", "mixture").with_cells(model=EXPERTS)), cells := {"__name__": "train"})
    experts = cells["Gated"](4, 32)
    with pytest.raises(SystemExit, match="Gated.forward got 3 sizes, not one for each of 4 experts"):
        cells["on_this_rank"](experts, experts.forward, None, torch.zeros(5, 32), torch.tensor([2, 0, 3]))


EACH = "torch.cat([F.gelu(part @ up) @ down\n"
IN_TURN = "                          for part, up, down in zip(rows.split(sizes), self.up, self.down, strict=True)])"
ALL = "torch.cat([F.gelu(rows.split(sizes)[i] @ self.up[i]) @ self.down[i] for i in range(8)])"


def test_experts_that_compute_a_fixed_number_are_refused_before_the_launch_and_in_it():
    composed = edited(Script.load("expert_parallel", task="mixture"), {EACH + IN_TURN: ALL})
    sentence = (
        "Experts.forward fails with 4 of its 8 experts (IndexError: tuple index out of range): it must compute "
        "len(sizes) of them"
    )

    with pytest.raises(LaunchError, match=f"^{re.escape(sentence)}$"):
        labkit.plan(composed, nproc_per_node=2)
    assert [finding.rule for finding in labkit.check(composed)] == ["all-experts-on-a-rank"]
    refused(composed, 2, {}, sentence)


@pytest.mark.soak
def test_a_capacity_drops_the_same_tokens_wherever_the_experts_are(tmp_path):
    there, here = (
        trained(composed_of(name, "mixture"), 2, ["--capacity", "1.0"], tmp_path / name)
        for name in ("expert_parallel", "ddp")
    )
    every = trained(composed_of("ddp", "mixture"), 2, [], tmp_path / "every")
    assert largest_difference(there, here) < 1e-9
    assert largest_difference(there, every) > 1e-6


def resumed(strategy: str, ranks: int, saved: Path, folder: Path) -> dict[str, float]:
    """What is trained after step 4, from another training's checkpoint."""
    shutil.copytree(saved / "checkpoints", folder / "checkpoints")
    options = ["--checkpoint-dir", str(folder / "checkpoints")]
    return trained(composed_of(strategy, MODEL[strategy], "checkpoints"), ranks, options, folder / "run", start=4)


MODEL = {"single": "mixture", "expert_parallel": "mixture", "context_parallel": "transformer"}


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        ("expert_parallel", "single"),
        pytest.param("single", "expert_parallel", marks=pytest.mark.soak),
        pytest.param("expert_parallel", "expert_parallel", marks=pytest.mark.soak),
        pytest.param("context_parallel", "context_parallel", marks=pytest.mark.soak),
    ],
)
def test_a_checkpoint_is_resumed_with_the_experts_on_other_ranks(saves, loads, tmp_path):
    ranks = {"single": 1}
    whole = trained(
        composed_of(saves, MODEL[saves], "checkpoints"), ranks.get(saves, 2), OPTIONS["checkpoints"], tmp_path / "saves"
    )
    shutil.rmtree(tmp_path / "saves" / "checkpoints" / "step-6")

    rest = resumed(loads, ranks.get(loads, 2), tmp_path / "saves", tmp_path / "loads")

    assert rest.keys() == {name for name in whole if name not in {f"loss {step}" for step in (1, 2, 3, 4)}}
    assert largest_difference({**whole, **rest}, whole) < (1e-15 if saves == loads else 1e-9)
