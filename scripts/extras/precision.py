"""Compute in 16 bits (fp16 with a loss scale, bf16), or in 64."""

# %% precision
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def precision_arguments(parser):
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16", "fp64"], default="fp32")


def half_of(args):
    """The 16-bit type to compute in, or None."""
    return HALVES.get(args.precision)


def in_precision(model, device, args):
    """The model, whose parameters stay in fp32 if it computes in 16 bits, and a scaler for its loss."""
    if args.precision == "fp16" and device.type != "cuda":
        raise SystemExit("--precision fp16 needs a GPU; use fp32 or bf16 on the CPU")
    if args.precision == "fp64" or any(p.dtype.to_real() == torch.float64 for p in model.parameters()):
        real = torch.float64 if args.precision == "fp64" else torch.float32  # `placed` converts 16 bits
        types = {True: real.to_complex(), False: real}
        model._apply(lambda t: t.to(types[t.is_complex()]) if t.is_complex() or t.is_floating_point() else t)
    if half_of(args):
        model.forward = torch.autocast(device.type, half_of(args))(model.forward)
    return model, LossScaler(device.type, enabled=args.precision == "fp16")


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
