"""Schedule-Free AdamW: its learning rate needs no end, because the weights to use are an average of those so far."""

# goes with: single, ddp, zero2, fsdp, tensor_parallel, pipeline, hybrid, context_parallel, expert_parallel

# %% optimizer
from functools import partial

import torch


def optimizer_arguments(parser):
    parser.add_argument("--schedule-free", action="store_true", help="AdamW that averages its weights "
                        "(arXiv 2405.15682)")  # fmt: skip


def optimizer_of(parameters, args):  # all parameters
    how = {"lr": args.lr, "weight_decay": args.weight_decay}
    return averaging([*parameters], how, args) if args.schedule_free else torch.optim.AdamW(parameters, **how)


def averaging(parameters, how, args):
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError:
        raise SystemExit("--schedule-free needs schedulefree: pip install schedulefree") from None
    if getattr(args, "lr_schedule", "constant") != "constant":
        raise SystemExit("--schedule-free replaces --lr-schedule: leave one of them out")
    trained = [p for p in parameters if p.requires_grad]
    optimizer = AdamWScheduleFree(trained, foreach=False, **how)  # one at a time: meshes may differ
    for group in optimizer.param_groups:
        group["train_mode"] = True
        for p in group["params"]:  # torch would create it for a checkpoint by a step, which raises in eval mode
            optimizer.state[p] = {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


make_optimizer_of_strategy = make_optimizer


def make_optimizer(model, mesh, args):
    """model.eval() gives the average, model.train() the weights at which gradients are taken."""
    optimizer = make_optimizer_of_strategy(model, mesh, args)
    if args.schedule_free:
        model.train = partial(switch, model, model.train, optimizer)
    return optimizer


def switch(model, train, optimizer, mode=True):
    stages = [*getattr(model, "stages", {}).values()]  # a pipeline's stages are not children of the model
    for module in [*model.modules(), *stages]:  # what FSDP has gathered holds the other weights
        if hasattr(module, "reshard"):
            module.reshard()
    (optimizer.train if mode else optimizer.eval)()
    return train(mode)
