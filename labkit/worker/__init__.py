"""Runs inside a rank: the guest of its script (guest.py), and what observes the training."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.worker.cell_folder import CellAnswer as CellAnswer  # how a rank executed a cell
    from labkit.worker.cell_folder import CellFolder as CellFolder  # the files of one cell
    from labkit.worker.frames import with_late_resume as with_late_resume  # code that leaves no visible frame
    from labkit.worker.measures.memory import live_optimizers as live_optimizers  # every optimizer of this process
    from labkit.worker.measures.step_loss import unpacked as unpacked  # leaves a saved tensor as it is
    from labkit.worker.measures.tracker import COLLECTIVES as COLLECTIVES  # the namespaces of collective operators
    from labkit.worker.measures.tracker import Tracker as Tracker  # tracks what one step holds in memory, by category
    from labkit.worker.recording import Recording as Recording  # what observes the training in a rank
    from labkit.worker.values import (
        CannotBeSentError as CannotBeSentError,
    )  # a value that is not made of tensors, text, …
    from labkit.worker.values import values_from as values_from  # what `values_to` has written
    from labkit.worker.values import values_to as values_to  # named values as bytes
else:
    __getattr__, __dir__ = face(__name__)
