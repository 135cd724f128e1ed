"""Trains on Kaggle's two T4s: pushes a notebook as a kernel, follows it, and fetches its runs."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.kaggle.cells import FROM_UPLOAD as FROM_UPLOAD  # the cell that installs an uploaded wheel
    from labkit.kaggle.cells import embedded_cell as embedded_cell  # the cell that holds labkit in its own text
    from labkit.kaggle.earlier_checkpoints import previous_checkpoints as previous_checkpoints  # to resume from
    from labkit.kaggle.following import follow as follow  # prints a kernel's output until its session ends
    from labkit.kaggle.following import pull_runs as pull_runs  # copies a kernel's runs to this machine
    from labkit.kaggle.kernel_files import MOST_BYTES as MOST_BYTES  # what Kaggle takes as one notebook
    from labkit.kaggle.kernel_files import TWO_T4 as TWO_T4  # Kaggle's name for its pair of T4s
    from labkit.kaggle.kernel_files import Kernel as Kernel  # a notebook's text and its metadata for Kaggle
    from labkit.kaggle.kernel_files import build as build  # makes a kernel from a notebook
    from labkit.kaggle.kernel_files import check_address as check_address  # raises LabError unless it is USER/SLUG
    from labkit.kaggle.service import Service as Service  # Kaggle, for a user who is logged in
    from labkit.kaggle.versions import what_is_missing as what_is_missing  # the packages that labkit lacks in a session
    from labkit.kaggle.wheels import DATASET as DATASET  # the slug of the dataset with labkit's wheel
    from labkit.kaggle.wheels import wheel as wheel  # the wheel of labkit or of the labs' package
    from labkit.kaggle.wheels import write_dataset as write_dataset  # a folder with wheels, for Kaggle's client
else:
    __getattr__, __dir__ = face(__name__)
