"""One training handed on from strategy to strategy by its checkpoints, as if one rank had done it all."""

from __future__ import annotations

import pytest
from strategies.matrix import OPTIONS, curve, script

import labkit

RELAY = [
    ("single", 1, {}),
    ("ddp", 2, {}),
    ("zero1", 2, {"full_checkpoints": True}),
    ("fsdp", 4, {}),
    ("tensor_parallel", 2, {}),
    ("pipeline", 2, {"accumulate": 2, "async_save": True}),
    ("hybrid", 4, {"tensor": 2, "pipeline": 2, "accumulate": 2}),
    ("fsdp1", 2, {}),
    ("zero2", 2, {"full_checkpoints": True, "async_save": True}),
    ("single", 1, {}),
]
SHORT = [leg for leg in RELAY if leg[0] in ("zero1", "fsdp", "tensor_parallel", "pipeline")]
EACH = 2  # steps


@pytest.mark.timeout(600)
@pytest.mark.parametrize("relay", [SHORT, pytest.param(RELAY, marks=pytest.mark.soak)], ids=["short", "whole"])
def test_every_strategy_goes_on_from_every_other(relay, tmp_path):
    alone = curve(script("single"), 1, lr_schedule="constant")[0]["loss"]
    for turn, (name, ranks, options) in enumerate(relay, 1):
        chosen = OPTIONS | options | {"lr_schedule": "constant", "steps": EACH * turn, "save_every": EACH}
        run = labkit.launch(script(name), nproc_per_node=ranks, checkpoint_dir=tmp_path, **chosen)
        losses = run.losses()

        assert list(losses.index) == [*range(EACH * (turn - 1) + 1, EACH * turn + 1)], name
        assert ((losses - alone[losses.index]).abs() / alone[losses.index]).max() < 1e-9, name
