"""Detects the front end that displays this process's output, which `LABKIT_UI` overrides, and redraws widgets in it."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import psutil

from labkit.errors import LabError
from labkit.install import pip_install
from labkit.text import escaped, framed

Ui = Literal["svg", "display", "static", "text"]
CHOICES = ("svg", "display", "static", "text")
BROKEN_KERNELS = ("7.0.0", "7.0.1")  # ipykernel releases in which a thread cannot update a widget
WORKING_KERNELS = f"ipykernel{','.join(f'!={release}' for release in BROKEN_KERNELS)}"
LONGEST_PERIOD_SECONDS = 5.0  # between two drawings of a live view
SHARE_OF_A_CORE = 0.02  # the most that drawing it may take
STRIKES = 3  # failures in a row after which it is given up
# jupyter_server, VS Code and Colab set them for the kernels they start; papermill and nbclient do not, but pass on
# those of the notebook or the editor in which they run.
SESSION_MARK, EDITOR_MARKS = "JPY_SESSION_NAME", ("VSCODE_PID", "VSCODE_CWD")
INTERACTIVE_MARKS = (SESSION_MARK, *EDITOR_MARKS, "COLAB_RELEASE_TAG")
EXECUTORS = {"papermill", "jupyter-execute", "jupyter-nbconvert"}
# A view is never wider than the page. ipywidgets marks the views of a kernel that is gone by a class, and with a
# picture of a broken chain.
STYLE = (
    "<style>.labkit-live .widget-html-content{min-width:0}"
    ".labkit-ended{display:none}.jupyter-widgets-disconnected .labkit-ended{display:block;font-weight:600}"
    ".labkit-live.jupyter-widgets-disconnected::before,.labkit-live .jupyter-widgets-disconnected::before,"
    ".labkit-live.jupyter-widgets-disconnected>:not(.widget-html),"
    ".jupyter-widgets-disconnected .labkit-state{display:none!important}</style>"
)


def ui() -> Ui:
    """`svg`: live widget; `display`: redrawn output, no widgets; `static`: final figures only; `text`: a terminal."""
    choice = os.environ.get("LABKIT_UI", "")
    if choice:
        if choice not in CHOICES:
            raise LabError(f"LABKIT_UI must be one of {', '.join(CHOICES)}; got {choice!r}")
        return cast(Ui, choice)
    if notebook_shell() is None:
        return "text"
    run_type = os.environ.get("KAGGLE_KERNEL_RUN_TYPE")
    if run_type == "Batch" or is_executed_by_a_program():
        return "static"
    if run_type:
        return "svg"
    if "COLAB_RELEASE_TAG" in os.environ and not _colab_draws_widgets():
        return "display"
    return "svg" if any(mark in os.environ for mark in INTERACTIVE_MARKS) else "static"


def check_kernel(version: str) -> None:
    """Raise LabError for the two ipykernel releases in which a thread cannot update a widget."""
    if version in BROKEN_KERNELS:
        raise LabError(
            f"ipykernel {version} raises LookupError when a thread updates a widget, so no live view can work in it. "
            f"Install another: {pip_install(WORKING_KERNELS)}, then restart the kernel; "
            "or set LABKIT_UI=static"
        )


def _colab_draws_widgets() -> bool:
    """Whether Colab's own widget manager can, which is made for ipywidgets 7 (googlecolab/colabtools #3020, #4525)."""
    try:
        return version("ipywidgets").startswith("7.")
    except PackageNotFoundError:
        return False


@cache
def is_executed_by_a_program() -> bool:
    """Whether papermill or the like has started this kernel from within a notebook or an editor, whose marks it
    inherits. The parent has the same session then, or is such a program; or another kernel is among the ancestors; or
    in VS Code, which starts kernels without Python, the parent is Python."""
    session = os.environ.get(SESSION_MARK)
    try:
        parent, *_ = parents = psutil.Process().parents()
        if session is not None:
            return parent.environ().get(SESSION_MARK) == session
        commands = [process.cmdline() for process in parents]
        is_python = Path(parent.exe()).name.startswith("python") and "vscode" not in " ".join(commands[0])
    except (psutil.Error, ValueError, OSError):
        return False
    return (
        not EXECUTORS.isdisjoint(Path(word).name for word in commands[0][:3])
        or any("kernel_launcher" in word for command in commands for word in command)
        or (is_python and any(mark in os.environ for mark in EDITOR_MARKS))
    )


def is_headless() -> bool:
    """Whether no user can interact with this process later: papermill, Kaggle batch, a plain Python program."""
    if ui() == "text":
        return not (hasattr(sys, "ps1") or _shell() is not None)
    return ui() == "static"


def notebook_shell() -> Any:
    """IPython's shell when it belongs to a notebook kernel, else None."""
    shell = _shell()
    is_kernels = any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)  # Colab's is derived
    return shell if is_kernels else None


def execution_count() -> int | None:
    """The number of the cell that is executed, if any."""
    return getattr(_shell(), "execution_count", None)


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None


class LiveView:
    """A widget that a thread redraws; once what it shows has ended, a static bundle replaces it. The thread touches
    nothing but widget traits. A subclass sets `box` and draws."""

    period_seconds = 0.5
    hint = ""  # how to show it again

    def __init__(self, name: str):
        import ipywidgets as widgets

        self.box: Any = None
        self._html = widgets.HTML()
        self._closed, self._changed = threading.Event(), threading.Event()
        self._handle: Any = None
        self._thread = threading.Thread(target=self._watch, name=f"labkit {name}", daemon=True)

    def _draw(self) -> bool:
        """Draw what is new; return whether it was the last time."""
        raise NotImplementedError

    def _bundle(self) -> dict[str, str]:
        """The MIME bundle that replaces the view. The thread may be drawing meanwhile."""
        raise NotImplementedError

    def show(self) -> None:
        """Display the view under its own display id, so that it can be replaced in place later."""
        from IPython.display import display

        self._draw()
        self.box.add_class("labkit-live")
        bundle = dict(self.box._repr_mimebundle_())
        # For whoever opens the saved file without this kernel.
        hint = f"This view is no longer live. {self.hint}"
        self._handle = display(bundle | {"text/html": escaped(hint), "text/plain": hint}, raw=True, display_id=True)
        self._thread.start()

    def finish(self) -> None:
        """Replace the live view with the static bundle. Call it on the main thread only; it is idempotent."""
        if self._closed.is_set() or self._handle is None:
            return
        self._closed.set()
        self._changed.set()
        self._handle.update(self._bundle(), raw=True)
        close_widget(self.box)

    def _update(self, page: str) -> None:
        ended = f"This view ended with its kernel, and this is its last picture. {self.hint}"
        page = f'{STYLE}<div class="labkit-ended">{framed(escaped(ended))}</div>{page}'
        if page != self._html.value:  # an unchanged page needs no message
            self._html.value = page

    def _watch(self) -> None:
        period, failures = self.period_seconds, 0
        while not self._closed.is_set():
            self._changed.wait(period)  # returns at once when the user has changed what is shown
            self._changed.clear()
            if self._closed.is_set():
                return
            began = time.thread_time()
            try:
                is_last = self._draw()
                failures = 0
            except Exception as error:
                failures += 1
                self._html.value = f"<pre>the view failed: {escaped(repr(error))}</pre>"
                if failures == STRIKES:
                    return
                continue
            if is_last:
                self._finish_from_thread()
                return
            cost = time.thread_time() - began
            # A view that is expensive to draw is drawn less often.
            period = max(self.period_seconds, min(LONGEST_PERIOD_SECONDS, cost / SHARE_OF_A_CORE))

    def _finish_from_thread(self) -> None:
        """Have the kernel's main thread replace the view when it is idle; only the main thread may display."""
        loop = getattr(getattr(notebook_shell(), "kernel", None), "io_loop", None)
        if loop is not None:
            loop.add_callback(self.finish)


class _Ends(Protocol):
    @property
    def is_final(self) -> bool: ...


S = TypeVar("S", bound=_Ends)


class Shown(Generic[S]):
    """What a notebook shows of a run or a sweep: live while it is active, then as a static bundle in its place."""

    _dashboard: LiveView | None = None
    _handle: Any = None
    _shown_in: int | None = None  # the number of the cell

    def status(self) -> S:
        """The state; `is_final` once it has ended."""
        raise NotImplementedError

    def _live_view(self, state: S) -> LiveView:
        raise NotImplementedError

    def _bundle(self) -> dict[str, str]:
        raise NotImplementedError

    def show(self) -> None:
        """Display it: live while it is active, if the front end supports it, otherwise as static figures or tables."""
        self._show(self.status())

    def _show(self, state: S) -> None:
        """Display it in this state, because asking for the state looks at every node."""
        from IPython.display import display

        self._shown_in = execution_count()
        if ui() == "svg" and not state.is_final:
            check_kernel(version("ipykernel"))
            self._dashboard = self._live_view(state)
            self._dashboard.show()
        else:
            self._handle = display(self._bundle(), raw=True, display_id=True)

    def _finish_view(self) -> None:
        if not self.status().is_final:
            return
        if self._dashboard is not None:
            self._dashboard.finish()
        if self._handle is not None:
            self._handle.update(self._bundle(), raw=True)
            self._handle = None

    def _ipython_display_(self) -> None:
        if ui() == "text":
            print(repr(self))
        elif self._shown_in is None or self._shown_in != execution_count():  # else this cell has shown it
            self.show()


def close_widget(widget: Any) -> None:
    """Close a widget and its parts: closing a widget leaves its parts open, in the kernel and in the page."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "style", None), getattr(widget, "layout", None)):
        if part is not None:
            close_widget(part)
    widget.close()
