"""Runs on several machines: hosts via ssh, and schedulers."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.cluster.hosts import begin as begin  # Start a run on every host and return its folder
    from labkit.cluster.hosts import lines_to_paste as lines_to_paste  # The folder of a run and (host, line to paste
    from labkit.cluster.jobs import job_in_words as job_in_words  # Whether the job of a stopped run has ended,
    from labkit.cluster.jobs import job_of as job_of  # The id of the job that starts a run's nodes
    from labkit.cluster.jobs import plain_text as plain_text  # A launch file that does not need labkit
    from labkit.cluster.jobs import prepare_submission as prepare_submission  # Make the folder of a run with its
    from labkit.cluster.jobs import resolved as resolved  # The options with numbers for all counts
    from labkit.cluster.jobs import state_of_run as state_of_run  # The state of a run, including its job
    from labkit.cluster.jobs import stop_run as stop_run  # End a run
    from labkit.cluster.jobs import submit_array as submit_array  # Submit prepared runs as the tasks of one job
    from labkit.cluster.jobs import submit_to_slurm as submit_to_slurm  # Submit the launch file of a run and
    from labkit.cluster.sbatch import JobOptions as JobOptions  # How a script is run as a Slurm job, independent
    from labkit.cluster.slurm import ask_array as ask_array  # Query all tasks of an array by one call, for the `ask`
    from labkit.cluster.slurm import ask_slurm as ask_slurm  # The job's current state
else:
    __getattr__, __dir__ = face(__name__)
