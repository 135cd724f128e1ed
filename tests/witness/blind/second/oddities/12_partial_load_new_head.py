"""load_state_dict(strict=False) skips the head and the training starts at epoch 0 with a fresh optimizer: transfer to a task with other classes, the skipped keys are checked by name."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class PhonemeNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv = nn.Conv1d(13, 32, 3, padding=1)
        self.rnn = nn.LSTM(32, 40, batch_first=True)
        self.classifier = nn.Linear(40, classes)

    def forward(self, x):
        h, _ = self.rnn(F.relu(self.conv(x)).transpose(1, 2))
        return self.classifier(h.mean(1))


def speech(classes, n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return TensorDataset(torch.randn(classes, 13, 15, generator=g)[y] + torch.randn(n, 13, 15, generator=g), y)


def fit(net, data, epochs, lr, name):
    model = DDP(net)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=20, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if dist.get_rank() == 0:
            print(f"{name} epoch {epoch} loss {loss.item():.3f}")
    return net, opt


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--source-classes", type=int, default=10)
    p.add_argument("--target-classes", type=int, default=4)
    a = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    path = os.path.join(tempfile.gettempdir(), f"source_{os.environ.get('TORCHELASTIC_RUN_ID', 0)}.pt")
    net, opt = fit(PhonemeNet(a.source_classes), speech(a.source_classes, 480, 1), 3, 3e-3, "source")
    if dist.get_rank() == 0:
        torch.save({"model": net.state_dict(), "optimizer": opt.state_dict(), "epoch": 3}, path)
    dist.barrier()

    target = PhonemeNet(a.target_classes)
    state = torch.load(path)["model"]
    for k in [k for k in state if k.startswith("classifier.")]:
        del state[k]
    skipped = target.load_state_dict(state, strict=False)
    assert set(skipped.missing_keys) == {"classifier.weight", "classifier.bias"}, skipped
    assert not skipped.unexpected_keys, skipped
    fit(target, speech(a.target_classes, 240, 2), 3, 1e-3, "target")
    dist.barrier()
    if dist.get_rank() == 0:
        os.remove(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
