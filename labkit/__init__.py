"""labkit: write a training script in a notebook, launch it on every rank, watch it live.

Names are imported on first use, so that `import labkit` is fast and loads neither torch nor widgets.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError, LaunchError, RankFailedError, RunFolderError, ScriptError
from labkit.version import __version__ as __version__

if TYPE_CHECKING:
    from labkit.batch_jobs import submit
    from labkit.checking import check
    from labkit.data import fetch
    from labkit.launching import launch
    from labkit.machine import doctor
    from labkit.planner.planned import Plan
    from labkit.planner.planning import plan
    from labkit.run import Run, attach, runs
    from labkit.strategy_panel import panel
    from labkit.sweeping import Sweep, sweep
    from labkit.view.comparison import compare
    from labkit.write.script import Script

_LAZY = {
    "Plan": "labkit.planner.planned",
    "Run": "labkit.run",
    "Script": "labkit.write.script",
    "Sweep": "labkit.sweeping",
    "attach": "labkit.run",
    "check": "labkit.checking",
    "compare": "labkit.view.comparison",
    "doctor": "labkit.machine",
    "fetch": "labkit.data",
    "launch": "labkit.launching",
    "panel": "labkit.strategy_panel",
    "plan": "labkit.planner.planning",
    "runs": "labkit.run",
    "submit": "labkit.batch_jobs",
    "sweep": "labkit.sweeping",
}

__all__ = [
    "LabError",
    "LaunchError",
    "Plan",
    "RankFailedError",
    "Run",
    "RunFolderError",
    "Script",
    "ScriptError",
    "Sweep",
    "attach",
    "check",
    "compare",
    "doctor",
    "fetch",
    "launch",
    "panel",
    "plan",
    "runs",
    "submit",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext labkit` adds the cell magic `%%ranks`."""
    import_module("labkit.ranks_magic").register(shell)


def _add_pictures() -> None:
    """In IPython, plotly's figures are saved with a picture, because most viewers of notebooks cannot draw them."""
    ipython = sys.modules.get("IPython")
    if shell := ipython.get_ipython() if ipython else None:
        import_module("labkit.view.plotly_pictures").register(shell)


_add_pictures()
