"""Sequence to sequence with GRUs, additive attention, teacher forcing, and sentences of different lengths."""

# %% model
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Model(nn.Module):
    def __init__(self, vocabulary=200, width=64):
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.cell, self.bridge = nn.GRUCell(3 * width, width), nn.Linear(2 * width, width)
        self.query, self.key, self.score = nn.Linear(width, width), nn.Linear(2 * width, width), nn.Linear(width, 1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source, lengths, target):
        packed = pack_padded_sequence(self.source(source), lengths.cpu(), batch_first=True, enforce_sorted=False)
        seen, last = self.encoder(packed)
        seen, _ = pad_packed_sequence(seen, batch_first=True, total_length=source.shape[1])
        hidden, keys = torch.tanh(self.bridge(last.transpose(0, 1).flatten(1))), self.key(seen)
        padding, outputs = torch.arange(source.shape[1], device=source.device) >= lengths[:, None], []
        for word in self.target(target).unbind(1):
            scores = self.score(torch.tanh(self.query(hidden)[:, None] + keys)).squeeze(2)
            attention = scores.masked_fill(padding, float("-inf")).softmax(1)
            hidden = self.cell(torch.cat([word, (attention[:, None] @ seen).squeeze(1)], 1), hidden)
            outputs.append(self.head(hidden))
        return torch.stack(outputs, 1)


# %% data
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Sentences(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        words = torch.randint(1, 200, (4 + i % 7,), generator=torch.Generator().manual_seed(i + self.samples))
        return words, words.flip(0)[: 3 + i % 5]


def collate(samples):
    source, target = zip(*samples, strict=True)
    return {
        "source": pad_sequence(source, batch_first=True),
        "lengths": torch.tensor([len(words) for words in source]),
        "target": pad_sequence([torch.cat([words.new_zeros(1), words[:-1]]) for words in target], batch_first=True),
        "labels": pad_sequence(target, batch_first=True, padding_value=-100),
    }


def load_datasets(data_dir):
    return Sentences(64), Sentences(16)


# %% task
from torch.nn import functional as F


def outputs_of(model, batch):
    return model(batch["source"], batch["lengths"], batch["target"])


def count_of(batch):
    return (batch["labels"] != -100).sum()


def loss_of(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    return {"accuracy": ((outputs.argmax(-1) == batch["labels"]).sum(), count_of(batch))}
