"""Each parameter is updated as soon as backward has its gradient, which is then freed: they never exist together."""

# goes with: single, zero2, fsdp

# %% optimizer
from functools import partial

import torch


def optimizer_arguments(parser):
    parser.add_argument("--optimizer-in-backward", action="store_true",
                        help="update each parameter in backward and free its gradient")  # fmt: skip


def optimizer_of(parameters, args):
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay)
    return in_backward(optimizer, args) if args.optimizer_in_backward else optimizer


def in_backward(optimizer, args):
    """The hooks update one parameter at a time; the optimizer's own step then finds no gradient."""
    reasons = {
        "--accumulate needs the sum of several gradients": getattr(args, "accumulate", 1) > 1,
        "--clip needs the norm of all gradients": getattr(args, "clip", 0) > 0,
        "--lr-schedule and --warmup-steps set the learning rate after backward":
            getattr(args, "warmup_steps", 0) > 0 or getattr(args, "lr_schedule", "constant") != "constant",
        "fp16's loss scale is removed after backward": getattr(args, "precision", "") == "fp16",
        "--cpu-offload has the gradients in host memory already": getattr(args, "cpu_offload", False),
    }  # fmt: skip
    for reason in [reason for reason, applies in reasons.items() if applies]:
        raise SystemExit(f"--optimizer-in-backward updates parameters during backward: {reason}; leave one of them out")
    step_of_all = type(optimizer).step.__wrapped__  # without the step hooks: the whole step still runs them once

    def update_one(number, parameter):
        groups = optimizer.param_groups  # loading a checkpoint replaces them
        optimizer.param_groups = [{**groups[number], "params": [parameter]}]
        step_of_all(optimizer)
        optimizer.param_groups, parameter.grad = groups, None

    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(update_one, number))
    return optimizer
