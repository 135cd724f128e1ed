"""Prepares fine-tuning without a hub: sums as questions and answers, a small language model, what checkpoints hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit_labs.draw.picture import GREY, Picture, box, colour_of, sheet, words

__all__ = ["adapter", "numbers_saved", "qwen3_1_7b", "small_model", "sums"]

SIDE = 150.0


def adapter(inputs: int, outputs: int, rank: int) -> Picture:
    """A frozen matrix, drawn as a square, and to scale LoRA's two beside it: outputs x `rank` and `rank` x inputs."""
    wide, low = (max(0.5, SIDE * rank / length) for length in (inputs, outputs))
    trained, frozen = rank * (inputs + outputs), inputs * outputs
    parts = [
        words(10, 16, f"frozen: {outputs:,} x {inputs:,}", bold=True),
        box(10, 26, SIDE, SIDE, GREY, opacity=0.4, round=0),
        words(10 + SIDE / 2, 106, f"{frozen:,}", anchor="middle"),
        words(SIDE + 35, 106, "+", bold=True),
        words(SIDE + 75, 16, f"trained: {outputs:,} x {rank} times {rank} x {inputs:,}", bold=True),
        box(SIDE + 75, 26, wide, SIDE, colour_of(0), round=0),
        box(SIDE + 87 + wide, 26, SIDE, low, colour_of(1), round=0),
        words(SIDE + 87 + wide, 26 + max(low, 14) + 24, f"{trained:,}, {trained / frozen:.1%} of it"),
        words(SIDE + 87 + wide, 150, "gradient and two moments: only for these", size=12),
    ]
    label = (
        f"a layer of {frozen:,} frozen numbers, and an adapter of rank {rank} with {trained:,}, {trained / frozen:.1%}"
    )
    return sheet(parts, SIDE + 36, label)


def sums(folder: Path, count: int = 600) -> list[dict[str, str]]:
    """Write `train.jsonl`, a line for each question with the columns prompt and completion; return its lines."""
    import torch

    numbers = torch.randint(0, 50, (count, 2), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [{"prompt": f"{a} and {b} make ", "completion": f"{a + b}."} for a, b in numbers]
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return lines


def small_model(folder: Path, lines: Sequence[dict[str, str]]) -> Path:
    """A folder with a tokenizer of single characters and a configuration, without weights, as transformers loads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    characters: Any = Tokenizer(models.BPE())
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    characters.train_from_iterator([json.dumps(lines)], trainers.BpeTrainer(special_tokens=["<s>", "</s>"]))
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=characters, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def qwen3_1_7b(folder: Path) -> Path:
    """The configuration of a model of Qwen3 1.7B's sizes."""
    from transformers import AutoConfig

    AutoConfig.for_model(
        "qwen3", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, head_dim=128,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=4096,
    ).save_pretrained(folder)  # fmt: skip
    return folder / "config.json"


def numbers_saved(checkpoint: Path) -> int:
    """Weights and moments in a full checkpoint; counters of steps are left out."""
    import torch

    saved = torch.load(checkpoint / "full.pt", weights_only=True)
    moments = (tensor for state in saved["optimizer"].values() for tensor in state.values() if tensor.dim())
    return sum(tensor.numel() for tensor in [*saved["model"].values(), *moments])
