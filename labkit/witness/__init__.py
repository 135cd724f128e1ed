"""Judges what ranks have witnessed: whether a training that succeeds, or still runs, is wrong, and since when.

Ranks write what torch declares to be equal, and what they see of it (labkit.worker.witness). Here it is compared, by
pure functions of their files. A finding needs a declaration and an observed violation of it; what is not declared is
not judged.
"""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.witness.finding import Finding as Finding  # what is wrong with a training, since when, and why
    from labkit.witness.finding import Findings as Findings  # all of one attempt, as written by its supervisor
    from labkit.witness.judge import Judge as Judge  # judges an attempt again and again while it runs
    from labkit.witness.mismatch import two_parties as two_parties  # ranks whose calls differ from the others'
else:
    __getattr__, __dir__ = face(__name__)
