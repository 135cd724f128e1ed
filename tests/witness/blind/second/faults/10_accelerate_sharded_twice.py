"""The loader already has a DistributedSampler and accelerator.prepare shards it once more, so every epoch silently leaves out half of the data."""
import argparse

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Reviews(Dataset):
    def __init__(self, n=512, length=16):
        g = torch.Generator().manual_seed(8)
        self.y = torch.randint(0, 2, (n,), generator=g)
        self.x = torch.randint(1, 200, (n, length), generator=g)
        self.x[:, 0] = torch.where(self.y == 1, torch.randint(1, 40, (n,), generator=g), torch.randint(160, 200, (n,), generator=g))

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.y[i], "index": i}


class Encoder(nn.Module):
    def __init__(self, vocab=200, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.classifier = nn.Linear(dim, 2)

    def forward(self, input_ids):
        return self.classifier(self.encoder(self.embed(input_ids)).mean(1))


def training_function(config):
    accelerator = Accelerator(cpu=True)
    set_seed(config["seed"], device_specific=True)
    dataset = Reviews()
    sampler = DistributedSampler(
        dataset, num_replicas=accelerator.num_processes, rank=accelerator.process_index, shuffle=True
    )
    loader = DataLoader(dataset, batch_size=config["batch_size"], sampler=sampler)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        seen = []
        for batch in loader:
            loss = loss_fn(model(batch["input_ids"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen += batch["index"].tolist()
        covered = set(gather_object(seen))
        accelerator.print(f"epoch {epoch} loss {loss.item():.3f}; {len(dataset) - len(covered)} of {len(dataset)} samples left out")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, dest="batch_size")
    args = parser.parse_args()
    training_function({"lr": 1e-3, "seed": 42, **vars(args)})
