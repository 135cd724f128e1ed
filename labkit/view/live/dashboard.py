"""Shows a live run in a notebook, with buttons that stop, pause and change it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from labkit.frontend import LiveView
from labkit.record import RunFolder, RunReader, State
from labkit.text import escaped
from labkit.view.live.page import run_html
from labkit.view.live.run_charts import AXES, SCALES, SIZES, Look, titles
from labkit.view.report import static_bundle

if TYPE_CHECKING:
    import pandas as pd

ALL_CHARTS = "all charts"
AUTOMATIC = "failed rank, or 0"  # whose log is shown unless another rank's is chosen
SMOOTHINGS = {"none": 0.0, "some": 0.6, "strong": 0.9}  # the share of the value before that an average keeps
MANY_NODES_SECONDS = 4.0  # between readings of the state, which is spread over several files a node
OPEN: dict[Path, Dashboard] = {}  # at most one view of each run per kernel
LOWEST, HIGHEST = -3, 1  # powers of ten around the current learning rate
RATE = "float(optimizer.param_groups[0]['lr'])"


class Dashboard(LiveView):
    """Shows one live run. It reads only the run's folder."""

    def __init__(
        self,
        folder: RunFolder,
        state: State,
        stop: Callable[[bool], Any],
        stacks: Callable[[], Any],
        status: Callable[[], State],
        run: Reached,
    ):
        import ipywidgets as widgets

        super().__init__(folder.id)
        self.folder = folder
        self.reader = RunReader(folder)
        self.hint = f"Show the run again with labkit.attach({folder.id!r})"
        self._stop, self._stacks, self._status = stop, stacks, status
        self._state, self._asked = state, time.monotonic()
        narrow = {"layout": widgets.Layout(width="auto")}  # shared: each layout and style is a message of its own
        self._stop_button = widgets.Button(
            description="Stop", icon="stop", tooltip="End the run on every rank", **narrow
        )
        detach = widgets.Button(
            description="Detach", icon="eye-slash", tooltip="Stop watching; the run continues", **narrow
        )
        why = widgets.Button(
            description="Why is it stuck?", icon="question", tooltip="Ask every rank where it is", **narrow
        )
        self._answer = widgets.HTML()
        self._rank = widgets.Dropdown(description="Log of rank", options=[(AUTOMATIC, AUTOMATIC)], **narrow)
        self._rank.style.description_width = "auto"
        narrow["style"] = self._rank.style
        self._search = widgets.Text(description="Search", placeholder="search the log", continuous_update=False)
        self._only = widgets.Dropdown(description="Show", options=[(ALL_CHARTS, "")], **narrow)
        self._axis = widgets.Dropdown(description="over", options=AXES, **narrow)
        self._scale = widgets.Dropdown(description="Scale", options=list(SCALES), **narrow)
        self._smoothing = widgets.Dropdown(description="Smoothing", options=SMOOTHINGS.items(), **narrow)
        self._size = widgets.Dropdown(description="Size", options=SIZES.items(), **narrow)
        look = [self._only, self._axis, self._scale, self._smoothing, self._size]
        for control in (self._rank, self._search, *look):
            control.observe(lambda _: self._changed.set(), names="value")
        why.on_click(lambda button: ask_ranks(button, self._answer, self._stacks_page))
        self._stop_button.on_click(self._on_stop)
        detach.on_click(lambda _: self._finish_from_thread())
        self._search.layout.width, self._search.style.description_width = "200px", "auto"
        self._reach = ReachControls(run, self._answer)
        buttons = widgets.HBox([self._stop_button, why, detach, self._reach.box, self._rank, self._search])
        self._look = widgets.HBox(look)
        buttons.layout.flex_flow = self._look.layout.flex_flow = "row wrap"
        self.box = widgets.VBox([self._html, self._look, buttons, self._answer])

    def show(self) -> None:
        if other := OPEN.get(self.folder.path):
            other.finish()
        OPEN[self.folder.path] = self
        super().show()

    def finish(self) -> None:
        super().finish()
        if OPEN.get(self.folder.path) is self:
            del OPEN[self.folder.path]
        self.reader = RunReader(self.folder)  # frees the records while the caller still holds the run

    def _bundle(self) -> dict[str, str]:
        state = self._status()
        # A separate reader: the thread may be inside a poll of self.reader.
        bundle = static_bundle(self.folder, RunReader(self.folder).read_all(), state)
        if not state.is_final:
            hint = f"detached; the run continues. Watch it again with labkit.attach({self.folder.id!r})"
            bundle["text/html"] += f"<div>{escaped(hint)}</div>"
            bundle["text/plain"] += f"\n{hint}"
        return bundle

    def _draw(self) -> bool:
        is_due = self.reader.folds is None or time.monotonic() - self._asked >= MANY_NODES_SECONDS
        if is_due and self._handle is not None:  # the first time, the state is the caller's
            # read before the records, so that a final state comes with its last record
            self._state, self._asked = self._status(), time.monotonic()
        state = self._state
        self.reader.poll()
        if len(self._rank.options) != 1 + len(ranks := self.reader.rank_numbers):
            self._rank.options = [(AUTOMATIC, AUTOMATIC), *((str(rank), rank) for rank in ranks)]
        if [name for name, _ in self._only.options[1:]] != (names := titles(self.reader)):
            kept = self._only.value if self._only.value in names else ""
            self._only.options = [(ALL_CHARTS, ""), *((name, name) for name in names)]
            self._only.value = kept
        self._look.layout.display = None if any(h.step for h in self.reader.ranks.values()) else "none"
        reachable = state.state == "running" and self.reader.attempt.requests.is_dir()
        self._reach.update(reachable=reachable, paused=state.is_paused)
        look = Look(self._axis.value, self._scale.value, self._smoothing.value, self._only.value, self._size.value)
        chosen, search = self._rank.value, self._search.value
        log_rank = None if chosen == AUTOMATIC else chosen
        page = run_html(self.folder, self.reader, state, log_rank=log_rank, search=search, look=look)
        self._update(page)
        return state.is_final

    def _stacks_page(self) -> str:
        page: str = self._stacks()._repr_mimebundle_()["text/html"]  # escaped there
        return page

    def _on_stop(self, button: Any) -> None:
        """Stop the run at the first click, after any checkpoint being saved, and kill it at the second."""
        again = button.description != "Stop"
        button.disabled, button.description = again, "Killing…" if again else "Kill now"

        def stop() -> None:
            try:
                self._stop(again)
            except Exception as error:  # such as a run of another user
                self._answer.value = escaped(str(error))

        threading.Thread(target=stop, name="labkit stop", daemon=True).start()


def ask_ranks(control: Any, answer: Any, action: Callable[[], str]) -> None:
    """Show the HTML that `action` returns, or why it failed, in the widget `answer`. It runs in a thread, because it
    waits for the ranks; `control` is disabled meanwhile."""
    control.disabled, answer.value = True, "asking every rank…"

    def act() -> None:
        try:
            answer.value = action()
        except Exception as error:
            answer.value = escaped(str(error))
        control.disabled = False

    threading.Thread(target=act, name="labkit ranks", daemon=True).start()


class Reached(Protocol):
    """What ReachControls need of the run that they act on."""

    def ask(self, expression: str) -> pd.DataFrame: ...
    def set(self, **options: Any) -> int: ...
    def pause(self) -> int: ...
    def resume(self) -> None: ...


class ReachControls:
    """Buttons that send requests to a run's ranks. The result, or why it failed, is shown in `answer`, a widget."""

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
        ask_ranks(control, self._answer, lambda: escaped(action()))

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
