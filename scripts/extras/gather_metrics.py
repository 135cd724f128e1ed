"""Metrics that are not sums, such as F1 or the area under a curve: computed on every rank from all predictions."""

# %% gathered
import torch
import torch.distributed as dist


def predictions_of(outputs, batch):
    """What gathered_metrics needs from a batch: tensors with samples along the first axis and equal other axes."""
    if not isinstance(batch, tuple):
        raise SystemExit("predictions_of reads batches of (inputs, labels); replace it for a batch that is a "
                         f"{type(batch).__name__}")  # fmt: skip
    return (outputs if hasattr(outputs, "argmax") else outputs.logits).argmax(-1), batch[1]


def gathered_metrics(predicted, labels):
    """{name: value} from the predictions for the whole data set: F1, averaged over the classes that occur."""
    wanted = labels != -100
    predicted, labels = predicted[wanted], labels[wanted]
    classes = int(torch.maximum(predicted, labels).max()) + 1
    hits, actual, guessed = (torch.bincount(values, minlength=classes).double()
                             for values in (labels[predicted == labels], labels, predicted))  # fmt: skip
    return {"f1": (2 * hits / (actual + guessed))[actual > 0].mean()}


def predicted_in(outputs, batch):
    parts = predictions_of(outputs, batch)
    if not isinstance(parts, tuple | list) or not all(torch.is_tensor(part) and part.ndim for part in parts):
        raise SystemExit(f"predictions_of returned {parts!r:.60} …; expected a tuple of tensors with samples along "
                         "the first axis, such as (predicted, labels)")  # fmt: skip
    return [part.cpu() for part in parts]


def metrics_of_all(predictions, dp_mesh):
    """The metrics of the whole data set, from what predicted_in returned for each of this rank's batches."""
    group = dp_mesh.get_group()
    # with own_part instead: group = dist.group.WORLD  # every rank has its own positions
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, predictions, group=group)
    whole = [torch.cat(parts) for parts in zip(*(batch for rank in everyone for batch in rank), strict=True)]
    return {f"test_{name}": float(value) for name, value in gathered_metrics(*whole).items()}
