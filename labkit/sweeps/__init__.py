"""Runs one script many times, from a queue that survives the kernel."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.sweeps.array import check_array as check_array  # the Slurm job of every point
    from labkit.sweeps.array import missing_points as missing_points  # the points still to be run by Slurm
    from labkit.sweeps.array import settled_points as settled_points  # the state of a sweep that Slurm runs
    from labkit.sweeps.array import stop_points as stop_points  # stops runs of an array, even queued ones
    from labkit.sweeps.array import submit_points as submit_points  # submits points as one array
    from labkit.sweeps.folder import SweepFolder as SweepFolder  # the names of the files of one sweep
    from labkit.sweeps.folder import SweepState as SweepState  # how a sweep stands or has ended
    from labkit.sweeps.folder import find_sweep as find_sweep  # a sweep by id, a part of it, path, or "latest"
    from labkit.sweeps.options import SweepOptions as SweepOptions  # how a sweep runs
    from labkit.sweeps.prepare import create as create  # checks every point and writes the folder
    from labkit.sweeps.prepare import environment_of as environment_of  # the ranks' variables of a sweep that goes on
    from labkit.sweeps.prepare import start_process as start_process  # starts the process that owns the queue
    from labkit.sweeps.results import Result as Result  # what one point has reached
    from labkit.sweeps.results import Results as Results  # reads a sweep again and again at the cost of what is new
    from labkit.sweeps.results import best_of as best_of  # the result with the best value
    from labkit.sweeps.sweeper import stop_runs as stop_runs  # stops many runs at the same time
    from labkit.sweeps.view import SweepDashboard as SweepDashboard  # the live view of a sweep
    from labkit.sweeps.view import headline as headline  # how many points are in which state, and the best of them
    from labkit.sweeps.view import named as named  # the parameters in which a point differs from the others
    from labkit.sweeps.view import sweep_bundle as sweep_bundle  # a sweep without widgets, as a MIME bundle
    from labkit.sweeps.view import sweep_text as sweep_text  # a sweep for a terminal
else:
    __getattr__, __dir__ = face(__name__)
