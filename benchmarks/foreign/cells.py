"""A language model of nn.LSTMCell layers, called token by token, with an adaptive softmax."""

# %% model
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocabulary=400, width=64, layers=2):
        super().__init__()
        self.embed, self.cells = (
            nn.Embedding(vocabulary, width),
            nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers)),
        )
        self.head = nn.AdaptiveLogSoftmaxWithLoss(width, vocabulary, cutoffs=[50, 150], div_value=2.0)

    def forward(self, x, labels):
        states, outputs = [None] * len(self.cells), []
        for hidden in self.embed(x).unbind(1):
            for i, cell in enumerate(self.cells):
                hidden, state = cell(hidden, states[i])
                states[i] = hidden, state
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1).flatten(0, 1), labels.flatten()).output


# %% data
import torch
from torch.utils.data import TensorDataset


def load_datasets(data_dir):
    text = torch.randint(400, (80, 13), generator=torch.Generator().manual_seed(0))
    return TensorDataset(text[:64, :-1], text[:64, 1:]), TensorDataset(text[64:, :-1], text[64:, 1:])


# %% task
def outputs_of(model, batch):
    return model(*batch)


def count_of(batch):
    return batch[1].numel()


def loss_of(outputs, batch):
    return -outputs.sum()


def metrics_of(outputs, batch):
    return {}
