"""What must be true after any fault: the state is final, the folder is whole, nothing of the run is alive."""

from __future__ import annotations

import json
import time

import labkit
from labkit.launcher.stop import processes_of
from labkit.record import RunFolder, RunReader, read_state

APART_SECONDS = 0.5


def assert_clean(folder: RunFolder) -> None:
    """Nothing left, looked at twice; `state.json` final and parsed; every record that was written can be read."""
    assert not processes_of(folder)
    time.sleep(APART_SECONDS)
    assert not processes_of(folder)
    written = json.loads(folder.state.read_text())
    assert written["state"] in ("succeeded", "failed", "stopped"), written
    assert written["state"] == read_state(folder).state
    assert (written["cause"] is None) == (written["state"] == "succeeded")
    assert written["ended"] >= written["started"]
    reader = RunReader(folder).read_all()
    assert reader.ranks
    assert reader.undecodable == 0
    assert str(labkit.attach(folder.path).script)
    assert labkit.attach(folder.path).report().stat().st_size > 1000
