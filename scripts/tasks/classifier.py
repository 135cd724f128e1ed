"""A text classifier of transformers, on texts of any length: batches are a padded dict and labels."""

# %% model
from transformers import AutoConfig, AutoModelForSequenceClassification


def Model():
    """Random weights; use AutoModelForSequenceClassification.from_pretrained(name) for a pretrained model."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_labels": 2}  # fmt: skip
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **sizes))


# %% data
import os
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence


def load_datasets(data_dir, context=128, limit=2**18):
    """(train, test): lines of text as bytes, and whether they open a block. Put your texts and tokenizer here."""
    files = sorted(Path(data_dir).glob("*.txt") if data_dir else Path(os.__file__).parent.glob("*.py"))
    lines = b"\n".join(file.read_bytes() for file in files)[: None if data_dir else limit].splitlines()
    lines = [line for line in lines if 8 <= len(line) <= context]
    samples = [(torch.tensor([*line[:-1]]), torch.tensor(line.endswith(b":")).long()) for line in lines]
    cut = len(samples) * 9 // 10
    return samples[:cut], samples[cut:]


def collate(samples):
    """Pads on the right to the longest text; padding is not attended to."""
    texts, labels = zip(*samples, strict=True)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    return {"input_ids": pad_sequence([*texts], batch_first=True), "attention_mask": mask}, torch.stack(labels)


# %% task
import torch
from torch.nn import functional as F


def outputs_of(model, batch):
    """Only calls the model: a pipeline replaces this call by its stages."""
    return model(**batch[0])


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch[1] != -100).sum()


def loss_of(outputs, batch):
    """The sum of their losses, not the mean; in fp32 or wider, for fp16 overflows and bf16 has two digits."""
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    return F.cross_entropy(logits, batch[1], reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    return {"accuracy": ((outputs.logits.argmax(-1) == batch[1]).sum(), count_of(batch))}
