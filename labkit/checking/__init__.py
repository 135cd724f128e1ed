"""Finds mistakes that hang, corrupt or slow distributed training by static analysis; the script is never run."""

from labkit.faces import face

TYPE_CHECKING = False
if TYPE_CHECKING:
    from labkit.checking.before_launch import warn as warn  # Warn on stderr about mistakes in the user's own script
    from labkit.checking.checker import check as check
    from labkit.checking.facts import facts_of as facts_of  # the facts of a script, read from its text
    from labkit.checking.findings import Findings as Findings  # what a script was found to do wrong
    from labkit.checking.source import files_in as files_in  # All .py and .ipynb files below a folder, sorted
else:
    __getattr__, __dir__ = face(__name__)
