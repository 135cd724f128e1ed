"""Buttons of the live view that pause a run and change its learning rate."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from labkit.record.text import escaped

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ReachControls", "Reached"]

LOWEST, HIGHEST = -3, 1  # powers of ten around the current learning rate
RATE = "float(optimizer.param_groups[0]['lr'])"


class Reached(Protocol):
    """The run that they act on."""

    def ask(self, expression: str) -> pd.DataFrame: ...
    def set(self, **options: Any) -> int: ...
    def pause(self) -> int: ...
    def resume(self) -> None: ...


class ReachControls:
    """One row. What a request says, or why it failed, is printed at its end."""

    def __init__(self, run: Reached):
        import ipywidgets as widgets

        self._run = run
        self._paused = False
        self._pause = widgets.Button(tooltip="Let all ranks wait at the end of the same step, or continue")
        self._show_rate = widgets.Button(
            description="Learning rate", icon="sliders", tooltip="Change it on all ranks after the same step"
        )
        self._rate = widgets.FloatLogSlider(continuous_update=False, readout_format=".3g", step=0.05)
        self._release = widgets.Button(description="As scheduled", tooltip="Give the learning rate back to the script")
        self._answer = widgets.HTML()
        self._rate.layout.display = self._release.layout.display = "none"
        self.box = widgets.HBox([self._pause, self._show_rate, self._rate, self._release, self._answer])
        self.box.layout.flex_flow = "row wrap"
        self._label_pause()
        self._pause.on_click(lambda button: self._start(button, self._toggle_pause))
        self._show_rate.on_click(lambda button: self._start(button, self._ask_rate))
        self._release.on_click(lambda button: self._start(button, lambda: self._set(None)))

    def update(self, *, reachable: bool, paused: bool) -> None:
        """Show the row for a run that is reachable, with the button that its state calls for."""
        self.box.layout.display = None if reachable else "none"
        if paused != self._paused and not self._pause.disabled:
            self._paused = paused
            self._label_pause()

    def _label_pause(self) -> None:
        self._pause.description, self._pause.icon = ("Resume", "play") if self._paused else ("Pause", "pause")

    def _start(self, control: Any, action: Callable[[], str]) -> None:
        """In a thread: a request waits for the end of a step."""
        control.disabled = True
        self._answer.value = "asking every rank…"

        def act() -> None:
            try:
                self._answer.value = escaped(action())
            except Exception as error:
                self._answer.value = escaped(str(error))
            control.disabled = False

        threading.Thread(target=act, name="labkit reach", daemon=True).start()

    def _toggle_pause(self) -> str:
        if self._paused:
            self._run.resume()
            message = ""
        else:
            message = f"paused at the end of step {self._run.pause()}"
        self._paused = not self._paused
        self._label_pause()
        return message

    def _ask_rate(self) -> str:
        """Show the slider at the current learning rate, which only the ranks know."""
        rate = self._run.ask(RATE)[RATE][0]
        if not (isinstance(rate, float) and rate > 0):
            return f"the learning rate is {rate}"
        self._rate.unobserve_all("value")
        with self._rate.hold_trait_notifications():  # the limits are checked against each other
            self._rate.min, self._rate.max = math.log10(rate) + LOWEST, math.log10(rate) + HIGHEST
            self._rate.value = rate
        self._rate.observe(lambda change: self._start(self._rate, lambda: self._set(change["new"])), names="value")
        self._rate.layout.display = self._release.layout.display = None
        self._show_rate.layout.display = "none"
        return ""

    def _set(self, rate: float | None) -> str:
        step = self._run.set(lr=rate)
        return f"from step {step} on" if rate is None else f"lr={rate:.3g} from step {step} on"
