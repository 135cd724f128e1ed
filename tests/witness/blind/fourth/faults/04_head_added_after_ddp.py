"""An auxiliary head is attached to model.module after the DDP wrap, so DDP never averages its gradients and the ranks' heads part."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TabularNet(nn.Module):
    def __init__(self, n_num=12, n_cat=30, d=32):
        super().__init__()
        self.emb = nn.Embedding(n_cat, 8)
        self.body = nn.Sequential(nn.Linear(n_num + 8, d), nn.ReLU(), nn.Dropout(0.1), nn.Linear(d, d), nn.ReLU())
        self.out = nn.Linear(d, 1)
        self.aux = None

    def forward(self, num, cat):
        h = self.body(torch.cat([num, self.emb(cat)], 1))
        y = self.out(h).squeeze(1)
        return (y, self.aux(h)) if self.aux is not None else (y, None)


def dataset(n=1024):
    g = torch.Generator().manual_seed(7)
    num = torch.randn(n, 12, generator=g)
    cat = torch.randint(0, 30, (n,), generator=g)
    y = num[:, 0] - 0.5 * num[:, 1] * num[:, 2] + 0.1 * cat.float()
    cls = (num[:, 3] > 0).long() + (num[:, 4] > 0).long()
    return TensorDataset(num, cat, y, cls)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    model = DDP(TabularNet())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    ds = dataset()
    sampler = DistributedSampler(ds, seed=3)
    loader = DataLoader(ds, batch_size=32, sampler=sampler)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        if epoch == 1:
            # warm-up epoch is over: turn on the multi-task objective
            model.module.aux = nn.Linear(32, 3)
            opt.add_param_group({"params": model.module.aux.parameters(), "lr": 5e-3})
        for num, cat, y, cls in loader:
            pred, aux = model(num, cat)
            loss = F.mse_loss(pred, y)
            if aux is not None:
                loss = loss + 0.3 * F.cross_entropy(aux, cls)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")

    w = model.module.aux.weight.detach().clone()
    ws = [torch.empty_like(w) for _ in range(2)]
    dist.all_gather(ws, w)
    if rank == 0:
        print("aux head difference between ranks:", (ws[0] - ws[1]).abs().max().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
