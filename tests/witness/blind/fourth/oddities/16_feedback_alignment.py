"""Right on purpose: feedback alignment, backward uses fixed random matrices in place of the transposed weights, so the hidden layers' gradients deliberately aren't the true ones."""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FAFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, feedback):
        ctx.save_for_backward(x, feedback)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx, go):
        x, feedback = ctx.saved_tensors
        return go @ feedback, go.t() @ x, go.sum(0), None


class FALinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i) * i ** -0.5)
        self.bias = nn.Parameter(torch.zeros(o))
        self.register_buffer("feedback", torch.randn(o, i) * i ** -0.5)

    def forward(self, x):
        return FAFunction.apply(x, self.weight, self.bias, self.feedback)


def alignment(layer):
    return F.cosine_similarity(layer.weight.flatten(), layer.feedback.flatten(), 0).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(FALinear(30, 64), nn.Tanh(), FALinear(64, 64), nn.Tanh(), FALinear(64, 5))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1280, 30, generator=g)
    y = (x @ torch.randn(30, 5, generator=g)).argmax(1)
    ds = TensorDataset(x, y)
    sampler = DistributedSampler(ds)
    loader = DataLoader(ds, batch_size=32, sampler=sampler)
    fb0, a0 = net[4].feedback.clone(), alignment(net[4])
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    if rank == 0:
        print(f"alignment of weights and feedback {a0:.3f} -> {alignment(net[4]):.3f}, feedback fixed: {torch.equal(fb0, net[4].feedback)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
