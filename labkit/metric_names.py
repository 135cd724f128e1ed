"""What the name of a metric says: the data it was measured on, and whether lower is better."""

from __future__ import annotations

EVALUATED = ("test", "val", "valid", "validation", "eval", "evaluation", "dev")
TRAINED = ("train", "training")
# As in scripts/extras/validate.py.
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "wer", "cer")


def parted(name: str) -> tuple[str, str]:
    """(data, metric): ("val", "accuracy") for "val_accuracy" or "val/accuracy", ("", name) for others."""
    data, _, metric = name.replace("/", "_", 1).partition("_")
    return (data, metric) if metric and data in (*EVALUATED, *TRAINED) else ("", name)


def is_evaluated(name: str) -> bool:
    return parted(name)[0] in EVALUATED


def is_lower_better(name: str) -> bool:
    return name.lower().endswith(LOWER_IS_BETTER)
