"""Cells of a script whose layers sleep, so that times are exact on busy cores: read as text, never imported."""

# %% model
import json
import os
import time
from typing import Any

import torch
from torch import nn

# layers; seconds of a layer: forward, backward; of the whole forward: slow, on the rank slow_rank
PAUSES = json.loads(os.environ.get("PAUSES", '{"layers": 1, "forward": 0, "backward": 0, "slow": 0, "slow_rank": -1}'))


class Pause(torch.autograd.Function):
    """Sleeps, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSES["forward"])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        time.sleep(PAUSES["backward"])
        return gradients[0]


class Model(nn.Module):
    """Linear layers of 4 MiB, each with a pause. In backward the pause comes before the layer's gradients."""

    def __init__(self, width: int = 1024):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(PAUSES["layers"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == str(PAUSES["slow_rank"]):
            time.sleep(PAUSES["slow"])
        for block in self.blocks:
            x = Pause.apply(block(x))
        return x


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir: str) -> tuple[TensorDataset, TensorDataset]:
    """(train, test): noise."""
    x, y = torch.rand(256, 1024), torch.randint(1024, (256,))
    return TensorDataset(x, y), TensorDataset(x[:8], y[:8])
