"""From a script to living ranks and back: check, start, supervise, stop, and say what went wrong."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.launcher.causes.failure_advice import EXPANDABLE as EXPANDABLE  # the setting that reduces fragmentation
    from labkit.launcher.causes.stuck import Stacks as Stacks  # what every rank of a run is doing, in words
    from labkit.launcher.causes.stuck import look_at as look_at  # asks every rank of an attempt where it is
    from labkit.launcher.checks import TORCH_FLOOR as TORCH_FLOOR
    from labkit.launcher.checks import check_arguments as check_arguments  # Raw arguments as text
    from labkit.launcher.checks import check_environment as check_environment  # The variables as text
    from labkit.launcher.checks import check_interface as check_interface  # The network interfaces that gloo is told
    from labkit.launcher.checks import check_ranks as check_ranks  # The number of ranks
    from labkit.launcher.checks import check_torch as check_torch  # torch is installed and not older than 2.8, below
    from labkit.launcher.checks import release_of as release_of  # (2, 10) of "2.10.0+cu128"
    from labkit.launcher.locks import GpusInUseError as GpusInUseError  # Another run holds a GPU that the launch
    from labkit.launcher.locks import cards as cards  # By a GPU's name in `CUDA_VISIBLE_DEVICES` (its index, its
    from labkit.launcher.locks import check_gpus_are_free as check_gpus_are_free  # Raises LaunchError when an
    from labkit.launcher.locks import gpus_in_use as gpus_in_use  # The active runs on this machine, each with its
    from labkit.launcher.locks import gpus_of as gpus_of  # The GPUs that this many ranks will use, as
    from labkit.launcher.locks import run_that_saves_to as run_that_saves_to  # The live run that holds the
    from labkit.launcher.multinode import create_on_nodes as create_on_nodes  # The folder of a run on several nodes,
    from labkit.launcher.multinode import node_command as node_command  # The command that one host of a run executes
    from labkit.launcher.multinode import torchrun_of_node as torchrun_of_node  # The torchrun command, with labkit's
    from labkit.launcher.request import Launchable as Launchable
    from labkit.launcher.request import LaunchRequest as LaunchRequest  # A script that passed the checks
    from labkit.launcher.request import Module as Module  # A module that Python finds by its name and runs, as `python
    from labkit.launcher.request import check as check  # Check a script with its arguments for this number of ranks
    from labkit.launcher.request import check_values as check_values  # Check arguments for a script that has been
    from labkit.launcher.request import checkpoint_arguments as checkpoint_arguments  # `--checkpoint-dir` in the run
    from labkit.launcher.request import script_and_file as script_and_file  # The script, and its file if it is the
    from labkit.launcher.starting import removed_on_failure as removed_on_failure  # Remove a folder if filling it fails
    from labkit.launcher.starting import start as start  # Start a run and return its folder immediately
    from labkit.launcher.stopping import LONGEST_GRACE as LONGEST_GRACE
    from labkit.launcher.stopping import check_may_stop as check_may_stop  # The run belongs to this user, and this is
    from labkit.launcher.stopping import freed_in_words as freed_in_words  # What NVML says about the processes of a
    from labkit.launcher.stopping import processes_of as processes_of  # Every live process of the run, or of one node
    from labkit.launcher.stopping import request_stop as request_stop  # Ask the supervisors of a run to stop it
    from labkit.launcher.stopping import still_running as still_running  # What the ranks of a run that is over left
    from labkit.launcher.stopping import stop as stop  # Stop a run, whatever state its processes are in, and return
    from labkit.launcher.torchrun import LEFTOVER_PREFIXES as LEFTOVER_PREFIXES
    from labkit.launcher.torchrun import LEFTOVERS as LEFTOVERS  # Left over from an earlier torchrun, a Slurm job or a
    from labkit.launcher.torchrun import node_torchrun_command as node_torchrun_command  # torchrun for node `rank` of
    from labkit.launcher.torchrun import recorded_environment as recorded_environment  # The part of an environment
    from labkit.launcher.torchrun import without_leftovers as without_leftovers  # The environment without the
else:
    __getattr__, __dir__ = face(__name__)
