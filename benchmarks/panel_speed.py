"""How long the panel takes to redraw after a move: `python benchmarks/panel_speed.py`.

Every control is moved through its values, for every strategy; a move is the prediction for all strategies and the page.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import labkit
from labkit.planner.data_sheets import DEVICES

START = {"global_batch_size": 64, "accumulate": 1, "precision": "fp32", "activation_checkpointing": False}
MOVES = {
    "ranks": (1, 2, 3, 4, 6, 8, 12, 16, 64, 256, 1024),
    "global_batch_size": (1, 8, 64, 512, 4096),
    "accumulate": (1, 2, 4, 8, 64),
    "precision": ("fp32", "bf16", "fp16"),
    "activation_checkpointing": (False, True),
    "device": [device.name for device in DEVICES],
}


def main() -> None:
    panel = labkit.panel("fsdp")
    began = time.perf_counter()
    panel.count()
    print(f"counting the model: {time.perf_counter() - began:.1f} s, once, in a process of its own")
    assert panel._facts, panel._problem
    print(f"the first page: {_seconds(panel, 'ddp', 'ranks', 2) * 1e3:.1f} ms; it is drawn when the counting is over")
    print(f"{'control':<26} {'moves':>6} {'median':>10} {'slowest':>10}")
    everything: list[float] = []
    for control, values in MOVES.items():
        times = [_seconds(panel, strategy, control, value) for strategy in panel.scripts for value in values]
        everything += times
        print(f"{control:<26} {len(times):>6} {median(times) * 1e3:>7.1f} ms {max(times) * 1e3:>7.1f} ms")
    print(f"{'all':<26} {len(everything):>6} {median(everything) * 1e3:>7.1f} ms {max(everything) * 1e3:>7.1f} ms")


def _seconds(panel: Any, strategy: str, control: str, value: Any) -> float:
    setting: dict[str, Any] = {"ranks": 2, "device": "T4"}
    parameters = dict(START)
    (setting if control in setting else parameters)[control] = value
    began = time.perf_counter()
    panel.page(strategy, setting["ranks"], setting["device"], parameters)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
