"""Runs on several machines: hosts over ssh, and Slurm."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.cluster.hosts import begin as begin  # starts a run on every host over ssh and returns its folder
    from labkit.cluster.hosts import lines_to_paste as lines_to_paste  # a run's folder, and the line for each host
    from labkit.cluster.jobs import job_in_words as job_in_words  # whether the job of a stopped run has ended
    from labkit.cluster.jobs import job_of as job_of  # the id of the job that starts a run's nodes
    from labkit.cluster.jobs import plain_text as plain_text  # a launch file that does not need labkit
    from labkit.cluster.jobs import prepare_submission as prepare_submission  # writes a run's folder and launch file
    from labkit.cluster.jobs import resolved as resolved  # a job's options with numbers for all counts
    from labkit.cluster.jobs import state_of_run as state_of_run  # the state of a run, including that of its job
    from labkit.cluster.jobs import stop_run as stop_run  # stops a run, on this machine or under Slurm
    from labkit.cluster.jobs import submit_array as submit_array  # submits prepared runs as one job array
    from labkit.cluster.jobs import submit_to_slurm as submit_to_slurm  # submits a prepared run; returns the job's id
    from labkit.cluster.sbatch import JobOptions as JobOptions  # how a script is run as a Slurm job
    from labkit.cluster.slurm import ask_array as ask_array  # asks Slurm about all tasks of an array by one call
    from labkit.cluster.slurm import ask_slurm as ask_slurm  # a job's current state
else:
    __getattr__, __dir__ = face(__name__)
