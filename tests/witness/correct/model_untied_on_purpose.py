# Two tensors start as one and are separated on purpose: the encoder and the decoder of an autoencoder share a matrix
# during a first stage, then the decoder gets a copy of its own, and both are trained apart in a new DDP.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 12, bias=False), nn.Linear(12, 12, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def stage(net, steps):
    model, data = DDP(net), torch.Generator().manual_seed(dist.get_rank() + steps)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(16, 12, generator=data)
        loss = (model(x) - x).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


dist.init_process_group("gloo")
torch.manual_seed(0)
net = Autoencoder()
stage(net, 31)
net.decoder.weight = nn.Parameter(net.encoder.weight.detach().clone())
stage(net.float(), 30)
assert not torch.equal(net.encoder.weight, net.decoder.weight)
dist.destroy_process_group()
