"""Train with experts on ranks of their own: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% experts
import inspect

import torch
import torch.distributed as dist


class Exchange(torch.autograd.Function):  # sends rows to each rank; in backward, their gradients return
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.back), None, None, None


def arriving_of(sizes, group, device):
    """By rank, how many rows it sends to each of this rank's experts; sizes are those that this rank sends to all."""
    sent = torch.tensor(sizes, device=device).view(dist.get_world_size(group), -1)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    return arriving.tolist()


def with_tokens_of_all(forward, group, rows, sizes):
    """Sends each row to its expert's rank, and the result back. rows: (tokens, width), sorted by expert."""
    to_each = sizes.tolist() if torch.is_tensor(sizes) else sizes
    arriving = arriving_of(to_each, group, rows.device)
    by_expert = [*zip(*arriving, strict=True)]
    ranks, own, own_sizes = len(arriving), len(by_expert), [*map(sum, by_expert)]
    sent, received = [sum(to_each[i * own : (i + 1) * own]) for i in range(ranks)], [sum(row) for row in arriving]
    parts = Exchange.apply(rows, sent, received, group).split([size for row in arriving for size in row])
    sorted_by_expert = torch.cat([part for expert in range(own) for part in parts[expert::own]])
    outputs = forward(sorted_by_expert, sizes.new_tensor(own_sizes) if torch.is_tensor(sizes) else own_sizes)
    parts = outputs.split([size for row in by_expert for size in row])
    sorted_by_rank = torch.cat([part for rank in range(ranks) for part in parts[rank::ranks]])
    return Exchange.apply(sorted_by_rank, received, sent, group)


def on_this_rank(experts, forward, group, *args, **kwargs):
    """The forward of this rank's experts. Their gradients are sums over the tokens of all ranks of the group, whereas
    FSDP averages over ranks."""
    rows, sizes = inspect.signature(forward).bind(*args, **kwargs).arguments.values()
    parameters, name = dict(experts._parameters), forward.__qualname__
    if len(sizes) != (number := len(next(iter(parameters.values())))):
        raise SystemExit(f"{name} got {len(sizes)} sizes, not one for each of {number} experts (0 without tokens)")
    ranks = dist.get_world_size(group)
    for key, parameter in parameters.items():
        experts._parameters[key] = local = parameter.to_local()
        if local.requires_grad:
            local.register_hook(lambda grad: grad / ranks)
    try:
        return with_tokens_of_all(forward, group, rows, sizes)
    except (IndexError, ValueError) as error:
        raise SystemExit(f"{name} fails with {number // ranks} of its {number} experts ({type(error).__name__}: "
                         f"{error}): it must compute len(sizes) of them") from error  # fmt: skip
    finally:
        experts._parameters.update(parameters)


# %% strategy
import inspect
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard


def strategy_arguments(parser):
    parser.add_argument("--expert-ranks", type=int, default=0, help="ranks that divide the experts (0: all)")


def make_mesh(device_type, args):
    ranks, expert_ranks = dist.get_world_size(), args.expert_ranks or dist.get_world_size()
    if expert_ranks < 1 or ranks % expert_ranks:
        raise SystemExit(f"--expert-ranks {expert_ranks} must divide the {ranks} ranks")
    return init_device_mesh(device_type, (ranks,), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """Each rank keeps its experts whole, or with replicas of them its part; tokens come to them. All other parameters
    are sharded over all ranks. Every rank reads its own samples."""
    expert_ranks = args.expert_ranks or mesh.size()
    shape = (mesh.size() // expert_ranks, expert_ranks)  # adjacent ranks, as tokens are exchanged in every layer
    own = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replica", "expert"))
    how = {}
    # with precision: how["mp_policy"] = policy_of(args)
    for experts in experts_of(model, *shape):
        experts.to(device)
        # with precision instead: placed(experts, device, args)
        for name, p in [*experts.named_parameters()]:
            share = p.detach().chunk(expert_ranks)[own["expert"].get_local_rank()].clone()
            share = DTensor.from_local(share, own["expert"], [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(share, p.requires_grad))
        experts.forward = partial(on_this_rank, experts, experts.forward, own["expert"].get_group())
        fully_shard(experts, mesh=own["replica"], **how, shard_placement_fn=lambda p: Shard(1))
    for module in [*model.blocks, model]:  # the model last: parameters outside the blocks
        # with blocks instead: for module in [*blocks_of(model), model]:
        fully_shard(module.to(device), mesh=mesh, **how)
        # with precision instead: fully_shard(placed(module, device, args), mesh=mesh, **how)
    return model


def experts_of(model, replicas, ranks):
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if not modules:
        raise SystemExit(f"expert parallelism divides modules named experts, and {type(model).__name__} has none: use "
                         "the task mixture, or fsdp")  # fmt: skip
    for experts in modules:
        nested = any("." in name for name, _ in experts.named_parameters())
        if nested or len(inspect.signature(experts.forward).parameters) != 2:
            raise SystemExit("expert parallelism needs a layer's experts in one module: parameters of its own, stacked "
                             "by expert, and forward(rows, sizes), as in the task mixture; got "
                             f"{type(experts).__name__}: rewrite it, or use fsdp")  # fmt: skip
        shapes = [p.shape for p in experts.parameters()]
        if [*experts.buffers()] or len({shape[:1] for shape in shapes}) != 1 or min(map(len, shapes)) < 2:
            raise SystemExit(f"{type(experts).__name__} has buffers, or parameters whose first axis is not the expert, "
                             "which cannot be divided: use fsdp")  # fmt: skip
        number, width = shapes[0][:2]
        if number % ranks:
            raise SystemExit(f"{number} experts cannot be split across {ranks} expert ranks")
        if any(shape[1] % replicas for shape in shapes):
            raise SystemExit(f"{width} features of the experts cannot be split across {replicas} replicas")
    return modules


def make_optimizer(model, mesh, args):
    optimizer = optimizer_of(model.parameters(), args)
    for group in optimizer.param_groups:  # torch cannot update parameters of different meshes together
        group["foreach"] = False
    return optimizer


# %% gradient_sync
# of fsdp.py
