"""Compute in 16 bits (fp16 with a loss scale, bf16), or in 64."""

# %% precision
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def precision_arguments(parser):
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16", "fp64"], default="fp32")


def half_of(args):
    """The 16-bit type to compute in, or None."""
    return HALVES.get(args.precision)


def policy_of(args):
    """For fully_shard: gather and compute in 16 bits, reduce gradients and keep shards in fp32."""
    return MixedPrecisionPolicy(param_dtype=half_of(args), reduce_dtype=torch.float32 if half_of(args) else None)


def placed(module, device, args):
    """On the device, and trained in fp32 or wider: 16 bits lose small updates. FSDP places one block at a time."""
    for parameter in module.to(device).parameters():
        if parameter.itemsize == 2 and (parameter.requires_grad or not half_of(args)):
            parameter.data = parameter.data.float()
        # with adapter: if half_of(args) and parameter.is_floating_point() and not parameter.requires_grad:
        # with adapter:     parameter.data = parameter.data.to(half_of(args))  # the frozen model
    return module


scaler = torch.amp.GradScaler("cpu", enabled=False)  # of the loss; in_precision makes that of fp16


def in_precision(model, device, args):
    """The model, whose parameters stay in fp32 if it computes in 16 bits."""
    global scaler
    if args.precision == "fp16" and device.type != "cuda":
        raise SystemExit("--precision fp16 needs a GPU; use fp32 or bf16 on the CPU")
    if args.precision == "fp64" or any(p.dtype.to_real() == torch.float64 for p in model.parameters()):
        real = torch.float64 if args.precision == "fp64" else torch.float32  # `placed` converts 16 bits
        types = {True: real.to_complex(), False: real}
        model._apply(lambda t: t.to(types[t.is_complex()]) if t.is_complex() or t.is_floating_point() else t)
    if half_of(args):
        model.forward = torch.autocast(device.type, half_of(args))(model.forward)
    if args.precision == "fp16":
        scaler = LossScaler(device.type)
    return model


class LossScaler(torch.amp.GradScaler):
    """fp16's loss scale. An overflow on one rank, in its shard or stage, skips the step on all of them."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        device = grads[0].device if grads else found_inf.device  # the CPU, if offloaded
        is_inf = found_inf.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, is_inf, inv_scale.to(device))
        found_inf.copy_(is_inf)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
