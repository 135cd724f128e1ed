"""Makes what labs train on without a hub: sums as questions and answers with a small language model, and pictures of
shapes; and checks what was trained."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit_labs.draw.picture import GREY, Picture, box, colour_of, sheet, words

__all__ = ["accuracy", "adapter", "filled", "numbers_saved", "qwen3_1_7b", "small_model", "strip", "sums"]

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
        words(SIDE + 87 + wide, 26 + max(low, 14) + 24, f"{trained:,}, {trained / frozen:.1%} of the layer"),
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
    """The configuration of a model of the same size as Qwen3 1.7B."""
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


SIZE = 72


def _picture(shape: str) -> Any:
    """A shape in a random place and color: disc, square, triangle, ring, frame or cross."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (SIZE, SIZE), tuple(random.choices(range(90), k=3)))
    width = random.randint(20, 40)
    left, top = (random.randint(0, SIZE - width) for _ in range(2))
    right, bottom = left + width, top + width
    box, color = (left, top, right, bottom), tuple(random.choices(range(120, 256), k=3))
    pen = ImageDraw.Draw(picture)
    if shape == "disc":
        pen.ellipse(box, fill=color)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    elif shape == "triangle":
        pen.polygon([(left, bottom), (right, bottom), (left + width // 2, top)], fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=4)
    elif shape == "frame":
        pen.rectangle(box, outline=color, width=4)
    else:
        pen.line([(left, top), (right, bottom)], fill=color, width=5)
        pen.line([(left, bottom), (right, top)], fill=color, width=5)
    return picture


def filled(root: Path, shapes: Sequence[str], train: int = 120, test: int = 30, seed: int = 0) -> Path:
    """Draw pictures into `train/<shape>` and `test/<shape>`; return the root."""
    random.seed(seed)
    for part, count in (("train", train), ("test", test)):
        for shape in shapes:
            (root / part / shape).mkdir(parents=True)
            for number in range(count):
                _picture(shape).save(root / part / shape / f"{number}.png")
    return root


def strip(root: Path | str, count: int = 8) -> Any:
    """Some of the training pictures side by side."""
    from PIL import Image

    paths = sorted(Path(root, "train").glob("*/*.*"))
    paths = paths[:: max(1, len(paths) // count)][:count]
    whole = Image.new("RGB", ((SIZE + 8) * len(paths), SIZE))
    for place, path in enumerate(paths):
        whole.paste(Image.open(path).convert("RGB").resize((SIZE, SIZE)), ((SIZE + 8) * place, 0))
    return whole


def accuracy(model: Any, root: Path | str, side: int, mean: Sequence[float], std: Sequence[float]) -> float:
    """The share of the test pictures whose class a model finds, at `side` x `side` pixels, normalized."""
    import torch
    from PIL import Image

    names = sorted(path.name for path in Path(root, "train").iterdir())
    centre, spread = (torch.tensor(each)[:, None, None] for each in (mean, std))
    right = []
    for number, name in enumerate(names):
        for path in Path(root, "test", name).iterdir():
            picture = Image.open(path).convert("RGB").resize((side, side))
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(side, side, 3)
            with torch.no_grad():
                logits = model.eval()(((pixels.permute(2, 0, 1) / 255 - centre) / spread)[None])
            right.append(int(logits.argmax()) == number)
    return sum(right) / len(right)
