"""The cheat sheet's formulas are what the planner counts: bytes held, and bytes sent by NCCL's rings."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from decision_judges import DECODERS, as_asked, at, sized  # noqa: E402

from labkit.planner.strategies.strategy import volume  # noqa: E402

SHEET = (ROOT / "docs" / "reference" / "cheat_sheet.md").read_text(encoding="utf-8")
ROWS = {cells[0]: cells for line in SHEET.splitlines() if len(cells := line.strip("| ").split(" | ")) == 7}
# A rank's share of what a ring sends (lab 02); a stage sends activations on, and gradients back.
RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "send": 2}
SIZE, SAMPLES = 0.03, 8
PIPELINE = {"schedule": "1F1B", "accumulate": 8}
STRATEGIES = [
    ("one rank", "single", {}),
    ("DDP", "ddp", {}),
    ("ZeRO-1, as in torch", "zero1", {}),
    ("`zero2`", "zero2", {}),
    ("FSDP", "fsdp", {"reshard_after_forward": "always"}),
    ("tensor", "tensor_parallel", {}),
    ("pipeline", "pipeline", PIPELINE),
]


WIDTH, LAYERS, VOCABULARY, CONTEXT = DECODERS[SIZE]
ENDS = 4 * (2 * VOCABULARY + CONTEXT) * WIDTH  # bytes of the embeddings and the head, which are in no block


def value(cell: str, ranks: int) -> float:
    """What a cell's formula gives: `2 (N - 1) / N P` for the decoder of this test, in bytes."""
    whole = 4 * sized(SIZE)[1].elements
    names = {"P": whole - ENDS if "blocks" in cell else whole, "L": LAYERS, "N": ranks}
    names["A"] = 4 * SAMPLES * ranks * CONTEXT * WIDTH
    (formula,) = re.findall(r"`(.+?)`", cell)
    return float(eval(re.sub(r"(?<=[\w)]) (?=[(A-Z])", "*", formula), {"__builtins__": {}}, names))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name, strategy, options", STRATEGIES, ids=[name for name, *_ in STRATEGIES])
def test_a_rank_holds_and_sends_what_the_planner_counts(name, strategy, options, ranks):
    _, parameters, gradients, optimizer, sent, _, _ = ROWS[name]
    ranks = 1 if strategy == "single" else ranks
    planned = as_asked(at(SIZE, ranks, "A100 40", SAMPLES, precision="fp32"), strategy, **options)
    calls = [call for call in volume(sized(SIZE)[1], planned.layout) if call.bytes > 1000]  # not the loss's
    share, held = (ranks - 1) / ranks, planned.peak.categories

    assert sum(share * RINGS[call.kind] * call.bytes for call in calls) == pytest.approx(value(sent, ranks), rel=0.02)
    for category, cell, of_ends in (("parameters", parameters, ENDS), ("optimizer", optimizer, 2 * ENDS)):
        most = of_ends if "blocks" in cell else 0
        assert 0.99 * value(cell, ranks) <= held[category] <= 1.02 * value(cell, ranks) + most
    assert value(gradients, ranks) == value(parameters, ranks)


def test_gradients_are_held_where_the_sheet_says_so():
    """At a step's peak FSDP's are still being reduced; DDP's and ZeRO-1's are whole."""
    for strategy in ("ddp", "zero1"):
        held = as_asked(at(SIZE, 4, "A100 40", SAMPLES, precision="fp32"), strategy).peak.categories
        assert held["gradients"] == pytest.approx(value(ROWS["DDP"][2], 4), rel=0.01)


def test_it_prints_on_one_page():
    assert len(SHEET.split()) < 700
