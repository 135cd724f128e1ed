"""Defines what an area of the witness is: one kind of thing that it looks at, in a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from labkit.ring import RingWriter
from labkit.worker.recorder import Recorder
from labkit.worker.witness.later import Later
from labkit.worker.witness.models import DistributedModel, Stepped


class Observed(Protocol):
    """A rank's training so far: see witness.Witness."""

    torch: Any
    recorder: Recorder
    ring: RingWriter
    later: Later
    models: list[DistributedModel]
    optimizers: list[Stepped]
    made: int
    step: int
    number: int
    fetched: int
    passes: int
    epochs: int

    @property
    def place(self) -> Mapping[str, Any]: ...
    def unseen(self) -> AbstractContextManager[Any]: ...
    def is_hidden(self) -> bool: ...
    def live_optimizers(self) -> list[Any]: ...
    def distributed_models(self) -> list[Any]: ...
    def calls(self) -> int: ...
    def messages(self, group: Any) -> int: ...
    def line(self) -> int: ...
    def write(self, kind: str, **values: Any) -> None: ...
    def called_in_join(self) -> None: ...
    def follow(self, area: Area) -> None: ...
    def leave(self, area: Area) -> None: ...


class Area:
    """Is called at these moments of a training. Those of every step cost all trainings time, so that an area is called
    at them only between `witness.follow(self)` and `witness.leave(self)`."""

    def __init__(self, witness: Observed):
        self._witness, self._torch, self._later = witness, witness.torch, witness.later

    def hook(self) -> None:
        """Hook what torch calls, once in a process."""

    def wrapped(self, number: int) -> None:
        """DDP has wrapped the model of this number."""

    def loaded(self, module: Any) -> None:
        """The script has loaded weights into a module."""

    def at_epoch(self) -> None:
        """The first batch of an epoch has been fetched."""

    def before_validation(self, known: DistributedModel, model: Any) -> None:
        """A model of DDP is about to be called without gradients."""

    def before_check(self, optimizer: Any, stepped: Stepped) -> None:
        """Before a step that is checked. Modes of the script see nothing."""

    def after_check(self, optimizer: Any, stepped: Stepped) -> None:
        """After a step that is checked. Modes of the script see nothing."""

    def forked(self) -> None:
        """This process is a forked child, which writes nothing."""

    def finish(self) -> None:
        """The script has ended."""

    # While it follows the steps

    def after_fetch(self, is_training: bool) -> None:
        """A batch has been fetched."""

    def before_backward(self) -> None:
        """A backward pass begins."""

    def after_backward(self) -> None:
        """A backward pass has ended."""

    def before_step(self, optimizer: Any, stepped: Stepped) -> None:
        """An optimizer that no other one wraps is about to make a step."""

    def after_step(self, optimizer: Any, stepped: Stepped) -> None:
        """It has made the step."""
