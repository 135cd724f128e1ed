"""Defines the verbs of the terminal, by subject; `cli.py` puts them together."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.verbs.check import add_check_verb as add_check_verb
    from labkit.verbs.doctor import add_doctor_verb as add_doctor_verb
    from labkit.verbs.kaggle import add_kaggle_verbs as add_kaggle_verbs  # Add the verbs of `labkit kaggle`
    from labkit.verbs.launch import add_launch_verb as add_launch_verb
    from labkit.verbs.plan import add_plan_verb as add_plan_verb
    from labkit.verbs.runs import add_run_verbs as add_run_verbs
    from labkit.verbs.scripts import add_script_verbs as add_script_verbs
    from labkit.verbs.slurm import add_slurm_verbs as add_slurm_verbs  # Add the verbs of `labkit slurm`
    from labkit.verbs.sweep import add_sweep_verb as add_sweep_verb
else:
    __getattr__, __dir__ = face(__name__)
