"""labkit: write a training script in a notebook, launch it on every rank, watch it live.

Names are imported on first use, so that `import labkit` is fast and loads neither torch nor widgets.
"""

from labkit.faces import face
from labkit.version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from labkit.batch_jobs import submit as submit  # submits a training to Slurm
    from labkit.checking import check as check  # finds mistakes in a script without running it
    from labkit.data import fetch as fetch  # downloads a file once, and verifies it
    from labkit.errors import FindingError as FindingError  # a training ended well and is wrong, if asked for
    from labkit.errors import LabError as LabError  # the base of labkit's errors
    from labkit.errors import LaunchError as LaunchError  # a training could not be launched
    from labkit.errors import RankFailedError as RankFailedError  # a rank failed; carries the cause
    from labkit.errors import RunFolderError as RunFolderError  # a run's folder cannot be used
    from labkit.errors import ScriptError as ScriptError  # a script cannot be read, composed or launched
    from labkit.interactive_ranks import ranks as ranks  # starts ranks that wait for cells: %%ranks
    from labkit.launching import launch as launch  # starts a training with torchrun
    from labkit.machine import doctor as doctor  # reports what this machine has, and what will go wrong on it
    from labkit.planner import Plan as Plan  # what `plan` returns
    from labkit.planner import plan as plan  # predicts memory and time of a training
    from labkit.run import Run as Run  # one training, from its folder on disk
    from labkit.run import attach as attach  # opens a run again
    from labkit.run import runs as runs  # lists the runs
    from labkit.strategy_panel import panel as panel  # chooses a strategy with widgets
    from labkit.sweeping import Sweep as Sweep  # many runs of one script
    from labkit.sweeping import sweep as sweep  # starts a sweep
    from labkit.view import compare as compare  # shows runs side by side
    from labkit.write import Script as Script  # a training script as titled cells
else:
    __getattr__, __dir__ = face(__name__)


def load_ipython_extension(shell: "Any") -> None:
    """`%load_ext labkit` adds the cell magic `%%ranks`."""
    from labkit.ranks_magic import register

    register(shell)
