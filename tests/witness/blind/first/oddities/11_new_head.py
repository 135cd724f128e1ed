# odd: strict=False leaves the head as it was initialised, on purpose: the new task has other classes than the old one.
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.head = nn.Linear(48, classes)

    def forward(self, x):
        return self.head(self.body(x))


def save_old_task(path, x, y):
    """Write the checkpoint of a model that tells the digits 0 to 4 apart."""
    old = MLPClassifier((48,), learning_rate_init=0.01, max_iter=100, random_state=0).fit(x, y)
    weights = [torch.tensor(w.T, dtype=torch.float32) for w in old.coefs_]
    biases = [torch.tensor(b, dtype=torch.float32) for b in old.intercepts_]
    names = ["body.0.weight", "body.0.bias", "head.weight", "head.bias"]
    torch.save(dict(zip(names, [weights[0], biases[0], weights[1], biases[1]], strict=True)), path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x = x / 16
    old, new = y < 5, y >= 5
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "zero_to_four.pt"
        save_old_task(checkpoint, x[old], y[old])
        state = torch.load(checkpoint)

    net = Classifier(classes=5)
    state = {name: value for name, value in state.items() if not name.startswith("head.")}
    missing, unexpected = net.load_state_dict(state, strict=False)
    assert missing == ["head.weight", "head.bias"] and not unexpected
    model = DDP(net)
    optimizer = torch.optim.AdamW(
        [{"params": net.body.parameters(), "lr": 1e-3}, {"params": net.head.parameters(), "lr": 1e-2}]
    )
    data = TensorDataset(torch.tensor(x[new], dtype=torch.float32), torch.tensor(y[new] - 5))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
