"""Detects the kind of front end that displays this process's output; `LABKIT_UI` overrides the detection."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, cast

import psutil

from labkit.errors import LabError

__all__ = [
    "BROKEN_KERNELS",
    "Ui",
    "check_kernel",
    "close_widget",
    "execution_count",
    "is_headless",
    "notebook_shell",
    "ui",
]

Ui = Literal["svg", "display", "static", "text"]
CHOICES = ("svg", "display", "static", "text")
BROKEN_KERNELS = ("7.0.0", "7.0.1")  # ipykernel releases in which a thread cannot update a widget
# jupyter_server, VS Code and Colab set them for the kernels they start; papermill and nbclient do not.
INTERACTIVE_MARKS = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG")


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
    if run_type:
        return "static" if run_type == "Batch" else "svg"
    if "COLAB_RELEASE_TAG" in os.environ and not _colab_draws_widgets():
        return "display"
    return "svg" if any(mark in os.environ and not _is_inherited(mark) for mark in INTERACTIVE_MARKS) else "static"


def check_kernel(version: str) -> None:
    """Raise LabError for the two ipykernel releases in which a thread cannot update a widget."""
    if version in BROKEN_KERNELS:
        raise LabError(
            f"ipykernel {version} raises LookupError when a thread updates a widget, so no live view can work in it. "
            f"Install another: {sys.executable} -m pip install 'ipykernel!=7.0.0,!=7.0.1', then restart the kernel; "
            "or set LABKIT_UI=static"
        )


def _colab_draws_widgets() -> bool:
    """Colab's own widget manager is made for ipywidgets 7 (googlecolab/colabtools #3020, #4525)."""
    try:
        return version("ipywidgets").startswith("7.")
    except PackageNotFoundError:
        return False


def _is_inherited(mark: str) -> bool:
    """Whether the mark comes from a parent process: papermill in a notebook cell inherits that notebook's name."""
    if mark != "JPY_SESSION_NAME":
        return False
    try:
        parent = psutil.Process().parent()
        return parent is not None and parent.environ().get(mark) == os.environ[mark]
    except (psutil.Error, AttributeError, OSError):
        return False


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


def close_widget(widget: Any) -> None:
    """Close a widget and its parts: closing a widget leaves its parts open, in the kernel and in the page."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "style", None), getattr(widget, "layout", None)):
        if part is not None:
            close_widget(part)
    widget.close()
