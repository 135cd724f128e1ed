# Personalized federated learning: the body is averaged every round, the head never. So the ranks' heads differ for
# ever, which is the point, and a proximal term holds the body near the last average.
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Client:
    def __init__(self, rank, samples=64):
        g = torch.Generator().manual_seed(rank)
        self.x = torch.randn(samples, 10, generator=g)
        self.y = (self.x.sum(1) > 0).long() if rank % 2 else (self.x.sum(1) < 0).long()  # opposite tasks
        self.body = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)
        self.g = g

    def local_round(self, steps, mu=0.1):
        anchor = [p.detach().clone() for p in self.body.parameters()]
        opt = torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.1)
        for _ in range(steps):
            i = torch.randint(0, len(self.x), (16,), generator=self.g)
            loss = F.cross_entropy(self.head(self.body(self.x[i])), self.y[i])
            loss = loss + mu / 2 * sum((p - a).square().sum() for p, a in zip(self.body.parameters(), anchor))
            opt.zero_grad()
            loss.backward()
            opt.step()
        return loss.item()

    @torch.no_grad()
    def average_body(self):
        for p in self.body.parameters():
            dist.all_reduce(p)
            p /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    client = Client(dist.get_rank())
    client.average_body()
    for _ in range(15):
        loss = client.local_round(steps=5)
        client.average_body()
    print(dist.get_rank(), loss)
    dist.destroy_process_group()


main()
