"""What is known of a model before it is trained: counted once, on tensors that hold no data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Facts", "Unit"]


@dataclass(frozen=True)
class Unit:
    """A part of the model that strategies handle as one: "embed", "blocks.0" …, "unembed", or a whole "model"."""

    name: str
    parameters: tuple[int, ...]  # elements of each trained parameter; a shared one belongs to the first unit
    frozen: int  # elements of parameters that are not trained
    buffers: int  # bytes
    flops: int  # of forward, per sample
    output: int  # elements per sample handed on to the next unit


@dataclass(frozen=True)
class Facts:
    """`itemsize`: bytes of a parameter's element. `predictions` and `inputs` (bytes of x and y) are per sample."""

    units: tuple[Unit, ...]
    itemsize: int
    predictions: int
    inputs: int
    samples: int  # in the training data

    @property
    def elements(self) -> int:
        """Of all trained parameters."""
        return sum(sum(unit.parameters) for unit in self.units)
