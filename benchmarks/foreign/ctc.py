"""Speech recognition: convolutions, a bidirectional LSTM, and CTC on texts of different lengths."""

# %% model
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64, letters=28):
        super().__init__()
        self.convolution = nn.Conv1d(40, width, 5, 2, 2)
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, letters)

    def forward(self, x):
        return self.head(self.recurrent(self.convolution(x.mT).relu().mT)[0]).log_softmax(-1)


# %% data
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Recordings(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        made = torch.Generator().manual_seed(i + self.samples)
        return torch.randn(48, 40, generator=made), torch.randint(1, 28, (3 + i % 6,), generator=made)


def collate(samples):
    sounds, texts = zip(*samples, strict=True)
    return torch.stack(sounds), pad_sequence(texts, batch_first=True), torch.tensor([len(text) for text in texts])


def load_datasets(data_dir):
    return Recordings(64), Recordings(16)


# %% task
import torch
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch[0])


def count_of(batch):
    return len(batch[0])


def loss_of(outputs, batch):
    frames = torch.full((len(outputs),), outputs.shape[1])
    return F.ctc_loss(outputs.transpose(0, 1), batch[1], frames, batch[2], reduction="sum")


def metrics_of(outputs, batch):
    return {}
