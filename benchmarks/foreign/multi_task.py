"""Three tasks weighted by their own learned uncertainty; the model computes the losses, of a nested batch."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict(
            {"kind": nn.Linear(width, 5), "depth": nn.Linear(width, 1), "tags": nn.Linear(width, 8)}
        )
        self.log_variance = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in self.heads})

    def forward(self, inputs, targets):
        x = self.trunk(inputs["features"])
        made = {name: head(x) for name, head in self.heads.items()}
        losses = {
            "kind": F.cross_entropy(made["kind"], targets["kind"], reduction="none"),
            "depth": F.smooth_l1_loss(made["depth"].squeeze(1), targets["depth"], reduction="none"),
            "tags": F.binary_cross_entropy_with_logits(made["tags"], targets["tags"], reduction="none").sum(1),
        }
        return {
            name: loss * (-self.log_variance[name]).exp() + self.log_variance[name] for name, loss in losses.items()
        }


# %% data
import torch
from torch.utils.data import Dataset


class Scenes(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        x = torch.randn(32, generator=torch.Generator().manual_seed(i + self.samples))
        targets = {"kind": i % 5, "depth": x[0].abs(), "tags": (x[:8] > 0).float()}
        return {"inputs": {"features": x}, "targets": targets}


def load_datasets(data_dir):
    return Scenes(64), Scenes(16)


# %% task
def outputs_of(model, batch):
    return model(batch["inputs"], batch["targets"])


def count_of(batch):
    return len(batch["targets"]["kind"])


def loss_of(outputs, batch):
    return sum(loss.sum() for loss in outputs.values())


def metrics_of(outputs, batch):
    return {name: (loss.sum(), count_of(batch)) for name, loss in outputs.items()}
