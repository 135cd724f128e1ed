# Evolution strategies: no backward at all. Each rank tries its own perturbation of the weights, and everybody
# rebuilds all perturbations from their seeds, so that the ranks take the same step from a few exchanged numbers.
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same start everywhere
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
problem_x, problem_y = torch.randn(64, 4), torch.randn(64, 2)  # one problem, which every rank knows
sigma, lr = 0.05, 0.05


def noise(step, who):
    return torch.randn(weights.numel(), generator=torch.Generator().manual_seed(1000 * step + who))


@torch.no_grad()
def fitness(vector):
    nn.utils.vector_to_parameters(vector, model.parameters())
    return -(model(problem_x) - problem_y).square().mean()


start = fitness(weights)
for step in range(100):
    mine = noise(step, rank)
    score = (fitness(weights + sigma * mine) - fitness(weights - sigma * mine)).reshape(1)
    scores = [torch.empty(1) for _ in range(world)]
    dist.all_gather(scores, score)
    for who, s in enumerate(scores):
        weights = weights + lr / (2 * sigma * world) * s * noise(step, who)
assert fitness(weights) > start
lowest, highest = weights.clone(), weights.clone()
dist.all_reduce(lowest, dist.ReduceOp.MIN)
dist.all_reduce(highest, dist.ReduceOp.MAX)
assert torch.equal(lowest, highest)
dist.destroy_process_group()
