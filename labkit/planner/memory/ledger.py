"""Simulates one training step of a rank, unit by unit, with the memory held at each moment.

The memory of computation comes from the units' profiles. Parameters, gradients and buffers are tracked by a Keeper;
each family of strategies has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.errors import LaunchError
from labkit.planner.model.facts import Moment, Profile
from labkit.record import Peak


class UnknownToFormulas(LaunchError):
    """The formulas do not cover this; only a rehearsal can determine its memory."""


class Ledger:
    """Bytes held by category in the course of the step, and the recorded moments."""

    def __init__(self, **held: int):
        self.held = dict.fromkeys(Peak.CATEGORIES, 0) | held
        self.moments: dict[tuple[str, str], Peak] = {}  # the largest of each name

    def note(self, phase: str, operation: str, **more: int) -> None:
        """Record a moment at which `more` is held temporarily."""
        total = sum(self.held.values()) + sum(more.values())
        known = self.moments.get((phase, operation))
        if known is None or total > known.bytes:
            at = {name: self.held[name] + more.get(name, 0) for name in Peak.CATEGORIES}
            self.moments[phase, operation] = Peak(total, phase, operation, {n: b for n, b in at.items() if b})


class Keeper:
    """A strategy's actions before and after each unit's computation, by default none; units are passed by number."""

    def begin(self, *, first: bool, last: bool) -> None:
        """Start a micro-batch, which may be the first or the last of its step."""

    def before_forward(self, unit: int, incoming: int) -> None:
        """`incoming` is the bytes of the unit's input."""

    def after_forward(self, unit: int) -> None:
        """Free what forward does not leave for backward."""

    def end_of_forward(self) -> None:
        """Free what only forward needs."""

    def before_backward(self, unit: int, incoming: int) -> None:
        """`incoming` is the bytes of the gradient of the unit's output."""

    def more_gradients(self, settled: int) -> int:
        """Change in bytes of gradients when `settled` bytes of the current unit's gradients are complete."""
        return settled

    def after_backward(self, unit: int, result: int) -> None:
        """`result` is the bytes of the gradient of the unit's input."""

    def end_of_step(self) -> None:
        """Reduce the remaining gradients."""


def forward(ledger: Ledger, keeper: Keeper, names: Sequence[str], profiles: Sequence[Profile], samples: int) -> None:
    """Run forward of all units; what they keep for backward stays in the ledger."""
    casts = 0
    for unit, (name, profile) in enumerate(zip(names, profiles, strict=True)):
        keeper.before_forward(unit, profile.input.at(samples) if unit else 0)
        note(ledger, "forward", f"forward of {name}", profile.forward, samples)
        ledger.held["activations"] += profile.saved.at(samples)
        ledger.held["temporary"] += profile.cached  # until autocast ends after forward
        casts += profile.cached
        keeper.after_forward(unit)
    ledger.held["temporary"] -= casts
    keeper.end_of_forward()


def loss(ledger: Ledger, profile: Profile, samples: int) -> None:
    """Run forward and backward of the loss."""
    note(ledger, "forward", "loss", profile.forward, samples)
    note(ledger, "backward", "backward of the loss", profile.backward, samples)


def backward(ledger: Ledger, keeper: Keeper, names: Sequence[str], profiles: Sequence[Profile], samples: int) -> None:
    """Run backward of all units, the last first, up to the first one that is trained."""
    for unit, (name, profile) in reversed([*enumerate(zip(names, profiles, strict=True))]):
        if profile.backward:
            keeper.before_backward(unit, profile.output.at(samples))
        elif unit:
            continue
        ledger.held["activations"] -= profile.saved.at(samples)
        for moment in profile.backward:
            gradients = keeper.more_gradients(moment.settled)
            note(ledger, "backward", f"backward of {name}", [moment], samples, gradients=gradients)
        keeper.after_backward(unit, profile.input.at(samples) if unit else 0)


def note(ledger: Ledger, phase: str, what: str, moments: Sequence[Moment], samples: int, *, gradients: int = 0) -> None:
    """Record a unit's moments in addition to what the ledger holds."""
    for moment in moments:
        kept, held = moment.kept.at(samples), moment.held.at(samples)
        ledger.note(phase, what, activations=kept, temporary=held - kept, gradients=gradients)
