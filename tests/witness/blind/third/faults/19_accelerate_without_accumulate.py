"""gradient_accumulation_steps=4 is given to Accelerator but the loop lacks accelerator.accumulate: it steps every batch with a quarter of the loss."""
import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Seq2Label(nn.Module):
    def __init__(self, vocab, dim, classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[1][0])


def training_function(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    ids = torch.randint(0, 50, (1024, 12), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids, ids.sum(1) % 3)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = Seq2Label(50, 24, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    criterion = nn.CrossEntropyLoss()
    updates, last = 0, model.module.head[1].weight.detach().clone()
    for epoch in range(args.epochs):
        model.train()
        for ids, labels in loader:
            loss = criterion(model(ids), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            now = model.module.head[1].weight.detach().clone()
            updates += not torch.equal(now, last)
            last = now
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    meant = args.epochs * len(loader) // args.gradient_accumulation_steps
    accelerator.print(f"updates made: {updates}, meant: {meant}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())
