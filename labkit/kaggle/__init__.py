"""Kaggle's two T4s: push a notebook as a kernel, follow it, and fetch its runs."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.kaggle.following import follow as follow  # Print a kernel's output until its session ends, and return
    from labkit.kaggle.kernel_files import TWO_T4 as TWO_T4  # Kaggle offers pairs only
    from labkit.kaggle.kernel_files import Kernel as Kernel  # A notebook's text and its metadata for Kaggle
    from labkit.kaggle.kernel_files import build as build  # The kernel of a notebook with this text and `name`
    from labkit.kaggle.kernel_files import check_address as check_address  # Raises LabError if this is not the address
    from labkit.kaggle.pull import pull_runs as pull_runs  # `(new runs, ids of existing runs)`, oldest first, of a
    from labkit.kaggle.service import Service as Service  # A logged-in user
    from labkit.kaggle.wheels import wheel as wheel  # `(file name, content)`
else:
    __getattr__, __dir__ = face(__name__)
