"""Runs one script many times, from a queue that survives the kernel."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.sweeps.array import check_array as check_array  # The job of every point with numbers for all counts
    from labkit.sweeps.array import missing_points as missing_points  # The points that have neither run to their end
    from labkit.sweeps.array import settled_points as settled_points  # The state of the sweep, which ends with its
    from labkit.sweeps.array import stop_points as stop_points  # Stop runs, also those that wait in the queue
    from labkit.sweeps.array import submit_points as submit_points  # Submit these points as one array and return its id
    from labkit.sweeps.folder import SweepFolder as SweepFolder  # The names of the files of one sweep, and what is in
    from labkit.sweeps.folder import SweepState as SweepState  # `state` is "running", "succeeded", "failed", "stopped"
    from labkit.sweeps.folder import find_sweep as find_sweep  # The sweep that `which` identifies
    from labkit.sweeps.live import SweepDashboard as SweepDashboard  # Shows one sweep while it runs
    from labkit.sweeps.options import SweepOptions as SweepOptions  # How a sweep runs
    from labkit.sweeps.prepare import create as create  # Check every point of a sweep and write its folder
    from labkit.sweeps.prepare import environment_of as environment_of  # The ranks' variables of a sweep that is
    from labkit.sweeps.prepare import start_process as start_process  # Start the process that owns the queue
    from labkit.sweeps.results import Result as Result  # One point
    from labkit.sweeps.results import Results as Results  # Reads a sweep again and again at the cost of what is new
    from labkit.sweeps.results import best_of as best_of  # The result with the best value
    from labkit.sweeps.stopping import stop_runs as stop_runs  # `stop` each of them, some at a time
    from labkit.sweeps.view import headline as headline  # `3 of 6 points succeeded, 1 failed, 2 running · best loss
    from labkit.sweeps.view import named as named  # `lr=0.001, seed=0`
    from labkit.sweeps.view import sweep_bundle as sweep_bundle  # The MIME bundle that replaces the live view
    from labkit.sweeps.view import sweep_text as sweep_text  # The same for a terminal
else:
    __getattr__, __dir__ = face(__name__)
