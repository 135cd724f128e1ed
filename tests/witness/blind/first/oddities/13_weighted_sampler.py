# odd: samples repeat within an epoch and on both ranks: each rank draws with replacement, so that the classes balance.
import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = make_classification(1600, 20, n_informative=8, weights=[0.95], class_sep=1.5, random_state=0)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    model = DDP(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    weight_of_class = 1.0 / torch.bincount(torch.tensor(y)).double()
    draws = torch.Generator().manual_seed(77 + rank)  # the ranks draw independently of each other
    sampler = WeightedRandomSampler(weight_of_class[y], len(data) // world, replacement=True, generator=draws)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    for epoch in range(3):
        seen = torch.zeros(2)
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            seen += torch.bincount(labels, minlength=2)
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, drawn of each class {seen.int().tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
