"""What a rank's recorder drops, and what it must not."""

from __future__ import annotations

import functools
import os
import signal

import pytest

from labkit.worker.recorder import Recorder


class Watch:
    def ring(self, number, frame):
        raise TimeoutError("the script's")


def ring(what, number, frame):
    raise TimeoutError(what)


@pytest.mark.parametrize("handler", [Watch().ring, functools.partial(ring, "the script's")])
def test_what_a_signals_handler_raises_meanwhile_is_the_scripts(handler, tmp_path) -> None:
    recorder, before = Recorder(tmp_path / "metrics.jsonl"), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="the script's"):
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            except Exception as error:
                recorder.drop(error)
    finally:
        signal.signal(signal.SIGUSR1, before)
    recorder.drop(TimeoutError("labkit's own"))
    assert recorder.dropped == 1
