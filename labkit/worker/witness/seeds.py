"""Writes down when a training draws the same random numbers again, because the script has seeded torch again."""

from __future__ import annotations

from ctypes import string_at
from typing import Any
from zlib import crc32

from labkit.worker.witness.area import Area, Observed
from labkit.worker.witness.around import call_around
from labkit.worker.witness.models import Stepped

REPEATED = 3  # steps that drew the same
LOOKS = 16  # at batches after a seed, until there is a step
MOST = 256  # different draws that are remembered


class Seeds(Area):
    """Hooks what `torch.manual_seed` calls, because TorchScript knows only the original of that function. Compared is
    what the first step after it draws between the fetch of a batch and its backward: a seed in between may be for
    something that is made in each step."""

    def __init__(self, witness: Observed):
        super().__init__(witness)
        self._seeded: dict[str, Any] = {}  # with what, and where, until the next step
        self._looks = 0  # that are left until then
        self._before: int | None = None  # digest of the generators after the newest fetch
        self._drawn: tuple[int, int] | None = None  # before and after this step's forward
        self._steps: dict[tuple[int, int, int], list[int]] = {}  # of an optimizer, that drew the same

    def hook(self) -> None:
        cuda = self._torch.cuda
        call_around(cuda, "manual_seed_all", self._before_seed, self._witness.recorder)
        cuda.random.manual_seed_all = cuda.manual_seed_all  # pickle finds a function where it was defined

    def _before_seed(self, seed: Any) -> None:
        self._seeded = {"seed": int(seed), "line": self._witness.line()}
        self._looks, self._before = LOOKS, None
        self._witness.follow(self)

    def after_fetch(self, is_training: bool) -> None:
        if self._looks:
            self._looks -= 1
            self._before = self._states() if is_training else None

    def before_backward(self) -> None:
        if self._before is not None and self._drawn is None and (after := self._states()) not in (None, self._before):
            self._drawn = self._before, after

    def after_step(self, optimizer: Any, stepped: Stepped) -> None:
        self._witness.leave(self)
        if self._drawn is not None and len(self._steps) < MOST:
            steps = self._steps.setdefault((stepped.number, *self._drawn), [])
            steps.append(self._witness.step)
            if len(steps) == REPEATED:
                self._witness.write("reseeded", steps=steps, **self._seeded)
        self._seeded, self._before, self._drawn = {}, None, None

    def loaded(self, module: Any) -> None:
        """Another training may begin when the script has loaded weights."""
        self._steps.clear()

    def _states(self) -> int | None:
        """A digest of the states of the generators in use; None if the script would see that, or captures a graph."""
        cuda = self._torch.cuda
        if self._witness.is_hidden():
            return None
        with self._witness.unseen():
            states = [self._torch.default_generator.get_state()]
            if cuda.is_initialized():
                states.append(cuda.default_generators[cuda.current_device()].get_state())
            return crc32(b"".join(string_at(state.data_ptr(), state.nbytes) for state in states))
