# A pretrained backbone with a new head: the head's keys are dropped and strict=False is meant. Only rank 0 reads the
# checkpoint, before DDP is built, and DDP's broadcast gives it to the others.
import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrained():
    torch.manual_seed(1)
    file = io.BytesIO()
    torch.save(Classifier(100).state_dict(), file)
    file.seek(0)
    return file


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
net = Classifier(5)
if rank == 0:
    state = {k: v for k, v in torch.load(pretrained(), weights_only=True).items() if not k.startswith("head.")}
    result = net.load_state_dict(state, strict=False)
    assert result.missing_keys == ["head.weight", "head.bias"] and not result.unexpected_keys
model = DDP(net)
g = torch.Generator().manual_seed(0)
x = torch.randn(240, 10, generator=g)
data = TensorDataset(x, x[:, :5].argmax(1))
sampler = DistributedSampler(data)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for a, b in DataLoader(data, 12, sampler=sampler):
        opt.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        opt.step()
dist.destroy_process_group()
