"""The loss in chunks: the head is applied to some positions at a time, so that the logits are never whole."""

# goes with: single, ddp, zero1, zero2, fsdp

# %% task
import argparse

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Chunk(argparse.Action):
    """Takes effect while the options are parsed: the task's functions do not receive them."""

    def __call__(self, parser, args, value, option=None):
        Logits.chunk = args.loss_chunk = value


def task_arguments(parser):
    parser.add_argument("--loss-chunk", action=Chunk, type=int, default=0,
                        help="predictions whose logits exist at a time (0: all)")  # fmt: skip


class Logits:
    """What precedes the model's last layer, `head`, which is applied to one chunk at a time, in the autocast in which
    the model would have called it."""

    chunk = 0

    def __init__(self, head):
        self.head = head

    def instead_of_head(self, x):
        kind = x.device.type
        self.autocast = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        return x

    def argmax(self, dim=-1):
        best = [self.of_chunk(chunk).argmax(dim) for chunk in self.chunks()]
        return torch.cat(best).view(self.hidden.shape[:-1])

    def chunks(self):
        return self.hidden.to(self.head.weight.dtype).flatten(0, -2).split(self.chunk)

    def of_chunk(self, hidden):
        with self.autocast:
            return self.head(hidden)


def outputs_of(model, batch):
    """Only calls the model, without its head."""
    if not Logits.chunk or not isinstance(model, nn.Module):  # a stand-in; only its inputs matter
        return model(batch[0])
    head = getattr(getattr(model, "module", model), "head", None)
    if not isinstance(head, nn.Linear):
        raise SystemExit("--loss-chunk needs a model whose last layer is a Linear named head")
    logits = Logits(head)
    head.forward = logits.instead_of_head
    logits.hidden = model(batch[0])
    del head.forward
    if isinstance(head.weight, DTensor):
        raise SystemExit("--loss-chunk needs the whole head after forward: leave out --reshard-after-forward always")
    return logits


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch[1] != -100).sum()


def loss_of(outputs, batch):
    """The sum of the losses. Backward computes a chunk's logits once more."""
    if torch.is_tensor(outputs):
        return loss_of_logits(outputs, batch[1])
    pairs = zip(outputs.chunks(), batch[1].flatten().split(outputs.chunk), strict=True)
    return sum(checkpoint(loss_of_chunk, outputs, *pair, use_reentrant=False) for pair in pairs)


def loss_of_chunk(outputs, hidden, labels):
    return loss_of_logits(outputs.of_chunk(hidden), labels)


def loss_of_logits(logits, labels):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    return {"accuracy": ((outputs.argmax(-1) == batch[1]).sum(), count_of(batch))}
