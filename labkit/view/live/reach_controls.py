"""Provides the live view's buttons, which pause a run and change its learning rate."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from labkit.text import escaped

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
    """What a request says, or why it failed, is shown in `answer`, a widget of the view."""

    def __init__(self, run: Reached, answer: Any):
        import ipywidgets as widgets

        self._run, self._answer = run, answer
        self._paused = self._noticed = False
        self._pause = widgets.Button(tooltip="Pause all ranks at the end of the same step, or resume them")
        self._show_rate = widgets.Button(
            description="Learning rate", icon="sliders", tooltip="Change it on all ranks after the same step"
        )
        self.box = widgets.HBox([self._pause, self._show_rate])
        self._pause.layout.width = self._show_rate.layout.width = "auto"
        self.box.layout.flex_flow = "row wrap"
        self._label_pause()
        self._pause.on_click(lambda button: self._start(button, self._toggle_pause))
        self._show_rate.on_click(lambda button: self._start(button, self._ask_rate))

    def update(self, *, reachable: bool, paused: bool) -> None:
        """Show the controls of a run that is reachable. Whether it is paused is only taken over when it has changed,
        because what is known of a run may be older than the last click."""
        self.box.layout.display = None if reachable else "none"
        if paused != self._noticed:
            self._paused = self._noticed = paused
            self._label_pause()

    def _label_pause(self) -> None:
        self._pause.description, self._pause.icon = ("Resume", "play") if self._paused else ("Pause", "pause")

    def _start(self, control: Any, action: Callable[[], str]) -> None:
        """Runs the request in a thread, because it waits for the end of a step."""
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
        """Put a slider at the current learning rate, which only the ranks know, in the place of the button."""
        import ipywidgets as widgets

        rate = self._run.ask(RATE)[RATE][0]
        if not (isinstance(rate, float) and rate > 0):
            return f"the learning rate is {rate}"
        exponent = math.log10(rate)
        slider = widgets.FloatLogSlider(
            rate,
            min=exponent + LOWEST,
            max=exponent + HIGHEST,
            step=0.05,
            readout_format=".3g",
            continuous_update=False,
        )
        slider.description, slider.style.description_width = "Learning rate", "auto"
        release = widgets.Button(description="As scheduled", tooltip="Use the script's learning rate again")
        release.layout.width = "auto"
        slider.observe(lambda change: self._start(slider, lambda: self._set(change["new"])), names="value")
        release.on_click(lambda button: self._start(button, lambda: self._set(None)))
        self.box.children += (slider, release)
        self._show_rate.layout.display = "none"
        return ""

    def _set(self, rate: float | None) -> str:
        shown = None if rate is None else float(f"{rate:.3g}")
        step = self._run.set(lr=shown)
        return f"{'as scheduled' if shown is None else f'lr={shown}'} from step {step} on"
