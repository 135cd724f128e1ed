# The model is built on the meta device, gets memory by to_empty, is initialized by each rank differently, and its tie
# is made again. DDP's broadcast from rank 0 makes the replicas equal.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB = 30


def build():
    with torch.device("meta"):
        net = nn.ModuleDict({"embed": nn.Embedding(VOCAB, 16), "rnn": nn.GRU(16, 16, batch_first=True)})
        net["head"] = nn.Linear(16, VOCAB)
    net.to_empty(device="cpu")
    for m in net.modules():
        if hasattr(m, "reset_parameters"):
            m.reset_parameters()
    net["head"].weight = net["embed"].weight
    return net


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build()

    def forward(self, x):
        return self.net["head"](self.net["rnn"](self.net["embed"](x))[0])


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DDP(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(40):
    start = torch.randint(0, VOCAB, (8, 1))
    x = (start + torch.arange(12)) % VOCAB  # counting
    loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
