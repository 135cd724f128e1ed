"""Shows a live sweep: one thread updates one HTML widget; at the end a static bundle replaces it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from labkit.sweeps.folder import SweepFolder, SweepState
from labkit.sweeps.results import Results
from labkit.sweeps.view import sweep_bundle, sweep_html
from labkit.text import escaped
from labkit.view import close, notebook_shell

__all__ = ["SweepDashboard"]

PERIOD_SECONDS = 2.0


class SweepDashboard:
    """Shows one sweep while it runs. It reads only folders; the thread touches nothing but widget traits."""

    def __init__(self, folder: SweepFolder, stop: Callable[[], Any], status: Callable[[], SweepState]):
        import ipywidgets as widgets

        self.folder, self._status = folder, status
        self._results = Results(folder)
        self._closed = threading.Event()
        self._handle: Any = None
        self._html = widgets.HTML()
        self._stop_button = widgets.Button(description="Stop all", icon="stop", tooltip="End every run of the sweep")
        self._stop_button.on_click(lambda _: self._on_stop(stop))
        self.box = widgets.VBox([self._html, widgets.HBox([self._stop_button])])
        self._thread = threading.Thread(target=self._watch, name=f"labkit {folder.id}", daemon=True)

    @property
    def is_open(self) -> bool:
        return not self._closed.is_set()

    def show(self) -> None:
        """Display the view under its own display id, so that it can be replaced in place later."""
        from IPython.display import display

        self._draw()
        bundle = dict(self.box._repr_mimebundle_())
        hint = f"This view is no longer live. Show the sweep again with labkit.Sweep.attach({self.folder.id!r})"
        self._handle = display(bundle | {"text/html": escaped(hint), "text/plain": hint}, raw=True, display_id=True)
        self._thread.start()

    def finish(self) -> None:
        """Replace the live view with the static bundle. Call it on the main thread only; it is idempotent."""
        if self._closed.is_set() or self._handle is None:
            return
        self._closed.set()
        results = Results(self.folder)  # the thread may be inside a poll of the other one
        self._handle.update(sweep_bundle(self.folder.id, self._status(), results.poll(), results), raw=True)
        close(self.box)

    def _watch(self) -> None:
        while not self._closed.wait(PERIOD_SECONDS):
            try:
                final = self._draw()
            except Exception as error:
                self._html.value = f"<pre>the view failed: {escaped(repr(error))}</pre>"
                return
            if final:
                loop = getattr(getattr(notebook_shell(), "kernel", None), "io_loop", None)
                if loop is not None:
                    loop.add_callback(self.finish)  # only the main thread may display
                return

    def _draw(self) -> bool:
        state = self._status()  # read before the runs, so that a final state comes with the last results
        page = sweep_html(self.folder.id, state, self._results.poll(), self._results)
        if page != self._html.value:
            self._html.value = page
        return state.is_final

    def _on_stop(self, stop: Callable[[], Any]) -> None:
        self._stop_button.disabled, self._stop_button.description = True, "Stopping…"
        threading.Thread(target=stop, name="labkit stop", daemon=True).start()
