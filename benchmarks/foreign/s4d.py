"""S4D: a diagonal state-space model, whose complex kernel is made of real parameters and convolved by FFT."""

# %% model
import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, states=16):
        super().__init__()
        self.log_pace = nn.Parameter(torch.rand(width) * 2 - 4)
        self.log_decay = nn.Parameter(torch.full((width, states), 0.5).log())
        self.frequency = nn.Parameter(torch.pi * torch.arange(states).float().repeat(width, 1))
        self.mix = nn.Parameter(torch.randn(width, states, 2))
        self.skip, self.out, self.norm = (
            nn.Parameter(torch.randn(width)),
            nn.Linear(width, 2 * width),
            nn.LayerNorm(width),
        )

    def forward(self, x):
        length = x.shape[1]
        poles = torch.complex(-self.log_decay.exp(), self.frequency) * self.log_pace.exp()[:, None]
        mix = torch.view_as_complex(self.mix) * (poles.exp() - 1) / poles
        steps = torch.arange(length, device=x.device)
        kernel = 2 * torch.einsum("ws,wst->wt", mix, torch.exp(poles[..., None] * steps)).real
        spectrum = torch.fft.rfft(x.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        y = torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT + self.skip * x
        return self.norm(x + F.glu(self.out(F.gelu(y)), -1))


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.into, self.head = nn.Linear(1, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))

    def forward(self, x):
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    x, labels = torch.randn(80, 64, 1, generator=torch.Generator().manual_seed(0)), torch.arange(80) % 10
    return TensorDataset(x[:64], labels[:64]), TensorDataset(x[64:], labels[64:])
