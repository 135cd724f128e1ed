"""Trains on Kaggle's two T4s: pushes a notebook as a kernel, follows it, and fetches its runs."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    # Copies the newest checkpoints that an earlier session left to where this one can go on with them
    from labkit.kaggle.earlier_checkpoints import previous_checkpoints as previous_checkpoints
    from labkit.kaggle.following import follow as follow  # Prints a kernel's log until its session ends; its status
    from labkit.kaggle.kernel_files import TWO_T4 as TWO_T4  # The accelerator that is two T4s
    from labkit.kaggle.kernel_files import Kernel as Kernel  # A notebook and its metadata, as Kaggle takes them
    from labkit.kaggle.kernel_files import build as build  # Makes the kernel of a notebook
    from labkit.kaggle.kernel_files import check_address as check_address  # Raises LabError if it is not USER/SLUG
    from labkit.kaggle.pull import pull_runs as pull_runs  # Fetches the runs of a kernel's output that are not here yet
    from labkit.kaggle.service import Service as Service  # Kaggle's service, for a logged-in user
else:
    __getattr__, __dir__ = face(__name__)
