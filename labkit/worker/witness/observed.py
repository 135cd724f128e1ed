"""What the witness's areas read of it, and call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from labkit.worker.recorder import Recorder
from labkit.worker.witness.models import DistributedModel, Stepped


class Observed(Protocol):
    """A rank's training so far: see witness.Witness."""

    torch: Any
    recorder: Recorder
    models: list[DistributedModel]
    optimizers: list[Stepped]
    step: int
    number: int
    passes: int
    epochs: int
    batches: Any

    def unseen(self) -> AbstractContextManager[Any]: ...
    def is_seen(self) -> bool: ...
    def live_optimizers(self) -> list[Any]: ...
    def distributed_models(self) -> list[Any]: ...
    def calls(self) -> int: ...
    def line(self) -> int: ...
    def called_in_join(self) -> None: ...
    def write(self, kind: str, **values: Any) -> None: ...
