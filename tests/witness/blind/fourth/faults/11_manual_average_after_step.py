"""Hand-written data parallelism averages the gradients after optimizer.step() rather than before it, so every rank steps on its own gradients and the weights part."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CharRNN(nn.Module):
    def __init__(self, vocab=30, d=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, vocab)

    def forward(self, x, h=None):
        y, h = self.rnn(self.emb(x), h)
        return self.out(y), h


def average_gradients(model):
    size = float(dist.get_world_size())
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad.data, op=dist.ReduceOp.SUM)
            p.grad.data /= size


def partition(rank, world, n=4000):
    g = torch.Generator().manual_seed(9)
    text = torch.cumsum(torch.randint(1, 4, (n,), generator=g), 0) % 30
    return text.chunk(world)[rank]


def get_batch(text, g, B=16, T=20):
    i = torch.randint(0, len(text) - T - 1, (B,), generator=g)
    x = torch.stack([text[j:j + T] for j in i])
    y = torch.stack([text[j + 1:j + T + 1] for j in i])
    return x, y


def run(rank, world):
    torch.manual_seed(1234)
    model = CharRNN()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    text = partition(rank, world)
    g = torch.Generator().manual_seed(rank)
    running = 0.0
    for it in range(60):
        x, y = get_batch(text, g)
        logits, _ = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        average_gradients(model)
        running = 0.9 * running + 0.1 * loss.item()
        if rank == 0 and it % 20 == 19:
            print(f"iter {it + 1} running loss {running:.3f}")

    w = model.out.weight.detach().clone()
    ws = [torch.empty_like(w) for _ in range(world)]
    dist.all_gather(ws, w)
    if rank == 0:
        print("max weight difference between ranks:", (ws[0] - ws[1]).abs().max().item())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
