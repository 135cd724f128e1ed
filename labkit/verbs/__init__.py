"""Defines the verbs of the terminal, by subject; `cli.py` puts them together."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.verbs.demo import add_demo_verb as add_demo_verb  # demo
    from labkit.verbs.kaggle import add_kaggle_verbs as add_kaggle_verbs  # kaggle export, push, pull
    from labkit.verbs.launch import add_doctor_verb as add_doctor_verb  # doctor
    from labkit.verbs.launch import add_launch_verb as add_launch_verb  # launch
    from labkit.verbs.launch import add_slurm_verbs as add_slurm_verbs  # slurm submit, print
    from labkit.verbs.runs import add_run_verbs as add_run_verbs  # runs, attach, stop, compare, export and others
    from labkit.verbs.scripts import add_check_verb as add_check_verb  # check
    from labkit.verbs.scripts import add_plan_verb as add_plan_verb  # plan
    from labkit.verbs.scripts import add_script_verbs as add_script_verbs  # write, diff
    from labkit.verbs.sweep import add_sweep_verb as add_sweep_verb  # sweep
    from labkit.verbs.watch import add_watch_verb as add_watch_verb  # watch
else:
    __getattr__, __dir__ = face(__name__)
