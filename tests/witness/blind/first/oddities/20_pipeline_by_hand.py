# odd: the ranks hold different models, read the same data and average nothing: they are two stages of one pipeline.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MICRO_BATCHES, MICRO_SIZE, WIDTH = 4, 16, 64


def first_stage(stage, images):
    sent = []
    for micro in images.chunk(MICRO_BATCHES):
        hidden = stage(micro)
        dist.send(hidden.detach(), dst=1)
        sent.append(hidden)
    for hidden in sent:
        grad = torch.empty_like(hidden)
        dist.recv(grad, src=1)
        hidden.backward(grad)


def last_stage(stage, labels):
    losses = []
    for micro in labels.chunk(MICRO_BATCHES):
        hidden = torch.empty(MICRO_SIZE, WIDTH)
        dist.recv(hidden, src=0)
        hidden.requires_grad_()
        losses.append((hidden, nn.functional.cross_entropy(stage(hidden), micro) / MICRO_BATCHES))
    for hidden, loss in losses:
        loss.backward()
        dist.send(hidden.grad, dst=0)
    return sum(loss.item() for _, loss in losses)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert dist.get_world_size() == 2
    torch.manual_seed(rank)
    if rank == 0:
        stage = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, WIDTH), nn.ReLU())
    else:
        stage = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)

    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    order = torch.Generator().manual_seed(5)  # the images go in at one end, their labels at the other
    loader = DataLoader(data, MICRO_BATCHES * MICRO_SIZE, shuffle=True, drop_last=True, generator=order)
    for epoch in range(2):
        for images, labels in loader:
            optimizer.zero_grad()
            if rank == 0:
                first_stage(stage, images)
            else:
                loss = last_stage(stage, labels)
            optimizer.step()
        if rank == 1:
            print(f"epoch {epoch}: loss {loss:.3f} after {len(loader)} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
