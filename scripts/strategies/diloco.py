"""Train with DiLoCo, replicas averaged now and then: torchrun --standalone --nproc-per-node=2 train.py --steps 100"""

# %% strategy
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

OUTER_STATE = ("round_start", "outer_momentum")


def strategy_arguments(parser):
    parser.add_argument("--sync-every", type=int, default=10, help="local steps between outer steps")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="learning rate of the outer SGD; 1 with "
                        "--outer-momentum 0 is local SGD, which averages the replicas")  # fmt: skip
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="Nesterov momentum of the outer SGD")


def make_mesh(device_type, args):
    if args.sync_every < 1:
        raise SystemExit(f"--sync-every {args.sync_every} must be at least 1")
    # with AllGather: if dist.get_world_size() > 1:
    # with AllGather:     raise SystemExit("this task's loss needs the samples of all ranks: use ddp, not diloco")
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def parallelize(model, mesh, device, args):
    """A replica on every rank, which trains alone within a round."""
    model = model.to(device)
    # with precision instead: model = placed(model, device, args)
    model.outer_state = OUTER_STATE  # replicas differ: checkpoints hold each of them
    return model


def make_optimizer(model, mesh, args):
    """The inner optimizer of one replica. The outer one runs after its step, and its state lies beside the inner one's,
    so that checkpoints hold both."""
    optimizer = optimizer_of(model.parameters(), args)
    rounds = Rounds(optimizer, mesh["data"], args)
    optimizer.register_step_pre_hook(rounds.before_step)
    optimizer.register_step_post_hook(rounds.after_step)
    model.train = partial(rounds.train, model, model.train)
    return optimizer


class Rounds:
    """Every --sync-every steps the outer SGD takes the mean of what the replicas changed as its gradient (DiLoCo,
    arXiv 2311.08105, algorithm 1)."""

    def __init__(self, optimizer, dp_mesh, args):
        self.optimizer, self.group, self.ranks = optimizer, dp_mesh.get_group(), dp_mesh.size()
        self.every, self.lr, self.momentum = args.sync_every, args.outer_lr, args.outer_momentum
        self.early, self.own = {}, {}  # outer state before a parameter's first step; replicas while the mean is used

    def parameters(self):
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def steps(self):
        return self.optimizer.param_groups[0].get("local_steps", 0)

    def outer(self, p):
        state = self.optimizer.state.get(p, {})
        if "outer_momentum" in state:
            return state
        return self.early.setdefault(p, {name: torch.zeros_like(p) for name in OUTER_STATE})

    @torch.no_grad()
    def before_step(self, *_):
        if self.steps() % self.every == 0:
            for p in self.parameters():
                self.outer(p)["round_start"].copy_(p)

    @torch.no_grad()
    def after_step(self, *_):
        for p in [p for p in self.early if p.grad is not None]:  # let AdamW create missing state
            self.optimizer.state[p] = self.early.pop(p) | self.optimizer.state[p]
        if not any(group["lr"] for group in self.optimizer.param_groups) and not self.steps():
            return  # not a training step: torch creates the state before loading a checkpoint
        self.optimizer.param_groups[0]["local_steps"] = self.steps() + 1
        if self.steps() % self.every == 0:
            for p in self.parameters():
                start, momentum = (self.outer(p)[name] for name in OUTER_STATE)
                gradient = self.mean(start - p)
                momentum.mul_(self.momentum).add_(gradient)
                p.copy_(start - self.lr * (gradient + self.momentum * momentum))

    def mean(self, tensor):
        dist.all_reduce(tensor, group=self.group)
        return tensor / self.ranks

    @torch.no_grad()
    def train(self, model, train, mode=True):
        """Within a round the mean of the replicas is what is evaluated, saved and exported."""
        if not mode and self.steps() % self.every and not self.own:
            self.own = {p: p.clone() for p in self.parameters()}
            for p in self.own:
                p.copy_(self.mean(p.clone()))
        elif mode:
            for p, own in self.own.items():
                p.copy_(own)
            self.own = {}
        return train(mode)


# %% step
import torch


def step_arguments(parser):
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step on each rank")


def forward_backward(model, batch, dp_mesh, args):
    """Backward of the mean loss over the predictions of this replica's batch. Returns it. Nothing is communicated."""
    count, total = torch.as_tensor(count_of(batch), device=dp_mesh.device_type).clamp(min=1), 0.0
    for part in micro_batches(batch, args.accumulate):
        loss = loss_of(outputs_of(model, part), part) / count
        loss.backward()
        # with precision instead: scaler.scale(loss).backward()
        total += loss.detach()
    return total


# %% micro_batches
# of ../extras/accumulate.py
