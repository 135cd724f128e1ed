"""The one rule that says which of the losses in a rank's records count."""

from __future__ import annotations

from typing import NamedTuple

from labkit.record.records import Record, Report, Step


class Counted(NamedTuple):
    """What a record says about the losses: its own loss, if that counts, and the step after which earlier ones count no
    longer, which is 0 if none of them does."""

    loss: float | None = None
    void_after: int | None = None


class Losses:
    """Says record by record which of the losses that a rank recorded in one attempt count: the script's own rather
    than the probe's, and none from the step on from which several optimizers each had their own. That which the script
    gives to a tracker counts where the probe has found that it has none.

    `newest` is the newest training's, None if it has none; `what` says what that is, or why there is none, and is empty
    if the script reports it.
    """

    def __init__(self) -> None:
        self.newest: float | None = None
        self.what = ""
        self.are_scripts = False
        self._training = 1
        self._last = 0  # the newest step of the probe with a loss that counts

    def take(self, record: Record) -> Counted:
        if isinstance(record, Report):
            has_own = self.newest is not None or not self.what
            return Counted() if record.is_tracked and has_own else self._take_report(record.loss)
        if not isinstance(record, Step) or self.are_scripts:
            return Counted()
        void_after = None
        if record.training != self._training:
            self._training, self.newest, self.what = record.training, None, ""
        if record.void_after is not None and record.void_after < self._last:
            void_after = self._last = max(0, record.void_after)
            self.newest = None
        if record.has_loss:
            self.newest, self.what = record.loss, record.loss_of
        if record.loss is not None:
            self._last = max(1, record.step or 0)
        return Counted(record.loss, void_after)

    def _take_report(self, loss: float | None) -> Counted:
        if loss is None:
            return Counted()
        is_first = not self.are_scripts
        self.newest, self.what, self.are_scripts = loss, "", True
        return Counted(loss, 0 if is_first else None)
