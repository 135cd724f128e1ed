"""Prepares, starts, supervises and stops runs, and says what went wrong in them."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.launcher.causes.failure_advice import EXPANDABLE as EXPANDABLE  # the setting that reduces fragmentation
    from labkit.launcher.causes.stuck import Stacks as Stacks  # what every rank of a run is doing, in words
    from labkit.launcher.causes.stuck import look_at as look_at  # asks every rank of an attempt where it is
    from labkit.launcher.checks import TORCH_FLOOR as TORCH_FLOOR
    from labkit.launcher.checks import check_arguments as check_arguments  # arguments as text, none of them a secret
    from labkit.launcher.checks import check_environment as check_environment
    from labkit.launcher.checks import check_interface as check_interface  # the interfaces that gloo is to use exist
    from labkit.launcher.checks import check_ranks as check_ranks  # the number of ranks, if it fits the devices
    from labkit.launcher.checks import check_torch as check_torch
    from labkit.launcher.checks import release_of as release_of  # (2, 10) of "2.10.0+cu128"
    from labkit.launcher.locks import GpusInUseError as GpusInUseError  # another run holds a GPU that the launch needs
    from labkit.launcher.locks import cards as cards
    from labkit.launcher.locks import check_gpus_are_free as check_gpus_are_free  # no active run holds these GPUs
    from labkit.launcher.locks import gpus_in_use as gpus_in_use
    from labkit.launcher.locks import gpus_of as gpus_of
    from labkit.launcher.locks import run_that_saves_to as run_that_saves_to  # the live run with a checkpoint folder
    from labkit.launcher.prepare import Launch as Launch  # a script with all that its start needs, checked
    from labkit.launcher.prepare import Launchable as Launchable  # what can be launched: a script, its path, a module
    from labkit.launcher.prepare import Module as Module  # a module that Python finds by its name
    from labkit.launcher.prepare import create_run as create_run  # writes the folder of a run, with nothing started
    from labkit.launcher.prepare import prepare_launch as prepare_launch  # checks a launch on one host or on several
    from labkit.launcher.prepare import removed_on_failure as removed_on_failure
    from labkit.launcher.prepare import script_and_file as script_and_file
    from labkit.launcher.starting import start as start  # starts a run on this host and returns its folder
    from labkit.launcher.stopping import LONGEST_GRACE as LONGEST_GRACE
    from labkit.launcher.stopping import check_may_stop as check_may_stop
    from labkit.launcher.stopping import freed_in_words as freed_in_words
    from labkit.launcher.stopping import processes_of as processes_of
    from labkit.launcher.stopping import request_stop as request_stop
    from labkit.launcher.stopping import still_running as still_running
    from labkit.launcher.stopping import stop as stop  # stops a run and returns its final state
    from labkit.launcher.torchrun import LEFTOVER_PREFIXES as LEFTOVER_PREFIXES
    from labkit.launcher.torchrun import LEFTOVERS as LEFTOVERS
    from labkit.launcher.torchrun import node_command as node_command
    from labkit.launcher.torchrun import node_torchrun_command as node_torchrun_command
    from labkit.launcher.torchrun import recorded_environment as recorded_environment
    from labkit.launcher.torchrun import torchrun_of_node as torchrun_of_node
    from labkit.launcher.torchrun import without_leftovers as without_leftovers
else:
    __getattr__, __dir__ = face(__name__)
