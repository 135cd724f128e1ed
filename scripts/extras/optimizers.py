"""Other optimizers: fused AdamW, AdamW with 8-bit moments (torchao), Muon for the matrices of repeated layers."""


# %% paths
def name_parameters(model):
    """`parameter.path` is a parameter's name in the model: an optimizer may treat layers differently."""
    for name, parameter in model.named_parameters():
        parameter.path = name


# %% optimizer
import re

import torch
from torch.distributed.tensor import DTensor, Replicate


def optimizer_arguments(parser):
    parser.add_argument("--optimizer", choices=["adamw", "adamw_fused", "muon", "adamw8bit"], default="adamw")
    parser.add_argument("--muon-momentum", type=float, default=0.95, help="Nesterov momentum of Muon")


def optimizer_of(parameters, args):  # all parameters; under ZeRO-1, this rank's share
    if args.optimizer == "adamw_fused":
        return fused_adamw_of(parameters, args)
    if args.optimizer == "muon":
        return muon_of(list(parameters), args)
    if args.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            raise SystemExit("--optimizer adamw8bit needs torchao: pip install torchao") from None
        return AdamW8bit(parameters, lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay)


def fused_adamw_of(parameters, args):
    """Updates all parameters of a mesh in one kernel, which has no temporaries."""
    meshes = {}
    for p in parameters:
        meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)
    groups = [{"params": of_a_mesh} for of_a_mesh in meshes.values()]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    optimizer._step_supports_amp_scaling = False  # the GradScaler unscales, and skips steps
    return optimizer


def muon_of(parameters, args):
    """Matrices of numbered layers, such as blocks.3.up.weight, are Muon's, all else is AdamW's: give embeddings and the
    head names without numbers, as net.0 in a Sequential has. FSDP1's shards are flat, so that it has no matrices."""
    matrices = [p for p in parameters if p.ndim == 2 and re.search(r"\.\d+\.", getattr(p, "path", ""))]
    args.has_matrices = getattr(args, "has_matrices", False) or bool(matrices)  # a ZeRO-1 rank's share may have none
    if not args.has_matrices:
        raise SystemExit("--optimizer muon has no matrices in numbered layers here; under fsdp1 use fsdp")
    others = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    return Muon([{"params": matrices, "muon": True}, {"params": others, "muon": False}], args)


class Muon(torch.optim.Optimizer):
    """A matrix changes by its momentum, orthogonalized, with the root mean square of AdamW's updates, so that one
    learning rate fits both (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al., arXiv 2502.16982)."""

    def __init__(self, groups, args):
        defaults = {"lr": args.lr, "weight_decay": args.weight_decay, "betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(groups, {**defaults, "momentum": args.muon_momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    (self.step_of_matrix if group["muon"] else self.step_of_adamw)(p, p.grad, self.state[p], group)

    def step_of_matrix(self, p, grad, state, group):
        """The momentum is sharded as the parameter is. Every rank gathers the matrix and orthogonalizes all of it."""
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum = state["momentum"]
        momentum.mul_(group["momentum"]).add_(grad)
        update = grad + group["momentum"] * momentum
        whole = orthogonalized(update.full_tensor() if isinstance(p, DTensor) else update)
        if isinstance(p, DTensor):  # this rank's shard
            whole = DTensor.from_local(whole, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
            whole = whole.redistribute(placements=p.placements)
        p.add_(whole, alpha=-0.2 * max(p.shape) ** 0.5 * group["lr"])

    def step_of_adamw(self, p, grad, state, group):
        if not state:
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state["step"] += 1
        (first, second), step = group["betas"], state["step"].item()
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        root = (state["exp_avg_sq"].sqrt() / (1 - second**step) ** 0.5).add_(group["eps"])
        p.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**step))


def orthogonalized(matrix, steps=5):
    """About U V^T of the matrix U S V^T, by a Newton-Schulz iteration; in bf16, as is usual, where the GPU has it."""
    x = matrix.bfloat16() if matrix.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False) else matrix
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
