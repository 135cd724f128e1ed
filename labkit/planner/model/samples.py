"""Finds the sample from which a plan makes its batches: samples of text may differ in length, and batches are
padded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

LOOKED_AT, SECONDS = 64, 1.0  # limits on the number of samples and on their loading time


def longest(
    dataset: Any, collate: Callable[[Any], Any], map_tensors: Callable[[Any, Callable[[Any], Any]], Any]
) -> tuple[Any, int]:
    """The longest of the first samples, and the number of samples compared; 0 if all have the same length."""
    if not hasattr(dataset, "__len__"):
        raise SystemExit(
            f"load_datasets returned training data without a length ({type(dataset).__name__}): with the extra "
            "streaming, return Stream(dataset, epoch_samples)"
        )
    until, sizes, sample = time.monotonic() + SECONDS, [0], None
    for each in _first(dataset):
        elements: list[int] = []
        map_tensors(collate([each]), partial(_note, elements))
        sample = each if sum(elements) > max(sizes) or sample is None else sample
        sizes.append(sum(elements))
        if time.monotonic() > until:
            break
    if len(sizes) == 1:
        raise SystemExit("there is nothing to train on: load_datasets returned a training set without samples")
    return sample, len(sizes) - 1 if len({*sizes[1:]}) > 1 else 0


def floating_type(model: torch.nn.Module) -> torch.dtype:
    """The type of the floating-point tensors in a batch for this model, as in main()."""
    doubles = (p.dtype.to_real() == torch.float64 for p in model.parameters())
    return torch.float64 if all(doubles) else torch.float32


def _note(elements: list[int], tensor: Any) -> None:
    elements.append(tensor.numel())


def _first(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):  # read in order
        return islice(iter(dataset), LOOKED_AT)
    return (dataset[i] for i in range(min(LOOKED_AT, len(dataset))))
