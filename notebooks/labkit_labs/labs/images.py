"""Makes small pictures of shapes in folders, one for each class, and counts how many of them a model recognizes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["accuracy", "filled", "strip"]

SIZE = 72


def _picture(shape: str) -> Any:
    """A shape somewhere, in some color: disc, square, triangle, ring, frame or cross."""
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
