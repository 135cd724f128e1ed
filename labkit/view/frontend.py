"""Which kind of front end looks at this process, decided once and overridable with `LABKIT_UI`."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal, cast

import psutil

from labkit.errors import LabError

__all__ = ["BROKEN_KERNELS", "Ui", "check_kernel", "is_headless", "notebook_shell", "ui"]

Ui = Literal["svg", "display", "static", "text"]
CHOICES = ("svg", "display", "static", "text")
BROKEN_KERNELS = ("7.0.0", "7.0.1")  # releases of ipykernel in which no thread may touch a widget
# Set by jupyter_server for a notebook's kernel, by VS Code for its own. Under papermill and nbclient neither is.
INTERACTIVE_MARKS = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG")


def ui() -> Ui:
    """`svg`: live widget; `display`: redrawn output, no widgets; `static`: final figures only; `text`: a terminal."""
    asked = os.environ.get("LABKIT_UI", "")
    if asked:
        if asked not in CHOICES:
            raise LabError(f"LABKIT_UI must be one of {', '.join(CHOICES)}; got {asked!r}")
        return cast(Ui, asked)
    if notebook_shell() is None:
        return "text"
    run_type = os.environ.get("KAGGLE_KERNEL_RUN_TYPE")
    if run_type:
        return "static" if run_type == "Batch" else "svg"
    return "svg" if any(mark in os.environ and not _is_inherited(mark) for mark in INTERACTIVE_MARKS) else "static"


def check_kernel(found: str) -> None:
    """Raise LabError for the two releases of ipykernel in which no thread may touch a widget."""
    if found in BROKEN_KERNELS:
        raise LabError(
            f"ipykernel {found} raises LookupError when a thread updates a widget, so no live view can work in it. "
            f"Install another: {sys.executable} -m pip install 'ipykernel!=7.0.0,!=7.0.1', then restart the kernel; "
            "or set LABKIT_UI=static"
        )


def _is_inherited(mark: str) -> bool:
    """papermill started from a notebook's cell has that notebook's session name, and so has its kernel."""
    if mark != "JPY_SESSION_NAME":
        return False
    try:
        return psutil.Process().parent().environ().get(mark) == os.environ[mark]
    except (psutil.Error, AttributeError, OSError):
        return False


def is_headless() -> bool:
    """Whether nobody can come back to this process: papermill, Kaggle's batch, a plain Python program."""
    if ui() == "text":
        return not (hasattr(sys, "ps1") or _shell() is not None)
    return ui() == "static"


def notebook_shell() -> Any:
    """IPython's shell when it belongs to a notebook kernel, else None."""
    shell = _shell()
    return shell if type(shell).__name__ == "ZMQInteractiveShell" else None


def _shell() -> Any:
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython else None
