"""What the witness's areas read of it, and call."""

from __future__ import annotations

from typing import Any, Protocol

from labkit.worker.recorder import Recorder


class Observed(Protocol):
    """A rank's training so far: see witness.Witness."""

    torch: Any
    recorder: Recorder
    step: int
    number: int
    passes: int
    epochs: int

    def number_of(self, optimizer: Any) -> int: ...
    def live_optimizers(self) -> list[Any]: ...
    def distributed_models(self) -> list[Any]: ...
    def line(self) -> int: ...
    def write(self, kind: str, **values: Any) -> None: ...
