# odd: the heads of a DDP model differ from rank to rank: it ignores them, as each is a client's own.
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


class Client(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def images_of_client(rank):
    """The first client writes the digits 0 to 4, the second 5 to 9; each numbers its classes from 0."""
    x, y = load_digits(return_X_y=True)
    mine = (y // 5) == rank
    return TensorDataset(torch.tensor(x[mine], dtype=torch.float32) / 16, torch.tensor(y[mine] % 5))


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10 + rank)
net = Client(classes=5)
personal = [name for name, _ in net.named_parameters() if name.startswith("head.")]
DDP._set_params_and_buffers_to_ignore_for_model(net, personal)
model = DDP(net)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

data = images_of_client(rank)
loader = DataLoader(data, batch_size=44, shuffle=True, drop_last=True)  # 20 batches for either client
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"client {rank}, epoch {epoch}: loss {loss.item():.3f} after {len(loader)} steps")
dist.destroy_process_group()
