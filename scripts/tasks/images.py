"""Folders of images, one per class, and a small ResNet: --data-dir has train/ and test/."""

# %% model
import torch
from torch import nn


class Block(nn.Module):  # two convolutions around a shortcut, which halves the image where the width grows
    def __init__(self, before, width):
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(before, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        inside = torch.relu(self.norm1(self.first(x)))
        return torch.relu(self.shortcut(x) + self.norm2(self.second(inside)))


class Model(nn.Module):  # (batch, 3, height, width) in, (batch, CLASSES) out
    def __init__(self, widths=(32, 32, 64, 64, 128, 128)):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 2, padding=1), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(*(Block(*pair) for pair in zip((widths[0], *widths), widths, strict=False)))
        self.head = nn.Linear(widths[-1], CLASSES)

    def embed(self, images):
        return self.stem(images)

    def unembed(self, x):
        return self.head(x.mean((2, 3)))

    def forward(self, images):
        return self.unembed(self.blocks(self.embed(images)))


# %% data
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch.utils.data import Dataset

CLASSES = 10  # in the model's output; the folders may have fewer
MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406])[:, None, None], torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class Pictures(Dataset):
    """(image, class), normalized; for training also randomly cropped and mirrored."""

    def __init__(self, folder, augmented, size=64):
        self.size, self.augmented = size, augmented
        self.classes = sorted(path.name for path in Path(folder).iterdir() if path.is_dir())
        files = [(path, number) for number, name in enumerate(self.classes) for path in Path(folder, name).rglob("*.*")]
        self.files = sorted(file for file in files if file[0].suffix.lower() in Image.registered_extensions())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        path, number = self.files[index]
        larger = self.size * 9 // 8
        with Image.open(path) as opened:
            pixels = numpy.array(opened.convert("RGB").resize((larger, larger)))
        picture, margin = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - MEAN) / SPREAD, larger - self.size
        top, left = torch.randint(margin + 1, (2,)).tolist() if self.augmented else (margin // 2, margin // 2)
        picture = picture[:, top : top + self.size, left : left + self.size]
        return picture.flip(2) if self.augmented and torch.rand(()) < 0.5 else picture, number


def load_datasets(data_dir):
    """(train, test) from the folders data_dir/train/<class>/ and data_dir/test/<class>/."""
    if not all(Path(data_dir, part).is_dir() for part in ("train", "test")):
        raise SystemExit(
            f"--data-dir {data_dir or '(none)'} must have the folders train and test, with one for each class"
        )
    train, test = Pictures(Path(data_dir, "train"), True), Pictures(Path(data_dir, "test"), False)
    if train.classes != test.classes or len(train.classes) > CLASSES:
        counts = f"{len(train.classes)} classes in train and {len(test.classes)} in test"
        raise SystemExit(f"{data_dir} has {counts}; they must be the same, at most CLASSES, {CLASSES}")
    return train, test
