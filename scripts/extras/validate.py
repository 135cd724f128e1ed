"""Validation during training: the best checkpoint is kept, and training stops when there is no more improvement."""

# %% notes
# of checkpoints.py

# %% validate
import math

LOW = ("loss", "error", "perplexity", "ppl", "nll", "bpb", "mae", "mse", "rmse", "mape", "wer", "cer", "fid", "ece")
HIGH = ("accuracy", "acc", "top1", "top5", "f1", "auc", "map", "precision", "recall", "iou", "dice", "bleu", "rouge")


def validate_arguments(parser):
    parser.add_argument("--validate-every", type=int, default=0, help="steps between validations (0: only at the end)")
    parser.add_argument("--best", default="loss", metavar="NAME",
                        help="the loss or metric for --patience and the best checkpoint")  # fmt: skip
    parser.add_argument("--best-is", choices=["lowest", "highest"], help="default: by its name, if that is known")
    parser.add_argument("--patience", type=int, default=0, help="stop after N validations, none better (0: never)")


def validate(step, total_steps, measure, args):
    """Every --validate-every steps and at the end, on the second data set of load_datasets. Returns what it measured,
    {} if nothing, and the reason to stop, the same on every rank, or None. Checkpoints keep notes["best_step"]'s."""
    if out_of_patience(args) or (step < total_steps and (not args.validate_every or step % args.validate_every)):
        return {}, out_of_patience(args)  # the former if a stopped run was resumed
    results = measure()
    if (name := f"test_{args.best}") not in results:  # saved anyway
        return results, f"--best {args.best} is not measured; there are {', '.join(n[5:] for n in results)}"
    lowest = lowest_is_best(args)
    if notes.get("best_of") != args.best:
        notes.update(best_of=args.best, best=math.inf if lowest else -math.inf, best_step=0, since_best=0)
    notes["since_best"] += 1
    if results[name] < notes["best"] if lowest else results[name] > notes["best"]:
        notes.update(best=results[name], best_step=step, since_best=0)
    report(step=step, **results, **{f"best_{args.best}": notes["best"], "best_step": notes["best_step"]})
    return results, out_of_patience(args)


def lowest_is_best(args):
    words = [word for word in args.best.lower().replace("/", "_").split("_") if word in LOW + HIGH]
    if not args.best_is and not words:
        raise SystemExit(f"is a low or a high {args.best} good? Pass --best-is lowest or --best-is highest")
    return args.best_is == "lowest" or (not args.best_is and ("loss" in words or words[-1] in LOW))


def out_of_patience(args):
    if 0 < args.patience <= notes.get("since_best", 0):
        return f"no better {args.best} in {args.patience} validations: the best was at step {notes['best_step']}"
    return None
