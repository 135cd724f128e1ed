"""Runs inside a rank: the guest of its script (guest.py), and what observes the training."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.worker.frames import with_late_resume as with_late_resume  # The code, also of the functions in it
    from labkit.worker.measures.memory import live_optimizers as live_optimizers  # Every optimizer of this process
    from labkit.worker.measures.tracker import Tracker as Tracker  # Enter it for one step
    from labkit.worker.measures.weights import unpacked as unpacked  # For saved-tensor hooks that leave tensors as
    from labkit.worker.recording import Recording as Recording  # what observes the training in a rank
else:
    __getattr__, __dir__ = face(__name__)
