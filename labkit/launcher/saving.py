"""What a script says of its checkpoints: the newest value that it reported as `checkpoint`."""

from __future__ import annotations

from labkit.record import RunFolder
from labkit.record.records import Tail

__all__ = ["Saving"]


class Saving:
    """Follows rank 0 of an attempt, which reports `checkpoint` as "step-8" or as "step 8 not saved: 12 bytes free"."""

    def __init__(self, attempt: RunFolder):
        self._tail = Tail(attempt.metrics(0))
        self.failure: str | None = None  # why the newest checkpoint was not saved

    def look(self) -> str | None:
        """Read what is new; returns `failure`."""
        for records in self._tail.chunks():
            for record in records:
                checkpoint = record.get("checkpoint") if record.get("k") == "report" else None
                if isinstance(checkpoint, str):
                    self.failure = checkpoint if " not saved" in checkpoint else None
        return self.failure
