"""A causal language model of transformers, on texts of any length: batches are padded dicts."""

# %% model
from transformers import AutoConfig, AutoModelForCausalLM


def Model():
    """Random weights; use AutoModelForCausalLM.from_pretrained(name) for a pretrained model."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}  # fmt: skip
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))


# %% data
import os
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence


def load_datasets(data_dir, context=128, limit=2**20):
    """(train, test): pieces of text of random lengths, as bytes. Put your tokenizer here."""
    files = sorted(Path(data_dir).glob("*.txt") if data_dir else Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"\n".join(file.read_bytes() for file in files)[: None if data_dir else limit])
    text = torch.frombuffer(text, dtype=torch.uint8)
    generator, lengths, total = torch.Generator().manual_seed(0), [], 0
    while total + context <= len(text):
        lengths.append(torch.randint(8, context + 1, (), generator=generator).item())
        total += lengths[-1]
    pieces, cut = text[:total].split(lengths), len(lengths) * 9 // 10
    return pieces[:cut], pieces[cut:]


def collate(samples):
    """Pads on the right to the longest text; padding is neither attended to nor predicted."""
    ids, labels = (
        pad_sequence([s.long() for s in samples], batch_first=True, padding_value=value) for value in (0, -100)
    )
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


# %% task
import torch
from torch.nn import functional as F


def outputs_of(model, batch):
    """Only calls the model: a pipeline replaces this call by its stages. With labels it would average."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)


def count_of(batch):
    """The number of predictions, a tensor; labels of -100 are ignored."""
    return (batch["labels"][:, 1:] != -100).sum()


def loss_of(outputs, batch):
    """The sum of their losses, not the mean; in fp32 or wider, for fp16 overflows and bf16 has two digits."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def metrics_of(outputs, batch):
    """{name: (sum, count)}; evaluate adds them up over batches and ranks, then divides."""
    hits = outputs.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    return {"accuracy": (hits.sum(), count_of(batch))}
