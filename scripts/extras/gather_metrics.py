"""Metrics that are not sums, such as F1 or the area under a curve: computed on every rank from all predictions."""

# %% gathered
import torch


def predictions_of(outputs, batch):
    """What gathered_metrics needs from a batch: tensors with samples along the first axis and equal other axes."""
    if not isinstance(batch, tuple):
        raise SystemExit("predictions_of reads batches of (inputs, labels); replace it for a batch that is a "
                         f"{type(batch).__name__}")  # fmt: skip
    return (outputs if torch.is_tensor(outputs) else outputs.logits).argmax(-1), batch[1]


def gathered_metrics(predicted, labels):
    """{name: value} from the predictions for the whole data set: F1, averaged over the classes that occur."""
    wanted = labels != -100
    predicted, labels = predicted[wanted], labels[wanted]
    classes = int(torch.maximum(predicted, labels).max()) + 1
    hits, actual, guessed = (torch.bincount(values, minlength=classes).double()
                             for values in (labels[predicted == labels], labels, predicted))  # fmt: skip
    return {"f1": (2 * hits / (actual + guessed))[actual > 0].mean()}


# %% evaluate
import torch
import torch.distributed as dist


def predicted_in(outputs, batch):
    parts = predictions_of(outputs, batch)
    if not isinstance(parts, tuple | list) or not all(torch.is_tensor(part) and part.ndim for part in parts):
        raise SystemExit(f"predictions_of returned {parts!r:.60} …; expected a tuple of tensors with samples along "
                         "the first axis, such as (predicted, labels)")  # fmt: skip
    return [part.cpu() for part in parts]


@torch.no_grad()
def evaluate(model, dataset, batch_size, data, on_device, args):
    """The mean loss and the metrics over a whole data set, on all ranks, every sample counted once."""
    sums, gathered = 0.0, []
    model.eval()
    for buffer in model.buffers():  # BatchNorm's statistics differ between ranks: use those that checkpoints save
        dist.broadcast(buffer, group=data.get_group(), group_src=0)
    for number, batch in enumerate(batches(dataset, batch_size, data, args)):
        batch = map_tensors(batch, on_device)
        outputs = outputs_of(model, batch)
        pairs = pairs_of(outputs, batch)
        real = (number * data.size() + data.get_local_rank()) * batch_size < len(dataset)
        sums += real * torch.stack([*pairs.values()])
        gathered += [predicted_in(outputs, batch)] if real else []
    dist.all_reduce(sums, group=data.get_group())
    everyone = [None] * data.size()
    dist.all_gather_object(everyone, gathered, group=data.get_group())
    whole = [torch.cat(parts) for parts in zip(*(batch for rank in everyone for batch in rank), strict=True)]
    if show_sample := globals().get("show_sample"):  # defined by some tasks
        show_sample(model, on_device)
    model.train()
    means = {name: total / count for name, (total, count) in zip(pairs, sums, strict=True)}
    return {f"test_{name}": float(value) for name, value in {**means, **gathered_metrics(*whole)}.items()}
