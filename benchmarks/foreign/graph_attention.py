"""Graph attention on molecules of different sizes, batched as one large graph; index_add gathers the messages."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


def summed(values, index, size):
    return values.new_zeros(size, *values.shape[1:]).index_add_(0, index, values)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message, self.score, self.norm = nn.Linear(width, width), nn.Linear(2 * width, 1), nn.LayerNorm(width)

    def forward(self, x, edges):
        source, target = edges
        message = self.message(x)
        score = F.leaky_relu(self.score(torch.cat([message[source], message[target]], 1)), 0.2).tanh().exp()
        gathered = summed(score * message[source], target, len(x)) / (summed(score, target, len(x)) + 1e-6)
        return self.norm(x + gathered.relu())


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.atoms, self.layers = nn.Embedding(20, width), nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, atoms, edges, graph, graphs):
        x = self.atoms(atoms)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(summed(x, graph, graphs)).squeeze(1)


# %% data
import torch
from torch.utils.data import Dataset


class Molecules(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        made, size = torch.Generator().manual_seed(i + self.samples), 5 + i % 8
        atoms = torch.randint(20, (size,), generator=made)
        return atoms, torch.randint(size, (2, 3 * size), generator=made), atoms.float().mean() / 10


def collate(samples):
    atoms, edges, targets = zip(*samples, strict=True)
    sizes = torch.tensor([len(a) for a in atoms])
    firsts = (sizes.cumsum(0) - sizes).tolist()
    return {
        "atoms": torch.cat(atoms),
        "edges": torch.cat([e + first for e, first in zip(edges, firsts, strict=True)], 1),
        "graph": torch.repeat_interleave(torch.arange(len(samples)), sizes),
        "targets": torch.stack(targets),
    }


def load_datasets(data_dir):
    return Molecules(64), Molecules(16)


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch["atoms"], batch["edges"], batch["graph"], len(batch["targets"]))


def count_of(batch):
    return len(batch["targets"])


def loss_of(outputs, batch):
    return F.mse_loss(outputs, batch["targets"], reduction="sum")


def metrics_of(outputs, batch):
    return {}
