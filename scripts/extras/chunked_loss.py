"""The loss in chunks: the head is applied to some positions at a time, so that the logits are never whole."""

# goes with: single, ddp, zero1, zero2, fsdp

# %% task
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 512  # predictions whose logits exist at a time


class Logits:
    """What precedes the model's last layer, `head`, which is applied to one chunk at a time."""

    def __init__(self, hidden, head):
        self.hidden, self.head = hidden, head

    def argmax(self, dim=-1):
        best = [self.head(chunk).argmax(dim) for chunk in self.chunks()]
        return torch.cat(best).view(self.hidden.shape[:-1])

    def chunks(self):
        return self.hidden.to(self.head.weight.dtype).flatten(0, -2).split(CHUNK)


def outputs_of(model, batch):
    """Only calls the model, without its head."""
    head = getattr(getattr(model, "module", model), "head", None)
    if not isinstance(head, nn.Linear):
        raise SystemExit("a loss in chunks needs a model whose last layer is a Linear named head")
    head.forward = lambda x: x
    try:
        return Logits(model(batch[0]), head)
    finally:
        del head.forward


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch[1] != -100).sum()


def loss_of(outputs, batch):
    """The sum of the losses. Backward computes a chunk's logits once more."""
    pairs = zip(outputs.chunks(), batch[1].flatten().split(CHUNK), strict=True)
    return sum(checkpoint(loss_of_chunk, outputs.head, *pair, use_reentrant=False) for pair in pairs)


def loss_of_chunk(head, hidden, labels):
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    return {"accuracy": ((outputs.argmax(-1) == batch[1]).sum(), count_of(batch))}
