"""Prepares, starts, supervises and stops runs, and says what went wrong in them."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.launcher.causes.stuck import Stacks as Stacks  # what every rank of a run is doing, in words
    from labkit.launcher.causes.stuck import look_at as look_at  # asks every rank of an attempt where it is
    from labkit.launcher.checks import check_arguments as check_arguments  # arguments as text; refuses secrets
    from labkit.launcher.checks import check_environment as check_environment  # variables as text, none torchrun's own
    from labkit.launcher.checks import check_ranks as check_ranks  # the number of ranks, if it fits the devices
    from labkit.launcher.locks import GpusInUseError as GpusInUseError  # another run holds a GPU that the launch needs
    from labkit.launcher.locks import busy_gpus as busy_gpus  # the GPUs that active runs hold, once for each run
    from labkit.launcher.locks import check_gpus_are_free as check_gpus_are_free  # refuses the GPUs of active runs
    from labkit.launcher.locks import run_that_saves_to as run_that_saves_to  # the live run that saves to this folder
    from labkit.launcher.prepare import Launch as Launch  # a script with all that its start needs, checked
    from labkit.launcher.prepare import Launchable as Launchable  # what can be launched: a script, its path, a module
    from labkit.launcher.prepare import Module as Module  # a module that Python finds by its name
    from labkit.launcher.prepare import create_run as create_run  # writes the folder of a run; nothing is started
    from labkit.launcher.prepare import prepare_launch as prepare_launch  # checks a launch on one host or on several
    from labkit.launcher.prepare import script_and_file as script_and_file  # a script, and its file if it is the user's
    from labkit.launcher.starting import start as start  # starts a run on this host and returns its folder
    from labkit.launcher.stopping import check_may_stop as check_may_stop  # refuses the runs of others, and copies
    from labkit.launcher.stopping import left_in_words as left_in_words  # what a stopped run has left, in words
    from labkit.launcher.stopping import request_stop as request_stop  # asks the supervisors of a run to stop it
    from labkit.launcher.stopping import still_running as still_running  # what ranks of a run that is over left running
    from labkit.launcher.stopping import stop as stop  # stops a run and returns its final state
    from labkit.launcher.torchrun_command import node_command as node_command  # what one of several hosts executes
    from labkit.launcher.torchrun_command import node_torchrun_command as node_torchrun_command  # torchrun for one node
    from labkit.launcher.torchrun_command import recorded_environment as recorded_environment  # the stored variables
    from labkit.launcher.torchrun_command import without_leftovers as without_leftovers  # drops another torchrun's
else:
    __getattr__, __dir__ = face(__name__)
