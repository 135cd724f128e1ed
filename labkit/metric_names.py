"""What is known of a metric: the data it was measured on, and whether lower or higher values are better.

Nothing is guessed: what nobody has said and no list has is unknown, and then no value is called the best.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Better = Literal["lower", "higher"]

EVALUATED = ("test", "val", "valid", "validation", "eval", "evaluation", "dev")
TRAINED = ("train", "training")

LIKELIHOODS = {  # functions of a cross-entropy that rise and fall with it
    *("cross_entropy", "xent", "nll", "negative_log_likelihood", "ppl", "perplexity"),
    *("bpb", "bpc", "bpd", "bits_per_byte", "bits_per_char", "bits_per_dim", "bits_per_token"),
}

# By words of the name. The sources are `higher_is_better` of torchmetrics 1.9 (errors, rates of errors, distances,
# perplexity, calibration; accuracy, overlap, ranking, signals, text) and of EleutherAI's lm-evaluation-harness (bits
# per byte, exact match), scikit-learn's scorers, whose errors begin with neg_, and MLPerf (latency). What they
# do not have, or disagree about, is not listed, nor is what describes a training and not its result: reward, runtime,
# throughput. scripts/extras/validate.py has the words that it needs.
LOWER = {
    *("loss", "losses", "error", "errors", "err", "hinge", "mae", "mse", "rmse", "nrmse", "msle", "rmsle", "mape"),
    *("smape", "wmape"),
    *LIKELIHOODS,
    *("wer", "cer", "mer", "ter", "eer", "fpr", "fnr", "false_positive_rate", "false_negative_rate"),
    *("edit_distance", "levenshtein", "hamming"),
    *("fid", "kid", "fvd", "fad", "lpips", "hausdorff", "hd95", "chamfer", "ece", "brier", "crps", "latency"),
}
HIGHER = {
    *("accuracy", "accuracies", "acc", "acc_norm", "top1", "top5", "top_1", "top_5", "exact_match", "f1", "precision"),
    *("recall", "specificity", "sensitivity"),
    *("auc", "auroc", "auprc", "logauc", "ap", "map", "average_precision", "ndcg", "mrr", "hit_rate", "kappa"),
    *("mcc", "matthews", "r2", "explained_variance"),
    *("iou", "miou", "giou", "jaccard", "dice", "panoptic_quality", "bleu", "sacrebleu", "chrf", "rouge"),
    *("bertscore", "clip_score", "inception_score"),
    *("psnr", "ssim", "snr", "sdr", "signal_noise_ratio", "signal_distortion_ratio", "pesq", "stoi"),
}
# Neither is better, whatever the words before say: `accuracy_std`, `loss_scale`, `error_count`.
NEITHER = {
    *("entropy", "kl", "norm", "lr", "temperature", "weight", "weights", "scale", "threshold", "samples", "time"),
    *("count", "num", "std", "stderr", "var", "variance", "ratio", "gap", "delta", "diff", "change", "drop"),
}
LONGEST = 3  # words that belong together
FIRST_SEPARATOR = re.compile(r"[/_ ]")
SEPARATORS = re.compile(r"[^A-Za-z0-9]+")
CAMEL_CASE = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*(?![a-z])|\d+")


def parted(name: str) -> tuple[str, str]:
    """(data, metric): ("val", "accuracy") for "val_accuracy", "val/accuracy", "Val Accuracy" or "Accuracy/val", as
    TensorBoard's own examples name them; ("", name) for others. Lightning's `train_loss_step` is a loss."""
    first, _, rest = FIRST_SEPARATOR.sub("_", name, count=1).partition("_")
    before, _, last = name.rpartition("/")
    for data, metric in ((first, rest), (last, before)):
        if metric and data.lower() in (*EVALUATED, *TRAINED):
            metric = metric.lower() if metric.istitle() else metric
            return data.lower(), "loss" if metric in ("loss_step", "loss_epoch") else metric
    return "", name


def is_evaluated(name: str) -> bool:
    return parted(name)[0] in EVALUATED


def is_a_loss(name: str) -> bool:
    """Whether a metric is the loss on some data, or rises and falls with a loss that is a cross-entropy."""
    metric = parted(name)[1]
    return metric == "loss" or "_".join(_words(metric)) in LIKELIHOODS


def better(name: str) -> Better | None:
    """Whether lower or higher values of a metric are better, by its name; None if that does not tell. The last word
    that is listed decides, but `loss_dice` is a loss, and `error_top1` and `neg_log_loss` are not judged."""
    words = _words(name)
    answers = [answer for end in range(len(words), 0, -1) if (answer := _listed_at_end(words[:end]))]
    if not answers or answers[0] == "neither" or "neg" in words:
        return None
    if answers[0] == "higher" and "lower" in answers:
        return "lower" if any(word.endswith(("loss", "losses")) for word in words) else None
    return answers[0]


def _words(name: str) -> list[str]:
    """The words of a name in lower case: `val`, `cross` and `entropy` of "val/crossEntropy", but `map` of "mAP"."""
    words = []
    for part in SEPARATORS.split(name):
        whole = part.lower()
        words += [whole] if _listed(whole) else [word.lower() for word in CAMEL_CASE.findall(part)]
    return words


def _listed_at_end(words: Sequence[str]) -> Better | Literal["neither"] | None:
    """The answer for as many of the last words as are listed together."""
    together = ("_".join(words[-size:]) for size in range(min(LONGEST, len(words)), 0, -1))
    return next((answer for each in together if (answer := _listed(each))), None)


def _listed(word: str) -> Better | Literal["neither"] | None:
    for each in (word, word.rstrip("0123456789")):  # acc1, mAP50
        if each in LOWER or each.endswith("loss"):
            return "lower"
        if each in HIGHER:
            return "higher"
        if each in NEITHER:
            return "neither"
    return None


@dataclass(frozen=True)
class Directions:
    """Whether lower or higher values of a run's metrics are better, as its owner `declared`, as the launch or the
    script says (`launched`), or by their names. What is said of a metric holds for it on all data."""

    declared: Mapping[str, Better] = field(default_factory=dict)
    launched: Mapping[str, Better] = field(default_factory=dict)

    def better(self, name: str) -> Better | None:
        """None if it is unknown."""
        metric = parted(name)[1]
        for known in (self.declared, self.launched):
            by_metric = {parted(each)[1]: answer for each, answer in known.items()}
            if answer := known.get(name) or by_metric.get(metric):
                return answer
        return better(name)


def agreed(each: Iterable[Directions], name: str) -> Better | None:
    """What is better in several runs; None if it is unknown for all, or they say different things."""
    answers = {answer for directions in each if (answer := directions.better(name))}
    return answers.pop() if len(answers) == 1 else None
